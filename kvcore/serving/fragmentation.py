"""What memory is used for: tokens, reservations without tokens, holes too short to serve."""

from __future__ import annotations

import attrs

from kvcore.policy import Job
from kvcore.serving.growth import Growth


@attrs.frozen(kw_only=True)
class Fragmentation:
    """How well a run used its memory. Shares are of the pool's slots, one token each.

    `used + cached + internal` and what was free are the whole pool. Means are over the time
    from the first arrival on; between two events, lengths and blocks are taken to grow evenly
    with each step.

    Attributes:
        running: requests with a seat in the batch, mean.
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


class Occupancy:
    """Adds up what slots are used for, from event to event. O(1) a step."""

    def __init__(self, growth: Growth) -> None:
        """Take who knows what jobs hold."""
        self._growth = growth
        # What holds since the last event.
        self._running = self._held = self._cached = self._idle = self._uncomputed = 0
        self._blocked = False
        # What has happened since: picoseconds, steps, tokens that came into slots.
        self._took = self._steps = self._filled = 0
        self._last = 0, 0, 0
        # Sums over time; of what changes between events, twice the sums.
        self._time = self._ran = self._ahead = self._waited = 0
        self._holds = self._caches = self._idles = self._frees = 0
        self._peak = 0

    def event(self, running: int, refused: Job | None) -> None:
        """Take in that something has happened, and what holds until something else does.

        Args:
            running: jobs with a seat.
            refused: the job that waits for memory, if one does.
        """
        if self._took:
            self._add_up()
        growth = self._growth
        self._running = running
        self._held, self._cached = growth.held()
        self._idle, self._uncomputed = growth.idle, growth.uncomputed
        self._blocked = refused is not None and growth.splintered(refused.request)
        self._took = self._steps = self._filled = 0

    def passed(self, took: int, prefill: int = 0, decode: int = 0, steps: int = 1) -> None:
        """Take in what `steps` steps did, in `took` picoseconds; all is allocated for them.

        Args:
            took: the time they took; without steps, time that nothing was done in.
            prefill: tokens of prompts that came into their slots.
            decode: generated ones, as many with each step.
            steps: how many steps.
        """
        growth = self._growth
        # The idle slots are those that there were had nothing been filled since the event.
        self._last = *growth.held(), growth.idle + self._filled
        self._took += took
        self._steps += steps
        self._filled += prefill + decode
        growth.idle -= prefill + decode
        growth.uncomputed -= prefill

    def summary(self) -> Fragmentation:
        """Return the shares."""
        self.event(0, None)
        time, slots = max(self._time, 1), self._growth.slots
        whole = time * slots
        waited = self._waited
        return Fragmentation(
            running=self._ran / time,
            used=(self._holds - self._idles) / (2 * whole),
            cached=self._caches / (2 * whole),
            internal=self._idles / (2 * whole),
            uncomputed=self._ahead / whole,
            internal_peak=self._peak / slots,
            external=waited / time,
            external_free=self._frees / (2 * waited * slots) if waited else None,
        )

    def _add_up(self) -> None:
        """Add the time since the last event. What grew or was filled did so evenly."""
        took, (held, cached, idle) = self._took, self._last
        # A step's tokens are there after it: those of the last one do not count yet.
        idle -= self._filled - self._filled // max(self._steps, 1)
        held += self._held
        self._time += took
        self._ran += took * self._running
        self._ahead += took * self._uncomputed
        self._holds += took * held
        self._caches += took * (self._cached + cached)
        self._idles += took * (self._idle + idle)
        self._peak = max(self._peak, self._idle, idle)
        if self._blocked:
            self._waited += took
            self._frees += took * (2 * self._growth.slots - held)
