"""The timeline of a pool's use: means over time, the peak, and a bounded number of samples."""

from __future__ import annotations

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


def test_a_span_without_length_has_no_mean():
    """A time span of no length has no mean, and raises no error."""
    timeline = PoolTimeline(8)
    timeline.pending.append((0, 8, 0))
    assert timeline.summary(0, 0)["active"] == {"mean": None, "peak": 0}


def test_samples_are_bounded_and_means_are_exact():
    """100,000 events leave a bounded number of samples and exact means.

    The first and the last sample are those of the first and the last event.
    """
    timeline = PoolTimeline(100)
    for now in range(100_001):
        timeline.pending.append((now, 100 - now % 10, 0))
    summary = timeline.summary(0, 100_000)
    times = summary["timeline"]["t_s"]
    assert MAX_SAMPLES // 4 < len(times) <= MAX_SAMPLES
    assert times == sorted(set(times))
    assert (times[0], times[-1]) == (0, 100_000 / 10**9)
    assert summary["active"] == {"mean": 4.5, "peak": 9}


def test_samples_lie_evenly_in_time():
    """A burst of events leaves samples of the rest of the time span."""
    timeline = PoolTimeline(100)
    for now in [*range(50_000), *range(50_000, 1_000_000, 1000)]:
        timeline.pending.append((now, 50, 0))
    times = [round(time * 10**9) for time in timeline.summary(0, 10**6)["timeline"]["t_s"]]
    assert sum(time >= 500_000 for time in times) > len(times) / 3
