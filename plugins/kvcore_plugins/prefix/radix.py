"""The radix prefix cache: a tree of spans, matched by one comparison a span."""

from __future__ import annotations

from collections.abc import Sequence as Keys
from contextlib import suppress
from operator import attrgetter
from typing import Any, ClassVar

import attrs

from kvcore import PolicyError, Span
from kvcore.cache import Ids, Match, Sequence
from kvcore.plugins import policy_error
from kvcore.request import DEFAULT_PRIORITY, Key
from kvcore_plugins.prefix.forks import pin_for_siblings
from kvcore_plugins.prefix.hints import (
    apply_hints,
    cut_at_hints,
    may_grow,
    raise_expiry,
    raise_priority,
)
from kvcore_plugins.prefix.integrity import check_tree
from kvcore_plugins.prefix.tree import SpanTree

HISTORY = ("creator", "hit_count", "last_hit_order", "last_request", "last_access", "expires")
"""What an access changes in a span."""

_history = attrgetter(*HISTORY)


def _histories(span: Span, root: Span) -> list[tuple[Span, Any]]:
    """Return the spans from `span` up to below `root`, with what an access would change."""
    before = []
    while span is not root:
        before.append((span, _history(span)))
        span = span.parent  # type: ignore[assignment]
    return before


@attrs.define(slots=False, eq=False)
class Radix(SpanTree):
    """Share prefixes of any length: a radix tree whose nodes are runs of blocks.

    Block keys are chained, so a run matches iff its last key does, and where it does not
    the divergence is found by bisection: matching costs O(spans on the path + log keys).
    Spans split where requests part. A new run becomes a child span, except that the
    sequence that made a leaf appends to it while its own is the only pin the leaf ever
    had. So one span has one access history, and one policy record a span decides exactly
    as one a block would.

    Source: the radix tree of SGLang (Zheng et al., 2024, section 3), with runs of chained
    block keys in place of token strings.
    """

    name: ClassVar[str] = "radix"

    def probe(self, keys: Keys[Key], limit: int, now: int) -> Match:
        """Find the longest cached prefix. O(spans on the path + log keys)."""
        span = self.root
        ratio = self.geometry.ratio
        position = reserved = 0
        while position < limit:
            children = span.children
            if not children:
                break
            child = children.get(keys[position // ratio])
            if child is None:
                break
            pinned = child.ref_count
            if self._expiring and self._is_expired(child, now):
                return span, position, reserved, child
            end = child.end
            last = (end - 1) // ratio
            if end > limit or keys[last] != child.path_keys[last]:
                stop = self._end_of_match(child, keys, end if end < limit else limit)
                return child, stop, reserved if pinned else reserved + stop - position, None
            if not pinned:
                reserved += end - position
            position = end
            span = child
        return span, position, reserved, None

    def open(self, seq: Sequence, match: Match, now: int) -> None:
        """Drop what expired, split where the hit ends, pin the path. O(its spans)."""
        self._now = now
        span, hit, _, expired = match
        if expired is not None:
            self._drop_expired(expired, seq.request.id, now)
        seq.span = span
        if hit < span.end:
            seq.span = self._split(span, hit)
            assert seq.span.parent is not None
            span = seq.span.parent
        root = self.root
        pinned = self._on_pin
        try:
            while span is not root:
                if span.ref_count:
                    span.ref_count += 1
                else:
                    span.ref_count = 1
                    self.unpinned -= span.end - span.start
                    if pinned is not None:
                        pinned(span)
                span = span.parent  # type: ignore[assignment]
        except Exception as error:
            self._unpin(seq, match, span.parent)
            raise policy_error(self.eviction, "on_pin", error) from error

    def hit(self, seq: Sequence, now: int, *, again: bool) -> None:
        """Count the access of every span hit. O(their number)."""
        span = seq.span
        root = self.root
        if again:
            while span is not root:
                span.creator = None
                span.last_access = now
                span = span.parent  # type: ignore[assignment]
            return
        cuts = [] if seq.priorities is None else cut_at_hints(self, seq)
        if self.residency is not None:
            self.residency.hit(span, now)
        before = None if self._on_access is None else _histories(span, root)
        opener, serial = seq.request.id, seq.admission
        while span is not root:
            span.creator = None
            span.hit_count += 1
            span.last_hit_order = serial
            span.last_request = opener
            span.last_access = now
            span = span.parent  # type: ignore[assignment]
        if before is not None:
            self._tell_accessed(before, cuts, now)
        if seq.priorities is not None:
            apply_hints(self, seq, now)

    def undo(self, seq: Sequence, match: Match, now: int) -> None:
        """Take `open` back."""
        del now
        self._unpin(seq, match, self.root)

    def commit(self, seq: Sequence, upto: int, now: int) -> None:
        """Publish blocks up to `upto`: switch to what others committed, store the rest."""
        self._now = now
        keys, ratio = seq.keys, self.geometry.ratio
        span = seq.span
        while span.children and span.end < upto:
            child = span.children.get(keys[span.end // ratio])
            if child is None:
                break
            if self._expiring and self._is_expired(child, now):
                self._drop_expired(child, seq.request.id, now)
                break
            self._switch(seq, child, upto, now)
            span = seq.span
        if seq.priorities is None:
            if span.end < upto:
                self._store(seq, upto, DEFAULT_PRIORITY, None, now)
            return
        for end, priority, duration in [*seq.priorities, (upto, DEFAULT_PRIORITY, None)]:
            if seq.span.end < end and seq.span.end < upto:
                until = None if duration is None else now + duration
                self._store(seq, min(end, upto), priority, until, now)

    def close(self, seq: Sequence, now: int) -> None:
        """Unpin the path, leaf to root. O(its spans)."""
        self._now = now
        span = seq.span
        span.creator = None
        try:
            self._release(span, now)
        finally:
            if self._expiring:
                raise_expiry(span, self.root)

    def fork(self, seq: Sequence, child: Sequence) -> None:
        """Pin the path once more. O(its spans)."""
        del child
        span = seq.span
        while span is not self.root:
            span.creator = None
            span.ref_count += 1
            span = span.parent  # type: ignore[assignment]

    def evict(self, blocks: int, requester: int | str, now: int) -> Ids | None:
        """Evict `blocks` blocks. O(victims), ids by slices."""
        self._now = now
        self.eviction.requester = requester
        gone: Ids | None = None
        missing = blocks
        try:
            while missing:
                span, count = self._victim(missing, now)
                ids = span.ids
                if ids is not None:
                    ids = ids[: -count - 1 : -1]
                    if self.trace is not None:
                        self._record_eviction(span, ids, now, "capacity")
                    if gone is None:
                        gone = ids
                    else:
                        gone.extend(ids)
                missing -= count
                self.evicted += count
                if self.residency is not None:
                    self.residency.evicted(span, count, now, "capacity")
                if count == span.end - span.start:
                    self._take_out(span, "capacity")
                else:
                    self._trim(span, count)
        except Exception:
            if missing < blocks:
                self._give_back(gone, blocks - missing)
            raise
        return gone

    def _give_back(self, gone: Ids | None, count: int) -> None:
        """Free victims of a call that failed, as if it had taken its blocks and closed."""
        pool = self.pool
        count += pool.free
        ids = pool.take(pool.free)
        if ids is not None and gone is not None:
            ids.extend(gone)
        pool.give(None if ids is None else ids[::-1], count)

    def check_integrity(self) -> None:
        """Check the tree's invariants. O(spans)."""
        check_tree(self)

    def _switch(self, seq: Sequence, child: Span, upto: int, now: int) -> None:
        """Let `seq` use the blocks of `child` that it computed too; free its own."""
        first = seq.span.end
        stop = min(child.end, upto)
        last = (stop - 1) // self.geometry.ratio
        if seq.keys[last] != child.path_keys[last]:
            stop = self._end_of_match(child, seq.keys, stop)
        whole = stop == child.end
        if not whole:
            child = self._split(child, stop)
        else:
            child.creator = None
            child.ref_count += 1
        seq.span = child
        own = None
        if seq.private is not None:
            own = seq.private[: stop - first][::-1]
            del seq.private[: stop - first]
        self.record_switch(seq, child, first, own, now)
        if whole and child.ref_count == 1:
            self.unpinned -= child.blocks
            if self._on_pin is not None:
                self._call("on_pin", self._on_pin, child)

    def _store(
        self, seq: Sequence, upto: int, priority: int, until: int | None, now: int
    ) -> None:
        """Move private blocks up to `upto` into the tree: into the leaf, or as a child."""
        span = seq.span
        first = span.end
        ids = seq.private
        if ids is not None:
            count = upto - first
            seq.private = ids[count:]
            if len(ids) > count:
                ids = ids[:count]
        self.cached += upto - first
        grown = span.creator is seq and may_grow(span, priority, until)
        if grown:
            span.end = upto
            if span.priority_until != until:
                span.priority_until = until
                raise_priority(span, self.root, now)
            if ids is not None and span.ids is not None:
                span.ids.extend(ids)
        else:
            span = self._child(seq, upto, priority, until, ids, now)
        if self.trace is not None:
            how = "grown" if grown else "new"
            self.record_commit(seq, span, first, upto - first, how, now)
        if self.residency is not None:
            self.residency.stored(span, upto - first)
        if self._listens or seq.family is not None:
            self._tell_stored(seq, span, first, ids, now, grown=grown)

    def _tell_stored(
        self, seq: Sequence, span: Span, first: int, ids: Ids | None, now: int, *, grown: bool
    ) -> None:
        """Tell the policy of blocks from `first` on, and pin them for forked siblings."""
        try:
            if grown:
                if self._on_extend is not None:
                    self._call("on_extend", self._on_extend, span, span.end - first)
            elif self._on_insert is not None:
                self._call("on_insert", self._on_insert, span, now)
        finally:
            if self._expiring:
                raise_expiry(span, self.root)
            if seq.family is not None and ids is not None:
                pin_for_siblings(self, seq, first, ids, now)

    def _child(
        self,
        seq: Sequence,
        upto: int,
        priority: int,
        until: int | None,
        ids: Ids | None,
        now: int,
    ) -> Span:
        """Put a new span below the deepest of `seq`, and make it the deepest."""
        parent, request = seq.span, seq.request
        self._last_id += 1
        self._births += 1
        span = Span(
            self._last_id, parent.end, upto, parent, 1, None, now, now, self._births,
            seq.admission, request.id, 0, 0, priority, until, None, request.tenant, None,
            self.geometry, seq.keys, ids, seq,
        )  # fmt: skip
        key = seq.keys[parent.end // self.geometry.ratio]
        if parent.children is None:
            parent.children = {key: span}
        else:
            parent.children[key] = span
        parent.creator = None
        seq.span = span
        if (parent.priority, parent.priority_until) != (priority, until):
            raise_priority(span, self.root, now)
        return span

    def _release(self, span: Span, now: int) -> None:
        """Take one pin from `span` and all above it."""
        root = self.root
        released = self._on_release
        try:
            while span is not root:
                span.ref_count -= 1
                if not span.ref_count:
                    self.unpinned += span.end - span.start
                    self._releases += 1
                    span.released_order = self._releases
                    if released is not None:
                        released(span, now)
                span = span.parent  # type: ignore[assignment]
        except Exception as error:
            with suppress(PolicyError):
                self._release(span.parent or root, now)
            raise policy_error(self.eviction, "on_release", error) from error

    def _unpin(self, seq: Sequence, match: Match, stop: Span | None) -> None:
        """Take back the pins of a failed `open`, from its deepest span up to `stop`."""
        span = seq.span
        if span is not match[0] and span.children:
            upper, span = span, span.parent  # type: ignore[assignment]
            self.join(upper)
        while span is not stop:
            span.ref_count -= 1
            if not span.ref_count:
                self.unpinned += span.blocks
            span = span.parent  # type: ignore[assignment]

    def _tell_accessed(
        self,
        before: list[tuple[Span, Any]],
        cuts: list[Span],
        now: int,
    ) -> None:
        """Tell the policy of an access; if it fails, take statistics and `cuts` back."""
        assert self._on_access is not None
        try:
            for span, _ in before:
                self._call("on_access", self._on_access, span, now)
        except PolicyError:
            for span, history in before:
                for name, value in zip(HISTORY, history, strict=True):
                    setattr(span, name, value)
            self.join_all(cuts)
            raise
        if self._expiring and before:
            raise_expiry(before[0][0], self.root)
