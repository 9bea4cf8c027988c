"""A torch-cpu pool with a codec: its bytes, its staged blocks, and its refusals."""

import pytest
from helpers.faults import fail, faulty

from kvcore import Codec, InputError, KVCache, PolicyError, Request
from kvcore.engine import Plane, RaggedBatch, TensorLayout
from kvcore_engine.compaction import Compactor
from kvcore_engine.retention.knorm import KNorm
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix

torch = pytest.importorskip("torch", reason="K/V lies in tensors")

from kvcore_engine.backend import TorchCPU  # noqa: E402 - need torch
from kvcore_plugins.codec import E4M3, FP16, INT4, INT8, KIVI  # noqa: E402

SIZE = 8


def backend(codec, **fixed):
    """Return a backend with a pool of 16 blocks under `codec`."""
    sizes = {"blocks": 16, "block_size": SIZE, "layers": 2, "kv_heads": 2} | fixed
    made = TorchCPU()
    made.allocate(TensorLayout(head_dim=16, value_dim=8, codec=codec, **sizes))
    return made


def store(made, table, context, length):
    """Store random K/V in both layers, and return it."""
    rows = [torch.randn(length, 2, width) for width in (16, 8)]
    plan = made.plan(RaggedBatch([table], [context], [length]))
    for layer in range(2):
        made.store(layer, plan, *rows)
    return rows


@pytest.mark.parametrize(
    "codec",
    [FP16(), E4M3(scale="head"), INT8(), INT4(), INT4(keys="channel"), KIVI()],
    ids=repr,
)
def test_allocated_bytes_are_those_of_the_layout(codec):
    """The tensors of the planes take exactly the bytes that the layout promises."""
    made = backend(codec)
    allocated = sum(matrix.untyped_storage().nbytes() for matrix in made._pool.matrices)
    assert allocated == made.layout.bytes == made._pool.bytes


def test_the_stage_grows_and_its_rows_are_reused():
    """A partial block takes a staged row in full precision.

    The row counts as memory, and is reused when the block has been coded.
    """
    made = backend(KIVI())
    empty = made.memory().allocated
    store(made, [0], 0, SIZE - 1)
    grown = made.memory().allocated
    rows = 4 * 2 * 2 * SIZE * (16 + 8) * 4
    assert grown == empty + rows
    for block in range(1, 12):
        store(made, [block - 1], SIZE - 1, 1)
        store(made, [block], 0, SIZE - 1)
    assert made.memory().allocated == grown


def test_a_full_block_leaves_the_stage_in_a_compaction():
    """A full block on the stage is coded when a compaction puts another one behind it."""
    made = backend(KIVI())
    store(made, [0], 0, SIZE - 1)
    half = made._pool.keys[0]
    made.move_tokens(0, [0, 1], [0, 2], torch.tensor([[0, 1], [0, 0], [SIZE, SIZE]]))
    assert 0 not in half.stage
    assert 2 in half.stage


def test_a_partial_block_goes_on_after_a_compaction():
    """Tokens that a compaction leaves in a partial block are coded with the next ones."""
    made = backend(INT4(keys="channel"))
    keys, _ = store(made, [0, 1], 0, SIZE + 4)
    moves = [(head, SIZE + slot, slot) for head in range(2) for slot in range(4)]
    for layer in range(2):
        made.move_tokens(layer, [0, 1], [5], torch.tensor(moves).t())
    more, _ = store(made, [5], 4, 4)
    block = torch.cat((keys[SIZE:], more)).transpose(0, 1)
    codec = INT4(keys="channel")
    expected = codec.decode("keys", codec.encode("keys", block)).transpose(0, 1)
    found, _ = made.read(0, [5], SIZE)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_coded_block_keeps_its_tokens_when_written_after_a_rollback():
    """A coded block that is written again after a rollback keeps its decoded tokens."""
    made = backend(KIVI())
    store(made, [0, 1], 0, 2 * SIZE)
    coded, _ = made.read(0, [0, 1], SIZE + 3)
    more, _ = store(made, [0, 1], SIZE + 3, 2)
    found, _ = made.read(0, [0, 1], SIZE + 5)
    torch.testing.assert_close(found, torch.cat((coded, more)), rtol=0, atol=0)


def test_a_reused_staged_block_loses_its_old_tokens():
    """A staged block loses its tokens when another block is copied or swapped into it."""
    made = backend(KIVI())
    store(made, [0], 0, SIZE)
    for copy in (
        lambda: made.copy_blocks([(0, 5)]),
        lambda: made.swap_in(made.swap_out([0]), [5]),
    ):
        store(made, [5], 0, 3)
        copy()
        expected, _ = made.read(0, [0], SIZE)
        found, _ = made.read(0, [5], SIZE)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_staged_blocks_can_change_places():
    """`copy_blocks` reads all staged blocks before it writes one, so they can change places."""
    made = backend(KIVI())
    for block in (0, 5, 7):
        store(made, [block], 0, 3)
    before = [made.read(0, [block], 3)[0] for block in (7, 0, 5)]
    made.copy_blocks([(0, 5), (5, 7), (7, 0)])
    for block, expected in zip((0, 5, 7), before, strict=True):
        torch.testing.assert_close(made.read(0, [block], 3)[0], expected, rtol=0, atol=0)


def test_a_staged_block_is_filled():
    """`fill` overwrites all tokens of a staged block."""
    made = backend(KIVI())
    for blocks in (None, [1]):
        store(made, [1], 0, 3)
        made.fill(2, blocks)
        assert (made.read(0, [1], 3)[0] == 2).all()


def test_a_compaction_leaves_the_partial_block_on_the_stage():
    """A compaction leaves the partial block on the stage, even if more blocks are allocated.

    These are for tokens that are yet to be computed.
    """
    made = backend(KIVI())
    cache = KVCache(16, SIZE, eviction=LRU(), prefix=Radix(), retention=KNorm(), ids=True)
    Compactor(cache, made, [None] * 2, [None] * 2)
    seq = cache.open(Request(id=0, prompt_tokens=5 * SIZE, key_tokens=SIZE))
    store(made, seq.table(), 0, 3 * SIZE)
    cache.commit(seq, 3 * SIZE)
    cache.compact(seq, SIZE + 3)
    assert [*made._pool.keys[0].stage] == seq.table().tolist()[1:2]


def test_layer_blocks_refuses_a_coded_pool():
    """`layer_blocks` refuses a pool of codes, and the error suggests `read`."""
    with pytest.raises(InputError, match=r"codec 'int8' keeps codes.*use `read`"):
        backend(INT8()).layer_blocks(0)


def test_a_codec_with_together_is_refused():
    """A codec is refused in a layout with `together`, which is for K/V as it is computed."""
    with pytest.raises(InputError, match=r"codec .int8. .*together=True"):
        backend(INT8(), together=True)


Odd = faulty(
    "Its methods do not do as its planes declare.",
    Codec,
    name="odd",
    rows=None,
    planes=lambda _, __, tokens, width: (Plane("codes", "uint8", (tokens, width)),),
    encode=lambda _, __, rows: (rows,),
    decode=fail,
)
Mute = faulty("Codes nothing.", Odd, encode=lambda *_: None)
Narrow = faulty(
    "Decodes one number fewer than it codes.",
    Odd,
    encode=lambda _, __, rows: (rows.to(torch.uint8),),
    decode=lambda _, __, planes: planes[0].float()[..., 1:],
)


def test_a_codec_that_loses_numbers_is_reported_by_name():
    """A codec that returns None or too few numbers raises PolicyError with its name."""
    with pytest.raises(PolicyError, match=r"'odd' .* raised TypeError in encode\(\)"):
        store(backend(Mute()), [0], 0, 1)
    made = backend(Narrow())
    store(made, [0], 0, 1)
    complaint = r"'odd' .* answered decode\(\) of keys with .* 15\]\), where it coded .* 16\)"
    with pytest.raises(PolicyError, match=complaint):
        made.read(0, [0], 1)


def test_a_codec_that_breaks_its_planes_is_reported_by_name():
    """Undeclared planes and exceptions of a codec raise PolicyError with its name."""
    made = backend(Odd())
    with pytest.raises(PolicyError, match=r"'odd' .* answered encode\(\) of keys.*float32"):
        store(made, [0], 0, 1)
    with pytest.raises(PolicyError, match=r"'odd' .* raised ZeroDivisionError in decode\(\)"):
        made.read(0, [0], 1)
