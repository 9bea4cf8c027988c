"""Exponential gaps, drawn by comparisons of random numbers alone."""

from __future__ import annotations

from math import exp
from random import Random

import pytest

from kvcore.workloads import exponential


@pytest.mark.parametrize(
    ("draws", "gap"),
    [
        ([0.25, 0.5], 0.25),
        ([0.75, 0.5, 0.25, 0.5], 0.75),
        ([0.75, 0.5, 0.625, 0.125, 0.25], 1.125),
        ([0.5, 0.5], 0.5),
    ],
    ids=["one", "three", "two, then one", "a tie ends it"],
)
def test_a_gap_is_the_first_draw_of_a_descent_of_odd_length(draws, gap):
    """A gap is the first draw of a descent of odd length.

    Each descent of even length before it adds 1.
    """
    left = iter(draws)
    assert exponential(left.__next__) == gap
    assert list(left) == []


def test_gaps_are_exponentially_distributed():
    """The distribution of 50,000 gaps lies within 1% of 1 - exp(-x)."""
    draw = Random(1).random
    gaps = sorted(exponential(draw) for _ in range(50_000))
    apart = (abs(rank / len(gaps) - (1 - exp(-gap))) for rank, gap in enumerate(gaps))
    assert max(apart) < 0.01
