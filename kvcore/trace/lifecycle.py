"""The lives of traced requests: arrival, admissions, preemptions, and one end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

from kvcore.trace.events import PREEMPTIONS
from kvcore.trace.spans import violated

Line: TypeAlias = dict[str, Any]


WAITING, RUNNING, PAUSED, PREEMPTED = "waiting", "running", "paused", "preempted"


FINISHED, REJECTED = "finished", "rejected"


@attrs.define(eq=False)
class Life:
    """A traced request between its REQUEST line and its end.

    Attributes:
        id: the request's.
        output: tokens it asks for.
        stage: `waiting` for its first admission, `running`, `paused`, `preempted` (waiting
            for another admission), `finished` or `rejected`.
        seq: the sequence of its last admission; None before the first.
        answered: whether its first token has come.
    """

    id: int | str
    output: int
    stage: str = WAITING
    seq: int | None = None
    answered: bool = False


class Lives:
    """What a server tells of its requests, each line checked against those before it.

    The lines of a server (FIRST_TOKEN, PREEMPT, RESUME, FINISH, REJECT) must be in order in
    any trace. A trace with a clock must also be complete: no admission without an arrival
    or a preemption, no close without one or a finish, and one end to every request.

    Attributes:
        finished, rejected: how many requests ended so.
        preemptions: how often one was preempted, by kind.
    """

    def __init__(self, mode: str) -> None:
        """Start without requests. `mode` is the header's."""
        self.finished = self.rejected = 0
        self.preemptions = dict.fromkeys(PREEMPTIONS, 0)
        self._complete = mode != "untimed"
        self._as_asked = mode != "wall"
        self._lives: dict[int | str, Life] = {}
        self._apply: dict[str, Callable[[Line], None]] = {
            "FIRST_TOKEN": self._first_token,
            "PREEMPT": self._preempt,
            "RESUME": self._resume,
            "FINISH": self._finish,
            "REJECT": self._reject,
        }

    def arrive(self, request: int | str, output: int) -> None:
        """Take in a request that asks for `output` tokens."""
        self._lives[request] = Life(request, output)

    def admit(self, request: int | str, seq: int, *, again: bool) -> None:
        """Let `request` run as the new sequence `seq`.

        Raises:
            ViolationError: it is over, or no admission of that kind is due.
        """
        life = self._life(request)
        if again and life.seq is None:
            violated(f"request {request!r} was not admitted before")
        if self._complete and life.stage != (PREEMPTED if again else WAITING):
            violated(f"request {request!r} is {life.stage}, and is admitted")
        life.stage, life.seq = RUNNING, seq

    def grow(self, request: int | str, seq: int) -> None:
        """Take in that `seq`, of `request`, gets blocks.

        Raises:
            ViolationError: it is paused.
        """
        life = self._lives[request]
        if life.stage == PAUSED and life.seq == seq:
            violated(f"sequence {seq} is paused, and gets blocks")

    def apply(self, line: Line) -> bool:
        """Take in a server's line. Say whether its sequence must be closed by the next one.

        Raises:
            ViolationError: it cannot follow from what was told of its request.
        """
        self._apply[line["event"]](line)
        return line["event"] == "FINISH" or line.get("how") == "recompute"

    def close(self, request: int | str, seq: int) -> None:
        """Take in that `seq` closed for no reason told; a fork needs none.

        Raises:
            ViolationError: a reason was due.
        """
        if self._complete and self._lives[request].seq == seq:
            violated(f"sequence {seq} closes without FINISH or PREEMPT before it")

    def end(self, sequences: int) -> None:
        """Take in the end of the trace, with so many sequences open.

        Raises:
            ViolationError: the trace has a clock, and something in it has not ended.
        """
        left = [life for life in self._lives.values() if not _is_over(life)]
        if self._complete and left:
            first = f"the first, {left[0].id!r}, is {left[0].stage}"
            violated(f"requests without FINISH or REJECT: {len(left)}; {first}")
        if self._complete and sequences:
            violated(f"sequences that are not closed: {sequences}")

    def _first_token(self, line: Line) -> None:
        life = self._at(line, RUNNING)
        if not life.output:
            violated(f"request {life.id!r} asks for no output")
        if life.answered:
            violated(f"request {life.id!r} has its first token already")
        life.answered = True

    def _preempt(self, line: Line) -> None:
        how = line["how"]
        if how == "pause":
            self._at(line, RUNNING).stage = PAUSED
        else:
            self._at(line, RUNNING, PAUSED).stage = PREEMPTED
        if "for" in line:
            self._life(line["for"])
        self.preemptions[how] += 1

    def _resume(self, line: Line) -> None:
        self._at(line, PAUSED).stage = RUNNING

    def _finish(self, line: Line) -> None:
        life, output = self._at(line, RUNNING), line["output"]
        if self._as_asked and output != life.output:
            violated(f"request {life.id!r} asks for {life.output} tokens, and gets {output}")
        if life.answered is not (output > 0):
            came = "came" if life.answered else "did not come"
            violated(f"request {life.id!r} gets {output} tokens; its first {came}")
        life.stage = FINISHED
        self.finished += 1

    def _reject(self, line: Line) -> None:
        life = self._life(line["request"])
        if life.seq is not None:
            violated(f"request {life.id!r} was admitted, as sequence {life.seq}")
        life.stage = REJECTED
        self.rejected += 1

    def _at(self, line: Line, *stages: str) -> Life:
        """Return the life that `line` is of, which must be at one of `stages`."""
        life = self._life(line["request"])
        if life.seq != line["seq"]:
            violated(f"sequence {line['seq']} is not of request {life.id!r}")
        if life.stage not in stages:
            violated(f"request {life.id!r} is {life.stage}, not {' or '.join(stages)}")
        return life

    def _life(self, request: int | str) -> Life:
        """Return the life of `request`, which must have begun and not be over."""
        life = self._lives.get(request)
        if life is None:
            violated(f"request {request!r} has no REQUEST line before this")
        if _is_over(life):
            violated(f"request {request!r} is {life.stage}: nothing of it follows")
        return life


def _is_over(life: Life) -> bool:
    return life.stage in (FINISHED, REJECTED)
