"""Segments leave that save little prefill for their memory, or were not used for long."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import attrs
from attrs.validators import ge, instance_of, le, optional

from kvcore.cache import CheckpointPolicy, Segment


@attrs.define(slots=False, eq=False)
class WeighedSegments(CheckpointPolicy):
    """Evicts the segment with the lowest sum of its recency and its worth.

    Both are scaled to [0, 1] over the segments that can leave.

    Options:
        cap: the most boundaries along a text; those nearest to its begin leave first. None: any
            number.
    """

    cap: int | None = attrs.field(
        default=None, kw_only=True, validator=optional([instance_of(int), ge(1)])
    )

    @property
    @abstractmethod
    def shares(self) -> tuple[float, float]:
        """The weights of recency and of worth."""

    @abstractmethod
    def worth(self, segment: Segment) -> float:
        """Return what a hit at the end of `segment` saves."""

    def victim(self, segments: Sequence[Segment]) -> Segment:
        """Return the segment with the lowest score, or the first one beyond the cap."""
        if self.cap is not None:
            over = [each for each in segments if each.resumable and each.below >= self.cap]
            if over:
                return over[0]
        latest = max(segment.last_use for segment in segments) + 1
        # A tail has no state: a hit cannot end there.
        worths = _scaled([self.worth(s) if s.resumable else 0.0 for s in segments])
        recent = _scaled([1 / (latest - segment.last_use) for segment in segments])
        for_recency, for_worth = self.shares
        scores = [for_recency * r + for_worth * w for r, w in zip(recent, worths, strict=True)]
        return segments[scores.index(min(scores))]


def _scaled(values: list[float]) -> list[float]:
    """Return `values` scaled to [0, 1]; all are 0 if they are equal."""
    low = min(values)
    span = max(values) - low
    return [(value - low) / span if span else 0.0 for value in values]


@attrs.define(slots=False, eq=False)
class Marconi(WeighedSegments):
    """Keep states at branch points and last tokens; evict by recency and FLOPs a byte.

    Branch points are junctions. The last token is that of the prompt, and of the output where
    the workload has keys for it: there, each full block is kept, and an earlier one is an inner
    segment that can leave by itself. The score of a segment is recency + alpha · efficiency,
    efficiency being the prefill that it saves beside the one above it, divided by its memory. A
    segment that texts branch off stays. The authors tune alpha by replaying what has come;
    here it is an option: `kvcore compare --checkpoint marconi:alpha=1,marconi:alpha=2`.

    Source: Pan et al., "Marconi: Prefix caching for the era of hybrid LLMs", MLSys 2025
    (arXiv 2411.19379), and its published code.

    Options:
        alpha: weight of efficiency; 0: by recency alone. The default is ours: it hits most on
            the workload `agents`.
    """

    name: ClassVar[str] = "marconi"
    output: ClassVar[bool] = True

    alpha: float = attrs.field(default=0.05, converter=float, validator=ge(0))

    @property
    def shares(self) -> tuple[float, float]:
        """The weights of recency and of efficiency."""
        return 1.0, self.alpha

    def worth(self, segment: Segment) -> float:
        """Return the seconds of prefill that `segment` saves for each of its blocks."""
        return segment.seconds / segment.blocks


@attrs.define(slots=False, eq=False)
class SegLen(WeighedSegments):
    """Keep states where the default does; evict by recency and by length.

    The length of a segment is the tokens that must be computed again without it: those since
    the boundary above. It stands for Marconi's FLOPs without a model of them. A segment that
    texts branch off stays.

    Source: `seglen` of SGLang pull request 22172, with its weight of 0.85; how the weight mixes
    both is ours.

    Options:
        weight: share of the length in the score, the rest being that of recency.
    """

    name: ClassVar[str] = "seglen"

    weight: float = attrs.field(default=0.85, converter=float, validator=[ge(0), le(1)])

    @property
    def shares(self) -> tuple[float, float]:
        """The weights of recency and of length."""
        return 1 - self.weight, self.weight

    def worth(self, segment: Segment) -> float:
        """Return the tokens of `segment`."""
        return segment.end - segment.start
