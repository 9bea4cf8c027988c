"""Hazard: evict the prefix that is least likely to be asked for again soon, learned online."""

from __future__ import annotations

from copy import copy
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import ClassVar

import attrs
from attrs.validators import gt, lt

from kvcore import EvictionPolicy, InputError, Request, Span
from kvcore_plugins.bounds import bounded
from kvcore_plugins.eviction.counts import read_counts, write_counts
from kvcore_plugins.eviction.ghost import GhostRuns
from kvcore_plugins.eviction.hazard_guard import Guard, Wait
from kvcore_plugins.eviction.queues import ScannedLeaves
from kvcore_plugins.eviction.survival import OTHER, ProportionalHazards, WaitClass, age_bucket

PARTS = ("turns", "pause", "answer", "tool", "hits", "tenant")
"""The parts of which a class can consist."""

_GHOSTS, _RETURNED = 16, 1000
"""Blocks that are remembered for each block of the pool; requests whose evicted turns are."""


_ROOT = Wait()
"""The wait above a first span."""


@attrs.define(slots=False, eq=False, repr=False, on_setattr=attrs.setters.NO_OP)
class Hazard(EvictionPolicy):
    """Evict the prefix with the lowest chance of a hit per second that a block of it is kept.

    A span waits from the end of one use to the next. The class of a wait is what is known when
    it begins: by default the turns of the conversation and the hits so far, the last pause, the
    tokens of the answer, the tool that it calls, and the hits alone. Its hazard, the share of
    the waits that end at an age, of those that reach it, is learned online from all waits
    (`ProportionalHazards`). They go on after an eviction: ghosts remember the keys, so it is
    learned what would have hit. With few observations the order is that of LRU.

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
    the index, Gittins, "Bandit processes and dynamic allocation indices", 1979. Tuned on the
    conversation trace of Mooncake and 40 agent sessions.
    """

    name: ClassVar[str] = "hazard"

    prior: float = bounded(8.0, "a number of uses above 0", gt(0), lt(inf))
    guard: bool = True
    by: str = "turns+pause+answer+tool+hits"
    load: Path | None = None
    save: Path | None = None

    def __attrs_post_init__(self) -> None:
        """Check the parts of a class, and read the counts to begin with."""
        by, load, parts = self.by, self.load, self.by.split("+")
        if len(parts) < 2 or len({*parts}) < len(parts) or not {*parts} <= {*PARTS}:  # noqa: PLR2004
            msg = f"hazard: by={by} must be two or more of {'+'.join(PARTS)}, once each"
            raise InputError(msg)
        self._parts, self._select = len(parts), itemgetter(*map(PARTS.index, parts))
        shapes = ProportionalHazards(self.prior, len(parts)).shapes() | {"last": (0, 2)}
        self._counts = load and read_counts(Path(load), "hazard", f"by={by}", shapes)

    def attach(self, blocks: int, block_size: int) -> None:
        """Store the size of the pool; create the model, and empty orders."""
        super().attach(blocks, block_size)
        self.model = ProportionalHazards(self.prior, self._parts)
        # Last keys of prompts that were used with the rest, and that were not.
        self._last_keys = [0.0, 0.0]
        if self._counts:
            self.model.restore(self._counts)
            self._last_keys = self._counts["last"][()]
        self._spans: dict[Span, None] = {}
        self._leaves = ScannedLeaves(self._score)
        self._ghosts: GhostRuns[Wait] = GhostRuns(_GHOSTS * blocks)
        self._guard = Guard(blocks, self._index) if self.guard else None
        self._is_lru = self.guard
        # By request: turn and pause of the evicted blocks that it computes again.
        self._returned: dict[int | str, tuple[int, int]] = {}
        # When a request last ended, and its answer, tool and tenant.
        self._ended: tuple[int, int, str | None, str | None] = -1, 0, None, None
        self._now = 0
        # Whether last keys leave by themselves; and whether the cache asks how much of a victim
        # may leave, or evicts leaves whole.
        self._parts_last = self._trims = False

    def on_miss(self, request: Request, hit_blocks: int, now: int) -> None:
        """End the waits of the evicted blocks that follow the hit."""
        for wait, start, end in self._ghosts.take(request, hit_blocks):
            if self._guard is not None:
                self._guard.end(wait, request.id, start, end)
            self._returned[request.id] = wait.turn, self._count(wait, now)
            if len(self._returned) > _RETURNED:  # a tier hears of no end of a request
                del self._returned[next(iter(self._returned))]

    def on_insert(self, span: Span, now: int) -> None:
        """Continue the conversation of the span above, or of the evicted blocks."""
        parent = span.parent
        assert parent is not None
        above: Wait = parent.data or _ROOT
        turn, pause = self._returned.get(span.last_request, (0, above.pause))
        first = span.created_by != parent.created_by
        turn = max(turn, above.turn - (not first)) + 1
        span.data = Wait(above, turn, pause, first, end=span.end)
        self._spans[span] = None
        siblings = parent.children or {}
        if above is not _ROOT and len(siblings) == 2:  # noqa: PLR2004
            for sibling in siblings.values():
                self._pass_last_key(sibling)

    def on_access(self, span: Span, now: int) -> None:
        """End the wait of `span`."""
        wait: Wait = span.data
        if wait.kind is not None:
            if self._guard is not None:
                end = max(span.end, wait.end)
                self._guard.end(wait, span.last_request, span.start, end)
            self._last_keys[0] += span.end > wait.end
            wait.pause, wait.kind = self._count(wait, now), None

    def on_split(self, upper: Span, lower: Span) -> None:
        """Let the upper half wait as before, and the lower one as passed by."""
        self._spans[upper] = None
        rest: Wait = lower.data
        wait = upper.data = rest.above = copy(rest)
        wait.end = upper.end
        if self._guard is not None:
            self._guard.split(wait, rest, upper.end - upper.start)
        if wait.kind is not None and not lower.ref_count:
            self._pass_last_key(lower)
            rest.counts, rest.kind = True, self.model.kind((OTHER,) * self._parts)
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
        uses = wait.turn + hits
        uses = uses if uses < 4 else min(uses.bit_length() + 1, 8)  # noqa: PLR2004
        few = hits.bit_length() if hits < 4 else 3  # noqa: PLR2004
        values = uses, wait.pause, answer, tool, few, tenant
        wait.kind = self.model.kind(self._select(values))
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
            self._count(wait, self._now, ended=False)

    def evictable_blocks(self, span: Span) -> int:
        """Return the blocks of the last key while that goes by itself, else all."""
        self._trims = True
        wait: Wait = span.data
        if self._parts_last and span.end > wait.end and not self._is_lru:
            return span.end - max(span.start, wait.end)
        return span.end - span.start

    def victim(self, now: int) -> Span:
        """Return the candidate with the lowest index, or the least recent span."""
        self._now = now
        if self.model.counted >= self.model.fit_at:
            self._fit(now)
            self._leaves.scan(now)
        if self._guard is not None and self._is_lru != self._guard.is_lru:
            self._is_lru = self._guard.is_lru
            self._leaves.scan(now)
        return self._leaves.first(now)

    def _fit(self, now: int) -> None:
        """Fit the model to all waits so far, and save the counts."""
        waits: list[Wait] = [span.data for span in self._spans if not span.ref_count]
        waits += self._ghosts.values()
        self.model.fit(
            (wait.kind, age_bucket(now - wait.since))
            for wait in waits
            if wait.counts and wait.kind is not None
        )
        self._parts_last = self._last_keys[1] > self._last_keys[0] + 4
        if self.save is not None:
            tables = self.model.tables() | {"last": {(): self._last_keys}}
            write_counts(Path(self.save), "hazard", f"by={self.by}", tables)

    def _count(self, wait: Wait, now: int, *, ended: bool = True) -> int:
        """Count a wait that ended, or is observed no longer; return its length in octaves."""
        bucket = age_bucket(now - wait.since)
        if wait.counts and wait.kind is not None:
            self.model.count(wait.kind, bucket, ended=ended)
        return bucket // 2

    def _pass_last_key(self, span: Span) -> None:
        """Count the last key of a prompt, if `span` has it, as not used with the rest."""
        wait: Wait = span.data
        self._last_keys[1] += span.end > wait.end
        wait.end = max(wait.end, span.end)

    def _index(self, wait: Wait, now: int) -> float:
        """Return the Gittins index of a wait."""
        kind: WaitClass = wait.kind  # type: ignore[assignment]
        return (kind.indices or self.model.indices(kind))[age_bucket(now - wait.since)]

    def _score(self, leaf: Span, now: int) -> float:
        """Return the index of a leaf, or under LRU the order in which it was released."""
        if self._is_lru:
            return leaf.released_order
        wait: Wait = leaf.data
        if (
            leaf.end > wait.end
            and self._parts_last
            and (self._trims or leaf.start >= wait.end)  # the last key is all that would leave
        ):
            return -1.0
        kind: WaitClass = wait.kind  # type: ignore[assignment]
        return (kind.indices or self.model.indices(kind))[age_bucket(now - wait.since)]
