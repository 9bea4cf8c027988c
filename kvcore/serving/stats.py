"""Percentiles of a run, and what the blocks of the pool were used for over time."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from itertools import repeat
from operator import add, mul, sub
from typing import Any, TypeAlias

import attrs

from kvcore.compiled import divided
from kvcore.histogram import PERCENTS, Histogram, nearest_rank
from kvcore.units import NS_PER_S

PENDING_EVENTS = 512
"""Recorded events from which on they are added up."""


@attrs.frozen
class Percentiles:
    """Mean and percentiles of times, in seconds. A percentile is the nearest rank."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, samples: Iterable[int], second: int) -> Percentiles | None:
        """Return the exact percentiles of integer `samples`; None without samples.

        Args:
            samples: times in some unit. They are sorted.
            second: how many of these units are a second.
        """
        ordered = sorted(samples)
        if not ordered:
            return None
        count = len(ordered)
        mean = divided(sum(ordered), count * second)
        return cls(
            mean,
            *(divided(ordered[nearest_rank(each, count) - 1], second) for each in PERCENTS),
        )

    def as_dict(self) -> dict[str, float]:
        """Return the JSON object: `mean`, `p50`, `p90`, `p95` and `p99`."""
        return attrs.asdict(self)


TokenGap: TypeAlias = tuple[int, int, int, int]
"""(first, slope, steps, jobs): in each of so many steps so many jobs got a token, the first
`first` ps after the one before, and with each step `slope` ps later."""


class TokenGaps:
    """The times between two tokens of a request, in picoseconds: inter-token latencies.

    Between two events the same requests decode, and the time of a step grows by the same
    with each: the gaps of k steps of n requests are n times an arithmetic progression. The
    loop appends these four numbers to `pending`; `settle` adds them to a histogram in closed
    form, some hundred at a time.

    Attributes:
        pending: progressions that are not in the histogram yet. Append to it.
    """

    __slots__ = ("_histogram", "pending")

    def __init__(self) -> None:
        self.pending: list[TokenGap] = []
        self._histogram = Histogram()

    @property
    def count(self) -> int:
        """The number of gaps."""
        self.settle()
        return self._histogram.weight

    def percentiles(self, second: int) -> Percentiles | None:
        """Return the mean, exact, and the percentiles, at most 1 % too large."""
        self.settle()
        found = self._histogram.percentiles()
        if found is None:
            return None
        return Percentiles(
            divided(self._histogram.total, self._histogram.weight * second),
            *(divided(found[f"p{percent}"], second) for percent in PERCENTS),
        )

    def merge(self, other: TokenGaps) -> None:
        """Add the gaps of another run."""
        other.settle()
        self._histogram.merge(other._histogram)

    def settle(self) -> None:
        """Add the pending progressions to the histogram."""
        pending = self.pending
        if not pending:
            return
        histogram, values, weights = self._histogram, [], []
        for first, slope, steps, jobs in pending:
            if slope and steps > 1:
                histogram.add_progression(first, slope, steps, jobs)
            else:
                values.append(first)
                weights.append(steps * jobs)
        if values:
            histogram.extend(values, weights)
        # In place, since the loop appends to this list.
        pending.clear()


MAX_SAMPLES = 512
"""Samples of the timeline. When there are as many, every second one is dropped."""


class PoolTimeline:
    """Use of the blocks of a pool, from event to event.

    A block is *active* if a sequence holds it, *cached* if only the prefix cache does, so
    that it can be evicted, else *free*. The state at an event counts until the next event.
    Means and the peak are those of all events; the samples are thinned out evenly in time.

    Attributes:
        blocks: blocks in the pool.
        pending: events that are not added up yet: time (ns), free blocks, evictable blocks.
            Append to it.
        peak: the most active blocks at any event that is added up.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.pending: list[tuple[int, int, int]] = []
        self.peak = 0
        self._now = self._active = self._cached = 0
        self._active_area = self._cached_area = 0
        self._due = self._interval = 0
        self._times, self._actives, self._cacheds = array("q"), array("i"), array("i")

    def settle(self) -> None:
        """Add up the pending events: columns at a time, in C."""
        if not self.pending:
            return
        times, free, cached = zip(*self.pending, strict=True)
        self.pending.clear()
        active = list(map(sub, repeat(self.blocks), map(add, free, cached)))
        # The state of an event holds until the next: the first of them ends that of the last.
        held = list(map(sub, times, (self._now, *times)))
        self._active_area += sum(map(mul, held, (self._active, *active)))
        self._cached_area += sum(map(mul, held, (self._cached, *cached)))
        self.peak = max(self.peak, *active)
        self._now, self._active, self._cached = times[-1], active[-1], cached[-1]
        at = bisect_left(times, self._due)
        while at < len(times):
            self._sample(times[at], active[at], cached[at])
            at = bisect_left(times, self._due, at + 1)

    def summary(self, first: int, end: int) -> dict[str, Any]:
        """Return peak, means from `first` to `end` in ns (None if they are equal), samples.

        Before `first` no block was active or cached; `end` is no earlier than the last event.
        """
        self.settle()
        span, since = end - first, end - self._now
        times, actives, cacheds = self._times[:], self._actives[:], self._cacheds[:]
        if times and times[-1] < self._now:
            times.append(self._now)
            actives.append(self._active)
            cacheds.append(self._cached)
        areas = (
            self._active_area + since * self._active,
            self._cached_area + since * self._cached,
        )
        active, cached = (divided(area, span) if span else None for area in areas)
        return {
            "blocks": self.blocks,
            "active": {"mean": active, "peak": self.peak},
            "cached": {"mean": cached},
            "timeline": {
                "t_s": [time / NS_PER_S for time in times],
                "active": actives.tolist(),
                "cached": cacheds.tolist(),
                "free": [self.blocks - a - c for a, c in zip(actives, cacheds, strict=True)],
            },
        }

    def _sample(self, now: int, active: int, cached: int) -> None:
        """Keep a sample; drop every second one when there are too many."""
        times, actives, cacheds = self._times, self._actives, self._cacheds
        times.append(now)
        actives.append(active)
        cacheds.append(cached)
        if len(times) == MAX_SAMPLES:
            del times[1::2], actives[1::2], cacheds[1::2]
            self._interval = max(
                2 * self._interval, (times[-1] - times[0]) // (MAX_SAMPLES // 2)
            )
        self._due = now + self._interval


@attrs.frozen(kw_only=True)
class Fragmentation:
    """How well a run used its memory. Shares are of the pool's slots, one token each.

    `used + cached + internal` and what was free are the whole pool. Means are over the time
    from the first arrival on; between two events, lengths and blocks are taken to grow evenly
    with each step.

    Attributes:
        running: running requests, mean.
        used: slots that hold tokens of open requests, mean. Shared ones count once.
        cached: slots that hold tokens of no open request, for later ones to hit, mean.
        internal: slots that open requests hold without a token in them (yet), mean: unfilled
            tails, prompts still to be computed, output still to come.
        uncomputed: those of them that prefill fills next, mean.
        internal_peak: the most of these at any event.
        external: share of the time in which the next request waited for memory although
            enough was free in sum, in holes too short for it. In a paged pool there is no
            such time.
        external_free: what was free at those times, mean; None without any.
    """

    running: float
    used: float
    cached: float
    internal: float
    uncomputed: float
    internal_peak: float
    external: float
    external_free: float | None

    @property
    def filled(self) -> float | None:
        """Share of the slots held by open requests that hold tokens: the effective use."""
        held = self.used + self.internal
        return self.used / held if held else None
