"""`Histogram`: its bounded memory, its exact figures and the error of its percentiles."""

from __future__ import annotations

from bisect import bisect_right

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvcore.histogram import PERCENTS, Histogram, borders, nearest_rank

VALUES = st.integers(0, 300) | st.integers(0, 10**6) | st.integers(0, 2**63 - 1)
PAIRS = st.lists(st.tuples(VALUES, st.integers(1, 9)), min_size=1, max_size=60)


def filled(pairs):
    """Return the histogram of pairs (value, weight), and the sorted values."""
    histogram = Histogram()
    histogram.extend(*zip(*pairs, strict=True))
    return histogram, sorted(value for value, weight in pairs for _ in range(weight))


@given(PAIRS)
def test_weight_sum_and_maximum_are_exact(pairs):
    """The weight, the sum and the maximum of a histogram are exact for any values."""
    histogram, values = filled(pairs)
    assert (histogram.weight, histogram.total) == (len(values), sum(values))
    assert histogram.high == values[-1]


@given(PAIRS)
def test_a_percentile_is_at_most_one_percent_too_large(pairs):
    """A percentile is at most 1% too large, never too small, and exact up to 200."""
    histogram, values = filled(pairs)
    found = histogram.percentiles()
    for percent in PERCENTS:
        exact = values[nearest_rank(percent, len(values)) - 1]
        assert exact <= found[f"p{percent}"] <= exact * 1.01
        assert exact > 200 or found[f"p{percent}"] == exact


@given(PAIRS)
def test_counts_up_to_round_numbers_are_exact(pairs):
    """The number of samples up to 0, 1, 2, 5, 10, ... is exact."""
    histogram, values = filled(pairs)
    bounds = [0, *(digit * 10**zeros for zeros in range(19) for digit in (1, 2, 5))]
    assert histogram.at_most(bounds) == [bisect_right(values, bound) for bound in bounds]


@given(PAIRS, st.lists(VALUES, min_size=1, max_size=40), st.integers(0, 10**15))
def test_add_ascending_equals_adding_each_age(pairs, ages, since):
    """`add_ascending` of sorted times equals adding each age by itself."""
    histogram, _ = filled(pairs)
    expected, _ = filled([*pairs, *((age, 1) for age in ages)])
    histogram.add_ascending([since + age for age in sorted(ages)], since)
    assert vars_of(histogram) == vars_of(expected)


def vars_of(histogram):
    """Return the weight, the sum, the maximum and the buckets of a histogram."""
    weights = {place: weight for place, weight in histogram._weights.items() if weight}
    return histogram.weight, histogram.total, histogram.high, weights


def test_memory_is_bounded():
    """A hundred thousand different values share a few thousand buckets."""
    histogram = Histogram()
    values = range(0, 10**9, 10**4)
    histogram.extend(values, [1] * len(values))
    assert len(histogram._weights) < 2500
    assert len(borders()) < 6500


def test_figures_in_json_are_divided_by_the_unit():
    """The sum, the percentiles and the bounds in the JSON are divided by the unit."""
    histogram, _ = filled([(2_000_000, 3), (5_000_001, 1)])
    assert histogram.as_dict(10**9, [10**6, 2 * 10**6, 5 * 10**6], "blocks") == {
        "blocks": 4,
        "sum": 0.011000001,
        "mean": pytest.approx(0.00275000025),
        "p50": 0.002,
        "p90": 0.005000001,
        "p95": 0.005000001,
        "p99": 0.005000001,
        "buckets": {"0.001": 0, "0.002": 3, "0.005": 3},
    }
