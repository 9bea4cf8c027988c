"""Segments leave that save little prefill for their memory, or were not used for long."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Sequence
from math import inf
from typing import Any, ClassVar, Literal

import attrs
from attrs.validators import ge, instance_of, le, optional

from kvcore.cache import CheckpointPolicy, Segment
from kvcore.errors import InputError
from kvcore.request import Request

GRID = 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0
"""The values of alpha that `tuned` tries; of equally good ones it takes the lowest."""

DELAY = 10
"""It tries them after so many times as many requests as came before the first eviction."""


class _Ranking:
    """Segments in the order of a rank, whose last number only one of them has.

    Attributes:
        entries: each rank with its segment, the lowest first.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[tuple[Any, ...], Segment]] = []
        self._ranks: dict[Segment, tuple[Any, ...]] = {}

    def put(self, segment: Segment, rank: tuple[Any, ...] | None) -> None:
        """Give `segment` a rank in place of the one it has; None: take it out."""
        before = self._ranks.get(segment)
        if rank == before:
            return
        if before is not None:
            del self._ranks[segment], self.entries[bisect_left(self.entries, (before,))]
        if rank is not None:
            self._ranks[segment] = rank
            insort(self.entries, (rank, segment))

    def ends(self, segments: Sequence[Segment]) -> list[Any]:
        """Return the first number of the lowest and of the highest rank of `segments`."""
        return [
            next(rank[0] for rank, segment in entries if segment in segments)
            for entries in (self.entries, reversed(self.entries))
        ]


@attrs.define(slots=False, eq=False)
class WeighedSegments(CheckpointPolicy):
    """Evicts the segment with the lowest sum of its recency and its worth.

    Both are scaled to [0, 1] over the segments that can leave. Of equal sums the first segment
    in their order leaves.

    Options:
        cap: the most boundaries along a text: those with as many behind them leave first, the
            least recent of them before others. None: any number.
    """

    cap: int | None = attrs.field(
        default=None, kw_only=True, validator=optional([instance_of(int), ge(1)])
    )

    _changed: dict[Segment, None] = attrs.field(init=False, factory=dict)
    _by_worth: _Ranking = attrs.field(init=False, factory=_Ranking)
    _by_use: _Ranking = attrs.field(init=False, factory=_Ranking)
    _beyond_cap: _Ranking = attrs.field(init=False, factory=_Ranking)

    @property
    @abstractmethod
    def shares(self) -> tuple[float, float]:
        """The weights of recency and of worth."""

    @abstractmethod
    def worth(self, segment: Segment) -> float:
        """Return what a hit at the end of `segment` saves."""

    def on_changed(self, segment: Segment) -> None:
        """Note that `segment` is to be ranked again."""
        self._changed[segment] = None

    def victim(self, segments: Sequence[Segment]) -> Segment:
        """Return the segment with the lowest score, or the first one beyond the cap."""
        self._rank_changed()
        for _, segment in self._beyond_cap.entries:
            if segment in segments:
                return segment
        least, most = self._by_worth.ends(segments)
        earliest, latest = self._by_use.ends(segments)
        now = latest + 1  # so that the highest recency is 1
        oldest = 1 / (now - earliest)
        for_recency, for_worth = self.shares

        def score(segment: Segment, of_worth: float) -> float:
            recency = 1 / (now - segment.last_use)
            return for_recency * _scaled(recency, oldest, 1.0) + of_worth

        first = victim = next(iter(segments))
        lowest = score(first, for_worth * _scaled(self._worth(first), least, most))
        # By rising worth: a segment that was used later than one before it here, and follows
        # it in the order, scores no lower; and none does from where its worth alone is more
        # than the lowest score, or as much as that of the first one, which wins ties.
        passed_use, passed_order = now, 0
        for (worth, use, order), segment in self._by_worth.entries:
            if (use >= passed_use and order > passed_order) or segment not in segments:
                continue
            of_worth = for_worth * _scaled(worth, least, most)
            if of_worth > lowest or (of_worth == lowest and victim is first):
                break
            own = score(segment, of_worth)
            if (own, order) < (lowest, victim.order):
                victim, lowest = segment, own
            if use < passed_use:
                passed_use, passed_order = use, order
        return victim

    def _rank_changed(self) -> None:
        """Rank the segments that have changed since the last call."""
        for segment in self._changed:
            use, order, cached = segment.last_use, segment.order, bool(segment.blocks)
            rank = (self._worth(segment), use, order) if cached else None
            self._by_worth.put(segment, rank)
            self._by_use.put(segment, (use, order) if cached else None)
            if self.cap is not None:
                beyond = cached and segment.resumable and segment.below >= self.cap
                self._beyond_cap.put(segment, (order,) if beyond else None)
        self._changed.clear()

    def _worth(self, segment: Segment) -> float:
        """Return the worth of `segment`: none of a tail, which has no state to resume from."""
        return self.worth(segment) if segment.resumable else 0.0


def _scaled(value: float, low: float, high: float) -> float:
    """Return `value` scaled to [0, 1], from the lowest to the highest; 0 if these are equal."""
    return (value - low) / (high - low) if high > low else 0.0


def _alpha(value: float | str) -> float | Literal["tuned"]:
    return "tuned" if value == "tuned" else float(value)


@attrs.define(slots=False, eq=False)
class Marconi(WeighedSegments):
    """Keep states at branch points and last tokens; evict by recency and FLOPs a byte.

    Branch points are junctions. The last token is that of the prompt, and of the output where
    the workload has keys for it: there, each full block is kept, and an earlier one is an inner
    segment that can leave by itself. The score of a segment is recency + alpha · efficiency,
    efficiency being the prefill that it saves beside the one above it, divided by its memory. A
    segment that texts branch off stays.

    `alpha=tuned` is the authors' procedure: alpha is 0 until ten times as many requests have
    come as before the first eviction. Then the prompts so far are replayed with each alpha of
    `GRID`, and the one whose tokens hit most is kept. They replay beside the server, on several
    CPUs; here it takes no time of the simulation.

    Source: Pan et al., "Marconi: Prefix caching for the era of hybrid LLMs", MLSys 2025
    (arXiv 2411.19379), section 4.2, which says 5 to 15 times.

    Options:
        alpha: weight of efficiency; 0: by recency alone; or `tuned`. The default is ours: it
            hits most on the workload `agents`.
    """

    name: ClassVar[str] = "marconi"
    output: ClassVar[bool] = True

    alpha: float | Literal["tuned"] = attrs.field(default=0.05, converter=_alpha)

    _weight: float = attrs.field(init=False)  # the alpha in use
    _is_tuned: bool = attrs.field(init=False)  # or was given
    _requests: list[Request] = attrs.field(init=False, factory=list)
    _tuned_after: float = attrs.field(init=False, default=inf)  # so many requests

    def __attrs_post_init__(self) -> None:
        """Check alpha; begin with 0 if it is to be tuned."""
        if self.alpha != "tuned" and not 0 <= self.alpha < inf:
            msg = f"marconi: alpha={self.alpha}: give a finite weight of 0 or more, or tuned"
            raise InputError(msg)
        self._is_tuned = self.alpha != "tuned"
        self._weight = 0.0 if self.alpha == "tuned" else self.alpha

    @property
    def shares(self) -> tuple[float, float]:
        """The weights of recency and of efficiency."""
        return 1.0, self._weight

    def worth(self, segment: Segment) -> float:
        """Return the seconds of prefill that `segment` saves for each of its blocks."""
        return segment.seconds / segment.blocks

    def victim(self, segments: Sequence[Segment]) -> Segment:
        """Return the segment with the lowest score; the first call sets when alpha is tuned."""
        if self._tuned_after == inf:
            self._tuned_after = DELAY * max(1, len(self._requests))
        return super().victim(segments)

    def on_admitted(self, request: Request, hit: int, junction: int) -> None:
        """Keep `request` until alpha is tuned; tune it when that is due."""
        if self._is_tuned:
            return
        self._requests.append(request)
        if len(self._requests) >= self._tuned_after:
            self._weight = max(GRID, key=self._hits)
            self._is_tuned = True
            self._requests.clear()

    def _hits(self, alpha: float) -> int:
        """Return the tokens that the requests so far hit with `alpha`."""
        return self.replay(Marconi(alpha=alpha, cap=self.cap), self._requests)


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
