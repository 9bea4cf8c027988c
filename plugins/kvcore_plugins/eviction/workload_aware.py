"""Workload-aware: evict by the chance of reuse soon, for each type and turn of requests."""

from __future__ import annotations

from collections import OrderedDict
from math import exp, inf
from typing import ClassVar, Literal, TypeAlias

import attrs
from attrs.validators import ge, le

from kvcore import EvictionPolicy, Request, Span
from kvcore.cache import LazyHeap
from kvcore.request import Key
from kvcore_plugins.bounds import bounded, one_of
from kvcore_plugins.eviction.last_end import LastEnd
from kvcore_plugins.eviction.survival import OTHER

_PRIOR = 8.0
"""Waits by which the estimates of a class are drawn to those of all waits."""

_RETURNED = 1000
"""Running requests whose turns are kept."""

_MOST_CLASSES = 1000
"""Classes that are told apart: the names of types are those that clients send."""

ClassKey: TypeAlias = tuple[str | int | None, int]
"""The type and the turn of a request."""


@attrs.define(eq=False)
class _Class:
    """The waits of one class, from one use of a span to the next.

    Attributes:
        leaves: the evictable leaves, least recent first.
        begun, reused, evicted: numbers of waits, and of those that ended so.
        reuse_ns, life_ns: sums of the times until a reuse, and until an eviction.
    """

    leaves: LazyHeap[Span] = attrs.field(factory=LazyHeap)
    begun: float = 0.0
    reused: float = 0.0
    evicted: float = 0.0
    reuse_ns: float = 0.0
    life_ns: float = 0.0


@attrs.define(slots=False, eq=False, repr=False, on_setattr=attrs.setters.NO_OP)
class WorkloadAware(EvictionPolicy):
    """Evict the span that is least likely to be reused within the life span of its class.

    The class of a span is the type of the request that last used it, and its turn: how many
    requests its conversation has had. Of each class are estimated online the share of the
    waits that end with a reuse, the mean time until then, by which reuse times are taken to be
    exponential, and the life span, the mean time from the last use to an eviction. A wait of
    age t ends within a life span L with the chance `share * exp(-t / mean) * (1 - exp(-L /
    mean))`; the lowest goes first, of equals the deepest. Within a class that is the order of
    LRU. Evicted spans are remembered, so that a reuse after an eviction counts: of several that
    a prompt continues with, that of the first, whose turn goes on. Types that come when there
    are 1,000 classes have one for each turn.

    Variant: the published estimates come from samples of the past in the background; here from
    the waits so far, of which older ones fade, and a class with few waits is near all of them.

    `span.data` is (class, turn, ns of the last use). O(classes) for a victim, else
    O(log leaves).

    Options:
        type: the field of a request that is its type, `tenant` or `tool`; `none`: turns alone.
        turns: the turn from which on all are one class.
        window: waits of a class after which its counts are halved.
        history: spans that are remembered, as a share of the blocks of the pool.

    Source: Wang et al., "KVCache cache in the wild: characterizing and optimizing KVCache
    cache at a large cloud provider", USENIX ATC 2025.
    """

    name: ClassVar[str] = "workload-aware"

    type: Literal["tenant", "tool", "none"] = one_of("tenant", "tool", "none")
    turns: int = bounded(8, "1 or more", ge(1))
    window: int = bounded(10_000, "1 or more", ge(1))
    # Nobody has more than 1,000.
    history: float = bounded(1.0, "a share of the pool, 0 to 1,000", ge(0), le(1000))

    def attach(self, blocks: int, block_size: int) -> None:
        """Store the size of the pool; create the classes and an empty history."""
        super().attach(blocks, block_size)
        self._classes: dict[ClassKey, _Class] = {}
        self._all = _Class()
        self._evicted: OrderedDict[Key, tuple[ClassKey, int, int]] = OrderedDict()
        self._returned: dict[int | str, int] = {}
        self._ended = LastEnd()
        self._now = 0

    def on_miss(self, request: Request, hit_blocks: int, now: int) -> None:
        """Count the reuse of what was evicted."""
        size, key_tokens = self.block_size, request.key_tokens
        ratio, stride = max(1, key_tokens // size), max(1, size // key_tokens)
        index = (hit_blocks // ratio + 1) * stride - 1  # a block has the last of its keys
        if index < len(request.keys):
            evicted = self._evicted.pop(request.keys[index], None)
            if evicted is not None:
                kind, turn, since = evicted
                self._count(kind, reused=1.0, reuse_ns=now - since)
                self._returned[request.id] = turn
                if len(self._returned) > _RETURNED:  # a tier hears of no end of a request
                    del self._returned[next(iter(self._returned))]

    def on_insert(self, span: Span, now: int) -> None:
        """Store the turn: one more than that of the span above, or of what was evicted."""
        parent = span.parent
        assert parent is not None
        turn = self._returned.get(span.last_request, 0) + 1
        if parent.data is not None:
            turn = max(turn, parent.data[1] + (span.created_by != parent.created_by))
        span.data = None, turn, now

    def on_access(self, span: Span, now: int) -> None:
        """Count a reuse."""
        kind, turn, since = span.data
        if kind is not None:
            self._count(kind, reused=1.0, reuse_ns=now - since)
        span.data = None, turn, now

    def on_split(self, upper: Span, lower: Span) -> None:
        """Copy the data to the upper half; move the lower one, which begins deeper."""
        upper.data = lower.data
        if not lower.ref_count and not lower.children:
            self._enter(lower)

    def on_end(self, request: Request, now: int) -> None:
        """Keep the request, of whose type the spans are that its end releases next."""
        self._ended.begin(request, now)
        self._returned.pop(request.id, None)

    def on_pin(self, span: Span) -> None:
        """Remove `span` from the order."""
        self._leave(span)

    def on_release(self, span: Span, now: int) -> None:
        """Begin a wait."""
        self._now, turn, type_ = now, span.data[1], None
        request = self._ended.of(span, now)
        if request is not None and self.type != "none":
            type_ = getattr(request, self.type)
        elif self.type == "tenant":
            type_ = span.tenant
        kind: ClassKey = type_, min(turn + span.hit_count, self.turns)
        if len(self._classes) >= _MOST_CLASSES and kind not in self._classes:
            kind = OTHER, kind[1]
        span.data = kind, turn, now
        self._count(kind, begun=1.0)
        if not span.children:
            self._enter(span)

    def on_leaf(self, span: Span) -> None:
        """Insert a span that has become a leaf."""
        self._enter(span)

    def on_remove(self, span: Span, reason: str) -> None:
        """Remove `span`; count its life, and remember it."""
        self._leave(span)
        kind, turn, since = span.data
        self._count(kind, evicted=1.0, life_ns=self._now - since)
        key = span.path_keys[span.start // span.geometry.ratio]
        self._evicted.pop(key, None)
        self._evicted[key] = kind, turn, since
        while len(self._evicted) > int(self.history * self.blocks) // span.geometry.ratio:
            self._evicted.popitem(last=False)

    def victim(self, now: int) -> Span:
        """Return the leaf with the lowest chance of a reuse, of equals the deepest."""
        self._now = now
        lowest: tuple[float, int, int, Span] | None = None
        for kind in self._classes.values():
            if kind.leaves:
                span = kind.leaves.first()
                chance = self._chance(kind, now - span.data[2])
                entry = chance, -span.start, span.released_order, span
                if lowest is None or entry < lowest:
                    lowest = entry
        assert lowest is not None
        return lowest[3]

    def _chance(self, kind: _Class, age: int) -> float:
        """Return the chance that a wait of `kind` ends within its life span after `age` ns."""
        total = self._all
        share = (total.reused + 1) / (total.begun + 2)
        mean = (total.reuse_ns + 1) / (total.reused + 1)
        share = min((kind.reused + _PRIOR * share) / (kind.begun + _PRIOR), 1.0)
        mean = (kind.reuse_ns + _PRIOR * mean) / (kind.reused + _PRIOR)
        life = kind.life_ns / kind.evicted if kind.evicted else inf
        return share * exp(-age / mean) * (1 - exp(-life / mean))

    def _count(self, key: ClassKey, **counts: float) -> None:
        """Add to the counts of a class and of all waits, of which old ones fade."""
        kind = self._classes.get(key)
        if kind is None:
            kind = self._classes[key] = _Class()
        for total in (kind, self._all):
            for name, count in counts.items():
                setattr(total, name, getattr(total, name) + count)
            if total.begun > self.window:
                for name in ("begun", "reused", "evicted", "reuse_ns", "life_ns"):
                    setattr(total, name, getattr(total, name) / 2)

    def _enter(self, span: Span) -> None:
        kind, _, since = span.data
        self._classes[kind].leaves.push(
            (since, span.released_order, -span.start, span.id, span)
        )

    def _leave(self, span: Span) -> None:
        kind = self._classes.get(span.data[0])
        if kind is not None:
            kind.leaves.discard(span)
