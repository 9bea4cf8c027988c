"""A job: a request on its way through a server, as schedulers see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from kvcore.request import SLO, Request

if TYPE_CHECKING:
    from kvcore.cache.sequence import Sequence

WAITING, PREFILL, DECODE, PAUSED, DONE = "waiting", "prefill", "decode", "paused", "done"
"""Where a job stands: no blocks yet; computing its prompt; generating; off the batch with
its blocks kept; finished or rejected."""


@attrs.define
class DecodeSteps:
    """How many decode steps a server has run: the clock by which its decoders advance."""

    count: int = 0


@attrs.define(eq=False, repr=False)
class Job:
    """A request between arrival and finish: the unit a scheduler orders.

    Schedulers read; only the serving loop writes, except `data`. Times are nanoseconds,
    lengths tokens.

    Attributes:
        request: what is to be served.
        serial: order of arrival, from 1.
        arrival: when it arrived here; in closed-loop traffic no workload can know.
        steps: the decode steps of its server.
        stage: `waiting`, `prefill`, `decode`, `paused` or `done`.
        seq: its blocks; None while it has none.
        slo: what is expected for it: by its client, else by the run; None: nothing.
        target: length of the prefill it needs: the prompt, and after a recompute
            preemption also what it had generated.
        computed: tokens of `target` that are computed; what hit counts.
        rank: the priority it was queued with.
        data: the scheduler's own.
        admitted, first_token: when it was first admitted, and when its first token came.
        hit: prompt tokens that hit at first admission.
        pauses, recomputes: how often it was preempted, by kind.
        last_token: when its newest token came, in picoseconds.
    """

    request: Request
    serial: int
    arrival: int
    steps: DecodeSteps
    target: int
    slo: SLO | None = None
    stage: str = WAITING
    seq: Sequence | None = None
    computed: int = 0
    rank: Any = None
    data: Any = None
    admitted: int | None = None
    first_token: int | None = None
    hit: int = 0
    pauses: int = 0
    recomputes: int = 0
    last_token: int = 0
    _generated: int = 0
    _joined: int | None = None

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        if self._joined is None:
            return self._generated
        return self._generated + self.steps.count - self._joined

    @property
    def prefill_left(self) -> int:
        """Tokens still to be computed before the next one is generated."""
        return self.target - self.computed

    @property
    def output_left(self) -> int:
        """Output tokens still to come: the truth, which no real scheduler knows."""
        return self.request.output - self.generated

    @property
    def predicted_left(self) -> int:
        """Output tokens still expected, by the request's prediction; the truth without one.

        At least 1 while there are any to come.
        """
        if self.request.predicted is None:
            return self.output_left
        left = self.request.predicted - self.generated
        return max(left, 1 if self.output_left else 0)

    @property
    def length(self) -> int:
        """Tokens of K/V it has: all but the newest, which the next step computes."""
        generated = self.generated
        return self.request.prompt + generated - 1 if generated else self.computed

    def join(self, generated: int) -> None:
        """Let it generate with every decode step from now on, `generated` tokens so far."""
        self._generated, self._joined = generated, self.steps.count

    def leave(self) -> int:
        """Stop generating; return how many tokens there are."""
        if self._joined is not None:
            self._generated += self.steps.count - self._joined
            self._joined = None
        return self._generated

    def __repr__(self) -> str:
        """Show the request and where it stands."""
        return f"<Job {self.serial}: request {self.request.id}, {self.stage}>"
