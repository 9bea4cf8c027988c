"""What runs a step: in a simulation a latency model, which says how long it would take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol

from kvcore.errors import PolicyError
from kvcore.plugins import Plugin, policy_error
from kvcore.request import Key
from kvcore.serving.decode_batch import Decoders
from kvcore.serving.latency import Batch, LatencyModel, Line
from kvcore.serving.scheduler import Job


class Executor(Protocol):
    """Runs steps. The loop is the same whatever runs them.

    Attributes:
        name: for the header of a trace.
        mode: whose clock it keeps: `model` or `wall`.
        jumps: whether many decode steps may be run at once, by `lines`.
        latency: how long schedulers may take a step to be.
    """

    name: str
    mode: str
    jumps: bool
    latency: LatencyModel

    @property
    def plugins(self) -> Sequence[Plugin]:
        """What it is made of, for the header of a trace."""

    @property
    def ended(self) -> Sequence[tuple[Job, int]]:
        """The jobs whose text the step before has ended early, and the tokens they have."""

    @property
    def named(self) -> Sequence[tuple[Job, Sequence[Key]]]:
        """The jobs that share what they generate, with keys that the step has told."""

    def run(
        self, batch: Batch, chunks: Sequence[tuple[Job, int]], decoders: Decoders | None
    ) -> int:
        """Run one step: prefill `chunks` of so many tokens, and decode if given decoders.

        Returns the picoseconds it took.
        """

    def lines(self, jobs: int) -> Sequence[Line]:
        """Return the lines of the time of steps that only decode `jobs` jobs."""


class SimulatedExecutor:
    """Computes nothing: a latency model says how long each step takes."""

    name = "simulate"
    mode = "model"
    ended: Sequence[tuple[Job, int]] = ()
    named: Sequence[tuple[Job, Sequence[Key]]] = ()

    def __init__(self, latency: LatencyModel) -> None:
        """Take the latency model."""
        self.latency = latency
        self.plugins = (latency,)
        self.jumps = latency.jumps
        self._decode_lines: dict[int, Sequence[Line]] = {}

    def run(
        self, batch: Batch, chunks: Sequence[tuple[Job, int]], decoders: Decoders | None
    ) -> int:
        """Return the picoseconds the step takes.

        Raises:
            PolicyError: the latency model failed, or gave no time.
        """
        del chunks, decoders
        try:
            took = self.latency.duration(batch)
        except Exception as error:
            raise policy_error(self.latency, "pieces", error) from error
        if type(took) is not int or took < 0:
            self._refuse(f"{batch} takes {took!r} ps; give whole picoseconds, 0 or more")
        return took

    def lines(self, jobs: int) -> Sequence[Line]:
        """Return the lines of steps that only decode, asked once for each number of jobs.

        Raises:
            PolicyError: the latency model failed, or a step could take less the longer the
                context is.
        """
        lines = self._decode_lines.get(jobs)
        if lines is None:
            lines = self._decode_lines[jobs] = _highest(self._checked(jobs))
        return lines

    def _checked(self, jobs: int) -> Sequence[Line]:
        windows = self.latency.windows
        nothing = (0,) * len(windows)
        try:
            lines = self.latency.pieces(Batch(0, nothing, jobs, nothing))
            sound = max(line[0] for line in lines) >= 0 and all(
                len(line) == 1 + len(windows)
                and all(type(number) is int for number in line)
                and min(line[1:]) >= 0
                for line in lines
            )
        except Exception as error:
            raise policy_error(self.latency, "pieces", error) from error
        if not sound:
            self._refuse(
                f"the lines of {jobs} decoding sequences are {list(lines)!r}; give whole "
                f"picoseconds, and a slope of 0 or more for each window of {windows!r}"
            )
        return lines

    def _refuse(self, why: str) -> NoReturn:
        msg = f"latency plugin {self.latency.name!r}: {why}"
        raise PolicyError(msg)


def _highest(lines: Sequence[Line]) -> Sequence[Line]:
    """Leave out lines that are below another one whatever the context."""
    kept: list[Line] = []
    for line in sorted(lines, reverse=True):
        if not any(all(a >= b for a, b in zip(other, line, strict=True)) for other in kept):
            kept.append(line)
    return kept
