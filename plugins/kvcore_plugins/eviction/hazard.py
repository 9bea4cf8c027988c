"""Hazard: evict the prefix that is least likely to be asked for again soon, learned online."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from copy import copy
from itertools import accumulate, pairwise
from math import isqrt
from operator import add, itemgetter, mul, truediv
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import attrs

from kvcore import EvictionPolicy, InputError, Request, Span
from kvcore.units import NS_PER_S
from kvcore_plugins.eviction.counts import Label, Tables, read_counts, write_counts
from kvcore_plugins.eviction.ghost import GhostRuns
from kvcore_plugins.eviction.hazard_guard import Guard
from kvcore_plugins.eviction.queues import ScannedLeaves
from kvcore_plugins.eviction.survival import hazards, indices

PARTS = ("turns", "pause", "answer", "tool", "hits", "tenant")
"""The parts of which a class can consist."""

_BUCKETS, _GROUP, _GROUPS = 30, 3, 10
"""Buckets of age; those that share a factor; and groups of these."""

_ENDS = [isqrt(1 << (60 + half)) for half in range(_BUCKETS - 1)]
_WIDTHS = [(end - start) / NS_PER_S for start, end in pairwise([0, *_ENDS, 2 * _ENDS[-1]])]
"""Ages in ns fall in buckets: to 2^30 (1.1 s), sqrt(2) times that, ..., 2^44 (5 h)."""

_TAIL, _TAIL_WAITS = [0.5] + [0.15] * len(_ENDS), 16.0
"""Hazards without observations, and the waits that this counts for: a heavy tail, by which
older waits are less likely to end."""

_STEP, _FADE = 8000, 16_000
"""A fit follows when half as many waits more, or this number, are counted; then all fade."""

_GHOSTS, _RETURNED = 16, 1000
"""Blocks that are remembered for each block of the pool; requests whose evicted turns are."""

_CLASSES, _OTHER = 4000, -2
"""Classes that are told apart; the values of all parts for others, and for what requests go
past."""

Row: TypeAlias = list[float]
"""Numbers by bucket of age, or by group of buckets."""


@attrs.define(eq=False)
class Waits:
    """The waits of a class: of those with the same `values` of all parts.

    Attributes:
        counts: by group, waits that ended with a use; then, those observed no longer.
        indices: by bucket, the Gittins index; None before it is needed.
    """

    values: Label
    counts: Row = attrs.field(factory=lambda: [0.0] * 2 * _GROUPS)
    indices: Row | None = None


@attrs.define(eq=False)
class Wait:
    """The time since a use of a span, which ends with the next one; its ghost shares it.

    Attributes:
        above: the wait of the span above; None at the root.
        turns: the number of requests of the conversation when the span was computed.
        pause: the group of the time between the last two uses; -1 before there are two.
        maker: the id of the request that computed the span.
        counts: whether it is counted: of the spans of a request, the first is.
        since: the time in ns at which the use ended.
        kind: its class; None while the span is in use.
        end: the end in blocks of what waits, without a last key that nobody has used again.
    """

    above: Wait | None = None
    turns: int = 0
    pause: int = -1
    maker: int | str | None = None
    counts: bool = False
    since: int = 0
    kind: Waits | None = None
    end: int = 0


class Model:
    """Hazards of waits by class and age, learned online, and the indices that follow."""

    def __init__(self, prior: float, parts: int) -> None:
        """Create a model without observations, of classes of `parts` parts."""
        self.prior = prior
        self.classes: dict[Label, Waits] = {}
        # Of all classes, by bucket: waits that ended, then others; and the hazards.
        self.counts, self.hazards = [0.0] * 2 * _BUCKETS, _TAIL
        self.factors: list[dict[int | str | None, Row]] = [{} for _ in range(parts)]
        # Last keys of prompts that were used with the rest, and that were not.
        self.last_keys, self.parts = [0.0, 0.0], False
        self.counted, self.fit_at = 0, 0

    def kind(self, values: Label) -> Waits:
        """Return the class with these values; one for all others where there are too many."""
        if len(self.classes) >= _CLASSES and values not in self.classes:
            values = (_OTHER,) * len(values)
        if values not in self.classes:
            self.classes[values] = Waits(values)
        return self.classes[values]

    def count(self, wait: Wait, now: int, *, used: bool = True) -> int:
        """Count a wait that ended with a use, or is observed no longer; return its group."""
        bucket = bisect_right(_ENDS, now - wait.since)
        if wait.counts and wait.kind is not None:
            self.counts[bucket if used else _BUCKETS + bucket] += 1
            group = bucket // _GROUP
            wait.kind.counts[group if used else _GROUPS + group] += 1
            self.counted += 1
        return bucket // 2

    def index(self, wait: Wait, now: int) -> float:
        """Return the Gittins index of a wait; a class computes those of all ages at once."""
        kind: Waits = wait.kind  # type: ignore[assignment]
        if kind.indices is None:
            factors = (factor for factor in self._product(kind.values) for _ in range(_GROUP))
            kind.indices = indices(list(map(mul, self.hazards, factors)), _WIDTHS)
        return kind.indices[bisect_right(_ENDS, now - wait.since)]

    def fit(self, waits: Iterable[Wait], now: int) -> None:
        """Fit hazards and factors to all waits so far, of which `waits` go on."""
        every, rows = self.counts[:], {kind: kind.counts[:] for kind in self.classes.values()}
        running = Counter((w.kind, bisect_right(_ENDS, now - w.since)) for w in waits if w.counts)
        for (kind, bucket), count in running.items():
            if kind in rows:
                every[_BUCKETS + bucket] += count
                rows[kind][_GROUPS + bucket // _GROUP] += count
        self.hazards = hazards(every[:_BUCKETS], every[_BUCKETS:], _TAIL, _TAIL_WAITS)
        self._fit_factors({kind: row for kind, row in rows.items() if any(row)})
        for kind in rows:
            kind.indices = None
        self.parts = self.last_keys[1] > self.last_keys[0] + 4
        self.fit_at = min(self.counted // 2 + 32, _STEP)
        if self.counted > _FADE:
            self.counted //= 2
            self.counts, self.last_keys = _half(self.counts), _half(self.last_keys)
            for kind, row in rows.items():
                kind.counts = _half(kind.counts)
                if sum(row) < 2:
                    del self.classes[kind.values]
        self.fit_at += self.counted

    def tables(self) -> Tables:
        """Return all counts, for a file."""
        classes = {values: kind.counts for values, kind in self.classes.items()}
        return {"all": {(): self.counts}, "last": {(): self.last_keys}, "classes": classes}

    def restore(self, tables: Tables) -> None:
        """Begin with the counts of a file."""
        self.counts, self.last_keys = tables["all"][()], tables["last"][()]
        for values, counts in tables["classes"].items():
            self.kind(values).counts = counts
        for _ in range(3):  # factors begin with those of the fit before
            self.fit([], 0)

    def _product(self, values: Label) -> Row:
        """Return the product of the factors of the values of a class."""
        row: Iterable[float] = [1.0] * _GROUPS
        for factors, value in zip(self.factors, values, strict=True):
            if value in factors:
                row = map(mul, row, factors[value])
        return list(row)

    def _fit_factors(self, rows: dict[Waits, Row]) -> None:
        """Fit factors by value and group: one sweep over the parts, from the latest factors.

        A factor is the ratio of the waits that ended to those that were to be expected by the
        other factors, with a gamma prior of mean 1: over all ages, then by group. As in an
        actuary's table, what ends or stops in a group has gone through half of it.
        """
        expected = {}
        for kind, row in rows.items():
            stops = list(map(add, row[:_GROUPS], row[_GROUPS:]))
            reached = list(accumulate(reversed(stops)))[::-1]
            expected[kind] = [r - stop / 2 for r, stop in zip(reached, stops, strict=True)]
        rates = [e / (r or 1) for e, r in zip(_sums(rows.values()), _sums(expected.values()))]
        for kind, row in expected.items():
            expected[kind] = list(map(mul, map(mul, row, rates), self._product(kind.values)))
        for part, factors in enumerate(self.factors):
            classes = defaultdict[int | str | None, list[Waits]](list)
            for kind in rows:
                classes[kind.values[part]].append(kind)
            for value, kinds in classes.items() if len(classes) > 1 else ():
                old = factors.get(value, [1.0] * _GROUPS)
                due = list(map(truediv, _sums(expected[kind] for kind in kinds), old))
                ended = _sums(kind.counts[:_GROUPS] for kind in kinds)
                ratio = (sum(ended) + self.prior) / (sum(due) + self.prior)
                factors[value] = row = [
                    ratio * (count + self.prior) / (ratio * before + self.prior)
                    for count, before in zip(ended, due, strict=True)
                ]
                steps = list(map(truediv, row, old))
                for kind in kinds:
                    expected[kind] = list(map(mul, expected[kind], steps))


def _sums(rows: Iterable[Row]) -> Row:
    """Return the sums of the columns."""
    return list(map(sum, zip(*rows, strict=True)))


def _half(row: Row) -> Row:
    return [count / 2 for count in row]


class Hazard(EvictionPolicy):
    """Evict the prefix with the lowest chance of a hit per second that a block of it is kept.

    A span waits from the end of one use to the next. The class of a wait is what is known when
    it begins: by default the turns of the conversation and the hits so far, the last pause, the
    tokens of the answer, the tool that it calls, and the hits alone. Its hazard, the share of
    the waits that end in a bucket of age, of those that reach it, is that of all waits times
    one factor for the value of each part (proportional hazards). All are counted online.
    Waits go on after an eviction: ghosts remember the keys, so it is learned what would have
    hit. With few observations the order is that of LRU.

    The score is the Gittins index of the wait: over all times T to keep a span, the highest
    ratio of the chance that it is used by then to the expected seconds until it is, or until
    T: hits per block and second of memory, in which spans of all sizes compare. What a request
    went past, the lower half of a split, waits in a class of its own. Where the last keys of
    prompts seldom return with the rest, as partial blocks, they are evicted before all else.

    A fit, after half as many waits more, costs O(classes + waits), and a scan O(leaves) for an
    eighth of them.

    Options:
        prior: uses by which a factor is drawn to 1.
        guard: whether to evict as LRU until `Guard` shows that this hits less.
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
        classes = len(parts), 2 * _GROUPS
        shapes = {"all": (0, 2 * _BUCKETS), "last": (0, 2), "classes": classes}
        self._counts = load and read_counts(Path(load), "hazard", f"by={by}", shapes)

    def attach(self, blocks: int, block_size: int) -> None:
        """Store the size of the pool; create the model, and empty orders."""
        super().attach(blocks, block_size)
        self.model = Model(self.prior, self._parts)
        if self._counts:
            self.model.restore(self._counts)
        self._spans: dict[Span, None] = {}
        self._leaves = ScannedLeaves(self._score)
        self._ghosts: GhostRuns[Wait] = GhostRuns(_GHOSTS * blocks)
        self._guard = Guard[Wait](blocks, self.model.index) if self.guard else None
        self._is_lru = self.guard
        # By request: turns and pause of the evicted blocks that it computes again.
        self._returned: dict[int | str, tuple[int, int]] = {}
        # When a request last ended, and its answer, tool and tenant.
        self._ended: tuple[int, int, str | None, str | None] = -1, 0, None, None
        self._now = 0
        # Whether the cache asks how much of a victim may leave; else leaves are evicted whole.
        self._trims = False

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
        turns, pause = self._returned.get(request, (0, above.pause))
        first = above.maker != request
        turns = max(turns, above.turns - (not first)) + 1
        span.data = Wait(above, turns, pause, request, first, end=span.end)
        self._spans[span] = None
        siblings = parent.children or {}
        if above is not _ROOT and len(siblings) == 2:  # noqa: PLR2004
            for sibling in siblings.values():
                self._part(sibling)

    def on_access(self, span: Span, now: int) -> None:
        """End the wait of `span`."""
        wait: Wait = span.data
        if wait.kind is not None:
            if self._guard is not None:
                end = max(span.end, wait.end)
                self._guard.end(wait, span.last_request, span.start, end)
            self.model.last_keys[0] += span.end > wait.end
            wait.pause, wait.kind = self.model.count(wait, now), None

    def on_split(self, upper: Span, lower: Span) -> None:
        """Let the upper half wait as before, and the lower one as passed by."""
        self._spans[upper] = None
        rest: Wait = lower.data
        wait = upper.data = rest.above = copy(rest)
        wait.end = upper.end
        if self._guard is not None:
            self._guard.split(wait, rest, upper.end - upper.start)
        if wait.kind is not None and not lower.ref_count:
            self._part(lower)
            rest.counts, rest.kind = True, self.model.kind((_OTHER,) * self._parts)
            if not lower.children:
                self._leaves.add(lower, self._now)

    def on_end(self, request: Request, now: int) -> None:
        """Store what the class of the waits that begin now depends on."""
        answer = (request.output_tokens >> 5).bit_length()
        self._ended = now, answer, request.tool, request.tenant
        self._returned.pop(request.id, None)

    def on_pin(self, span: Span) -> None:
        """Remove `span` from the order."""
        self._leaves.discard(span)

    def on_release(self, span: Span, now: int) -> None:
        """Begin a wait."""
        self._now, hits = now, span.hit_count
        wait: Wait = span.data
        wait.since, wait.end = now, span.end
        ended, answer, tool, tenant = self._ended
        if ended != now:
            answer, tool, tenant = 0, None, None
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
            self._leaves.add(span, now)

    def on_leaf(self, span: Span) -> None:
        """Insert a span that has become a leaf."""
        self._leaves.add(span, self._now)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Move a span whose last key has left."""
        if span.end <= span.data.end < span.end + blocks:
            self._leaves.add(span, self._now)

    def on_remove(self, span: Span, reason: str) -> None:
        """Remove `span`, and remember what has left during its wait, without the last key."""
        del self._spans[span]
        self._leaves.discard(span)
        for wait in self._ghosts.add(span, span.data.end, span.data):
            self.model.count(wait, self._now, used=False)

    def evictable_blocks(self, span: Span) -> int:
        """Return the blocks of the last key while that goes by itself, else all."""
        self._trims = True
        wait: Wait = span.data
        if span.end > wait.end and self.model.parts and not self._is_lru:
            return span.end - max(span.start, wait.end)
        return span.end - span.start

    def victim(self, now: int) -> Span:
        """Return the candidate with the lowest index, or the least recent span."""
        self._now, model = now, self.model
        if model.counted >= model.fit_at:
            waits = (span.data for span in self._spans if not span.ref_count)
            model.fit([*waits, *self._ghosts.values()], now)
            self._leaves.scan(now)
            if self.save is not None:
                write_counts(Path(self.save), "hazard", f"by={self.by}", model.tables())
        if self._guard is not None and self._is_lru != self._guard.is_lru:
            self._is_lru = self._guard.is_lru
            self._leaves.scan(now)
        return self._leaves.first(now)

    def _part(self, span: Span) -> None:
        """Count the last key of a prompt, if `span` has it, as not used with the rest."""
        self.model.last_keys[1] += span.end > span.data.end
        span.data.end = max(span.data.end, span.end)

    def _score(self, leaf: Span, now: int) -> float:
        """Return the index of a leaf, or under LRU the order in which it was released."""
        if self._is_lru:
            return leaf.released_order
        wait: Wait = leaf.data
        if leaf.end > wait.end and self.model.parts and self._trims:
            return -1.0
        return self.model.index(wait, now)


_ROOT = Wait()
"""The wait above a first span."""
