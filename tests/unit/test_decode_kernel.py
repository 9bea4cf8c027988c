"""Triton's attention of decoding sequences, in its interpreter, against float64."""

import json
import os
import subprocess
import sys
from math import inf, nan, sqrt
from pathlib import Path

import pytest
from helpers.engine import compute
from helpers.serving import ask

from kvcore import InputError, Plugins
from kvcore.engine import DeviceMemory, RaggedBatch, TensorLayout
from kvcore_plugins.backend import TorchCPU, torch_backend

torch = pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
pytest.importorskip("triton", reason="needs Triton: pip install 'kvcore[triton]'")

from kvcore_plugins.backend import _triton_decode  # noqa: E402 - needs Triton

pytestmark = pytest.mark.skipif(
    not _triton_decode.INTERPRETED, reason=f"TRITON_INTERPRET={os.getenv('TRITON_INTERPRET')}"
)

TOLERANCES = {"fp32": 4e-6, "fp16": 3e-3, "bf16": 2e-2}
"""Greatest difference from float64 over the same numbers, which are normally distributed."""


class Decoding:
    """Sequences that decode, in a pool that is NaN where nothing is stored.

    The first and the last block of the pool are in use, of one sequence.
    """

    def __init__(self, lengths, *, group=4, codec=None, spare=3, **fields):
        """Store K/V of all tokens but the last, and plan the last."""
        sizes = {"block_size": 16, "kv_heads": 1, "head_dim": 64} | fields
        sizes.setdefault("value_dim", sizes["head_dim"])
        held = [-(-length // sizes["block_size"]) for length in lengths]
        codec = Plugins().build("codec", codec) if codec else None
        layout = TensorLayout(blocks=sum(held) + spare, layers=1, codec=codec, **sizes)
        draw = torch.Generator().manual_seed(7)
        order = torch.randperm(layout.blocks - 2, generator=draw) + 1
        order = [layout.blocks - 1, 0, *order.tolist()]
        self.tables = [[order.pop(0) for _ in range(blocks)] for blocks in held]
        self.backend = TorchCPU(attention="triton")
        self.backend.allocate(layout)
        self.kernel = self.backend._kernel._divider.kernel
        self.lengths, dtype = lengths, self.backend._pool.dtype
        self.backend.fill(nan if codec is None else 7)
        tokens, heads = sum(lengths), layout.kv_heads
        plan = self.backend.plan(RaggedBatch(self.tables, [0] * len(lengths), lengths))
        rows = [
            torch.randn(tokens, heads, width, generator=draw).to(dtype)
            for width in (layout.head_dim, layout.value_dim)
        ]
        self.backend.store(0, plan, *rows)
        queries = torch.randn(len(lengths), heads * group, layout.head_dim, generator=draw)
        self.queries = queries.to(dtype)

    def check(self, *, window=None, sinks=0, scale=None, weighed=False):
        """Compare with attention in float64 over what `read` returns."""
        contexts = [length - 1 for length in self.lengths]
        plan = self.backend.plan(RaggedBatch(self.tables, contexts, [1] * len(contexts)))
        options = {"window": window, "sinks": sinks, "scale": scale}
        tolerance = TOLERANCES[self.backend.layout.dtype]
        close = {"atol": tolerance, "rtol": tolerance}
        if weighed:
            found, sums = self.backend.attend_weighed(0, plan, self.queries, **options)
        else:
            found = self.backend.attend(0, plan, self.queries, **options)
        assert not self.backend.fallbacks
        for row, (table, length) in enumerate(zip(self.tables, self.lengths, strict=True)):
            keys, values = (x.double() for x in self.backend.read(0, table, length))
            group = self.queries.shape[1] // keys.shape[1]
            query = self.queries[row].double().view(keys.shape[1], group, -1)
            scores = torch.einsum("hgd,thd->hgt", query, keys)
            scores *= 1 / sqrt(keys.shape[2]) if scale is None else scale
            if window is not None:
                at = torch.arange(length)
                scores[..., (at < length - window) & (at >= sinks)] = -inf
            weights = scores.softmax(-1)
            expected = torch.einsum("hgt,thd->hgd", weights, values).flatten(0, 1)
            torch.testing.assert_close(found[row].double(), expected, **close)
            if weighed:
                summed = weights.sum(1)
                torch.testing.assert_close(sums[row].double(), summed, **close)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_any_length(dtype):
    """A tile, a block, and a chunk may be full, or not, or hold one token."""
    Decoding([1, 15, 16, 17, 63, 64, 65, 130], dtype=dtype).check()


@pytest.mark.parametrize("group", [1, 8, 16, 20])
def test_any_group(group):
    """Query heads that share a K/V head are padded to what a matrix unit takes."""
    Decoding([40, 70], group=group, kv_heads=2, dtype="fp16").check()


@pytest.mark.parametrize(
    ("width", "value", "together"),
    [(80, 80, True), (96, 96, False), (128, 64, True), (256, 256, False), (8, 24, True)],
)
def test_any_width(width, value, together):
    """Widths need not be powers of two, nor alike, nor what moves at once."""
    made = Decoding([70, 20], head_dim=width, value_dim=value, together=together, dtype="fp16")
    made.check(scale=0.3)


@pytest.mark.parametrize("block_size", [2, 32, 64, 128])
def test_any_power_of_two(block_size):
    """A tile is several blocks, or a part of one."""
    Decoding([200, 31], block_size=block_size, dtype="fp32").check()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "codec",
    [
        "fp8-e4m3:factor=0.5",
        "fp8-e4m3:scale=head",
        "fp8-e5m2",
        "fp8-e5m2:scale=head",
        "int8",
        "int4",
    ],
)
def test_decodes(codec, dtype):
    """Codes become numbers in registers; what is compared is what `read` decodes."""
    Decoding([70, 17], codec=codec, dtype=dtype, head_dim=80).check()


def test_fp8_as_a_gpu_widens_it(monkeypatch):
    """Where the GPU has an instruction for it, numbers are loaded as fp8, not as bytes."""
    monkeypatch.setattr(_triton_decode, "_widens_fp8", lambda _: True)
    for codec in ("fp8-e4m3", "fp8-e5m2:scale=head"):
        made = Decoding([70, 17], codec=codec, dtype="fp16")
        assert made.kernel._coding.fp8 is not None
        made.check()


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (20, 3), (150, 40), (64, 0), (400, 4)])
def test_windows_and_sinks(window, sinks):
    """A window that begins inside a block, and sinks, are two ranges; nothing else is read."""
    Decoding([300, 21, 140], dtype="fp32").check(window=window, sinks=sinks)


def test_what_left_the_window_may_be_gone():
    """Blocks between sinks and window are not read."""
    made = Decoding([300], dtype="fp32")
    plain = TorchCPU(attention="sdpa")
    plain.allocate(made.backend.layout)
    plain._pool = made.backend._pool
    batch = RaggedBatch(made.tables, [299], [1])
    before = made.backend.attend(0, made.backend.plan(batch), made.queries, window=100, sinks=5)
    made.backend.fill(nan, made.tables[0][1:12])
    after = made.backend.attend(0, made.backend.plan(batch), made.queries, window=100, sinks=5)
    assert after.equal(before)


@pytest.mark.parametrize(
    ("codec", "options"),
    [(None, {}), ("int4", {"window": 50, "sinks": 3}), ("fp8-e4m3:scale=head", {})],
)
def test_weighs(codec, options):
    """The weights that tokens get, summed over the query heads, come with the output."""
    made = Decoding([300, 17], kv_heads=2, codec=codec, dtype="fp16")
    made.check(weighed=True, **options)


def test_a_long_sequence_beside_short_ones():
    """Contexts that differ are cut into short chunks, the longest first; some are not cut."""
    made = Decoding([1100, 3, 90], dtype="fp32")
    made.kernel.programs = 1
    made.check()
    plan = made.backend.plan(RaggedBatch(made.tables, [1099, 2, 89], [1, 1, 1]))
    (part,) = plan.parts(made.backend._kernel._divider, 4, None, 0)
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
    """Alike contexts: as many programs as run at once, and no more. Others: finer."""
    assert _triton_decode.chunk_of(lengths, 8, programs=528) == chunk


def test_empty_chunks_do_nothing():
    """A grid may be larger than the work, as that of a captured graph is."""
    made = Decoding([300, 20], dtype="fp32")
    plan = made.backend.plan(RaggedBatch(made.tables, [299, 19], [1, 1]))
    before = made.backend.attend(0, plan, made.queries)
    (part,) = plan.parts(made.backend._kernel._divider, 4, None, 0)
    for name, width in (("work", 5), ("splits", 3)):
        given = getattr(part.plan, name)
        padded = torch.cat((given, torch.zeros(4, width, dtype=torch.int32)))
        object.__setattr__(part.plan, name, padded)
    assert made.backend.attend(0, plan, made.queries).equal(before)


def test_beyond_2_to_the_31():
    """Where a token lies is counted in 64 bits; memory that nothing touches costs nothing."""
    numbers = 16 * 8 * 256
    blocks = 2**31 // numbers + 8
    made = Decoding.__new__(Decoding)
    layout = TensorLayout(
        blocks=blocks, block_size=16, layers=1, kv_heads=8, head_dim=256, value_dim=256,
        dtype="fp16",
    )  # fmt: skip
    backend = TorchCPU(attention="triton")
    backend.memory = lambda: DeviceMemory(0, None, None)
    backend.allocate(layout)
    made.backend, made.lengths = backend, [33]
    made.tables = [[blocks - 1, 0, blocks - 2]]
    draw = torch.Generator().manual_seed(7)
    plan = backend.plan(RaggedBatch(made.tables, [0], [33]))
    rows = [torch.randn(33, 8, 256, generator=draw).half() for _ in range(2)]
    backend.store(0, plan, *rows)
    made.queries = torch.randn(1, 8, 256, generator=draw).half()
    made.check()


def test_prefill_and_decode_in_one_batch():
    """Chunks of prompts go through torch, single tokens through the kernel."""
    made = Decoding([40, 30], dtype="fp32")
    batch = RaggedBatch(made.tables, [39, 10], [1, 20])
    draw = torch.Generator().manual_seed(3)
    queries = torch.randn(21, 4, 64, generator=draw)
    plain = TorchCPU()
    plain.allocate(made.backend.layout)
    plain._pool.matrices[0].copy_(made.backend._pool.matrices[0])
    plain._pool.matrices[1].copy_(made.backend._pool.matrices[1])
    found, expected = (
        each.attend(0, each.plan(batch), queries) for each in (made.backend, plain)
    )
    torch.testing.assert_close(found, expected, atol=4e-6, rtol=4e-6)


@pytest.mark.slow
def test_compiles_for_gpus(tmp_path):
    """Registers suffice, shared memory too, copies are wide, and K and V have a buffer each.

    Of codes, which are widened on the way to the matrix unit, some copies may be narrow.
    """
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    }
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": "."}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "helpers.compiled_kernels"],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    for name, found in json.loads(done.stdout).items():
        assert found["spilled"] == 0, name
        limit = 163 if name.endswith("sm_80") else 227
        assert found["shared"] <= limit * 1024, name
        if name.startswith(("combining", "weighing")):
            continue
        assert len(found["buffers"]) >= 2, name
        assert found["wide"], name
        if "p8" not in name and "int" not in name:
            assert not found["narrow"], name


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "fp64"}, "not in fp64"),
        ({"block_size": 17}, "not of 17"),
        ({"head_dim": 264}, "up to 256 numbers"),
        ({"codec": "int8:keys=channel"}, "not int8 as it is set"),
        ({"codec": "kivi"}, "not kivi as it is set"),
    ],
)
def test_what_is_not_covered_is_said(fields, reason, caplog):
    """Asked for, it is refused; otherwise torch does it, and the reason is kept and logged."""
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


def test_without_triton_it_is_said(monkeypatch):
    """What is missing is named with the command that installs it."""
    monkeypatch.setattr(
        torch_backend, "find_spec", lambda name: None if name == "triton" else name
    )
    layout = TensorLayout(
        blocks=4, block_size=16, layers=1, kv_heads=1, head_dim=16, value_dim=16
    )
    with pytest.raises(InputError, match=r"pip install 'kvcore\[triton\]'"):
        TorchCPU(attention="triton").allocate(layout)


def test_without_its_interpreter_a_cpu_is_refused(monkeypatch):
    """There are no kernels for a CPU."""
    monkeypatch.setattr(_triton_decode, "INTERPRETED", False)
    layout = TensorLayout(
        blocks=4, block_size=16, layers=1, kv_heads=1, head_dim=16, value_dim=16
    )
    with pytest.raises(InputError, match="TRITON_INTERPRET=1"):
        TorchCPU(attention="triton").allocate(layout)


def test_too_many_query_heads_are_computed_by_torch(caplog):
    """That is known when queries come; the reason is logged once."""
    made = Decoding([20], dtype="fp32")
    plan = made.backend.plan(RaggedBatch(made.tables, [19], [1]))
    for _ in range(2):
        made.backend.attend(0, plan, torch.zeros(1, 65, 64))
    assert len(caplog.records) == 1
    assert made.backend.fallbacks == (
        "Triton's kernels take 64 query heads of a K/V head, not 65",
    )


def test_positions_are_computed_by_torch():
    """A window by position is torch's; without a window the kernel takes such a sequence."""
    made = Decoding([20, 30], dtype="fp32")
    held = [torch.arange(19), None]
    batch = RaggedBatch(made.tables, [19, 29], [1, 1], positions=[19, 29], held_positions=held)
    plan = made.backend.plan(batch)
    made.backend.attend(0, plan, made.queries)
    assert not made.backend.fallbacks
    made.backend.attend(0, plan, made.queries, window=5)
    assert len(made.backend.fallbacks) == 1


def test_the_engine_computes_the_same_tokens():
    """A run that preempts, evicts and shares prefixes has the tokens of torch's attention."""

    def served(attention):
        """Return the texts of some requests."""
        requests = [
            ask(n, n * 5, 9 + 5 * n % 23, 4 + 3 * n % 11, keys=[*range(1 + n % 3)])
            for n in range(4)
        ]
        size = "layers=2,hidden=32,heads=4,kv_heads=2,head_dim=8,vocab_size=97"
        run = compute(
            requests,
            generator=Plugins().build("generator", f"transformer:{size}"),
            backend=TorchCPU(attention=attention),
            blocks=12,
            max_tokens=8,
            max_seqs=4,
        )
        return run.result.outputs

    assert served("triton") == served("sdpa")
