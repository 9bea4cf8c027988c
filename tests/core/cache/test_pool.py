"""The block pool: the ids that it allocates, their order, and their owners."""

from array import array

import pytest

from kvcore import OutOfBlocks
from kvcore.cache import BlockPool, CountingPool


def ids(*blocks):
    """Return `blocks` as an array, as the pool does."""
    return array("i", blocks)


def test_unused_ids_come_in_ascending_order():
    """A new pool allocates 0, 1, 2 and so on."""
    pool = BlockPool(8)
    assert pool.allocate(3) == ids(0, 1, 2)
    assert pool.allocate(2) == ids(3, 4)


def test_the_last_freed_block_is_allocated_first():
    """The block freed last is allocated first."""
    pool = BlockPool(8)
    pool.allocate(6)
    pool.free(ids(5, 1, 3), 3)
    assert pool.allocate(3) == ids(3, 1, 5)


def test_freed_blocks_that_are_not_allocated_keep_their_order():
    """Freed blocks that are not allocated keep their order."""
    pool = BlockPool(8)
    pool.allocate(4)
    pool.free(ids(3, 2, 1, 0), 4)
    assert pool.allocate(2) == ids(0, 1)
    assert pool.free_ids() == ids(3, 2)
    assert pool.allocate(2) == ids(2, 3)


def test_an_allocation_of_no_blocks_changes_nothing():
    """`allocate(0)` returns no ids and changes nothing, even if freed blocks are there."""
    pool = BlockPool(4)
    pool.free(pool.allocate(2)[::-1], 2)
    assert pool.allocate(0) == ids()
    assert (pool.free_blocks, pool.free_ids(), pool.high_water) == (4, ids(1, 0), 2)


@pytest.mark.parametrize("kind", [CountingPool, BlockPool])
def test_an_allocation_of_more_than_the_free_blocks_changes_nothing(kind):
    """OutOfBlocks names the blocks asked for and the free ones, and nothing is allocated."""
    pool = kind(4)
    pool.allocate(1)
    with pytest.raises(OutOfBlocks, match="4 blocks were asked for; 3 of 4 are free"):
        pool.allocate(4)
    assert pool.free_blocks == 3


def test_counting_pool_allocates_no_ids():
    """CountingPool allocates no ids, and keeps the number of free blocks."""
    pool = CountingPool(4)
    assert pool.allocate(3) is None
    pool.free(None, 2)
    assert pool.free_blocks == 3


def test_the_largest_pool_stores_no_unused_ids():
    """A pool of 2^31 - 1 blocks is made and used at once, since unused ids are not stored."""
    pool = BlockPool(2**31 - 1)
    assert pool.allocate(2) == ids(0, 1)
    assert len(pool.free_ids()) == 0


def test_release_frees_blocks_with_one_owner():
    """`release` frees blocks with one owner; the last of them is allocated next."""
    pool = BlockPool(4)
    pool.allocate(3)
    assert pool.release(ids(2, 1)) == ids(2, 1)
    assert pool.allocate(2) == ids(1, 2)


def test_shared_blocks_are_freed_by_their_last_owner():
    """A block with three owners is freed by the third release."""
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.share(blocks[:1])
    assert pool.release(blocks) == ids()
    assert pool.release(blocks) == ids(1)
    assert pool.release(blocks[:1]) == ids(0)
    assert (pool.free_blocks, pool.owners) == (4, {})


def test_unshare_returns_whether_another_owner_is_left():
    """`unshare` returns True if the block has another owner left."""
    pool = BlockPool(4)
    pool.share(pool.allocate(1))
    assert pool.unshare(0)
    assert not pool.unshare(0)
