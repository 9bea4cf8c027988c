"""The blocks of a pool over time: exact means, and a bounded number of samples."""

from __future__ import annotations

from array import array
from typing import Any

from kvcore.units import NANOSECONDS

MOST = 512
"""Samples that are kept. When there are as many, every second one is dropped."""


class PoolTimeline:
    """What the blocks of a pool are used for, from event to event.

    A block is *active* if a sequence holds it, *cached* if only the prefix cache does, so
    that it can be evicted, else *free*. What is told at an event counts until the next.
    Means and the peak are those of all events; the samples are thinned out evenly in time.

    Attributes:
        blocks: in the pool.
        peak: the most active blocks at any event.
    """

    def __init__(self, blocks: int) -> None:
        """Start with a pool that is free."""
        self.blocks = blocks
        self.peak = 0
        self._now = self._active = self._cached = 0
        self._active_area = self._cached_area = 0
        self._due = self._interval = 0
        self._times, self._actives, self._cacheds = array("q"), array("i"), array("i")

    def add(self, now: int, free: int, evictable: int) -> None:
        """Take in the state of the pool after an event at `now` (ns)."""
        held = now - self._now
        self._active_area += held * self._active
        self._cached_area += held * self._cached
        self._now, self._cached = now, evictable
        self._active = active = self.blocks - free - evictable
        if active > self.peak:
            self.peak = active
        if now >= self._due:
            self._times.append(now)
            self._actives.append(active)
            self._cacheds.append(evictable)
            if len(self._times) == MOST:
                self._thin_out()
            self._due = now + self._interval

    def summary(self, first: int, end: int) -> dict[str, Any]:
        """Return peak, means from `first` to `end` in ns (None if they are one), and samples.

        Before `first` nothing was active or cached; `end` is no earlier than the last event.
        """
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
        active, cached = (area / span if span else None for area in areas)
        return {
            "blocks": self.blocks,
            "active": {"mean": active, "peak": self.peak},
            "cached": {"mean": cached},
            "timeline": {
                "t_s": [time / NANOSECONDS for time in times],
                "active": actives.tolist(),
                "cached": cacheds.tolist(),
                "free": [self.blocks - a - c for a, c in zip(actives, cacheds, strict=True)],
            },
        }

    def _thin_out(self) -> None:
        del self._times[1::2], self._actives[1::2], self._cacheds[1::2]
        span = self._times[-1] - self._times[0]
        self._interval = max(2 * self._interval, span // (MOST // 2))
