"""The timeline of a pool's use: means over time, the peak, and a bounded number of samples."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcore.serving import stats
from kvcore.serving.stats import MAX_SAMPLES, PoolTimeline


def test_means_are_weighted_by_time():
    """2 blocks for 10 ns and 6 for 30 ns have the mean 5; the peak is 6."""
    timeline = PoolTimeline(8)
    timeline.pending.append((0, 6, 0))
    timeline.pending.append((10, 2, 0))
    timeline.pending.append((40, 0, 8))
    summary = timeline.summary(0, 40)
    assert (summary["active"], summary["cached"]) == ({"mean": 5, "peak": 6}, {"mean": 0})


def test_evictable_blocks_count_as_cached():
    """Evictable blocks count as cached: free, cached and active add up to the pool."""
    timeline = PoolTimeline(8)
    timeline.pending.append((0, 5, 1))
    timeline.pending.append((2_000_000_000, 4, 4))
    assert timeline.summary(0, 2_000_000_000)["timeline"] == {
        "t_s": [0.0, 2.0],
        "active": [2, 0],
        "cached": [1, 4],
        "free": [5, 4],
    }


@pytest.mark.parametrize("first", [0, 10**6])
def test_samples_are_bounded_and_means_are_exact(first):
    """100,000 events leave a bounded number of samples and exact means.

    The first and the last sample are those of the first and the last event, and no gap between
    others is more than twice as long as another.
    """
    timeline = PoolTimeline(100)
    for now in range(100_001):
        timeline.pending.append((first + now, 100 - now % 10, 0))
    summary = timeline.summary(first, first + 100_000)
    times = summary["timeline"]["t_s"]
    assert MAX_SAMPLES // 4 < len(times) <= MAX_SAMPLES
    gaps = [after - before for before, after in pairwise(times[:-1])]
    assert 0 < max(gaps) < 2.01 * min(gaps)
    assert (times[0], times[-1]) == (first / 10**9, (first + 100_000) / 10**9)
    assert summary["active"] == {"mean": 4.5, "peak": 9}


def test_samples_lie_evenly_in_time():
    """A burst of events leaves samples of the rest of the time span."""
    timeline = PoolTimeline(100)
    for now in [*range(50_000), *range(50_000, 1_000_000, 1000)]:
        timeline.pending.append((now, 50, 0))
    times = [round(time * 10**9) for time in timeline.summary(0, 10**6)["timeline"]["t_s"]]
    assert sum(time >= 500_000 for time in times) > len(times) / 3


states = st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 4), st.booleans())


@given(st.lists(states, min_size=1, max_size=60), st.integers(-9, 9))
@example([(0, 0, 0, False)], 0)  # a span without length has no mean
def test_a_timeline_equals_a_sum_over_its_events(drawn, later):
    """Means and peak are those of all events, and each sample is the state at one of them.

    The last sample is that of the last event, even if the run has ended before it.
    """
    times = list(accumulate((gap for gap, *_ in drawn), initial=3))[1:]
    events = [(now, 8 - a - b, b) for now, (_, a, b, _) in zip(times, drawn, strict=True)]
    end = times[-1] + max(later, 0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stats, "MAX_SAMPLES", 8)
        timeline = PoolTimeline(8)
        for event, (*_, settles) in zip(events, drawn, strict=True):
            timeline.pending.append(event)
            if settles:
                timeline.settle()
        summary = timeline.summary(3, times[-1] + later)
    lasts = [after - now for now, after in zip(times, [*times[1:], end], strict=True)]
    for name, column in (("active", 1), ("cached", 2)):
        area = sum(time * state[column] for time, state in zip(lasts, drawn, strict=True))
        mean = None if end == 3 else float(Fraction(area, end - 3))
        assert summary[name]["mean"] == mean
    assert summary["active"]["peak"] == max(active for _, active, _, _ in drawn)
    columns = summary["timeline"]
    times, *others = (columns[name] for name in ("t_s", "free", "cached", "active"))
    samples = [(round(t * 10**9), *state) for t, *state in zip(times, *others, strict=True)]
    assert len(samples) <= 8
    whole = Counter((*event, 8 - event[1] - event[2]) for event in events)
    assert Counter(samples) <= whole
    assert samples == sorted(samples, key=lambda sample: sample[0])
    assert samples[-1][:3] == events[-1]
