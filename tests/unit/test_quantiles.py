"""Percentiles and means are exact, whatever the samples are stored as."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvcore.serving import stats as quantiles
from kvcore.serving.stats import Progressions, distribution, nearest_rank

WEIGHTED = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=30)
PIECES = st.lists(
    st.tuples(
        st.integers(0, 10_000), st.integers(0, 30), st.integers(1, 400), st.integers(1, 5)
    ),
    min_size=1,
    max_size=12,
)


SCALES = st.sampled_from([1, 1000, 10**12])


@pytest.fixture(params=[(127, 256), (127, 1), (5, 2), (1, 1)], scope="module")
def cells(request):
    """Sort a few numbers into as many cells as many would be, or into next to none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantiles, "SAMPLE", request.param[0])
        patch.setattr(quantiles, "APART", request.param[1])
        yield


def weighted_distribution(samples, weights, unit):
    """Return the distribution of single values with weights."""
    progressions = Progressions()
    for sample, weight in zip(samples, weights, strict=True):
        progressions.add(sample, 0, 1, weight)
    return progressions.distribution(unit)


def stored(pieces):
    """Return the progressions, and all their values one by one."""
    progressions = Progressions()
    values = []
    for first, step, count, weight in pieces:
        progressions.add(first, step, count, weight)
        values += [first + step * place for place in range(count)] * weight
    return progressions, values


@pytest.mark.parametrize(
    ("percent", "count", "rank"),
    [(50, 1, 1), (50, 4, 2), (50, 5, 3), (90, 10, 9), (99, 10, 10)],
)
def test_a_percentile_is_the_nearest_rank(percent, count, rank):
    """At least p % of the samples are at or below it, and it is the first such one."""
    assert nearest_rank(percent, count) == rank


def test_a_distribution_in_units():
    """Samples are integers; mean and percentiles come in the unit asked for."""
    assert distribution([4, 1, 3, 2], 10) == {
        "mean": 0.25,
        "p50": 0.2,
        "p90": 0.4,
        "p95": 0.4,
        "p99": 0.4,
    }


def test_no_samples_no_distribution():
    """Without samples there is no number to give, and 0 would be one."""
    nothing = distribution([], 1), weighted_distribution([], [], 1)
    assert (*nothing, Progressions().distribution(1)) == (None, None, None)


@pytest.mark.usefixtures("cells")
@given(WEIGHTED, SCALES)
def test_weights_are_repetitions(pairs, scale):
    """A sample of weight w counts as w samples."""
    pairs = [(value * scale, weight) for value, weight in pairs]
    values = [value for value, weight in pairs for _ in range(weight)]
    samples, weights = zip(*pairs, strict=True)
    assert weighted_distribution(samples, weights, 7) == distribution(values, 7)


def test_a_sample_of_no_weight_is_none():
    """It counts for nothing, wherever it is, and alone there is no distribution."""
    assert weighted_distribution([1, 5, 9], [0, 3, 0], 1) == distribution([5], 1)
    assert weighted_distribution([1, 5], [0, 0], 1) is None


@pytest.mark.usefixtures("cells")
@given(PIECES)
def test_progressions_are_their_values(pieces):
    """Percentiles and mean are those of all values written out, repeated by weight."""
    progressions, values = stored(pieces)
    assert progressions.count == len(values)
    assert progressions.distribution(7) == distribution(values, 7)


@pytest.mark.usefixtures("cells")
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40)), max_size=60), SCALES)
def test_the_same_few_progressions_over_and_over(pieces, scale):
    """What occurs a lot is found as surely as what occurs once."""
    rows = [(count % 2 * scale, scale, count, weight) for count, weight in pieces]
    progressions, values = stored(rows)
    assert progressions.distribution(1) == distribution(values, 1)


@pytest.mark.parametrize("spread", [1, 10**6])
def test_many_values_of_which_some_occur_often(spread):
    """Tens of thousands, a third of them equal, single or in progressions."""
    rows = [
        (0, 0, 1, 3)
        if place % 3 == 0
        else (place * 7919 % 10007 * spread, place % 5, 1 + place % 4, 1 + place % 6)
        for place in range(30_000)
    ]
    progressions, values = stored(rows)
    assert progressions.distribution(3) == distribution(values, 3)


@pytest.mark.parametrize("order", [1, -1])
def test_many_weighted_values(order):
    """Thousands in order, up or down, are as exact as a few."""
    samples = [place * place * order for place in range(20_000)]
    weights = [place % 3 for place in range(20_000)]
    values = [
        value for value, weight in zip(samples, weights, strict=True) for _ in range(weight)
    ]
    assert weighted_distribution(samples, weights, 9) == distribution(values, 9)


def test_a_million_values_of_few_progressions():
    """Long progressions that cross each other are narrowed down to the exact values."""
    progressions = Progressions()
    for start in range(10):
        progressions.add(start, 10, 100_000, 1 + start % 2)
    odd = progressions.distribution(1)
    # Of any ten values in a row five weigh 1 and five weigh 2.
    assert odd == {
        "mean": pytest.approx(499_999.5 + 1 / 6),
        "p50": 499_999,
        "p90": 899_999,
        "p95": 949_999,
        "p99": 989_999,
    }


@given(PIECES)
def test_merging_single_values_changes_nothing(pieces):
    """Equal single values become one; the others stay."""
    progressions, values = stored([*pieces, *((place % 3, 0, 1, 1) for place in range(30))])
    before = len(progressions)
    progressions._compact()
    assert len(progressions) <= before - 27
    assert progressions.distribution(1) == distribution(values, 1)


def test_memory_is_bounded_by_the_distinct_values():
    """However often the same few times come, few progressions are kept."""
    progressions = Progressions()
    for place in range(200_000):
        progressions.add(place % 5, 0, 1, 2)
    assert progressions.count == 400_000
    assert len(progressions) < 2**16
