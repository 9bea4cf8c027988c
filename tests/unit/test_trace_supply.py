from array import array

import pytest

from kvcore.trace.allocation_order import Supply
from kvcore.trace.spans import ViolationError


def ids(*blocks):
    """Return block ids as the cache holds them."""
    return array("i", blocks)


@pytest.fixture
def supply():
    """Return a supply of 6 blocks: 3 and 1 freed, in this order, 0 and 2 in use."""
    supply = Supply(6)
    supply.take(ids(0, 1, 2, 3), "r")
    supply.pool.free(ids(3, 1), 2)
    return supply


def test_freed_blocks_come_before_new_ones_and_those_before_victims(supply):
    """Ids come last freed first, then unused ascending, then evicted in their order."""
    supply.evicted(ids(2, 0), "r")
    supply.take(ids(1, 3, 4, 5, 2, 0), "r")
    assert supply.free == 0


def test_another_order_is_a_violation(supply):
    """The error has what the pool gives and what was taken."""
    with pytest.raises(ViolationError, match=r"the pool gives \[\(1, 1\), \(3, 2\)\], not"):
        supply.take(ids(3, 1, 4), "r")


def test_more_than_is_free_is_a_violation(supply):
    """What is taken must be free, or evicted just before."""
    with pytest.raises(ViolationError, match="5 blocks are taken; 4 are free"):
        supply.take(ids(1, 3, 4, 5, 6), "r")


def test_none_is_evicted_while_there_are_enough(supply):
    """Who evicts takes all that was free and all that it evicted."""
    supply.evicted(ids(2, 0), "r")
    with pytest.raises(ViolationError, match="1 more blocks were evicted than were missing"):
        supply.take(ids(1, 3, 4, 5, 2), "r")


def test_a_copy_leaves_victims_for_what_follows(supply):
    """COPY takes the first block of its call, ALLOC the others."""
    supply.evicted(ids(2, 0), "r")
    supply.take(ids(1), "r", copy=True)
    supply.take(ids(3, 4, 5, 2, 0), "r")


def test_a_copy_alone_leaves_no_victims(supply):
    """If only a copy was needed, only one block was missing."""
    supply.take(ids(1, 3, 4, 5), "r")
    supply.evicted(ids(2, 0), "r")
    supply.take(ids(2), "r", copy=True)
    with pytest.raises(ViolationError, match="1 more blocks were evicted than were missing"):
        supply.settle()


def test_expired_blocks_are_free_at_once(supply):
    """What expired is the next to be taken, the last one first."""
    supply.expired(ids(2, 0))
    supply.take(ids(0, 2, 1), "r")


def test_victims_of_a_failed_call_come_last_among_the_free(supply):
    """They are free as if the call had taken all it wanted and given it back."""
    supply.evicted(ids(2, 0), "failed")
    supply.take(ids(1, 3, 4, 5, 2), "r")
    assert supply.free == 1
