"""The frequency sketch, compared with exact counts."""

from __future__ import annotations

import hypothesis.strategies as st
from helpers.reference.flat import Counts
from hypothesis import given

from kvcore_plugins.eviction.tinylfu import FrequencySketch

KEYS = st.lists(st.integers(0, 40) | st.text("abcdef", max_size=2), max_size=200)


@given(KEYS)
def test_an_estimate_is_never_below_the_exact_count(keys):
    """An estimate is never below the exact count, however small the sketch is."""
    sketch, counts = FrequencySketch(4, 1000), Counts(1000)
    for key in keys:
        sketch.add(key)
        counts.add(key)
    assert all(sketch.estimate(key) >= counts.estimate(key) for key in keys)


def test_most_estimates_are_exact_at_full_load():
    """With as many keys as the sketch is made for, nine of ten estimates are exact."""
    sketch, counts = FrequencySketch(1000, 10_000), Counts(10_000)
    for key in [*range(1000), *range(0, 1000, 2)]:
        sketch.add(key)
        counts.add(key)
    right = sum(sketch.estimate(key) == counts.estimate(key) for key in range(1000))
    assert right > 900


def test_counts_are_halved_and_the_doorkeeper_cleared():
    """After a period counts are halved and the doorkeeper is cleared.

    A key used 7 times counts 3 then, and a key used once 0.
    """
    sketch = FrequencySketch(100, 8)
    for _ in range(7):
        sketch.add("a")
    assert sketch.estimate("a") == 7
    sketch.add("b")
    assert (sketch.estimate("a"), sketch.estimate("b")) == (3, 0)
