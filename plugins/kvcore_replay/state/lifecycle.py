"""The life cycles of traced requests: arrival, admissions, preemptions, and one end."""

from __future__ import annotations

import attrs

from kvcore.trace import events
from kvcore.trace.events import methods_by_event, violated

PREEMPTIONS = ("pause", "recompute", "swap")

WAITING, RUNNING, PAUSED, PREEMPTED = "waiting", "running", "paused", "preempted"

ANNOUNCED = "announced"

FINISHED, REJECTED = "finished", "rejected"


@attrs.define(eq=False)
class Lifecycle:
    """A traced request between its REQUEST line and its end.

    Attributes:
        id: id of the request.
        output: number of tokens that it asks for.
        stage: `announced` by a prefetch, before it arrives; `waiting` for its first admission,
            `running`, `paused`, `preempted` (waiting for another admission), `finished` or
            `rejected`.
        seq: the sequence of its last admission; None before the first.
        answered: whether its first token has come.
    """

    id: int | str
    output: int
    stage: str = WAITING
    seq: int | None = None
    answered: bool = False

    @property
    def over(self) -> bool:
        """Whether the request has ended, so that no line of it can follow."""
        return self.stage in (FINISHED, REJECTED)


class Lifecycles:
    """The life cycles of requests, each line of a server checked against those before it.

    The lines of a server (FIRST_TOKEN, PREEMPT, RESUME, FINISH, REJECT) must be in order in
    any trace. A trace with a clock must also be complete: no admission without an arrival
    or a preemption, no close without one or a finish, and one end to every request.

    Attributes:
        finished, rejected: number of requests that finished, and that were rejected.
        preemptions: number of preemptions by kind.
    """

    def __init__(self, mode: str) -> None:
        """Start without requests, in a trace of the header's `mode`."""
        self.finished = self.rejected = 0
        self.preemptions = dict.fromkeys(PREEMPTIONS, 0)
        self._complete = mode != "untimed"
        # By the wall clock a model may end a text early; a simulated one never does.
        self._as_asked = mode != "wall"
        self._requests: dict[int | str, Lifecycle] = {}
        served = ("FIRST_TOKEN", "PREEMPT", "RESUME", "FINISH", "REJECT")
        self._apply = methods_by_event(self, *served)

    def arrive(self, request: int | str, output: int) -> None:
        """Record a request that asks for `output` tokens."""
        self._requests[request] = Lifecycle(request, output)

    def adopt(self, request: int | str, *, answered: bool = True) -> None:
        """Record that `request`, which has arrived, was prefilled elsewhere.

        `answered`: it got its first token there.
        """
        life = self._requests[request]
        life.stage, life.seq, life.answered = PREEMPTED, -1, answered

    def forget(self, request: int | str) -> None:
        """Record that `request`, which waits or has ended, is no longer served here."""
        life = self._requests[request]
        if life.stage not in (PREEMPTED, FINISHED):
            violated(f"request {request!r} is {life.stage}, and is given up")
        del self._requests[request]

    def announce(self, request: int | str) -> None:
        """Record that blocks are loaded for `request`, which is yet to arrive."""
        self._requests[request] = Lifecycle(request, 0, ANNOUNCED)

    def admit(self, request: int | str, seq: int, *, resumed: bool) -> None:
        """Record that `request` runs as the new sequence `seq`.

        Raises:
            ViolationError: it is over, or no admission of that kind is due.
        """
        life = self._running(request)
        if resumed and life.seq is None:
            violated(f"request {request!r} was not admitted before")
        if self._complete and life.stage != (PREEMPTED if resumed else WAITING):
            violated(f"request {request!r} is {life.stage}, and is admitted")
        life.stage, life.seq = RUNNING, seq

    def grow(self, request: int | str, seq: int) -> None:
        """Check that `seq`, of `request`, may get blocks, and commit them.

        Raises:
            ViolationError: it is paused.
        """
        life = self._requests[request]
        if life.stage == PAUSED and life.seq == seq:
            violated(f"sequence {seq} is paused: it gets no blocks and commits none")

    def want(self, request: int | str) -> None:
        """Check that blocks may be evicted for `request`: it runs, or is admitted next.

        Raises:
            ViolationError: it is over, or paused.
        """
        if self.is_announced(request):
            return
        if self._running(request).stage == PAUSED:
            violated(f"request {request!r} is paused, and needs no blocks")

    def generate(self, request: int | str) -> None:
        """Check that `request` may have generated tokens.

        Raises:
            ViolationError: it does not run.
        """
        life = self._running(request)
        if life.stage != RUNNING:
            violated(f"request {request!r} is {life.stage}, and generates nothing")

    def apply(self, event: events.Event) -> bool:
        """Record an event of a server; return True if the next line must close its sequence.

        Raises:
            ViolationError: it cannot follow from the events of its request before it.
        """
        self._apply[event.event](event)
        return event.event == "FINISH" or getattr(event, "how", None) in ("recompute", "swap")

    def is_announced(self, request: int | str) -> bool:
        """Return True if blocks were loaded for `request`, which is yet to arrive."""
        life = self._requests.get(request)
        return life is not None and life.stage == ANNOUNCED

    def waits(self, request: int | str) -> bool:
        """Return True if `request` was preempted, and waits for another admission."""
        return self._requests[request].stage == PREEMPTED

    def close(self, request: int | str, seq: int) -> None:
        """Record that `seq` closed without a reason in the line before, as only forks may.

        Raises:
            ViolationError: a reason was due.
        """
        if self._complete and self._requests[request].seq == seq:
            violated(f"sequence {seq} closes without FINISH or PREEMPT before it")

    def output(self, request: int | str) -> int:
        """Return the number of tokens that `request` asks for."""
        return self._requests[request].output

    def end(self, sequences: int) -> None:
        """Check the end of the trace, at which `sequences` sequences are open.

        Raises:
            ViolationError: the trace has a clock, and something in it has not ended.
        """
        left = [
            life for life in self._requests.values()
            if not (life.over or life.stage == ANNOUNCED)
        ]  # fmt: skip
        if self._complete and left:
            first = f"the first, {left[0].id!r}, is {left[0].stage}"
            violated(f"requests without FINISH or REJECT: {len(left)}; {first}")
        if self._complete and sequences:
            violated(f"sequences that are not closed: {sequences}")

    def _first_token(self, event: events.FirstToken) -> None:
        life = self._at(event, RUNNING)
        if not life.output:
            violated(f"request {life.id!r} asks for no output")
        if life.answered:
            violated(f"request {life.id!r} has its first token already")
        life.answered = True

    def _preempt(self, event: events.Preempt) -> None:
        if event.how == "pause":
            self._at(event, RUNNING).stage = PAUSED
        else:
            self._at(event, RUNNING, PAUSED).stage = PREEMPTED
        if isinstance(event.requester, (int, str)):
            requester = self._running(event.requester)
            if requester.stage == RUNNING or event.requester == event.request:
                violated(f"request {requester.id!r} does not wait for what it preempts")
        self.preemptions[event.how] += 1

    def _resume(self, event: events.Resume) -> None:
        self._at(event, PAUSED).stage = RUNNING

    def _finish(self, event: events.Finish) -> None:
        life, output = self._at(event, RUNNING), event.output
        if self._as_asked and output != life.output:
            violated(f"request {life.id!r} asks for {life.output} tokens, and gets {output}")
        if life.answered is not (output > 0):
            came = "came" if life.answered else "did not come"
            violated(f"request {life.id!r} gets {output} tokens; its first {came}")
        life.stage = FINISHED
        self.finished += 1

    def _reject(self, event: events.Reject) -> None:
        life = self._running(event.request)
        if life.seq is not None and life.seq >= 0:
            violated(f"request {life.id!r} was admitted, as sequence {life.seq}")
        life.stage = REJECTED
        self.rejected += 1

    def _at(self, event: events.RequestEvent, *stages: str) -> Lifecycle:
        """Return the life cycle of the request of `event`, which must be at one of `stages`."""
        life = self._running(event.request)
        if life.seq != event.seq:
            violated(f"sequence {event.seq} is not of request {life.id!r}")
        if life.stage not in stages:
            violated(f"request {life.id!r} is {life.stage}, not {' or '.join(stages)}")
        return life

    def _running(self, request: int | str) -> Lifecycle:
        """Return the life cycle of `request`, which must have arrived and not have ended."""
        life = self._requests.get(request)
        if life is None or life.stage == ANNOUNCED:
            violated(f"request {request!r} has no REQUEST line before this")
        if life.over:
            violated(f"request {request!r} is {life.stage}: nothing of it follows")
        return life
