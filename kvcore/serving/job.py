"""The job: a request between arrival and finish, as schedulers and the loop see it.

Its stages, and the methods of `Batcher` and `ServingLoop` that take it from one to the next:

    waiting ---_open---> prefill ---_prefill_done---> decode ---_finish---> done
       |                    ^
       +----_open----> loading: `_loaded` follows

    prefill, decode          ---_pause--->      paused   ---_resume---> where it was
    prefill, decode, paused  ---_take_blocks-->  waiting, without blocks

A paused job keeps its blocks, and waits for a slot alone. A loading job has all its blocks;
some are on their way from a tier or another server. A job without blocks is preempted: what
it has generated counts as prompt from then on (`target`); `_open` gives it new blocks, of which
those that are still cached are hit.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from kvcore.cache.sequence import Sequence
from kvcore.request import SLO, Key, Request

WAITING: Final = "waiting"
PREFILL: Final = "prefill"
DECODE: Final = "decode"
PAUSED: Final = "paused"
DONE: Final = "done"
LOADING: Final = "loading"


class DecodeSteps:
    """Number of decode steps that a server has run: the clock of its decode batch."""

    __slots__ = ("count",)

    def __init__(self, count: int = 0) -> None:
        self.count = count


class Job:
    """A request between arrival and finish: the unit a scheduler orders.

    Schedulers read; only the serving loop writes, except `data`. Times are nanoseconds,
    lengths tokens.

    Attributes:
        request: the request to be served.
        serial: order of arrival, from 1.
        arrival: when it arrived here, which in closed-loop traffic no workload knows.
        steps: the decode steps of its server.
        target: tokens of its prefill: the prompt, and after a recompute preemption also the
            tokens that it had generated.
        slo: its own SLO, else that of the run; None: none.
        stage: `waiting`, `loading`, `prefill`, `decode`, `paused` or `done`.
        seq: its blocks; None while it has none.
        computed: tokens of `target` that are computed, those that hit included.
        rank: the priority it was queued with.
        data: the scheduler's own.
        admitted, first_token: when it was first admitted, and when its first token came.
        hit: prompt tokens that hit at first admission.
        loaded: prompt tokens that were loaded from tiers at first admission.
        pauses, recomputes, swaps: how often it was preempted, by kind.
        last_token_ps: when its newest token came, in picoseconds.
        output_tokens: tokens it generates: those the request asks for, or fewer where a run
            on tensors has ended its text.
        named_keys: block keys of generated tokens that became known while it ran.
        generated_before: output tokens it had when it last joined or left the decode batch.
        joined: the decode step from which on it generates a token a step; None: it does not.
    """

    __slots__ = (
        "admitted", "arrival", "computed", "data", "first_token", "generated_before", "hit",
        "joined", "last_token_ps", "loaded", "named_keys", "output_tokens", "pauses", "rank",
        "recomputes", "request", "seq", "serial", "slo", "stage", "steps", "swaps", "target",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        serial: int,
        arrival: int,
        steps: DecodeSteps,
        target: int,
        slo: SLO | None = None,
    ) -> None:
        """Create a job that waits, with nothing computed."""
        self.request = request
        self.serial = serial
        self.arrival = arrival
        self.steps = steps
        self.target = target
        self.slo = slo
        self.stage: str = WAITING
        self.seq: Sequence | None = None
        self.computed = 0
        self.rank: Any = None
        self.data: Any = None
        self.admitted: int | None = None
        self.first_token: int | None = None
        self.hit = self.loaded = 0
        self.pauses = self.recomputes = self.swaps = 0
        self.last_token_ps = 0
        self.output_tokens = request.output_tokens
        self.named_keys: tuple[Key, ...] = ()
        self.generated_before = 0
        self.joined: int | None = None

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        if self.joined is None:
            return self.generated_before
        return self.generated_before + self.steps.count - self.joined

    @property
    def prefill_left(self) -> int:
        """Tokens still to be computed before the next one is generated."""
        return self.target - self.computed

    @property
    def output_left(self) -> int:
        """Output tokens still to come: the truth, which no real scheduler knows."""
        return self.output_tokens - self.generated

    @property
    def predicted_left(self) -> int:
        """Output tokens still expected, by the request's prediction; the truth without one.

        At least 1 while there are any to come.
        """
        if self.request.predicted_output_tokens is None:
            return self.output_left
        left = self.request.predicted_output_tokens - self.generated
        return max(left, 1 if self.output_left else 0)

    @property
    def length(self) -> int:
        """Tokens of K/V it has: all but the newest, which the next step computes."""
        if self.prefill_left:
            return self.computed
        return max(self.computed, self.request.prompt_tokens + self.generated - 1)

    def known_request(self) -> Request:
        """Return the request with all output keys that are known by now."""
        if not self.named_keys:
            return self.request
        keys = [*self.request.output_keys, *self.named_keys]
        return attrs.evolve(self.request, output_keys=keys)

    def __repr__(self) -> str:
        """Show the request and its stage."""
        return f"<Job {self.serial}: request {self.request.id}, {self.stage}>"


def admission_of(job: Job) -> int:
    """Return the serial number of the admission of `job`, by which jobs of one step end."""
    return 0 if job.seq is None else job.seq.admission
