"""Hazard: evict the prefix that is least likely to be asked for again soon, learned online."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import ClassVar
from zlib import crc32

from kvcore import InputError, Request, Span
from kvcore.request import Key
from kvcore_plugins.eviction.hazard_guard import Guard
from kvcore_plugins.eviction.hazard_model import (
    ENDS,
    LeafOrder,
    Model,
    Wait,
    Waits,
    read_counts,
    write_counts,
)

_GHOSTS = 16
"""Blocks that are remembered for each block of the pool."""

_FAN_OUT = 4
"""Children above which a span is a prefix that conversations share."""

_NAMES = 1000
"""Names of tools and tenants that are told apart."""

PARTS = ("turns", "pause", "answer", "tool", "hits", "tenant")
"""The parts of which a class can consist."""


class Hazard(LeafOrder):
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
    went past, the lower half of a split, waits in a class of its own. The last key of a prompt
    is evicted by itself, at the learned chance that it is used with the rest: in traces whose
    last block is partial it never is.

    With the guard it evicts as LRU until `Guard` shows that this order hits more, and again
    when it does not. Without ends of requests, as in a tier, it is LRU then.

    `span.data` is a `Wait`. O(leaves) for a share of the leaves, see `LeafOrder`; a fit, after
    a third more waits, costs O(classes + waits).

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
        prior: float = 1.0,
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
        self._select = itemgetter(*map(PARTS.index, parts))
        self._counts = None if load is None else read_counts(Path(load), by)

    def attach(self, blocks: int, block_size: int) -> None:
        """Store the size of the pool; create the model, and empty orders."""
        super().attach(blocks, block_size)
        self.follow(Model(self.prior))
        if self._counts is not None:
            self.model.restore(self._counts)
        self._spans: dict[Span, None] = {}
        # By the first key: the wait and the blocks that left during it, without a last key.
        self._ghosts: OrderedDict[Key, tuple[Wait, int]] = OrderedDict()
        self._ghost_blocks = 0
        # By request: turns and pause of the evicted blocks that it computes again.
        self._returned: dict[int | str, tuple[int, int]] = {}
        self._missed: tuple[int | str | None, Key] = None, None
        # When a request last ended, and its answer, tool and tenant.
        self._ended_at = -1
        self._ended: tuple[int, str | None, str | None] = 0, None, None
        self._names: set[str | None] = {None}
        self._guard = Guard(blocks, block_size, self.model) if self.guard else None
        # The unpinned spans in the order of LRU, while the guard wants that.
        self._recent: OrderedDict[Span, None] | None = OrderedDict() if self.guard else None

    def on_miss(self, request: Request, hit_blocks: int, now: int) -> None:
        """End the waits of the evicted blocks that follow the hit."""
        keys, ratio = request.keys, max(1, request.key_tokens // self.block_size)
        position, end = hit_blocks // ratio, len(keys)
        key = keys[position] if position < end else None
        self._missed = request.id, key
        while key in self._ghosts:
            wait, blocks = self._ghosts.pop(key)
            self._ghost_blocks -= blocks
            self.model.count(wait, now)
            self._returned[request.id] = wait.turns, now - wait.since
            if len(self._returned) > _NAMES:  # a tier hears of no end of a request
                del self._returned[next(iter(self._returned))]
            position += max(1, blocks // ratio)
            key = keys[position] if position < end else None
            if wait.last_key is not None:
                self.model.count_last(used=wait.last_key == key)
                if wait.last_key == key:
                    position += 1
                    key = keys[position] if position < end else None

    def on_insert(self, span: Span, now: int) -> None:
        """Continue the conversation of the span above, or of the evicted blocks."""
        parent, request = span.parent, span.last_request
        assert parent is not None
        siblings, above = parent.children or {}, parent.data
        turns, pause = self._returned.get(request, (0, -1))
        if above is None or len(siblings) > _FAN_OUT:
            key = span.path_keys[span.start // span.geometry.ratio]
            conversation = crc32(repr(key).encode())
        else:
            conversation = above.conversation
        counts = above is None or above.maker != request
        if above is not None:
            turns = max(turns, above.turns - (not counts))
            pause = above.pause if request not in self._returned else pause
        wait = span.data = Wait(turns + 1, pause, now, request, conversation)
        wait.counts = counts
        self._spans[span] = None

    def on_access(self, span: Span, now: int) -> None:
        """End the wait of `span`."""
        wait = span.data
        if wait.kind is not None:
            self.model.count(wait, now)
            if wait.last:
                self.model.count_last(used=True)
            elif wait.last_key is not None:
                missed = span.last_request, wait.last_key
                self.model.count_last(used=self._missed == missed)
        span.data = wait.next(now - wait.since, now)

    def on_split(self, upper: Span, lower: Span) -> None:
        """Let the upper half wait as before, and the lower one as passed by."""
        wait = upper.data = lower.data
        self._spans[upper] = None
        if wait.kind is None:
            upper.data = wait.next(wait.pause, wait.since)
        elif not lower.ref_count:
            self._pass_by(lower)
            wait.last = False

    def on_end(self, request: Request, now: int) -> None:
        """Keep what the waits that begin now depend on; let the guard decide."""
        answer = (request.output_tokens >> 4).bit_length()
        self._ended_at = now
        self._ended = answer, self._name(request.tool), self._name(request.tenant)
        self._returned.pop(request.id, None)
        if self._guard is not None:
            safe = self._guard.end(request, now)
            if safe != (self._recent is not None):
                self._switch()

    def on_pin(self, span: Span) -> None:
        """Remove `span` from the order."""
        if self._recent is not None:
            del self._recent[span]
        elif not span.children:
            self.leave(span)

    def on_release(self, span: Span, now: int) -> None:
        """Begin a wait."""
        self._now, hits, wait = now, span.hit_count, span.data
        if wait.kind is not None:  # it was pinned without an access
            wait = span.data = wait.next(wait.pause, now)
        wait.since = now
        answer, tool, tenant = self._ended if self._ended_at == now else (0, None, None)
        uses = wait.turns + hits
        uses = uses if uses < 4 else min(uses.bit_length() + 1, 8)  # noqa: PLR2004
        pause = bisect_right(ENDS, wait.pause) // 2 if wait.pause >= 0 else -1
        values = self._select((uses, pause, answer, tool, min(hits.bit_length(), 3), tenant))
        kind = self.model.classes.get(values)
        if kind is None:
            kind = self.model.classes[values] = Waits(self.model.all, values)
        wait.kind = kind
        wait.last = not hits and not span.children
        if self._guard is not None and self._ended_at == now:
            self._guard.path.append((span.end, wait))
        if self._recent is not None:
            self._recent[span] = None
        elif not span.children:
            self.enter(span, wait)

    def on_leaf(self, span: Span) -> None:
        """Insert a span that has become a leaf."""
        if self._recent is None:
            self.enter(span, span.data)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Remember the blocks that left, the last key apart once all of it has."""
        wait, ratio = span.data, span.geometry.ratio
        if wait.last:
            position = (span.end + blocks - 1) // ratio
            blocks = position * ratio - span.end
            if blocks >= 0:
                wait.last, wait.last_key = False, span.path_keys[position]
                if self._recent is None:
                    self.enter(span, wait)
        if blocks > 0:
            self._remember(span, span.end, blocks)

    def on_remove(self, span: Span, reason: str) -> None:
        """Remove `span`, and remember it."""
        del self._spans[span]
        if self._recent is None:
            self.leave(span)
        else:
            del self._recent[span]
        self._remember(span, span.start, span.end - span.start)

    def evictable_blocks(self, span: Span) -> int:
        """Return the blocks of the last key while that goes by itself, else all."""
        if span.data.last and self._recent is None:
            return super().evictable_blocks(span)
        return span.end - span.start

    def victim(self, now: int) -> Span:
        """Return the candidate with the lowest index, or the least recent span."""
        self._now = now
        if self.model.counted >= self.model.fit_at:
            waits = [span.data for span in self._spans if not span.ref_count]
            waits += [wait for wait, _ in self._ghosts.values()]
            self.model.fit([wait for wait in waits if wait.counts], now)
            if self.save is not None:
                write_counts(Path(self.save), self.model, self.by)
        return super().victim(now) if self._recent is None else next(iter(self._recent))

    def _name(self, name: str | None) -> str | None:
        """Return `name`; an empty one if too many are known already."""
        if name not in self._names:
            if len(self._names) > _NAMES:
                return ""
            self._names.add(name)
        return name

    def _pass_by(self, span: Span) -> None:
        """Begin a wait of the class of what a request went past."""
        before = span.data
        before.entry = 0
        if before.last:
            self.model.count_last(used=False)
        wait = span.data = before.next(before.pause, before.since)
        wait.counts, wait.kind = True, self.model.passed_by
        if self._recent is None and not span.children:
            self.enter(span, wait)

    def _switch(self) -> None:
        """Change from LRU to the order by index, or back."""
        unpinned = [span for span in self._spans if not span.ref_count]
        unpinned.sort(key=attrgetter("released_order"))
        if self._recent is None:
            self._recent = OrderedDict.fromkeys(unpinned)
            self.follow(self.model)
        else:
            self._recent = None
            for span in unpinned:
                if not span.children:
                    self.enter(span, span.data)

    def _remember(self, span: Span, start: int, blocks: int) -> None:
        """Remember evicted blocks, as one ghost with those that left the same wait before."""
        ghosts, wait = self._ghosts, span.data
        key = span.path_keys[start // span.geometry.ratio]
        self._ghost_blocks += blocks
        before = None if wait.ghost is None else ghosts.get(wait.ghost)
        if before is not None and before[0] is wait:
            blocks += before[1]
            del ghosts[wait.ghost]
        wait.ghost = key
        if key in ghosts:
            self._ghost_blocks -= ghosts.pop(key)[1]
        ghosts[key] = wait, blocks
        while self._ghost_blocks > _GHOSTS * self.blocks:
            dropped, size = ghosts.popitem(last=False)[1]
            self._ghost_blocks -= size
            self.model.count(dropped, self._now, used=False)
