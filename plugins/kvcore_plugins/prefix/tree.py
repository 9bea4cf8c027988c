"""The prefix tree of spans: looking along it, splitting, joining, taking spans out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Keys
from typing import Any, NoReturn

import attrs

from kvcore import EvictionPolicy, PolicyError, PrefixCache, Span
from kvcore.cache import (
    BlockPool,
    CountingPool,
    Ids,
    Recorder,
    Sequence,
    SpanGeometry,
    root_span,
)
from kvcore.plugins import find_override, policy_error
from kvcore.request import Key


@attrs.define(slots=False, eq=False)
class SpanTree(PrefixCache):
    """The tree's mechanics, without sequences.

    A child is found by the key at the block position where its parent ends, so that a
    span may end inside a key. Keys are chained: a span matches iff its last key does.
    """

    root: Span = attrs.field(init=False, repr=False)
    _last_id: int = attrs.field(init=False, default=0, repr=False)
    _releases: int = attrs.field(init=False, default=0, repr=False)
    _births: int = attrs.field(init=False, default=0, repr=False)
    _now: int = attrs.field(init=False, default=0, repr=False)

    def attach(
        self,
        pool: CountingPool,
        eviction: EvictionPolicy,
        geometry: SpanGeometry,
        trace: Recorder | None,
    ) -> None:
        """Make the root, and look up once which methods the policy overrides."""
        super().attach(pool, eviction, geometry, trace)
        self.root = root_span(geometry)
        self._expiring = eviction.expires_spans
        self._on_insert = find_override(eviction, "on_insert")
        self._on_access = find_override(eviction, "on_access")
        self._on_extend = find_override(eviction, "on_extend")
        self._on_split = find_override(eviction, "on_split")
        self._on_pin = find_override(eviction, "on_pin")
        self._on_release = find_override(eviction, "on_release")
        self._on_leaf = find_override(eviction, "on_leaf")
        self._on_trim = find_override(eviction, "on_trim")
        self._on_remove = find_override(eviction, "on_remove")
        self._evictable_blocks = find_override(eviction, "evictable_blocks")
        listeners = (self._on_insert, self._on_extend)
        self._listens = self._expiring or listeners != (None, None)

    def _end_of_match(self, span: Span, keys: Keys[Key], stop: int) -> int:
        """Return where `keys` leave `span`, at most `stop`, by bisection over its keys.

        The key at `span.start` is known to match.
        """
        ratio = self.geometry.ratio
        own = span.path_keys
        low, high = span.start // ratio, (stop - 1) // ratio
        if keys[high] == own[high]:
            return stop
        while high - low > 1:
            middle = (low + high) // 2
            if keys[middle] == own[middle]:
                low = middle
            else:
                high = middle
        return high * ratio

    def _split(self, lower: Span, at: int) -> Span:
        """Cut `lower` at block position `at`; return the new upper half, pinned once more.

        The lower half stays the object: its id, its place in the policy's order, and the
        sequences that end in it. The one more pin is the caller's. If the policy fails,
        the halves are joined again.
        """
        upper = self.cut(lower, at)
        try:
            self.tell_split(upper, lower)
        except PolicyError:
            self.join(upper)
            raise
        return upper

    def cut(self, lower: Span, at: int) -> Span:
        """Split without telling the policy: `tell_split` has to follow."""
        ratio = self.geometry.ratio
        parent = lower.parent
        assert parent is not None
        self._last_id += 1
        head = lower.ids
        if head is not None:
            cut = at - lower.start
            lower.ids = head[cut:]
            head = head[:cut]
        upper = Span(
            self._last_id, lower.start, at, parent, lower.ref_count + 1,
            {lower.path_keys[at // ratio]: lower}, lower.created, lower.last_access,
            lower.created_order, lower.last_hit_order, lower.last_request,
            lower.released_order, lower.hit_count,
            lower.priority, lower.priority_until, lower.expires, lower.tenant, None,
            self.geometry, lower.path_keys, head, None,
        )  # fmt: skip
        assert parent.children is not None
        parent.children[lower.path_keys[lower.start // ratio]] = upper
        lower.parent = upper
        lower.start = at
        if not lower.ref_count:
            self.unpinned -= upper.blocks
        if self.trace is not None:
            self.trace.line("SPLIT", self._now, span=lower.id, upper=upper.id, at=at)
        return upper

    def tell_split(self, upper: Span, lower: Span) -> None:
        """Tell the policy of a cut."""
        if self._on_split is not None:
            self._call("on_split", self._on_split, upper, lower)

    def split_pinned(self, lower: Span, at: int) -> Span:
        """Cut a span that the caller has pinned already; return the upper half."""
        upper = self._split(lower, at)
        upper.ref_count -= 1
        return upper

    def join(self, upper: Span) -> None:
        """Take a split back. Nothing but the caller's pin tells the halves apart."""
        assert upper.children
        (lower,) = upper.children.values()
        parent = upper.parent
        assert parent is not None
        assert parent.children is not None
        parent.children[lower.path_keys[upper.start // self.geometry.ratio]] = lower
        lower.parent = parent
        lower.start = upper.start
        if upper.ids is not None and lower.ids is not None:
            lower.ids = upper.ids + lower.ids
        if not lower.ref_count:
            self.unpinned += upper.blocks
        upper.parent = None
        if self.trace is not None:
            self.trace.line("JOIN", self._now, span=lower.id, upper=upper.id)

    def join_all(self, uppers: list[Span]) -> None:
        """Take splits back, the latest first."""
        for upper in reversed(uppers):
            self.join(upper)

    def _victim(self, missing: int, now: int) -> tuple[Span, int]:
        """Ask the policy for a victim; return it, and how many of its blocks leave."""
        try:
            span = self.eviction.victim(now)
        except Exception as error:
            raise policy_error(self.eviction, "victim", error) from error
        if (
            span.__class__ is not Span
            or span.geometry is not self.geometry
            or span.ref_count
            or span.children
            or span.parent is None
        ):
            self._refuse(span)
        count = span.end - span.start
        if self._evictable_blocks is not None:
            count = self._leaving(span, count)
        return span, count if count < missing else missing

    def _leaving(self, span: Span, blocks: int) -> int:
        """Ask the policy how many of the `blocks` blocks of a victim leave at once."""
        assert self._evictable_blocks is not None
        try:
            count = self._evictable_blocks(span)
        except Exception as error:
            raise policy_error(self.eviction, "evictable_blocks", error) from error
        if type(count) is not int or not 1 <= count <= blocks:
            cls = type(self.eviction)
            msg = (
                f"eviction plugin {cls.name!r} ({cls.__module__}.{cls.__qualname__}) answered "
                f"evictable_blocks() of {span!r} with {count!r}: give 1 to {blocks}"
            )
            raise PolicyError(msg)
        return count

    def _take_out(self, span: Span, reason: str) -> None:
        """Take a leaf out of the tree and tell the policy."""
        parent = span.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[span.path_keys[span.start // self.geometry.ratio]]
        blocks = span.end - span.start
        self.cached -= blocks
        self.unpinned -= blocks
        try:
            if self._on_remove is not None:
                self._call("on_remove", self._on_remove, span, reason)
        finally:
            span.parent = None
        if self._on_leaf is not None and not parent.children and not parent.ref_count:
            self._call("on_leaf", self._on_leaf, parent)

    def _trim(self, span: Span, blocks: int) -> None:
        """Cut `blocks` blocks from the tail of a leaf and tell the policy."""
        span.end -= blocks
        self.cached -= blocks
        self.unpinned -= blocks
        if span.ids is not None:
            del span.ids[-blocks:]
        if self._on_trim is not None:
            self._call("on_trim", self._on_trim, span, blocks)

    def _is_expired(self, span: Span, now: int) -> bool:
        return not span.ref_count and span.expires is not None and span.expires <= now

    def _drop_expired(self, top: Span, requester: int | str, now: int) -> None:
        """Evict `top`, which has expired, and all below it, leaves first."""
        self.eviction.requester = requester
        order = [top]
        for span in order:
            order.extend((span.children or {}).values())
        for span in reversed(order):
            ids = None if span.ids is None else span.ids[::-1]
            self._record_eviction(span, ids, now, "expired")
            self.expired_blocks += span.blocks
            if self.residency is not None:
                self.residency.evicted(span, span.blocks, now, "expired")
            self.pool.give(ids, span.blocks)
            self._take_out(span, "expired")

    def record_switch(
        self, seq: Sequence, span: Span, first: int, own: Ids | None, now: int
    ) -> None:
        """Free the duplicates `own`, now that `seq` uses `span` from position `first`."""
        pool = self.pool
        if isinstance(pool, BlockPool) and own is not None:
            own = pool.release(own)
        else:
            pool.give(None, span.end - first)
        if self.trace is not None:
            self.record_commit(seq, span, first, span.end - first, "same", now)
            self.trace.line("FREE", now, seq=seq.id, runs=own, reason="duplicate")

    def record_commit(
        self, seq: Sequence, span: Span, first: int, blocks: int, how: str, now: int
    ) -> None:
        """Write that `blocks` blocks of `seq` from `first` on are those of `span` now."""
        if self.trace is not None:
            self.trace.line(
                "COMMIT", now, seq=seq.id, span=span.id, first=first, blocks=blocks, how=how
            )

    def _record_eviction(self, span: Span, ids: Ids | None, now: int, reason: str) -> None:
        if self.trace is not None:
            fields = {
                "span": span.id,
                "runs": ids,
                "by": self.eviction.name,
                "for": self.eviction.requester,
                "age": now - span.last_access,
                "hits": span.hit_count,
                "reason": reason,
                "scope": "cache",
            }
            self.trace.line("EVICT", now, **fields)

    def _call(self, method: str, hook: Callable[..., None], *args: Any) -> None:
        """Call the policy; its exception becomes a PolicyError that names it."""
        try:
            hook(*args)
        except Exception as error:
            raise policy_error(self.eviction, method, error) from error

    def _refuse(self, answer: object) -> NoReturn:
        """Raise the PolicyError that says what is wrong with a victim."""
        if not isinstance(answer, Span):
            why = f"{answer!r}, which is no span"
        elif answer.geometry is not self.geometry:
            why = f"{answer!r} of another cache"
        elif answer.parent is None:
            why = f"{answer!r}, which has left the cache"
        elif answer.ref_count:
            why = f"{answer!r}, which is pinned"
        else:
            why = f"{answer!r}, which has children: only leaves can go"
        cls = type(self.eviction)
        msg = (
            f"eviction plugin {cls.name!r} ({cls.__module__}.{cls.__qualname__}) answered "
            f"victim() with {why}; {self.unpinned} blocks are evictable"
        )
        raise PolicyError(msg)

    def spans(self) -> Iterator[Span]:
        """Yield every span, parents before children."""
        stack = list((self.root.children or {}).values())
        while stack:
            span = stack.pop()
            yield span
            stack.extend((span.children or {}).values())
