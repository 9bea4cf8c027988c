"""Hazard: evict the prefix that is least likely to be asked for again soon, learned online."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable
from copy import copy
from itertools import accumulate, pairwise
from math import isqrt
from operator import add, itemgetter, mul, truediv
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import attrs

from kvcore import EvictionPolicy, InputError, Request, Span
from kvcore.request import Key
from kvcore.units import NS_PER_S
from kvcore_plugins.eviction.counts import Label, Tables, read_counts, write_counts
from kvcore_plugins.eviction.ghost import GhostRuns
from kvcore_plugins.eviction.hazard_guard import Guard
from kvcore_plugins.eviction.queues import ScannedLeaves
from kvcore_plugins.eviction.survival import hazards, indices

PARTS = ("turns", "pause", "answer", "tool", "hits", "tenant")
"""The parts of which a class can consist."""

_BUCKETS, _GROUP = 30, 3
_GROUPS = _BUCKETS // _GROUP
"""Buckets of age; those that share a factor; and groups of these."""

ENDS = [isqrt(1 << (60 + half)) for half in range(_BUCKETS - 1)]
_WIDTHS = [(end - start) / NS_PER_S for start, end in pairwise([0, *ENDS, 2 * ENDS[-1]])]
"""Ages in ns fall in buckets: to 2^30 (1.1 s), sqrt(2) times that, ..., 2^44 (5 h)."""

_TAIL, _TAIL_WAITS = [0.5] + [0.15] * len(ENDS), 16.0
"""Hazards without observations, and the waits that this counts for: a heavy tail, by which
older waits are less likely to end."""

_GROWTH, _STEP, _FADE = 2, 8000, 16_000
"""A fit follows when half as many waits more, or this number, are counted; then all fade."""

_GHOSTS = 16
"""Blocks that are remembered for each block of the pool; children above which a span is a
prefix that conversations share."""

_CLASSES, _OTHER, _RETURNED = 4000, -2, 1000
"""Classes that are told apart; the values of all parts for others, and for what requests go
past; running requests whose evicted turns are kept."""

Row: TypeAlias = list[float]
"""Numbers by bucket of age, or by group of buckets."""


@attrs.define(eq=False)
class Waits:
    """The waits of a class: of those with the same values of all parts.

    Attributes:
        values: these values.
        factors: the product of their factors, by group of ages.
        ended, left: by group, the waits that ended with a use, and those observed no longer.
        indices: by bucket, the Gittins index; None before it is needed.
    """

    values: Label
    factors: Row
    ended: Row = attrs.field(factory=lambda: [0.0] * _GROUPS)
    left: Row = attrs.field(factory=lambda: [0.0] * _GROUPS)
    indices: Row | None = None


@attrs.define(eq=False)
class Wait:
    """The time since a use of a span, which ends with the next one; its ghost shares it.

    Attributes:
        turns: the number of requests of the conversation when the span was computed.
        pause: the group of the time between the last two uses; -1 before there are two.
        maker: the id of the request that computed the span.
        conversation: the first key of the conversation.
        counts: whether it is counted: of the spans of a request, the first is.
        since: the time in ns at which the use ended.
        kind: its class; None while the span is in use.
        end: the end in blocks of what waits, without a last key that leaves by itself.
    """

    turns: int = 0
    pause: int = -1
    maker: int | str | None = None
    above: Any = None
    counts: bool = False
    since: int = 0
    kind: Any = None
    end: int = 0


class Model:
    """Hazards of waits by class and age, learned online, and the indices that follow."""

    def __init__(self, prior: float, parts: int) -> None:
        """Create a model without observations, of classes of `parts` parts."""
        self.prior = prior
        self.classes: dict[Label, Waits] = {}
        # By bucket: the waits of all classes, and their hazards.
        self.ended, self.left, self.hazards = [0.0] * _BUCKETS, [0.0] * _BUCKETS, _TAIL
        self.factors: list[dict[int | str | None, Row]] = [{} for _ in range(parts)]
        # Last keys of prompts that were used with the rest, and that were not.
        self.whole, self.parted, self.parts = 0.0, 0.0, False
        self.counted, self.fit_at, self.fade_at = 0, 0, _FADE

    def kind(self, values: Label) -> Waits:
        """Return the class with these values; one for all others where there are too many."""
        if len(self.classes) >= _CLASSES and values not in self.classes:
            values = (_OTHER,) * len(values)
        if values not in self.classes:
            self.classes[values] = Waits(values, self._product(values))
        return self.classes[values]

    def count(self, wait: Wait, now: int, *, used: bool = True) -> int:
        """Count a wait that ended with a use, or is observed no longer; return its group."""
        bucket = bisect_right(ENDS, now - wait.since)
        if wait.counts:
            kind = wait.kind
            in_all, in_kind = (self.ended, kind.ended) if used else (self.left, kind.left)
            in_all[bucket] += 1
            in_kind[bucket // _GROUP] += 1
            self.counted += 1
        return bucket // 2

    def indices(self, kind: Waits) -> Row:
        """Return the Gittins indices of a class. They are computed once after a fit."""
        spread = [factor for factor in kind.factors for _ in range(_GROUP)]
        kind.indices = indices(list(map(mul, self.hazards, spread)), _WIDTHS)
        return kind.indices

    def fit(self, waits: list[Wait], now: int) -> None:
        """Fit hazards and factors to all waits so far, of which `waits` go on."""
        left, stopped = self.left[:], {kind: kind.left[:] for kind in self.classes.values()}
        running = Counter((wait.kind, bisect_right(ENDS, now - wait.since)) for wait in waits)
        for (kind, bucket), count in running.items():
            left[bucket] += count
            stopped[kind][bucket // _GROUP] += count
        self.hazards = hazards(self.ended, left, _TAIL, _TAIL_WAITS)
        self._fit_factors(stopped)
        self.parts = self.parted > self.whole + 4
        step = min(self.counted // _GROWTH + 32, max(_STEP, len(waits) // 2))
        self.fit_at = self.counted + step
        if self.counted > self.fade_at:
            self.fade_at = self.counted + _FADE
            self.whole, self.parted = self.whole / 2, self.parted / 2
            every: list[Model | Waits] = [self, *stopped]
            for counts in every:
                counts.ended = [count / 2 for count in counts.ended]
                counts.left = [count / 2 for count in counts.left]
            kept = (k for k, row in stopped.items() if sum(k.ended) + sum(row) >= 1)
            self.classes = {kind.values: kind for kind in kept}

    def tables(self) -> Tables:
        """Return all counts, for a file."""
        classes = {values: kind.ended + kind.left for values, kind in self.classes.items()}
        last = [self.whole, self.parted]
        return {"all": {(): self.ended + self.left}, "last": {(): last}, "classes": classes}

    def restore(self, tables: Tables) -> None:
        """Begin with the counts of a file."""
        row = tables["all"][()]
        self.ended, self.left = row[:_BUCKETS], row[_BUCKETS:]
        self.whole, self.parted = tables["last"][()]
        for values, row in tables["classes"].items():
            kind = self.kind(values)
            kind.ended, kind.left = row[:_GROUPS], row[_GROUPS:]
        for _ in range(3):  # factors begin with those of the fit before
            self.fit([], 0)

    def _product(self, values: Label) -> Row:
        """Return the product of the factors of the values of a class."""
        row: Iterable[float] = [1.0] * _GROUPS
        for factors, value in zip(self.factors, values, strict=True):
            if value in factors:
                row = map(mul, row, factors[value])
        return list(row)

    def _fit_factors(self, stopped: dict[Waits, Row]) -> None:
        """Fit factors by value and group: one sweep over the parts, from the latest factors.

        A factor is the ratio of the waits that ended to those that were to be expected by the
        other factors, with a gamma prior of mean 1: over all ages, then by group. As in an
        actuary's table, what ends or stops in a group has gone through half of it.
        """
        expected = {}
        for kind, row in stopped.items():
            stops = list(map(add, kind.ended, row))
            reached = list(accumulate(reversed(stops)))[::-1]
            expected[kind] = [r - stop / 2 for r, stop in zip(reached, stops, strict=True)]
        ended = _sums(kind.ended for kind in stopped)
        rates = [e / (r or 1) for e, r in zip(ended, _sums(expected.values()), strict=True)]
        for kind, row in expected.items():
            expected[kind] = list(map(mul, map(mul, row, rates), kind.factors))
        for part, factors in enumerate(self.factors):
            classes: dict[int | str | None, list[Waits]] = {}
            for kind in stopped:
                classes.setdefault(kind.values[part], []).append(kind)
            for value, kinds in classes.items() if len(classes) > 1 else ():
                ended = _sums(kind.ended for kind in kinds)
                old = factors.get(value, [1.0] * _GROUPS)
                due = list(map(truediv, _sums(expected[kind] for kind in kinds), old))
                ratio = (sum(ended) + self.prior) / (sum(due) + self.prior)
                factors[value] = row = [
                    ratio * (count + self.prior) / (ratio * before + self.prior)
                    for count, before in zip(ended, due, strict=True)
                ]
                steps = list(map(truediv, row, old))
                for kind in kinds:
                    expected[kind] = list(map(mul, expected[kind], steps))
        for kind in stopped:
            kind.factors, kind.indices = self._product(kind.values), None


def _sums(rows: Iterable[Row]) -> Row:
    """Return the sums of the columns."""
    return list(map(sum, zip(*rows, strict=True)))


class Hazard(EvictionPolicy):
    """Evict the prefix with the lowest chance of a hit per second that a block of it is kept.

    A span waits from the end of one use to the next. The class of a wait is what is known when
    it begins: by default the turns of the conversation and the hits so far, the last pause, the
    tokens of the answer, the tool that it calls, and the hits alone. Its hazard, the share of
    the waits that end in a bucket of age, of those that reach it, is that of all waits times
    one factor for the value of each part (proportional hazards). All are counted online.
    Waits go on after an eviction: ghosts remember the keys, so it is learned what would have
    hit. With few observations the factors are near 1 and the hazard near a heavy tail, for
    which the order is that of LRU.

    The score is the Gittins index of the wait: over all times T to keep a span, the highest
    ratio of the chance that it is used by then to the expected seconds until it is, or until
    T: hits per block and second of memory, in which spans of all sizes compare. What a request
    went past, the lower half of a split, waits in a class of its own. Where the last keys of
    prompts seldom return with the rest, as partial blocks, they are evicted before all else.

    With the guard it evicts as LRU until `Guard` shows that this order hits more, and again
    when it does not. Without ends of requests, as in a tier, it is LRU then. A fit, after half
    as many waits more, costs O(classes + waits), and a scan O(leaves) for an eighth of them.

    Options:
        prior: uses by which a factor is drawn to 1.
        guard: whether to evict as LRU while that hits as much.
        by: the parts of a class, of turns, pause, answer, tool, hits and tenant.
        load: path of counts to begin with.
        save: path at which the counts are written after each fit; runs must not share it.

    Source: reuse by class of request with an exponential life, Wang et al., "KVCache in the
    wild", ATC 2025; hits per block-second by age, LHD, Beckmann, Chen and Cidon, NSDI 2018;
    the index, Gittins, "Bandit processes and dynamic allocation indices", 1979; proportional
    hazards, Cox, 1972. Tuned on the conversation trace of Mooncake and 40 agent sessions.
    """

    name: ClassVar[str] = "hazard"

    def __init__(
        self,
        prior: float = 8.0,
        guard: bool = True,  # noqa: FBT001, FBT002
        by: str = "turns+pause+answer+tool+hits",
        load: str | None = None,
        save: str | None = None,
    ) -> None:
        """Store the options, and read the counts to begin with."""
        if not 0 < prior < float("inf"):
            msg = f"hazard: prior={prior} must be a number of uses above 0"
            raise InputError(msg)
        parts = by.split("+")
        if len(parts) < 2 or len({*parts}) < len(parts) or not {*parts} <= {*PARTS}:  # noqa: PLR2004
            msg = f"hazard: by={by} must be two or more of {'+'.join(PARTS)}, once each"
            raise InputError(msg)
        self.prior, self.guard, self.by, self.load, self.save = prior, guard, by, load, save
        self._parts, self._select = len(parts), itemgetter(*map(PARTS.index, parts))
        last, classes = (0, 2), (len(parts), 2 * _GROUPS)
        shapes = {"all": (0, 2 * _BUCKETS), "last": last, "classes": classes}
        self._counts = load and read_counts(Path(load), "hazard", f"by={by}", shapes)

    def attach(self, blocks: int, block_size: int) -> None:
        """Store the size of the pool; create the model, and empty orders."""
        super().attach(blocks, block_size)
        self.model = Model(self.prior, self._parts)
        if self._counts:
            self.model.restore(self._counts)
        self._spans: dict[Span, None] = {}
        self._ghosts: GhostRuns[Wait] = GhostRuns(_GHOSTS * blocks)
        # By request: turns and pause of the evicted blocks that it computes again.
        self._returned: dict[int | str, tuple[int, int]] = {}
        # When a request last ended, and its answer, tool and tenant.
        self._ended_at, self._now = -1, 0
        self._ended: tuple[int, str | None, str | None] = 0, None, None
        self._leaves = ScannedLeaves(self._indices)
        # The leaves that still have the last key of a prompt that nobody has used since; and
        # whether the cache asks how much of a victim may leave, or evicts leaves whole.
        self._lasts: OrderedDict[Span, None] = OrderedDict()
        self._trims = False
        self._is_lru = self.guard
        self._guard = Guard(blocks, self._index) if self.guard else None

    def on_miss(self, request: Request, hit_blocks: int, now: int) -> None:
        """End the waits of the evicted blocks that follow the hit."""
        for wait, start, end in self._ghosts.take(request, hit_blocks):
            if self._guard is not None:
                self._guard.end(wait, request.id, start, end)
            self._returned[request.id] = wait.turns, self.model.count(wait, now)
            if len(self._returned) > _RETURNED:  # a tier hears of no end of a request
                del self._returned[next(iter(self._returned))]

    def on_insert(self, span: Span, now: int) -> None:
        """Continue the conversation of the span above, or of the evicted blocks."""
        parent, request = span.parent, span.last_request
        assert parent is not None
        above: Wait = parent.data or _ROOT
        siblings = parent.children or {}
        turns, pause = self._returned.get(request, (0, above.pause))
        first = above.maker != request
        turns = max(turns, above.turns - (not first)) + 1
        span.data = Wait(turns, pause, request, above, first)
        self._spans[span] = None
        if above is not _ROOT and len(siblings) == 2:  # noqa: PLR2004
            for sibling in siblings.values():
                self._part(sibling)

    def on_access(self, span: Span, now: int) -> None:
        """End the wait of `span`."""
        wait: Wait = span.data
        if wait.kind is not None:
            if self._guard is not None:
                self._guard.end(wait, span.last_request, span.start, max(span.end, wait.end))
            wait.pause, wait.kind = self.model.count(wait, now), None

    def on_split(self, upper: Span, lower: Span) -> None:
        """Let the upper half wait as before, and the lower one as passed by."""
        self._spans[upper] = None
        wait = upper.data = copy(lower.data)
        lower.data.above, wait.end = wait, upper.end
        if self._guard is not None:
            self._guard.split(wait, lower.data, upper.end - upper.start)
        if wait.kind is not None and not lower.ref_count:
            self._part(lower)
            passed = self.model.kind((_OTHER,) * self._parts)
            lower.data.counts, lower.data.kind = True, passed
            if not lower.children:
                self._leaves.add(lower, self._now)

    def on_end(self, request: Request, now: int) -> None:
        """Keep what the waits that begin now depend on; let the guard decide."""
        self._ended_at = now
        self._ended = (request.output_tokens >> 5).bit_length(), request.tool, request.tenant
        self._returned.pop(request.id, None)

    def on_pin(self, span: Span) -> None:
        """Remove `span` from the order; its last key is used, if it has it."""
        self._leaves.discard(span)
        if span in self._lasts:
            del self._lasts[span]
            self.model.whole += 1

    def on_release(self, span: Span, now: int) -> None:
        """Begin a wait."""
        self._now, hits = now, span.hit_count
        wait: Wait = span.data
        wait.since, wait.end = now, span.end
        answer, tool, tenant = self._ended if self._ended_at == now else (0, None, None)
        uses = wait.turns + hits
        uses = uses if uses < 4 else min(uses.bit_length() + 1, 8)  # noqa: PLR2004
        values = uses, wait.pause, answer, tool, min(hits.bit_length(), 3), tenant
        selected, model = self._select(values), self.model
        wait.kind = model.classes.get(selected) or model.kind(selected)
        if self._guard is not None:
            self._guard.add(wait, span.end - span.start, now)
        if not span.children:
            if not hits:
                wait.end -= (span.end - 1) % span.geometry.ratio + 1
                self._lasts[span] = None
            self._leaves.add(span, now)

    def on_leaf(self, span: Span) -> None:
        """Insert a span that has become a leaf."""
        self._leaves.add(span, self._now)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Note that the last key of a prompt has left."""
        if span.end <= span.data.end:
            self._lasts.pop(span, None)

    def on_remove(self, span: Span, reason: str) -> None:
        """Remove `span`, and remember what has left during its wait, without the last key."""
        del self._spans[span]
        self._leaves.discard(span)
        self._lasts.pop(span, None)
        for wait in self._ghosts.add(span, span.data.end, span.data):
            self.model.count(wait, self._now, used=False)

    def evictable_blocks(self, span: Span) -> int:
        """Return the blocks of the last key while that goes by itself, else all."""
        self._trims = True
        wait: Wait = span.data
        if self.model.parts and not self._is_lru and span in self._lasts:
            return span.end - max(span.start, wait.end)
        return span.end - span.start

    def victim(self, now: int) -> Span:
        """Return the candidate with the lowest index, or the least recent span."""
        self._now, model = now, self.model
        if self._guard is not None and self._is_lru != self._guard.is_lru:
            self._is_lru = self._guard.is_lru
            self._leaves.scan(now)
        if model.counted >= model.fit_at:
            waits = [span.data for span in self._spans if not span.ref_count]
            waits += self._ghosts.values()
            model.fit([wait for wait in waits if wait.counts], now)
            self._leaves.scan(now)
            if self.save is not None:
                write_counts(Path(self.save), "hazard", f"by={self.by}", model.tables())
        if model.parts and self._lasts and self._trims and not self._is_lru:
            return next(iter(self._lasts))
        return self._leaves.first(now)

    def _part(self, span: Span) -> None:
        """Count the last key of a prompt, if `span` has it, as not used with the rest."""
        if span in self._lasts:
            del self._lasts[span]
            self.model.parted += 1

    def _indices(self, leaves: list[Span], now: int) -> Row:
        """Return the indices of leaves, or under LRU the order in which they were released."""
        if self._is_lru:
            return [leaf.released_order for leaf in leaves]
        return [self._index(leaf.data, now) for leaf in leaves]

    def _index(self, wait: Wait, now: int) -> float:
        kind = wait.kind
        return (kind.indices or self.model.indices(kind))[bisect_right(ENDS, now - wait.since)]


_ROOT = Wait()
"""What stands above a first span."""
