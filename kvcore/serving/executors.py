"""What runs a step: in a simulation a latency model, which says how long it would take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcore.policy import Batch, Job, LatencyModel, Line, Plugin
from kvcore.request import Key
from kvcore.serving.decoding import Decoders


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
        """Return the picoseconds the step takes."""
        del chunks, decoders
        return self.latency.duration(batch)

    def lines(self, jobs: int) -> Sequence[Line]:
        """Return the lines of steps that only decode, asked once for each number of jobs."""
        lines = self._decode_lines.get(jobs)
        if lines is None:
            nothing = (0,) * len(self.latency.windows)
            lines = _highest(self.latency.pieces(Batch(0, nothing, jobs, nothing)))
            self._decode_lines[jobs] = lines
        return lines


def _highest(lines: Sequence[Line]) -> Sequence[Line]:
    """Leave out lines that are below another one whatever the context."""
    kept: list[Line] = []
    for line in sorted(lines, reverse=True):
        if not any(all(a >= b for a, b in zip(other, line, strict=True)) for other in kept):
            kept.append(line)
    return kept
