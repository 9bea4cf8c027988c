"""What runs a step: in a simulation a latency model, which says how long it would take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcore.policy import Batch, Job, LatencyModel, Line
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

    def run(
        self, batch: Batch, chunks: Sequence[tuple[Job, int]], decoders: Decoders | None
    ) -> int:
        """Run one step: prefill `chunks` of so many tokens, and decode if given decoders.

        Returns the picoseconds it took.
        """

    def lines(self, batch: Batch) -> Sequence[Line]:
        """Return the lines of a step's time, for many decode steps at once."""


class SimulatedExecutor:
    """Computes nothing: a latency model says how long each step takes."""

    name = "simulate"
    mode = "model"

    def __init__(self, latency: LatencyModel) -> None:
        """Take the latency model."""
        self.latency = latency
        self.jumps = latency.jumps
        self._decode_lines: dict[int, Sequence[Line]] = {}

    def run(
        self, batch: Batch, chunks: Sequence[tuple[Job, int]], decoders: Decoders | None
    ) -> int:
        """Return the picoseconds the step takes."""
        del chunks, decoders
        return self.latency.duration(batch)

    def lines(self, batch: Batch) -> Sequence[Line]:
        """Return the lines of a step that only decodes, asked once for each batch size."""
        lines = self._decode_lines.get(batch.decode)
        if lines is None:
            lines = self._decode_lines[batch.decode] = self.latency.pieces(batch)
        return lines
