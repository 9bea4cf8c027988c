"""Decode attention by Triton: step plans, refusals, and fallbacks to torch."""

import os
from types import SimpleNamespace

import pytest

from kvcore import InputError, Plugins
from kvcore.engine import RaggedBatch, TensorLayout
from kvcore_engine.backend import TorchCPU, torch_backend

torch = pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
pytest.importorskip("triton", reason="needs Triton: pip install 'kvcore[triton]'")

from helpers.decoding import Decoding  # noqa: E402 - needs torch

from kvcore_engine.backend import _triton_attention  # noqa: E402 - needs Triton
from kvcore_engine.backend._step_plan import BY_POSITION, KernelPart, LayerKind  # noqa: E402

pytestmark = pytest.mark.skipif(
    not _triton_attention.INTERPRETED,
    reason=f"TRITON_INTERPRET={os.getenv('TRITON_INTERPRET')}",
)


def compiled(registers, shared, waits, spills=0):
    """Return a compiled kernel, as Triton describes it, that waits for copies so."""
    ptx = "".join(f"cp.async.wait_group {count};\n" for count in waits)
    return SimpleNamespace(
        n_regs=registers,
        n_spills=spills,
        metadata=SimpleNamespace(shared=shared),
        asm={"ptx": ptx},
    )


@pytest.mark.parametrize(
    ("three_stages", "pipeline"),
    [
        ((185, 71_680, [0, 2]), (3, 3)),  # 3 programs with two tiles each, not 5 with one
        ((185, 71_680, [0]), (2, 5)),  # it waits for each tile
        ((255, 120_000, [0, 2]), (2, 5)),  # 1 program with two tiles
        ((255, 71_680, [0, 2], 124), (2, 5)),
    ],
)
def test_the_pipeline_has_most_tiles_under_way(three_stages, pipeline):
    """Stages and programs of a multiprocessor follow from registers, memory and waits."""
    kernels = {2: compiled(168, 38_912, [0]), 3: compiled(*three_stages)}
    card = _triton_attention.Card(132, 1 << 16, 228 << 10)
    assert _triton_attention.deepest(kernels, 2, card) == pipeline


def test_a_long_sequence_is_cut_into_chunks():
    """A long sequence beside short ones is cut into chunks; the longest chunk comes first."""
    made = Decoding([1100, 3, 90], dtype="fp32")
    made.kernel.programs = 1
    made.check()
    plan = made.backend.plan(RaggedBatch(made.tables, [1099, 2, 89], [1, 1, 1]))
    (part,) = plan.parts(LayerKind(4, None, 0))
    work = part.plan.work
    lengths = work[:, 3] - work[:, 2]
    assert lengths.tolist() == sorted(lengths.tolist(), reverse=True)
    assert part.plan.splits.tolist() == [[0, 0, 4]]
    assert (work[work[:, 0] != 0][:, 4] == -1).all()


@pytest.mark.parametrize(
    ("lengths", "chunk"),
    [
        ([4096] * 8, 512),  # 8 chunks each: 512 programs of 528
        ([4096] * 32, 2048),
        ([4096] * 128, 4096),  # more than one wave, uncut
        ([32768], 497),
        ([8192], 128),
        ([400_000, *[128] * 63], 1546),  # 408,064 tokens for 4 * 528 programs
    ],
)
def test_chunks_fill_one_wave(lengths, chunk):
    """Equal contexts are cut into one wave of programs; unequal ones are cut finer."""
    assert _triton_attention.chunk_of(lengths, 8, programs=528) == chunk


def test_prefill_and_decode_in_one_batch():
    """A batch of a prompt chunk and a single token has the output of the torch backend.

    The kernel computes each in a part of its own.
    """
    made = Decoding([40, 30], dtype="fp32")
    batch = RaggedBatch(made.tables, [39, 10], [1, 20])
    draw = torch.Generator().manual_seed(3)
    queries = torch.randn(21, 4, 64, generator=draw)
    plain = TorchCPU()
    plain.allocate(made.backend.layout)
    plain._pool.matrices[0].copy_(made.backend._pool.matrices[0])
    plain._pool.matrices[1].copy_(made.backend._pool.matrices[1])
    plan = made.backend.plan(batch)
    found, expected = (
        each.attend(0, given, queries)
        for each, given in ((made.backend, plan), (plain, plain.plan(batch)))
    )
    chunk, single = plan.parts(LayerKind(4, None, 0))
    assert isinstance(chunk, KernelPart)
    assert isinstance(single, KernelPart)
    assert chunk.plan.work[:, 0].sort().values.tolist() == [1, 5, 9, 13, 17]
    assert single.plan.work[:, 0].tolist() == [0]
    assert not made.backend.fallbacks
    torch.testing.assert_close(found, expected, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "fp64"}, "not in fp64"),
        ({"block_size": 17}, "not of 17"),
        ({"head_dim": 264}, "up to 256 numbers"),
        ({"codec": "int8:keys=channel"}, "not int8 as it is set"),
        ({"codec": "kivi"}, "not kivi as it is set"),
        ({"codec": "int4", "head_dim": 18}, "heads of 18 and 18 numbers do not fill"),
    ],
)
def test_unsupported_layouts_are_refused_or_computed_by_torch(fields, reason, caplog):
    """An unsupported layout is refused with attention=triton, else computed by torch.

    Then the reason is in `fallbacks` and in the log.
    """
    sizes = {"blocks": 4, "block_size": 16, "layers": 1, "kv_heads": 1, "head_dim": 16}
    sizes |= fields
    codec = sizes.pop("codec", None)
    codec = Plugins().build("codec", codec) if codec else None
    layout = TensorLayout(value_dim=sizes["head_dim"], codec=codec, **sizes)
    with pytest.raises(InputError, match=f"attention=triton: .*{reason}; take attention=sdpa"):
        TorchCPU(attention="triton").allocate(layout)
    backend = TorchCPU(attention=None)
    backend.allocate(layout)
    backend.allocate(layout)
    (kept,) = backend.fallbacks
    assert reason in kept
    assert reason in caplog.text


def test_without_triton_the_install_command_is_given(monkeypatch):
    """Without Triton, attention=triton is refused with the command that installs it."""
    monkeypatch.setattr(
        torch_backend, "find_spec", lambda name: None if name == "triton" else name
    )
    layout = TensorLayout(
        blocks=4, block_size=16, layers=1, kv_heads=1, head_dim=16, value_dim=16
    )
    with pytest.raises(InputError, match=r"pip install 'kvcore\[triton\]'"):
        TorchCPU(attention="triton").allocate(layout)


def test_without_its_interpreter_a_cpu_is_refused(monkeypatch):
    """On a CPU, attention=triton is refused without Triton's interpreter."""
    monkeypatch.setattr(_triton_attention, "INTERPRETED", False)
    layout = TensorLayout(
        blocks=4, block_size=16, layers=1, kv_heads=1, head_dim=16, value_dim=16
    )
    with pytest.raises(InputError, match="TRITON_INTERPRET=1"):
        TorchCPU(attention="triton").allocate(layout)


def test_too_many_query_heads_are_computed_by_torch(caplog):
    """Too many query heads are computed by torch, and the reason is logged once."""
    made = Decoding([20], dtype="fp32")
    plan = made.backend.plan(RaggedBatch(made.tables, [19], [1]))
    for _ in range(2):
        made.backend.attend(0, plan, torch.zeros(1, 65, 64))
    assert len(caplog.records) == 1
    assert made.backend.fallbacks == (
        "Triton's kernels take up to 64 query heads of a K/V head, not 65",
    )


def test_weights_of_chunks_are_computed_by_torch():
    """Attention weights of several new tokens are summed by torch, without a fallback."""
    made = Decoding([40, 20], new=[12, 1], dtype="fp32")
    made.check(weighed=True, window=20, sinks=2)


def test_positions_are_computed_by_torch():
    """A window over explicit positions is computed by torch.

    Without a window the kernel computes such a sequence.
    """
    made = Decoding([20, 30], dtype="fp32")
    held = {0: torch.arange(19)}
    batch = RaggedBatch(made.tables, [19, 29], [1, 1], positions=[19, 29], held_positions=held)
    plan = made.backend.plan(batch)
    made.backend.attend(0, plan, made.queries)
    assert not made.backend.fallbacks
    made.backend.attend(0, plan, made.queries, window=5)
    assert made.backend.fallbacks == (BY_POSITION,)


@pytest.mark.parametrize("codec", [None, "fp8-e4m3:scale=head", "fp8-e5m2", "int4"])
def test_weights_are_those_of_the_stored_kv(codec):
    """With any codec, outputs and weights are those of the stored K/V."""
    Decoding([70, 5], codec=codec, dtype="fp16").check(weighed=True, window=40, sinks=2)
