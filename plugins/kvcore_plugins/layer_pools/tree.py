"""A tree of spans that may lack what some layers need to resume at their ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore import Span
from kvcore.cache import KVCache
from kvcore.cache.tree import SpanTree
from kvcore.request import Key
from kvcore_plugins.layer_pools.side import SidePool, States, Windows


class PooledTree(SpanTree):
    """A `SpanTree` in which a prompt hits down to a span whose windows and states are cached.

    Args:
        cache: the cache, whose parts it has.
        window_blocks: blocks before a position that a window needs to resume there; None: no
            layer has a window.
        windows, states: slots of the pools; None: there is no such pool.

    Attributes:
        windows, states: the pools beside that of full attention, or None.
    """

    __slots__ = ("sides", "states", "window_blocks", "windows")

    def __init__(
        self, cache: KVCache, window_blocks: int, windows: int | None, states: int | None
    ) -> None:
        trace = cache.trace
        super().__init__(cache.pool, cache.prefix, cache.eviction, cache.geometry, trace)
        self.window_blocks = window_blocks
        self.windows = None if windows is None else Windows(windows, self._evict_from)
        self.states = None if states is None else States(states, self._evict_from)
        self.sides = [side for side in (self.windows, self.states) if side is not None]

    def find(
        self, keys: Sequence[Key], limit: int, now: int, after: Span | None = None
    ) -> tuple[Span, int, int, Span | None]:
        """Return the fields of `match`: the deepest span at whose end all layers can resume."""
        return self._resumable(super().find(keys, limit, now, after))

    def full_match(self, keys: Sequence[Key], limit: int, now: int) -> tuple[Span, int]:
        """Return how far full attention matches: the deepest span, and a position."""
        span, end, _, _ = super().find(keys, limit, now)
        return span, end

    def _resumable(
        self, match: tuple[Span, int, int, Span | None]
    ) -> tuple[Span, int, int, Span | None]:
        """Return the deepest match above which windows and states are cached."""
        span, end, unpinned, expired = match
        path: list[Span] = []
        node: Span | None = span
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        # From the root on all tokens count as in the window.
        run, best = self.window_blocks, 0
        for depth, node in enumerate(reversed(path), 1):
            stop = min(node.end, end)
            if self.windows is not None:
                run = run + stop - node.start if node in self.windows else 0
            has_state = self.states is None or (stop == node.end and node in self.states)
            if run >= self.window_blocks and has_state:
                best = depth
        for node in path[: len(path) - best]:
            if not node.ref_count:
                unpinned -= min(node.end, end) - node.start
        if best == len(path):
            return match
        span = path[len(path) - best] if best else self.root
        return span, min(span.end, end), unpinned, expired

    def window_path(self, span: Span, blocks: int) -> list[Span]:
        """Return `span` and those above it that have the last `blocks` blocks up to its end."""
        path, end = [], span.end
        while span.parent is not None and end - span.end < blocks:
            path.append(span)
            span = span.parent
        return path

    def cut(self, lower: Span, at: int, now: int) -> Span:
        """Split `lower` at position `at`; return the upper half, which gets no further pin.

        If no sequence pins it, the upper half is as recent as if it had just been released,
        with the spans above it.
        """
        self._now = now
        upper = self.split(lower, at)
        above: Span = upper.parent  # type: ignore[assignment]
        while above.parent is not None:
            self._pin_once(above)
            above = above.parent
        self.close(upper, now)
        return upper

    def split(self, lower: Span, at: int) -> Span:
        """Cut `lower` at block position `at`, as `SpanTree.split` does."""
        upper = super().split(lower, at)
        for side in self.sides:
            side.split(upper, lower)
        return upper

    def take(self, side: SidePool, slots: int, requester: int | str, now: int) -> None:
        """Allocate private slots of a pool for the request `requester`: `SidePool.take`."""
        self._now, self.eviction.requester = now, requester
        side.take(slots)

    def _evict_from(self, side: SidePool, span: Span) -> None:
        """Evict what a pool has of `span`: of a leaf all, of any other span that alone."""
        trace, now, requester = self.trace, self._now, self.eviction.requester
        assert requester is not None
        if span.ref_count or span.children:
            side.drop(span)
            if trace is not None:
                trace.tombstone(now, span=span.id, pool=side.name, requester=requester)
            return
        if trace is not None:
            trace.evict(
                now, span=span.id, runs=None if span.ids is None else span.ids[::-1],
                by=side.name, requester=requester, age=now - span.last_access,
                hits=span.hit_count, reason="capacity",
            )  # fmt: skip
        self.evicted_blocks += span.blocks
        if self.residency is not None:
            self.residency.on_evict(span, span.blocks, now, "capacity")
        self._leave(span, now, "capacity")

    def _remove(self, span: Span, reason: str) -> None:
        for side in self.sides:
            side.drop(span)
        super()._remove(span, reason)

    @property
    def created(self) -> int:
        """Serial number of the newest span."""
        return self._created

    def path_from(self, position: int, span: Span) -> list[Span]:
        """Return the spans that end after `position` down to `span`, the first one first."""
        path: list[Any] = []
        while span.end > position:
            path.append(span)
            span = span.parent  # type: ignore[assignment]
        return path[::-1]
