"""The latency contract: how long a step takes, as a maximum of integer lines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import attrs

from kvcore.policy.plugin import Plugin

Windows: TypeAlias = tuple[int | None, ...]
Line: TypeAlias = tuple[int, ...]
"""`(a, b)`: a + b x context picoseconds. With more attention windows `(a, b, c, ...)`."""


@attrs.define
class Batch:
    """What one step computes, as far as its time depends on it.

    Attributes:
        prefill: prompt tokens, of all chunks together.
        pairs: (query, key) pairs these attend to, by attention window.
        decode: sequences that generate a token.
        context: (query, key) pairs of those tokens, by attention window: without a window
            the lengths of the sequences, the new token included.
    """

    prefill: int = 0
    pairs: tuple[int, ...] = (0,)
    decode: int = 0
    context: tuple[int, ...] = (0,)


@attrs.define(slots=False, eq=False)
class LatencyModel(Plugin):
    """Says how long a step of a server takes.

    The time is the largest of a few lines in the context of the decoding sequences. Their
    coefficients are whole picoseconds, so that the core sums k steps in closed form and
    gets exactly what k single steps take. More work never takes less time.
    """

    kind: ClassVar[str] = "latency"
    jumps: ClassVar[bool] = True
    """Whether the lines hold while contexts grow. If not, they hold for `batch.context`
    alone, and every step is asked for by itself."""

    @property
    def windows(self) -> Windows:
        """The attention windows it tells apart: tokens, or None for no window."""
        return (None,)

    @abstractmethod
    def pieces(self, batch: Batch) -> Sequence[Line]:
        """Return the lines whose maximum is the time of `batch`, in picoseconds.

        A line has one slope for each of `windows`. Where `jumps` is true they depend on
        `prefill`, `pairs` and `decode` alone.
        """

    def duration(self, batch: Batch) -> int:
        """Return the picoseconds that `batch` takes."""
        context = batch.context
        if len(context) == 1:
            (pairs,), longest = context, 0
            for a, b in self.pieces(batch):
                time = a + b * pairs
                if time > longest:
                    longest = time
            return longest
        return max(
            line[0] + sum(b * c for b, c in zip(line[1:], context, strict=True))
            for line in self.pieces(batch)
        )

    def coefficients(self) -> dict[str, Any]:
        """Return what the model computes with, for the header of a trace."""
        return {}
