"""The conformance tests of backends pass a correct backend and fail each wrong one."""

import attrs
import pytest
from helpers.faults import faulty, run_test
from helpers.seeds import FewSeeds

torch = pytest.importorskip("torch", reason="the backends here keep K/V in torch tensors")

from kvcore.engine import DeviceMemory, TensorLayout  # noqa: E402 - these need torch
from kvcore.testing import BackendTests  # noqa: E402
from kvcore_engine.backend import TorchCPU  # noqa: E402
from kvcore_engine.backend._pool import Pool  # noqa: E402


class Narrow(TorchCPU):
    """A backend that supports one dtype, fp32."""

    name = "narrow"

    def check(self, layout: TensorLayout) -> None:
        """Fail on any dtype that the backend does not declare."""
        assert layout.dtype == "fp32"

    def tensor(self, data, dtype=None):
        """Fail on any dtype that the backend does not declare."""
        assert dtype in (None, "fp32")
        return super().tensor(data, dtype)


class TestNarrow(FewSeeds, BackendTests):
    """The conformance tests skip dtypes that the backend does not declare."""

    backend = Narrow
    dtypes = ("fp32",)

    @pytest.mark.parametrize("seed", range(2))
    def test_chunks_are_one_prefill(self, seed):
        """A replaced test of the kit: in fp32, chunks equal one prefill within a tolerance."""
        self.batch(seed, contexts=[0], lengths=[50]).check()


class Wrapped(TorchCPU):
    """A backend whose tensors are of another library: a torch tensor in a tuple."""

    def tensor(self, data, dtype=None):
        """Return a tuple with the tensor."""
        return (super().tensor(data, dtype),)

    def store(self, layer, plan, keys, values):
        """Store the tensors in the tuples."""
        super().store(layer, plan, *keys, *values)

    def attend(self, layer, plan, queries, *, sink_logits=(None,), **options):
        """Attend with the tensors in the tuples."""
        return super().attend(layer, plan, *queries, sink_logits=sink_logits[0], **options)


class WrappedTests(BackendTests):
    """The conformance tests with `numbers` for such tensors."""

    def numbers(self, tensor):
        """Return the tensor, also if it is in a tuple."""
        return super().numbers(tensor[0] if isinstance(tensor, tuple) else tensor)


@pytest.mark.parametrize("test", ["learned_sinks", "paged_is_dense"])
def test_tensors_of_another_library_are_read_by_numbers(test):
    """With `numbers`, a backend with tensors of another library passes."""
    run_test(WrappedTests, Wrapped, test, 0, dtype="fp32")


def attending(fault, **options):
    """Return a backend with a fault: that of each option is what a function makes of it."""

    def attend(*given, **asked):
        changed = {name: change(asked.get(name)) for name, change in options.items()}
        return TorchCPU.attend(*given, **asked | changed)

    return faulty(fault, TorchCPU, attend=attend)


Wide = attending(
    "A backend whose attention window is one token too wide.",
    window=lambda window: window and window + 1,
)
Unscaled = attending("A backend that ignores the scale of attention.", scale=lambda _: None)


class Interleaved(TorchCPU):
    """A backend in which every other query head shares a K/V head, instead of neighbours."""

    def attend(self, layer, plan, queries, **options):
        """Attend with the query heads in interleaved order."""
        heads = self.layout.kv_heads
        mixed = queries.unflatten(1, (-1, heads)).transpose(1, 2).flatten(1, 2)
        return super().attend(layer, plan, mixed, **options)


Rough = faulty(
    "A backend whose attention has the precision of fp32 in every dtype.",
    TorchCPU,
    attend=lambda *given, **options: TorchCPU.attend(*given, **options).float().double(),
)


class Shallow(TorchCPU):
    """A backend that copies, writes and swaps in only a part of the blocks."""

    def copy_blocks(self, pairs):
        """Copy the first two tensors only."""
        matrices, self._pool.matrices = self._pool.matrices, self._pool.matrices[:2]
        super().copy_blocks(pairs)
        self._pool.matrices = matrices

    def write_blocks(self, blocks, data):
        """Write the first block only."""
        super().write_blocks(blocks[:1], data[:1])

    def swap_in(self, host, blocks):
        """Restore the first block only."""
        super().swap_in(host[:1], blocks[:1])


class Still(TorchCPU):
    """A backend that rotates halves even where a rotation is of adjacent numbers."""

    def store_rotated(self, layer, plan, keys, values, rotation):
        """Rotate halves, whatever the rotation."""
        other = attrs.evolve(rotation, adjacent=False)
        super().store_rotated(layer, plan, keys, values, other)


class Hasty(TorchCPU):
    """A backend that moves blocks one after the other."""

    def move_blocks(self, pairs):
        """Copy pair by pair, which overwrites blocks that have not been moved yet."""
        for pair in pairs:
            self.copy_blocks([pair])


Sloppy = faulty(
    "A backend that fills all blocks, whichever are given.",
    TorchCPU,
    fill=lambda self, value, *_: TorchCPU.fill(self, value),
)


class Sharing(TorchCPU):
    """A backend whose `read` returns its own memory."""

    def read(self, layer, table, tokens):
        """Return views of the first block."""
        parts = self._pool.keys[layer], self._pool.values[layer]
        return tuple(part.blocks[table[0]].transpose(0, 1)[:tokens] for part in parts)


Modest = faulty(
    "A backend that reports no allocated memory.",
    TorchCPU,
    memory=lambda _: DeviceMemory(0, None, None),
)


class Greedy(TorchCPU):
    """A backend that allocates less than it was asked for."""

    def allocate(self, layout):
        """Allocate a pool of one block, whatever the layout."""
        small = TensorLayout(
            blocks=1, block_size=1, layers=1, kv_heads=1, head_dim=1, value_dim=1
        )
        self._pool = Pool(small, self.torch_device, self.upload)
        self.layout = layout


Floating = faulty(
    "A backend that gives integers the dtype of the layout.",
    TorchCPU,
    tensor=lambda self, data, dtype=None: TorchCPU.tensor(
        self, data, dtype or self.layout.dtype
    ),
)


class Careless(TorchCPU):
    """A backend whose attention reads whole blocks, beyond the last token."""

    def attend(self, layer, plan, queries, **options):
        """Attend, and add all values times 0, which is NaN if one of them is."""
        found = super().attend(layer, plan, queries, **options)
        return found + 0 * self._pool.values[layer].blocks.sum()


@pytest.mark.parametrize(
    ("wrong", "test", "arguments"),
    [
        (Wide, "windows_and_sinks", (0, 20, 0)),
        (Unscaled, "scale", ()),
        (Interleaved, "query_heads_share", (2, 2)),
        (Rough, "paged_is_dense", (0, "fp64")),
        (Still, "stores_rotated_keys", ("fp32", True)),
        (Still, "codes_rotated_keys", (True, "int8")),
        (Shallow, "copies_blocks", (False,)),
        (Shallow, "swaps", ("fp32", False)),
        (Shallow, "gives_and_takes_bytes", ("fp32", False)),
        (Sloppy, "fills", (True,)),
        (Sharing, "reads_copies", ()),
        (Modest, "reports_its_memory", ()),
        (Floating, "tensors", ()),
        (Careless, "a_reused_block_leaks_nothing", (0,)),
    ],
)
def test_each_wrong_backend_fails_the_test_of_its_fault(wrong, test, arguments):
    """Each wrong backend fails the conformance test of its fault, which `TorchCPU` passes."""
    run_test(BackendTests, TorchCPU, test, *arguments)
    with pytest.raises(AssertionError):
        run_test(BackendTests, wrong, test, *arguments)


def test_moving_blocks_pair_by_pair_fails(monkeypatch):
    """A backend that moves blocks one after the other fails the test of `move_blocks`."""
    values = {"seed": 2, "together": False, "monkeypatch": monkeypatch}
    with pytest.raises(AssertionError):
        run_test(BackendTests, Hasty, "moves_blocks", **values)


def test_allocating_fewer_blocks_than_requested_fails():
    """A backend that accepts too large a pool fails the test that expects a refusal."""
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        run_test(BackendTests, Greedy, "refuses_a_pool_that_does_not_fit")
