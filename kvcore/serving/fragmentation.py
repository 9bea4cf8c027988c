"""What memory is used for: tokens, reservations without tokens, holes too short to serve."""

from __future__ import annotations

import attrs

from kvcore.policy import Job
from kvcore.serving.growth import Growth


@attrs.frozen(kw_only=True)
class Fragmentation:
    """How well a run used its memory. Shares are of the pool's slots, one token each.

    `used + cached + internal` and what was free are the whole pool. Means are over the time
    from the first arrival on, exact but for decode steps between two events, over which
    lengths and blocks are taken to grow evenly.

    Attributes:
        running: requests with a seat in the batch, mean.
        used: slots that hold tokens of open requests, mean. Shared ones count once.
        cached: slots that hold tokens of no open request, for later ones to hit, mean.
        internal: slots that open requests hold without a token in them (yet), mean: unfilled
            tails, prompts still to be computed, output still to come.
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
    internal_peak: float
    external: float
    external_free: float | None

    @property
    def filled(self) -> float | None:
        """Share of the slots held by open requests that hold tokens: the effective use."""
        held = self.used + self.internal
        return self.used / held if held else None


class Occupancy:
    """Adds up what slots are used for, step by step. O(1) a step."""

    __slots__ = (
        "_blocked", "_blocked_free", "_cached", "_growth", "_held", "_idle", "_peak",
        "_running", "_time",
    )  # fmt: skip

    def __init__(self, growth: Growth) -> None:
        """Take who knows what jobs hold."""
        self._growth = growth
        self._time = self._running = self._held = self._cached = self._idle = self._peak = 0
        self._blocked = self._blocked_free = 0

    def passed(
        self,
        took: int,
        running: int,
        refused: Job | None,
        tokens: int = 0,
        steps: int = 1,
        grown: int = 0,
    ) -> None:
        """Take in that `took` picoseconds have passed with nobody coming or leaving.

        Args:
            took: the time of `steps` steps.
            running: jobs with a seat.
            refused: the job that waits for memory, if one does.
            tokens: how many got a slot, the same number in each step.
            steps: how many steps it were.
            grown: slots allocated on the way, after the first step's.
        """
        growth = self._growth
        idle, held = growth.idle, growth.held
        # Twice the means: what changes evenly was half there.
        self._idle += took * (2 * idle - grown - (tokens - tokens // steps))
        self._held += took * (2 * held - grown)
        self._cached += took * growth.cached
        self._running += took * running
        self._time += took
        growth.idle = idle - tokens
        self._peak = max(self._peak, idle - grown, idle - tokens + tokens // steps)
        if refused is not None and growth.splintered(refused.request):
            self._blocked += took
            self._blocked_free += took * (growth.slots - held)

    def summary(self) -> Fragmentation:
        """Return the shares."""
        time = self._time or 1
        whole = time * self._growth.slots
        return Fragmentation(
            running=self._running / time,
            used=(self._held - self._idle) / (2 * whole),
            cached=self._cached / whole,
            internal=self._idle / (2 * whole),
            internal_peak=self._peak / self._growth.slots,
            external=self._blocked / time,
            external_free=(
                self._blocked_free / (self._blocked * self._growth.slots)
                if self._blocked
                else None
            ),
        )
