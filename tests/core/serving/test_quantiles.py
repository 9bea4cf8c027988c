"""Percentiles: exact for lists, and at most 1 % too large for token gaps."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvcore.histogram import PERCENTS, Histogram, borders, nearest_rank
from kvcore.serving import Percentiles
from kvcore.serving.stats import TokenGaps

PIECES = st.lists(
    st.tuples(
        st.integers(0, 10**13), st.integers(0, 10**11), st.integers(1, 400), st.integers(1, 5)
    ),
    min_size=1,
    max_size=12,
)


def stored(pieces):
    """Return TokenGaps of the progressions `pieces`, and all their values in order."""
    gaps = TokenGaps()
    gaps.pending.extend(pieces)
    values = [
        first + slope * step
        for first, slope, steps, jobs in pieces
        for step in range(steps)
        for _ in range(jobs)
    ]
    return gaps, sorted(values)


@pytest.mark.parametrize(
    ("percent", "count", "rank"),
    [(50, 1, 1), (50, 4, 2), (50, 5, 3), (90, 10, 9), (99, 10, 10)],
)
def test_a_percentile_is_the_nearest_rank(percent, count, rank):
    """The percentile is the first sample that at least p % of the samples do not exceed."""
    assert nearest_rank(percent, count) == rank


def test_percentiles_in_seconds():
    """Mean and percentiles of integer samples are returned in the unit asked for."""
    assert Percentiles.from_samples([4, 1, 3, 2], 10) == Percentiles(0.25, 0.2, 0.4, 0.4, 0.4)


def test_percentiles_of_no_samples_are_none():
    """Percentiles of no samples are None, not 0."""
    assert Percentiles.from_samples([], 1) is None
    assert TokenGaps().percentiles(1) is None
    assert TokenGaps().count == 0


@given(PIECES)
def test_percentiles_of_gaps_are_up_to_1_percent_too_large(pieces):
    """Mean and count of token gaps are exact, and percentiles 0 to 1 % too large."""
    gaps, values = stored(pieces)
    found = gaps.percentiles(1)
    assert gaps.count == len(values)
    assert found.mean == sum(values) / len(values)
    for percent in PERCENTS:
        exact = values[nearest_rank(percent, len(values)) - 1]
        assert exact <= getattr(found, f"p{percent}") <= exact * 1.01


@given(PIECES, st.integers(1, 5))
def test_the_grouping_of_gaps_changes_no_percentile(pieces, every):
    """Percentiles are exactly equal however the progressions are divided into pieces."""
    whole, cut = TokenGaps(), TokenGaps()
    whole.pending.extend(pieces)
    for first, slope, steps, jobs in pieces:
        for start in range(0, steps, every):
            rest = min(every, steps - start)
            cut.pending.append((first + slope * start, slope, rest, jobs))
            cut.settle()
    assert whole.percentiles(7) == cut.percentiles(7)


@given(PIECES)
def test_a_progression_fills_the_buckets_of_its_values(pieces):
    """A progression added in closed form fills the same buckets as its single values."""
    closed, one_by_one = Histogram(), Histogram()
    for first, slope, steps, jobs in pieces:
        closed.add_progression(first, slope + 1, steps, jobs)
        values = [first + (slope + 1) * step for step in range(steps)]
        one_by_one.extend(values, [jobs] * steps)
    assert closed._weights == one_by_one._weights
    assert (closed.weight, closed.total, closed.high) == (
        one_by_one.weight,
        one_by_one.total,
        one_by_one.high,
    )


def test_a_million_gaps_fill_few_buckets():
    """1.5 million gaps up to 10^6 ps fill at most one bucket for each border up to there."""
    gaps = TokenGaps()
    gaps.pending.extend((start, 10, 100_000, 1 + start % 2) for start in range(10))
    found = gaps.percentiles(1)
    assert gaps.count == 1_500_000
    assert gaps.pending == []
    assert len(gaps._histogram._weights) == borders().index(10**6) + 1 < 2_000
    assert found.mean == pytest.approx(499_999.5 + 1 / 6, rel=1e-12)
    assert 499_999 <= found.p50 <= 499_999 * 1.01
    assert 989_999 <= found.p99 <= 989_999 * 1.01
