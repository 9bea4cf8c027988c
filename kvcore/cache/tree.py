"""The tree of cached spans: their pins, commits, splits and evictions.

A span is a run of cached blocks, and its children continue it. A `PrefixIndex` looks up the
spans of a prompt; all changes of spans are made here, in the same way for every index.

The life of a span:

    commit                  stored as a leaf, pinned by its sequence, which may append to it
                            until another one uses it (`creator`)
    open, fork, pin         pinned once more, with all spans above it
    split                   its first blocks become a span above it, with the same pins
    close                   unpinned, with all spans above it: without pins it can leave
    demote                  without pins, the next to leave, whatever the policy says
    evict                   a leaf without pins loses blocks from its tail, the last at the end
    drop_expired, discard   leaves at once, with all spans below it that are not pinned
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

from kvcore.cache.eviction import EvictionPolicy
from kvcore.cache.hints import (
    PriorityStep,
    apply_hints,
    hint_borders,
    may_append,
    raise_expiry,
    raise_expiry_above,
    raise_priority_above,
)
from kvcore.cache.layout import BlockLayout
from kvcore.cache.pins import ClientPins
from kvcore.cache.pool import BlockPool, CountingPool, Ids
from kvcore.cache.prefix import PrefixIndex, PrefixMatch
from kvcore.cache.recorder import Recorder, Victim
from kvcore.cache.residency import Residency
from kvcore.cache.sequence import Sequence as CacheSequence
from kvcore.cache.span import Span
from kvcore.errors import PolicyError
from kvcore.plugins import FAILURES, Plugin, find_override, policy_error, wrong_answer
from kvcore.request import DEFAULT_PRIORITY, Key, Request


def root_span(geometry: BlockLayout) -> Span:
    """Return the empty span at which every path begins. It is pinned once, for good."""
    root = Span(
        0, 0, 0, None, geometry, (), None, now=0, created_order=0, last_hit_order=0,
        last_request="",
    )  # fmt: skip
    root.children, root.created_by = {}, None
    return root


class Watcher(Protocol):
    """Receives the changes of a tree: implemented by the tiers below it, and by routers.

    Generated blocks without keys (`Span.is_generated`) are left out, since only one request
    can hit them.
    """

    def stored(self, span: Span, blocks: int, now: int) -> None:
        """Called when the last `blocks` blocks of `span` were stored. It is pinned."""

    def hit(self, span: Span, now: int) -> None:
        """Called when another request has hit `span` and all above it. They are pinned."""

    def leaving(self, span: Span, blocks: int, now: int, reason: str) -> None:
        """Called when the last `blocks` blocks of `span` are about to leave (`on_remove`)."""


class Callbacks:
    """The methods that the policy and the index of a tree override; None: not overridden.

    They are looked up once: one that is not overridden costs nothing.
    """

    def __init__(self, index: PrefixIndex, eviction: EvictionPolicy) -> None:
        self.index_insert = find_override(index, "insert")
        self.index_split = find_override(index, "split")
        self.index_remove = find_override(index, "remove")
        self.on_insert = find_override(eviction, "on_insert")
        self.on_access = find_override(eviction, "on_access")
        self.on_end = find_override(eviction, "on_end")
        self.on_extend = find_override(eviction, "on_extend")
        self.on_split = find_override(eviction, "on_split")
        self.on_pin = find_override(eviction, "on_pin")
        self.on_miss = find_override(eviction, "on_miss")
        self.on_release = find_override(eviction, "on_release")
        self.on_leaf = find_override(eviction, "on_leaf")
        self.on_trim = find_override(eviction, "on_trim")
        self.on_remove = find_override(eviction, "on_remove")
        self.evictable_blocks = find_override(eviction, "evictable_blocks")


class SpanTree:
    """Keeps the cached spans and their pins, and evicts.

    `KVCache` adds the pool and the sequences. It checks that enough blocks are free or
    evictable before it calls `open` or `evict`, which do not check it. All positions and
    sizes are in blocks, times in nanoseconds. Keys are chained: a span matches iff its last
    key does. A child is found by the key at the position where its parent ends, since a span
    may end inside a key.

    A plugin that raises, or returns a value outside its contract, ends the use of the cache:
    `failure` is set, and no change is undone.

    Attributes:
        root: the empty span at which every prompt begins. It is pinned, and never evicted.
        cached_blocks, unpinned_blocks: blocks in spans, and those of spans without any pin.
        evicted_blocks, expired_blocks: blocks evicted as victims, and dropped as expired; those
            that leave for another reason, such as a move to another place, are in neither.
        pins: the pins of clients; None before the first one.
        failure: the first error of a plugin; None if there was none. `KVCache` refuses all
            further calls then.
        fixed_order: whether the class of the policy itself promises, by `fixed_order`, that the
            order of its victims follows from the callbacks so far alone: then `evict` may run
            ahead of the clock, with `times`. It is not inherited.
        residency: statistics of hits and evictions; None if they are not kept.
        watcher: receives changes; None if there is none.
        upper: for a tree of a tier, the tree of its cache, which fails with it; None for that
            of a cache.
        pool, index, eviction, geometry, trace: the arguments.
    """

    __slots__ = (
        "_announces", "_block_spans", "_callbacks", "_created", "_demoted", "_evicts_leaves",
        "_expires", "_last_id", "_match", "_now", "_released", "_shares", "cached_blocks",
        "evicted_blocks", "eviction", "expired_blocks", "failure", "fixed_order", "geometry",
        "index", "pins", "pool", "residency", "root", "trace", "unpinned_blocks", "upper",
        "watcher",
    )  # fmt: skip

    def __init__(
        self,
        pool: CountingPool,
        index: PrefixIndex,
        eviction: EvictionPolicy,
        geometry: BlockLayout,
        trace: Recorder | None,
    ) -> None:
        """Store the parts, and look up once which methods the plugins override."""
        self.pool = pool
        self.index = index
        self.eviction = eviction
        self.geometry = geometry
        self.trace = trace
        self.residency: Residency | None = None
        self.watcher: Watcher | None = None
        self.upper: SpanTree | None = None
        self.failure: PolicyError | None = None
        self.cached_blocks = self.unpinned_blocks = 0
        self.evicted_blocks = self.expired_blocks = 0
        self.pins: ClientPins | None = None
        # Each with its `released_order` at that time: a later release ends the demotion.
        self._demoted: dict[Span, int] = {}
        self.root = root_span(geometry)
        self._last_id = self._created = self._released = self._now = 0
        self._match = index.match
        self._callbacks = calls = Callbacks(index, eviction)
        self._evicts_leaves = index.evicts_leaves
        self._block_spans = index.block_spans
        self._shares = index.shares
        self._expires = eviction.expires_spans
        self.fixed_order = bool(vars(type(eviction)).get("fixed_order"))
        listeners = (calls.index_insert, calls.on_insert, calls.on_extend)
        self._announces = self._expires or any(listeners)

    # Lookup.

    def match(
        self, keys: Sequence[Key], limit: int, now: int, after: Span | None = None
    ) -> PrefixMatch:
        """Return the longest cached prefix of `keys`, at most `limit` blocks. Changes nothing.

        The search starts below the span `after`, which is known to match; None: at the root.
        """
        return PrefixMatch(*self.find(keys, limit, now, after))

    def find(
        self, keys: Sequence[Key], limit: int, now: int, after: Span | None = None
    ) -> tuple[Span, int, int, Span | None]:
        """Return the fields of `match` as a plain tuple, which costs half as much."""
        try:
            span, blocks = self._match(keys, limit, after or self.root)
        except BaseException as error:
            raise self.fail(self.index, "match", error) from error
        if not blocks:
            return self.root, 0, 0, None
        # Unpinned spans are the lower end of every path, so the walk ends at the first pin
        # (the root has one). Where several have expired, the match ends above the highest.
        node, end, unpinned, expired = span, blocks, 0, None
        while not node.ref_count:
            unpinned += end - node.start
            end = node.start
            parent: Span = node.parent  # type: ignore[assignment]
            if self._expires and node.expires is not None and node.expires <= now:
                span, blocks, unpinned, expired = parent, end, 0, node
            node = parent
        return span, blocks, unpinned, expired

    def spans(self) -> Iterator[Span]:
        """Yield every cached span, parents before children."""
        stack = list((self.root.children or {}).values())
        while stack:
            span = stack.pop()
            yield span
            stack.extend((span.children or {}).values())

    # Admission and release: pins.

    def open(
        self,
        seq: CacheSequence,
        match: tuple[Span, int, int, Span | None],
        need: int,
        now: int,
        missed: bool,  # noqa: FBT001 - a keyword costs more than the rest of some calls
        resumed: bool,  # noqa: FBT001
    ) -> None:
        """Admit `seq`: pin the spans it hits, and allocate `need` private blocks. O(its spans).

        The expired span of `match` is dropped, and the span in which the hit ends is split.
        `missed`: the hit is shorter than it could be. The admission of a `resumed` request
        counts neither as a hit nor as a miss.
        """
        self._now = now
        span, hit, _, expired = match
        if expired is not None:
            self.drop_expired(expired, seq.request.id, now)
        if hit < span.end:
            # The upper half is pinned by the split.
            seq.span = upper = self.split(span, hit)
            span = upper.parent  # type: ignore[assignment]
        else:
            seq.span = span
        # Pinned before the evictions below, so that none of them is a victim.
        root = self.root
        on_pin = self._callbacks.on_pin
        try:
            while span is not root:
                if span.ref_count:
                    span.ref_count += 1
                else:
                    span.ref_count = 1
                    self.unpinned_blocks -= span.end - span.start
                    if on_pin is not None:
                        on_pin(span)
                span = span.parent  # type: ignore[assignment]
        except BaseException as error:
            raise self.fail(self.eviction, "on_pin", error) from error
        if self._callbacks.on_miss is not None and missed and not resumed:
            self.missed(seq.request, seq.hit_blocks, now)
        seq.private = self.allocate(need, seq, now)
        # The access counts after the evictions that the admission needs.
        if seq.span is not root:
            self._record_hit(seq, now, resumed)

    def missed(self, request: Request, hit: int, now: int) -> None:
        """Call `on_miss` of the policy: `request` hit `hit` blocks, fewer than it could."""
        if self._callbacks.on_miss is not None:
            self._call(self.eviction, "on_miss", self._callbacks.on_miss, request, hit, now)

    def _record_hit(  # noqa: C901 - one access, from top to bottom
        self,
        seq: CacheSequence,
        now: int,
        resumed: bool,  # noqa: FBT001
    ) -> None:
        """Record the access of every span that `seq` hit. O(spans).

        That of a `resumed` request updates the times of the spans alone, and ends their growth.
        """
        span = seq.span
        root = self.root
        if resumed:
            while span is not root:
                span.creator = None
                span.last_access = now
                span = span.parent  # type: ignore[assignment]
            return
        if seq.priorities is not None:
            self._split_at_hints(seq.span, seq.priorities)
        if self.residency is not None:
            self.residency.on_hit(span, now)
        request_id, serial = seq.request.id, seq.admission
        while span is not root:
            span.creator = None
            span.hit_count += 1
            span.last_hit_order = serial
            span.last_request = request_id
            span.last_access = now
            span = span.parent  # type: ignore[assignment]
        # Callbacks see the new statistics of the whole path. A span expires no earlier than
        # those below it; None: never; 0: there is none.
        if self._callbacks.on_access is not None:
            policy, span = self.eviction, seq.span
            child_expires: int | None = 0
            while span is not root:
                before = span.expires
                self._call(policy, "on_access", self._callbacks.on_access, span, now)
                if self._expires:
                    # It compares what the policy has stored in `expires`, so its errors are
                    # those of the policy.
                    child_expires = self._call(
                        policy, "on_access", raise_expiry, span, before, child_expires
                    )
                span = span.parent  # type: ignore[assignment]
        if seq.priorities is not None:
            apply_hints(seq.span, seq.priorities, now)
        if self.watcher is not None:
            self.watcher.hit(seq.span, now)

    def close(self, span: Span, now: int, ended: Request | None = None) -> None:
        """Unpin the path down to `span`, leaf to root. O(its spans).

        `ended` is the request of the path if it has ended; None if it was preempted, or if the
        path is that of a client's pin.
        """
        self._now = now
        if ended is not None and self._callbacks.on_end is not None:
            self._call(self.eviction, "on_end", self._callbacks.on_end, ended, now)
        span.creator = None
        root = self.root
        on_release, expires = self._callbacks.on_release, self._expires
        child_expires: int | None = 0
        try:
            while span is not root:
                if expires:
                    before = span.expires
                span.ref_count -= 1
                if not span.ref_count:
                    self.unpinned_blocks += span.end - span.start
                    self._released += 1
                    span.released_order = self._released
                    if on_release is not None:
                        on_release(span, now)
                if expires:
                    child_expires = raise_expiry(span, before, child_expires)
                span = span.parent  # type: ignore[assignment]
        except BaseException as error:
            raise self.fail(self.eviction, "on_release", error) from error

    def fork(self, seq: CacheSequence) -> None:
        """Pin the path of `seq` once more, without an access or a hit. O(its spans)."""
        span = seq.span
        while span is not self.root:
            span.creator = None
            span.ref_count += 1
            span = span.parent  # type: ignore[assignment]

    def pin(self, seq: CacheSequence, until: int, now: int) -> None:
        """Pin the path of `seq` until `until` (ns), for its client. O(its spans)."""
        self._now = now
        if self.pins is None:
            self.pins = ClientPins(self)
        self.pins.pin(seq, until)

    def demote(self, span: Span) -> None:
        """Make the path down to `span` the next to be evicted, up to where it is shared."""
        children = 0  # of `span`, those that are demoted already
        while not span.ref_count and len(span.children or ()) == children:
            self._demoted.pop(span, None)
            self._demoted[span] = span.released_order
            children, span = 1, span.parent  # type: ignore[assignment]

    # Commit: private blocks become shared ones.

    def commit(self, seq: CacheSequence, upto: int, now: int) -> None:
        """Share the blocks of `seq` before position `upto`.

        Blocks whose keys another sequence has committed meanwhile are freed, and the cached
        blocks take their place; the others are stored.
        """
        if not self._shares:
            return
        self._now = now
        span = seq.span
        if seq.family is not None:
            upto = self._before_forks(seq, upto)
            if upto == span.end:
                return
        if span.children and seq.keys[span.end // self.geometry.ratio] in span.children:
            self._switch_to_cached(seq, upto, now)
            if seq.span.end >= upto:
                return
        if seq.priorities is None:
            self._store(seq, upto, DEFAULT_PRIORITY, None, now)
            return
        for end, priority, duration in [*seq.priorities, (upto, DEFAULT_PRIORITY, None)]:
            if seq.span.end < end and seq.span.end < upto:
                until = None if duration is None else now + duration
                self._store(seq, min(end, upto), priority, until, now)

    def _before_forks(self, seq: CacheSequence, upto: int) -> int:
        """Return `upto`, or the position before it of a block that a fork will write into.

        The fork has rolled back into it, and has not its key: it may generate something else.
        The block is shared no earlier than the fork has copied it.
        """
        first, size, ratio = seq.span.end, self.geometry.block_size, self.geometry.ratio
        for fork in seq.family or ():
            last = fork.blocks - 1
            if first <= last < upto and fork.tokens % size:
                own = (seq.private or ())[last - first : last - first + 1]
                key = slice(last // ratio, last // ratio + 1)  # the fork may have none there
                if (fork.private or ())[-1:] == own and fork.keys[key] != seq.keys[key]:
                    upto = last
        return upto

    def _switch_to_cached(self, seq: CacheSequence, upto: int, now: int) -> None:
        """Replace blocks that `seq` has computed by equal cached ones, where its hints hold."""
        top = seq.span
        span, end = self._call(self.index, "match", self._match, seq.keys, upto, top)
        path: list[Span] = []
        while span is not top:
            path.append(span)
            span = span.parent
        for child in reversed(path):
            # A pinned span does not expire.
            expires = None if child.ref_count else child.expires
            if self._expires and expires is not None and expires <= now:
                self.drop_expired(child, seq.request.id, now)
                break
            self._switch(seq, child, min(child.end, end), now)
        if seq.priorities is not None:
            steps: list[PriorityStep] = [(top.end, DEFAULT_PRIORITY, None)]
            steps += (step for step in seq.priorities if step[0] > top.end)
            self._split_at_hints(seq.span, steps)
            apply_hints(seq.span, steps, now)

    def _switch(self, seq: CacheSequence, child: Span, stop: int, now: int) -> None:
        """Pin `child` up to position `stop` for `seq`, and free its private blocks there."""
        first = seq.span.end
        if stop < child.end:
            child = self.split(child, stop)
        else:
            child.creator = None
            self._pin_once(child)
        seq.span = child
        own = None
        if seq.private is not None:
            own = seq.private[: stop - first][::-1]
            del seq.private[: stop - first]
        self._free_duplicates(seq, child, first, own, now)

    def _pin_once(self, span: Span) -> None:
        """Pin `span` once more; those above it are pinned by the caller."""
        span.ref_count += 1
        if span.ref_count == 1:
            self.unpinned_blocks -= span.blocks
            if self._callbacks.on_pin is not None:
                self._call(self.eviction, "on_pin", self._callbacks.on_pin, span)

    def _free_duplicates(
        self, seq: CacheSequence, span: Span, first: int, own: Ids | None, now: int
    ) -> None:
        """Free the private blocks `own` of `seq`, which `span` replaces from `first` on."""
        blocks = span.end - first
        own = self.pool.release(own, blocks)
        if self.trace is not None:
            self.trace.commit(
                now, seq=seq.id, span=span.id, first=first, blocks=blocks, how="same",
                generated=span.is_generated,
            )  # fmt: skip
            self.trace.free(now, seq=seq.id, runs=own, reason="duplicate")

    def _store(  # noqa: C901, PLR0912 - one store, from top to bottom
        self, seq: CacheSequence, upto: int, priority: int, until: int | None, now: int
    ) -> None:
        """Move private blocks up to `upto` into the tree: into a leaf, or as a child.

        Only the sequence that created a leaf appends to it, and only while no other sequence
        has pinned the leaf (`creator`): all blocks of a span have one access history. With
        `block_spans` every block becomes a child of the block before it. With
        `evicts_leaves` the blocks of each step of a prompt become a leaf of their own, and
        all generated blocks become another.
        """
        span = seq.span
        first = span.end
        count = upto - first
        if self._block_spans and count > 1:
            for end in range(first + 1, upto + 1):
                self._store(seq, end, priority, until, now)
            return
        # The blocks leave the sequence, with their ids.
        ids = seq.private
        if ids is not None:
            seq.private = ids[count:]
            if len(ids) > count:
                ids = ids[:count]
        self.cached_blocks += count
        # They continue the leaf of the sequence, or become a child of it.
        appends = (
            span.creator is seq
            and not self._block_spans
            and may_append(span, priority, until)
            and (
                not self._evicts_leaves
                or span.start >= seq.request.prompt_tokens // self.geometry.block_size
            )
        )
        if appends:
            span.end = upto
            if span.priority_until != until:
                span.priority_until = until
                raise_priority_above(span, now)
            if ids is not None and span.ids is not None:
                span.ids.extend(ids)
        else:
            parent, request, keys = span, seq.request, seq.keys
            self._last_id += 1
            self._created += 1
            span = Span(
                self._last_id, first, upto, parent, self.geometry, keys, ids, now,
                self._created, seq.admission, request.id, request.tenant,
            )  # fmt: skip
            span.priority, span.priority_until, span.creator = priority, until, seq
            key, children = keys[first // self.geometry.ratio], parent.children
            if children is None:
                parent.children = {key: span}
            elif children.setdefault(key, span) is not span:
                why = f"no more than {parent!r}, which {children[key]!r} continues"
                raise self.refuse(self.index, "match()", why)
            parent.creator = None
            seq.span = span
            if parent.priority != priority or parent.priority_until != until:
                raise_priority_above(span, now)
        # All who listen hear of them: trace, statistics, index and policy, tiers, forks.
        if self.trace is not None:
            how: Literal["grown", "new"] = "grown" if appends else "new"
            self.trace.commit(
                now, seq=seq.id, span=span.id, first=first, blocks=count, how=how,
                generated=span.is_generated,
            )  # fmt: skip
        if self.residency is not None:
            self.residency.on_store(span, count)
        if self._announces:
            self._announce(span, first, now, appended=appends)
        if self.watcher is not None and not span.is_generated:
            self.watcher.stored(span, count, now)
        if seq.family is not None and ids is not None:
            self._share_with_forks(seq, first, ids, now)

    def _announce(self, span: Span, first: int, now: int, *, appended: bool) -> None:
        """Call the index and the policy for the new blocks of `span`, from `first` on."""
        policy, method = self.eviction, "on_extend" if appended else "on_insert"
        if self._callbacks.index_insert is not None:
            self._call(self.index, "insert", self._callbacks.index_insert, span, first)
        if appended:
            if self._callbacks.on_extend is not None:
                self._call(policy, method, self._callbacks.on_extend, span, span.end - first)
        elif self._callbacks.on_insert is not None:
            self._call(policy, method, self._callbacks.on_insert, span, now)
        if self._expires:
            self._call(policy, method, raise_expiry_above, span)

    # Forks: sequences that hold the same private blocks when one of them commits these.

    def _share_with_forks(self, seq: CacheSequence, first: int, ids: Ids, now: int) -> None:
        """Pin the blocks that `seq` has just committed for its forks which own them too.

        `ids` are the committed blocks, from position `first` on. In another sequence of
        the family a pin of their span replaces the ownership of these blocks. Blocks before
        `first` that `seq` had exchanged for cached ones are exchanged there too.
        O(sequences · blocks).
        """
        for other in seq.family or ():
            if other.span.end > first:  # as that of `seq` itself
                continue
            own, common = (other.private or ())[first - other.span.end :], 0
            for mine, theirs in zip(own, ids, strict=False):
                if mine != theirs:
                    break
                common += 1
            if common:
                span = seq.span
                while span.start >= first + common:
                    span = span.parent  # type: ignore[assignment]
                if first + common < span.end:
                    span = self.split(span, first + common)
                    span.ref_count -= 1
                self._pin_for_fork(other, span, first, now)

    def _pin_for_fork(self, seq: CacheSequence, deepest: Span, first: int, now: int) -> None:
        """Replace private blocks of `seq` by the spans down to `deepest`, and pin the spans.

        From position `first` on the spans have the same blocks; before it, equal ones.
        """
        path = []
        span = deepest
        while span is not seq.span:
            path.append(span)
            span = span.parent  # type: ignore[assignment]
        for span in reversed(path):
            span.creator = None
            span.ref_count += 1
            begin = seq.span.end
            assert seq.private is not None
            shared_ids = seq.private[: span.end - begin]
            del seq.private[: span.end - begin]
            seq.span = span
            if span.end <= first:
                self._free_duplicates(seq, span, begin, shared_ids[::-1], now)
                continue
            assert isinstance(self.pool, BlockPool)
            for block in shared_ids:
                self.pool.unshare(block)
            if self.trace is not None:
                blocks = len(shared_ids)
                self.trace.commit(
                    now, seq=seq.id, span=span.id, first=begin, blocks=blocks, how="shared"
                )

    # Splitting.

    def split(self, lower: Span, position: int) -> Span:
        """Cut `lower` at block `position`; return the upper half, pinned once more.

        The span before and after::

            before              after

            parent              parent
              |                   |
              |  start            |  start
            +-----+             +-----+  upper: a new span with a copy of the statistics
            |     |             |     |         and the pins of `lower`, and one more pin
            |     |             +-----+
            |     | lower          |  position
            |     |             +-----+  lower: the same object: its id, its `data`, its
            |     |             |     |         place in the policy's order, its children,
            +-----+             +-----+         and the sequences that end in it
                   end                 end

        The additional pin belongs to the caller.
        """
        geometry = self.geometry
        parent: Span = lower.parent  # type: ignore[assignment]
        self._last_id += 1
        head = lower.ids
        if head is not None:
            cut = position - lower.start
            lower.ids = head[cut:]
            head = head[:cut]
        upper = lower.head(self._last_id, position, lower.path_keys[position // geometry.ratio])
        upper.ids = head
        assert parent.children is not None
        parent.children[lower.path_keys[lower.start // geometry.ratio]] = upper
        lower.parent = upper
        lower.start = position
        if self.pins:  # there may be some, and none be left
            self.pins.on_split(upper, lower)
        if not lower.ref_count:
            self.unpinned_blocks -= position - upper.start
        if self.trace is not None:
            self.trace.split(self._now, span=lower.id, upper=upper.id, at=position)
        if self._callbacks.index_split is not None:
            self._call(self.index, "split", self._callbacks.index_split, upper, lower)
        if self._callbacks.on_split is not None:
            self._call(self.eviction, "on_split", self._callbacks.on_split, upper, lower)
        return upper

    def _split_at_hints(self, span: Span, steps: list[PriorityStep]) -> None:
        """Split `span` and those above it where retention hints begin and end."""
        borders = hint_borders(steps)
        while span is not self.root:
            # The upper half is the parent, and is split next.
            inside = [border for border in borders if span.start < border < span.end]
            if inside:
                self.split(span, inside[-1]).ref_count -= 1
            span = span.parent  # type: ignore[assignment]

    # Eviction and expiry.

    def allocate(self, need: int, seq: CacheSequence, now: int) -> Ids | None:
        """Return `need` blocks: free ones, then those of victims. As many must be available."""
        pool = self.pool
        missing = need - pool.free_blocks
        if missing <= 0:
            if type(pool) is CountingPool:  # inlined: the call would cost more than its work
                pool.free_blocks -= need
                return None
            return pool.allocate(need)
        before = self.evicted_blocks
        victims = self.evict(missing, seq.request.id, now)
        surplus = self.evicted_blocks - before - missing
        if missing == need and victims is None and not surplus:
            return None  # the usual case where blocks are allocated one by one
        ids = pool.allocate(pool.free_blocks)
        if ids is not None:
            ids.extend(victims or ())
        if surplus:
            pool.free(None if ids is None else ids[need:], surplus)
            if ids is not None:
                del ids[need:]
        return ids

    def evict(
        self,
        blocks: int,
        requester: int | str,
        now: int,
        times: Sequence[int] | None = None,
        victims: list[Victim] | None = None,
    ) -> Ids | None:
        """Evict `blocks` blocks, victim by victim, each from its tail.

        With `PrefixIndex.evicts_leaves` the last victim leaves whole, so more blocks may be
        evicted. They belong to the caller, and do not become free. O(victims), ids by slices.

        `times` has a time (ns) for each of the blocks, for the statistics of residency; the
        order of victims must not depend on the time then (`fixed_order`).

        `victims` gets the victims in place of the trace, for a GROW.

        Returns:
            The ids of the blocks in the order of eviction; None in a pool that only counts.

        Raises:
            PolicyError: the policy raised, or returned no unpinned leaf.
        """
        self._now = now
        eviction, residency = self.eviction, self.residency
        eviction.requester = requester
        evicted: Ids | None = None
        missing = blocks
        while missing > 0:
            span, count = self._victim(now)
            if count > missing and not self._evicts_leaves:
                count = missing
            # While the span is whole: its ids, the trace, watchers and statistics.
            ids = span.ids
            if ids is not None:
                ids = ids[: -count - 1 : -1]
                if self.trace is not None:
                    self._trace_victim(span, ids, now, victims)
                if evicted is None:
                    evicted = ids
                else:
                    evicted.extend(ids)
            missing -= count
            if self.watcher is not None and not span.is_generated:
                self.watcher.leaving(span, count, now, "capacity")
            self.evicted_blocks += count
            if residency is not None:
                done = blocks - missing
                if times is None or self._evicts_leaves:  # whole leaves leave at one time
                    left_at = now if times is None else times[done - count]
                    residency.on_evict(span, count, left_at, "capacity")
                else:
                    residency.on_evict_by_block(span, times[done - count : done])
            if count == span.end - span.start:
                self._remove(span, "capacity")
            else:
                self._trim(span, count)
        return evicted

    def _next_demoted(self) -> Span | None:
        """Return the leaf that was demoted first and not used since; None without one."""
        while self._demoted:
            span, released = next(iter(self._demoted.items()))
            if not (span.ref_count or span.children) and span.released_order == released:
                return span
            del self._demoted[span]
        return None

    def _victim(self, now: int) -> tuple[Span, int]:
        """Return the next victim, and how many of its blocks may be evicted.

        That is a demoted leaf, or the victim of the policy.
        """
        if self._demoted:
            demoted = self._next_demoted()
            if demoted is not None:
                return demoted, demoted.end - demoted.start
        try:
            span = self.eviction.victim(now)
        except BaseException as error:
            raise self.fail(self.eviction, "victim", error) from error
        if (
            span.__class__ is not Span
            or span.ref_count
            or span.children
            or span.parent is None
            or span.geometry is not self.geometry
        ):
            raise self.refuse(self.eviction, "victim()", self._why_not(span))
        blocks = span.end - span.start
        method = self._callbacks.evictable_blocks
        if method is None or self._evicts_leaves:
            return span, blocks
        count = self._call(self.eviction, "evictable_blocks", method, span)
        if type(count) is not int or not 1 <= count <= blocks:
            why = f"{count!r}: give 1 to {blocks}"
            raise self.refuse(self.eviction, f"evictable_blocks() of {span!r}", why)
        return span, count

    def _why_not(self, answer: object) -> str:
        """Return the reason why the answer of a policy cannot be a victim."""
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
        return f"{why}; {self.unpinned_blocks} blocks are evictable"

    def _remove(self, span: Span, reason: str) -> None:
        """Remove a leaf from the tree and call the policy.

        When `on_remove` is called, the parent has lost the child already, so it may be a
        leaf; `span.parent` can still be read, and is None afterwards.
        """
        parent: Span = span.parent  # type: ignore[assignment]
        start = span.start
        if self._callbacks.index_remove is not None:
            self._call(self.index, "remove", self._callbacks.index_remove, span, start)
        children = parent.children
        assert children is not None
        del children[span.path_keys[start // self.geometry.ratio]]
        blocks = span.end - start
        self.cached_blocks -= blocks
        self.unpinned_blocks -= blocks
        if self._demoted:
            self._demoted.pop(span, None)
        if self._callbacks.on_remove is not None:
            self._call(self.eviction, "on_remove", self._callbacks.on_remove, span, reason)
        span.parent = None
        if self._callbacks.on_leaf is not None and not children and not parent.ref_count:
            self._call(self.eviction, "on_leaf", self._callbacks.on_leaf, parent)

    def _trim(self, span: Span, blocks: int) -> None:
        """Cut `blocks` blocks from the tail of a leaf, and call the policy."""
        calls = self._callbacks
        if calls.index_remove is not None:
            self._call(self.index, "remove", calls.index_remove, span, span.end - blocks)
        span.end -= blocks
        self.cached_blocks -= blocks
        self.unpinned_blocks -= blocks
        if span.ids is not None:
            del span.ids[-blocks:]
        if calls.on_trim is not None:
            self._call(self.eviction, "on_trim", calls.on_trim, span, blocks)

    def drop_expired(self, top: Span, requester: int | str, now: int) -> None:
        """Free the expired span `top` and all spans below it, leaves first."""
        self.eviction.requester = requester
        self.discard(top, now, "expired")

    def discard(self, top: Span, now: int, reason: str) -> None:
        """Free `top` and all spans below it, leaves first, except pinned ones. O(spans)."""
        order = [top]
        for span in order:
            order.extend((span.children or {}).values())
        for span in reversed(order):
            if not (span.ref_count or span.children):
                self._leave(span, now, reason)

    def vacate(self, span: Span, now: int) -> None:
        """Free `span` and the spans above it, up to one that is pinned or has children."""
        while span.parent is not None and not (span.ref_count or span.children):
            parent = span.parent
            self._leave(span, now, "moved")
            span = parent

    def _leave(self, span: Span, now: int, reason: str) -> None:
        """Remove an unpinned leaf, and free its blocks."""
        ids = None if span.ids is None else span.ids[::-1]
        if self.watcher is not None and not span.is_generated:
            self.watcher.leaving(span, span.blocks, now, reason)
        if reason == "expired":
            if self.trace is not None:
                self._trace_eviction(span, ids, now, "expired")
            self.expired_blocks += span.blocks
            if self.residency is not None:
                self.residency.on_evict(span, span.blocks, now, "expired")
        self.pool.free(ids, span.blocks)
        self._remove(span, reason)

    # Failures of plugins, and the trace.

    def fail(self, plugin: Plugin, method: str, error: BaseException) -> PolicyError:
        """Return a PolicyError for the `error` of a plugin; it ends the use of the cache.

        Raises as `end` does.
        """
        return self.end(policy_error(plugin, method, error), error)

    def end(self, failure: PolicyError, error: BaseException) -> PolicyError:
        """Return `failure`, for the `error` of a callback; it ends the use of the cache.

        So does an `error` which is no failure of a plugin, such as KeyboardInterrupt: whatever
        it was, the call has stopped half-way. Hence callers catch BaseException.

        Raises:
            BaseException: `error`, if it is none of `FAILURES`, or is a PolicyError already,
                which names its plugin and method.
        """
        self._failed(error if isinstance(error, PolicyError) else failure)
        if self.failure is error or not isinstance(error, FAILURES):
            raise error
        return failure

    def refuse(self, plugin: Plugin, question: str, why: str) -> PolicyError:
        """Return a PolicyError for a wrong answer; it ends the use of the cache."""
        return self._failed(wrong_answer(plugin, question, why))

    def _failed(self, failure: PolicyError) -> PolicyError:
        """Store `failure` in this tree and in that of the cache above it, and return it."""
        self.failure = failure
        if self.upper is not None:
            self.upper.failure = failure
        return failure

    def _call(self, plugin: Plugin, method: str, hook: Callable[..., Any], *args: Any) -> Any:
        """Return the result of `hook`; its exception becomes a PolicyError of `plugin`."""
        try:
            return hook(*args)
        except BaseException as error:
            raise self.fail(plugin, method, error) from error

    def _trace_victim(
        self, span: Span, ids: Ids, now: int, victims: list[Victim] | None
    ) -> None:
        """Write EVICT, or add to `victims` if there is a list: `ids` of `span` leave."""
        if victims is None:
            self._trace_eviction(span, ids, now, "capacity")
            return
        # A span that has lost other blocks just before stays one entry.
        before = victims.pop()[1] if victims and victims[-1][0] == span.id else 0
        victims.append((span.id, before + len(ids), span.hit_count, span.last_access))

    def _trace_eviction(
        self, span: Span, ids: Ids | None, now: int, reason: Literal["capacity", "expired"]
    ) -> None:
        """Write EVICT: the blocks `ids` of `span` leave."""
        assert self.trace is not None
        assert self.eviction.requester is not None
        self.trace.evict(
            now, span=span.id, runs=ids, by=self.eviction.name,
            requester=self.eviction.requester, age=now - span.last_access,
            hits=span.hit_count, reason=reason,
        )  # fmt: skip
