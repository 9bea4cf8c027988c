"""`LazyHeap` equals a sorted list in which items move and disappear."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.cache import LazyHeap

CALLS = st.lists(
    st.tuples(st.sampled_from(["push", "push", "discard", "pop", "first"]),
              st.integers(0, 5), st.integers(0, 9)),
    max_size=80,
)  # fmt: skip


@given(CALLS)
def test_a_lazy_heap_is_a_sorted_dict(calls):
    """After any pushes and removals, the first item is that of the lowest entry."""
    heap, order = LazyHeap(), {}
    for call, item, place in calls:
        if call == "push":
            heap.push((place, item, item))
            order[item] = place, item, item
        elif call == "discard":
            heap.discard(item)
            order.pop(item, None)
        elif order and call == "pop":
            lowest = min(order.values())
            assert heap.pop() == lowest[-1]
            del order[lowest[-1]]
        elif order:
            assert heap.first_entry() == min(order.values())
            assert heap.first() == min(order.values())[-1]
        assert (len(heap), set(heap), item in heap) == (len(order), set(order), item in order)


def test_garbage_is_bounded():
    """An item that moves often leaves a bounded number of old entries in the heap."""
    heap = LazyHeap()
    for index in range(1000):
        heap.push((index, "a"))
        assert len(heap._heap) <= 20
    assert heap.first_entry() == (999, "a")


def test_an_empty_heap_has_no_first_item():
    """The first item of an empty heap raises LookupError."""
    heap = LazyHeap()
    heap.push((1, "a"))
    heap.discard("a")
    with pytest.raises(LookupError, match="the queue is empty"):
        heap.first()
