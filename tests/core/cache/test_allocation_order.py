"""The check of the order in which a trace allocates blocks: free, unused, then victims."""

from array import array

import pytest

from kvcore.trace.events import ViolationError
from kvcore_replay.check.pool import AllocationOrder


def ids(*blocks):
    """Return block ids as the cache holds them."""
    return array("i", blocks)


@pytest.fixture
def order():
    """Return the order of a pool of 6 blocks: 0 and 2 are in use, 3 and then 1 were freed."""
    order = AllocationOrder(6)
    order.take(ids(0, 1, 2, 3), "r")
    order.pool.free(ids(3, 1), 2)
    return order


def test_freed_then_unused_then_evicted_blocks_are_allocated(order):
    """Freed blocks are taken first (last freed first), then unused ascending, then victims."""
    order.evict(ids(2, 0), "r")
    order.take(ids(1, 3, 4, 5, 2, 0), "r")
    assert order.free == 0


def test_blocks_in_another_order_are_a_violation(order):
    """Another order is a violation; the error has the blocks of the pool and those taken."""
    with pytest.raises(ViolationError, match=r"the pool gives \[\(1, 1\), \(3, 2\)\], not"):
        order.take(ids(3, 1, 4), "r")


def test_allocating_more_blocks_than_are_free_is_a_violation(order):
    """Taking more blocks than are free or just evicted is a violation."""
    with pytest.raises(ViolationError, match="5 blocks are taken; 4 are free"):
        order.take(ids(1, 3, 4, 5, 6), "r")


def test_an_unnecessary_eviction_is_a_violation(order):
    """Evicting more blocks than the call is short of is a violation."""
    order.evict(ids(2, 0), "r")
    with pytest.raises(ViolationError, match="1 more blocks were evicted than were missing"):
        order.take(ids(1, 3, 4, 5, 2), "r")


def test_a_copy_leaves_victims_to_the_next_allocation(order):
    """A COPY takes the first block of its call and leaves the victims to the next ALLOC."""
    order.evict(ids(2, 0), "r")
    order.take(ids(1), "r", copy=True)
    order.take(ids(3, 4, 5, 2, 0), "r")
    assert order.free == 0


def test_two_victims_for_a_single_copy_are_a_violation(order):
    """Evicting two blocks for a call that only copies one block is a violation."""
    order.take(ids(1, 3, 4, 5), "r")
    order.evict(ids(2, 0), "r")
    order.take(ids(2), "r", copy=True)
    with pytest.raises(ViolationError, match="1 more blocks were evicted than were missing"):
        order.settle()


def test_expired_blocks_are_free_at_once(order):
    """Expired blocks are free at once, and the one that expired last is taken first."""
    order.expire(ids(2, 0))
    assert order.free == 6
    order.take(ids(0, 2, 1), "r")
    assert order.free == 3


def test_victims_of_a_failed_call_are_allocated_last(order):
    """The victims of a call that failed are free, and are taken after all other free blocks."""
    order.evict(ids(2, 0), "failed")
    order.take(ids(1, 3, 4, 5, 2), "r")
    assert order.free == 1


def test_spare_blocks_of_a_whole_evicted_leaf_become_free():
    """If whole leaves are evicted, the blocks of the last leaf that are not taken become free.

    Evicting another leaf when there are enough blocks is a violation.
    """
    order = AllocationOrder(6, leaves=True)
    order.take(ids(0, 1, 2, 3, 4, 5), "r")
    order.evict(ids(2, 1), "r")
    order.take(ids(2), "r")
    assert order.free == 1
    order.take(ids(1), "r")
    order.evict(ids(3), "r")
    order.evict(ids(5, 4), "r")
    with pytest.raises(ViolationError, match="2 more blocks were evicted than were missing"):
        order.take(ids(3), "r")
