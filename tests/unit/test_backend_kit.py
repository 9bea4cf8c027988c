"""The conformance tests of backends: a right backend passes, wrong ones do not."""

import attrs
import pytest

torch = pytest.importorskip("torch", reason="the backends here keep K/V in torch tensors")

from kvcore.engine import DeviceMemory, TensorLayout  # noqa: E402 - these need torch
from kvcore.testing import BackendTests  # noqa: E402
from kvcore_plugins.backend import TorchCPU  # noqa: E402
from kvcore_plugins.backend._pool import Pool  # noqa: E402


class Narrow(TorchCPU):
    """Knows one dtype."""

    name = "narrow"

    def check(self, layout: TensorLayout) -> None:
        """Fail where the tests should not have asked."""
        assert layout.dtype == "fp32"


class TestNarrow(BackendTests):
    """What a backend says that it cannot do is not asked of it."""

    backend = Narrow
    dtypes = ("fp32",)

    @pytest.mark.parametrize("seed", range(2))
    def test_chunks_are_one_prefill(self, seed):
        """In fp32 they are so only nearly: a kit's test can be replaced."""
        self.batch(seed, contexts=[0], lengths=[50]).check()


class Wide(TorchCPU):
    """Lets the window be a token too wide."""

    def attend(self, layer, plan, queries, *, scale=None, window=None, sinks=0):
        """Attend to one more."""
        wider = window and window + 1
        return super().attend(layer, plan, queries, scale=scale, window=wider, sinks=sinks)


class Unscaled(TorchCPU):
    """Has no ear for a scale."""

    def attend(self, layer, plan, queries, *, scale=None, window=None, sinks=0):
        """Attend with the usual one."""
        return super().attend(layer, plan, queries, window=window, sinks=sinks)


class Interleaved(TorchCPU):
    """Lets every other query head share a K/V head, rather than neighbours."""

    def attend(self, layer, plan, queries, **options):
        """Attend in another order."""
        heads = self.layout.kv_heads
        mixed = queries.unflatten(1, (-1, heads)).transpose(1, 2).flatten(1, 2)
        return super().attend(layer, plan, mixed, **options)


class Rough(TorchCPU):
    """Computes in fp32, whatever was asked for."""

    def attend(self, layer, plan, queries, **options):
        """Attend, and round."""
        return super().attend(layer, plan, queries, **options).float().to(queries.dtype)


class Shallow(TorchCPU):
    """Copies, writes and swaps a part of it."""

    def copy_blocks(self, pairs):
        """Copy half of it."""
        matrices, self._pool.matrices = self._pool.matrices, self._pool.matrices[:2]
        super().copy_blocks(pairs)
        self._pool.matrices = matrices

    def write_blocks(self, blocks, data):
        """Write the first of them."""
        super().write_blocks(blocks[:1], data[:1])

    def swap_in(self, host, blocks):
        """Put back the first of them."""
        super().swap_in(host[:1], blocks[:1])


class Still(TorchCPU):
    """Takes all rotations for those of halves."""

    def store_rotated(self, layer, plan, keys, values, rotation):
        """Rotate in the one way that it knows."""
        other = attrs.evolve(rotation, adjacent=False)
        super().store_rotated(layer, plan, keys, values, other)


class Hasty(TorchCPU):
    """Moves blocks one after the other."""

    def move_blocks(self, pairs):
        """Overwrite what is yet to move."""
        for pair in pairs:
            self.copy_blocks([pair])


class Sloppy(TorchCPU):
    """Fills everything, whatever was named."""

    def fill(self, value, blocks=None):
        """Fill all."""
        super().fill(value)


class Sharing(TorchCPU):
    """Hands out its own memory."""

    def read(self, layer, table, tokens):
        """Return views of the first block."""
        parts = self._pool.keys[layer], self._pool.values[layer]
        return tuple(part.blocks[table[0]].transpose(0, 1)[:tokens] for part in parts)


class Modest(TorchCPU):
    """Says that it takes nothing."""

    def memory(self):
        """Return nothing."""
        return DeviceMemory(0, None, None)


class Greedy(TorchCPU):
    """Allocates less than it was asked for."""

    def allocate(self, layout):
        """Take whatever there is."""
        small = TensorLayout(
            blocks=1, block_size=1, layers=1, kv_heads=1, head_dim=1, value_dim=1
        )
        self._pool = Pool(small, self.torch_device, self.upload)
        self.layout = layout


class Careless(TorchCPU):
    """Attends to whole blocks."""

    def attend(self, layer, plan, queries, **options):
        """Read what is behind the last token."""
        found = super().attend(layer, plan, queries, **options)
        return found + 0 * self._pool.values[layer].blocks.sum()


@pytest.mark.parametrize(
    ("wrong", "test", "arguments"),
    [
        (Wide, "test_windows_and_sinks", (0, 20, 0)),
        (Unscaled, "test_scale", ()),
        (Interleaved, "test_query_heads_share", (2, 2)),
        (Rough, "test_paged_is_dense", (0, "fp64")),
        (Still, "test_stores_rotated_keys", ("fp32", True)),
        (Still, "test_codes_rotated_keys", (True, "int8")),
        (Shallow, "test_copies_blocks", (False,)),
        (Shallow, "test_swaps", ("fp32", False)),
        (Shallow, "test_gives_and_takes_bytes", ("fp32", False)),
        (Sloppy, "test_fills", (True,)),
        (Sharing, "test_reads_copies", ()),
        (Modest, "test_reports_its_memory", ()),
        (Careless, "test_a_reused_block_leaks_nothing", (0,)),
    ],
)
def test_a_wrong_backend_fails(wrong, test, arguments):
    """Each fault is found by the test that is about it."""

    class Kit(BackendTests):
        backend = wrong

    with pytest.raises(AssertionError):
        getattr(Kit(), test)(*arguments)


def test_moving_one_after_the_other_fails(monkeypatch):
    """A block that is overwritten before it has moved is lost."""

    class Kit(BackendTests):
        backend = Hasty

    with pytest.raises(AssertionError):
        Kit().test_moves_blocks(2, together=False, monkeypatch=monkeypatch)


def test_allocating_less_than_asked_for_fails():
    """Too large a pool has to be refused."""

    class Kit(BackendTests):
        backend = Greedy

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        Kit().test_refuses_what_does_not_fit()
