"""The host of an eviction policy for blocks that an engine owns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import deepcopy
from itertools import pairwise
from operator import attrgetter
from typing import Any, TypeAlias

from kvcore.cache import BlockLayout, EvictionPolicy, Span
from kvcore.cache.hints import (
    apply_hints,
    priority_steps,
    raise_expiry,
    raise_expiry_above,
    raise_priority_above,
    reset_lapsed_priority,
)
from kvcore.cache.tree import root_span
from kvcore.errors import InputError, PolicyError
from kvcore.plugins import find_override, policy_error, resolve, wrong_answer
from kvcore.plugins.base import FAILURES
from kvcore.request import DEFAULT_PRIORITY, Key, Request

Block: TypeAlias = Hashable
"""The name that an engine gives a block: unique among its cached blocks."""

Id: TypeAlias = int | str

COPIED = 256
"""Most keys, of 8 bytes, that a path copies of the one that it leaves; others it refers to."""

_log = logging.getLogger("kvcore")


class _BlockSpan(Span):
    """The span of one block, with the name of the block in the engine."""

    __slots__ = ("block",)

    block: Block


class _Branch(Sequence[Key]):
    """The keys of a path that leaves another one, which has those before `start`.

    ::

        trunk   k0 k1 .. k7999 k8000 k8001
        branch          start: 8000  j8000 j8001    own

    So many ends of one long prompt take memory for what is new in them, not for all of it. A
    key takes O(1) from `start` on, and O(branches) before: one in `COPIED` keys at most.
    """

    __slots__ = ("own", "start", "trunk")

    def __init__(self, trunk: Sequence[Key], start: int, own: list[Key]) -> None:
        self.trunk, self.start, self.own = trunk, start, own

    def __len__(self) -> int:
        return self.start + len(self.own)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        path: Any = self
        while isinstance(path, _Branch):
            if index >= path.start:
                return path.own[index - path.start]
            path = path.trunk
        return path[index]


class PolicyHost:
    """Runs an `EvictionPolicy` on blocks that an engine owns.

    An engine calls the host for every change of its cached blocks, and for victims. The host
    has a span for each cached block, and calls the policy exactly as a `KVCache` does: one
    with the prefix index `hashed:spans=block` and the same requests has the same victims.

    The calls of an admission, in order: `pin` for the blocks that hit, the deepest first;
    `missed`, unless the whole prompt hits; `victims` for the blocks to allocate; `hit`.
    Computed blocks are `stored`, from the root down. At the end of a request come `ended`, and
    `unpin` for its blocks, the deepest first.

    The policy gets a time that never decreases: an earlier `now` stands for that of the call
    before, since an engine may read its clock at several places.

    Args:
        eviction: the policy, a name with options, or a class.
        blocks, block_size: size of the engine's cache in blocks, and of a block in tokens.
        layout: the layout of blocks and keys; None: a key for each block.
        recompute: seconds to compute n tokens after a context of c; None: Llama-3.1-8B, H100.
        fallback: what happens when the policy raises, or returns a span that is no victim.
            False: that call, and each that changes blocks until `clear`, raises PolicyError.
            True: `lru` replaces the policy, in the order of releases so far; a warning is
            logged once, and no error is raised.

    Attributes:
        eviction: the policy that chooses victims; after a fallback `lru`.
        blocks: size of the cache in blocks.
        released: serial number of the last release, the `released_order` of its span.
        now: the time of the last call, in ns.
        failure: the first error of a policy; None: no policy has failed.
        failures: number of policies that have failed.

    Raises:
        InputError: sizes below 1, or a policy that is in use already.
        PolicyError: the policy raises when it is attached.
    """

    def __init__(
        self,
        eviction: EvictionPolicy | type[EvictionPolicy] | str,
        blocks: int,
        block_size: int,
        *,
        layout: BlockLayout | None = None,
        recompute: Callable[[int, int], float] | None = None,
        fallback: bool = False,
    ) -> None:
        if type(blocks) is not int or blocks < 1:
            msg = f"a host of {blocks!r} blocks: give a whole number above 0"
            raise InputError(msg)
        self.blocks = blocks
        self.released: int
        self.now: int
        self.failure: PolicyError | None = None
        self.failures = 0
        self._geometry = layout or BlockLayout("tokens", block_size, block_size, recompute)
        self._fallback = fallback
        policy = resolve("eviction", eviction, "lru")
        policy.bind()
        self._unused = deepcopy(policy)
        self._begin(policy)

    def __len__(self) -> int:
        """Return the number of cached blocks."""
        return len(self._spans) + len(self._orphans)

    def __contains__(self, block: object) -> bool:
        """Return True if the block is cached."""
        return block in self._spans or block in self._orphans

    @property
    def evictable(self) -> int:
        """Number of blocks that can be evicted. O(1 + blocks below lost ones)."""
        return self._unpinned + sum(not pins for _, pins in self._orphans.values())

    def span(self, block: Block) -> Span:
        """Return the span of a block. Raises KeyError if the policy does not know it."""
        return self._spans[block]

    def are_latest(self, path: Sequence[Block]) -> bool:
        """Return True if no blocks but those of a path were released since its last one."""
        latest = range(self.released, self.released - len(path), -1)
        spans = map(self._spans.get, path)
        return all(
            span is not None and not span.ref_count and span.released_order == order
            for span, order in zip(spans, latest, strict=True)
        )

    # Calls for what the engine does to its blocks.

    def admitted(self, request: Id) -> None:
        """Count an admission of `request`, to which its next hits and stored blocks belong.

        Call it before `pin`. Otherwise the first hit or stored block counts as admission.
        """
        self._admissions += 1
        self._orders[request] = self._admissions

    def stored(
        self,
        block: Block,
        parent: Block | None,
        now: int,
        *,
        key: Key | None = None,
        request: Id | None = None,
        priority: int = DEFAULT_PRIORITY,
        priority_until: int | None = None,
        tenant: str | None = None,
    ) -> None:
        """Insert a block that can be hit from now on, pinned once. O(1) amortised.

        Args:
            block: the new block.
            parent: the block before it; None, or a block that is not cached: the new block
                begins a prompt.
            now: time in ns.
            key: chained key of its content, which other blocks may have too; None: `block`.
            request: id of the request that computed it; None: a request of its own.
            priority: retention priority.
            priority_until: time (ns) at which the priority ends; None: never.
            tenant: tenant of the request.

        Raises:
            InputError: the block is cached already.
        """
        self.stored_run(
            (block,), parent, now, keys=None if key is None else (key,), request=request,
            priority=priority, priority_until=priority_until, tenant=tenant,
        )  # fmt: skip

    def stored_run(  # noqa: C901, PLR0912 - one store, from top to bottom
        self,
        blocks: Sequence[Block],
        parent: Block | None,
        now: int,
        *,
        keys: Sequence[Key] | None = None,
        path: Sequence[Key] | None = None,
        start: int = 0,
        request: Id | None = None,
        priority: int = DEFAULT_PRIORITY,
        priority_until: int | None = None,
        tenant: str | None = None,
    ) -> None:
        """Insert consecutive blocks, each after the one before it, as `stored` does.

        Costs half of a call of `stored` for each. In place of `keys`, `path` has those of a
        whole text, in which the first of the blocks has the position `start`; the list is kept.
        It is needed where a key of the layout has several blocks.
        """
        if self._dead is not None:
            raise self._dead
        self.now = now = now if now > self.now else self.now
        spans, above = self._spans, self._root
        if path is not None:
            ratio = self._geometry.ratio
            keys = [path[index // ratio] for index in range(start, start + len(blocks))]
        elif self._geometry.ratio > 1:
            msg = (
                f"a key has {self._geometry.ratio} blocks: give the keys of the text as `path`"
            )
            raise InputError(msg)
        elif keys is None:
            keys = blocks
        if len(keys) != len(blocks):
            msg = f"{len(blocks)} blocks with {len(keys)} keys: give a key for each block"
            raise InputError(msg)
        if not (spans.keys().isdisjoint(blocks) and self._orphans.keys().isdisjoint(blocks)):
            block = next(block for block in blocks if block in self)
            msg = f"block {block!r} is stored already: let it leave by `victims` or `dropped`"
            raise InputError(msg)
        if parent is not None:
            above = spans.get(parent, above)
        if path is None:
            path, start = extended_path(above, keys), above.end
        name = "" if request is None else request
        order = self._order(request)
        geometry, serial = self._geometry, self._last_id
        self._last_id += len(blocks)
        index = start
        for block, key in zip(blocks, keys, strict=True):
            serial += 1
            span = _BlockSpan(
                serial, index, index + 1, above, geometry, path, None, now, serial, order, name,
                tenant,
            )  # fmt: skip
            span.priority, span.priority_until, span.block = priority, priority_until, block
            index += 1
            spans[block] = span
            if above.children is None:
                above.children = {key: span}
            elif above.children.setdefault(key, span) is not span:
                above.children[key, serial] = span  # a duplicate
            if above.ref_count:
                above.ref_count += 1
            else:
                self._pin(above)
            if above.priority != priority or above.priority_until != priority_until:
                raise_priority_above(span, now)
            if self._on_insert is not None:
                self._call("on_insert", self._on_insert, span, now)
            if self._expires:
                self._call("on_insert", raise_expiry_above, span)
            above = span

    def pin(self, block: Block) -> None:
        """Pin a block that is in use, and so all blocks before it. O(blocks newly pinned)."""
        if self._dead is not None:
            raise self._dead
        span = self._spans.get(block)
        if span is None:
            self._pin_orphan(block, 1)
        elif span.ref_count:
            span.ref_count += 1
        else:
            self._pin(span)

    def unpin(self, block: Block, now: int) -> None:
        """Remove a pin of a block. Unpin a path from its deepest block up to the root."""
        self.unpin_run((block,), now)

    def unpin_run(self, blocks: Iterable[Block], now: int) -> None:
        """Remove a pin of each of `blocks`, which are in order, the deepest first."""
        if self._dead is not None:
            raise self._dead
        self.now = now = now if now > self.now else self.now
        spans, expires = self._spans, self._expires
        for block in blocks:
            span = spans.get(block)
            if span is None:
                self._pin_orphan(block, -1)
            elif span.ref_count != 1 or expires:
                if not span.ref_count:
                    raise _not_pinned(block)
                self._unpin(span, now)
            else:
                # `_unpin`, inlined for the case of nearly every block.
                span.ref_count = 0
                self._unpinned += 1
                self.released = span.released_order = self.released + 1
                if self._on_release is not None:
                    try:
                        self._on_release(span, now)
                    except FAILURES as error:
                        self._fail(policy_error(self.eviction, "on_release", error), error)
                above: Any = span.parent
                if above.ref_count > 1:
                    above.ref_count -= 1
                else:
                    self._unpin(above, now)

    def hit(
        self,
        blocks: Sequence[Block],
        now: int,
        request: Id | None = None,
        *,
        again: bool = False,
    ) -> None:
        """Count that another request reuses `blocks`, which it has pinned. O(blocks).

        Args:
            blocks: the blocks, from the first of the prompt on.
            now: time in ns.
            request: id of the request; None: a request of its own.
            again: whether the request was preempted, and these are its own blocks: they are
                used, not reused.
        """
        if self._dead is not None:
            raise self._dead
        self.now = now = now if now > self.now else self.now
        if self._orphans:
            self._adopt(blocks, now, request)
        path = _closed(self._pinned(blocks))
        if again:
            for span in path:
                span.last_access = now
            return
        order, name = self._order(request), "" if request is None else request
        for span in path:
            span.hit_count += 1
            span.last_hit_order = order
            span.last_request = name
            span.last_access = now
        if self._on_access is None:
            return
        below: int | None = 0
        for span in reversed(path):
            before = span.expires
            if self._on_access is not None:
                self._call("on_access", self._on_access, span, now)
            if self._expires:
                below = self._call("on_access", raise_expiry, span, before, below)

    def hinted(self, block: Block, request: Request, now: int) -> None:
        """Apply the retention priorities of `request` to the path that ends at `block`."""
        if request.retention:
            apply_hints(
                self._cached(block), priority_steps(request, self._geometry.block_size), now
            )

    def victims(
        self, count: int, protected: Iterable[Block] = (), *, now: int, requester: Id = ""
    ) -> list[Block] | None:
        """Evict exactly `count` blocks, or none.

        Args:
            count: number of blocks.
            protected: blocks that must stay. They are pinned during the call, and so released
                at its end, the deepest first.
            now: time in ns.
            requester: id of the request that needs the room.

        Returns:
            The evicted blocks, in the order of eviction. None: fewer than `count` blocks can
            be evicted, and nothing has changed.

        Raises:
            PolicyError: the policy failed, and there is no fallback.
        """
        if self._dead is not None:
            raise self._dead
        self.now = now = now if now > self.now else self.now
        kept = set(protected)
        evicted: list[Block] = [
            block
            for block, (_, pins) in self._orphans.items()
            if not pins and block not in kept
        ][:count]
        rest = count - len(evicted)
        known = [self._spans[block] for block in kept if block in self._spans]
        known.sort(key=attrgetter("start"), reverse=True)
        if rest > self._unpinned - _unpinned_above(known):
            return None
        for span in known:
            self._pin(span)
        for block in evicted:
            del self._orphans[block]
        self.eviction.requester = requester
        while len(evicted) < count:
            self._evict(evicted, count, now)
        for span in known:
            self._unpin(span, now)
        return evicted

    def victim(
        self, usable: Callable[[Block], bool], *, now: int, requester: Id = ""
    ) -> Block | None:
        """Evict one block for which `usable` returns True; return None if there is none.

        For engines that do not pin blocks: a victim that is not usable stays, and is pinned
        during the call. O(unusable victims), besides the cost of the policy.
        """
        if self._dead is not None:
            raise self._dead
        self.now = now = now if now > self.now else self.now
        for block, (_, pins) in self._orphans.items():
            if not pins and usable(block):
                del self._orphans[block]
                return block
        self.eviction.requester = requester
        unusable: list[_BlockSpan] = []
        freed: Block | None = None
        try:
            while freed is None and self._unpinned:
                span = self._victim(now)
                if usable(span.block):
                    freed = self._remove(span, "capacity")
                else:
                    self._pin(span)
                    unusable.append(span)
        finally:  # `usable` may raise
            for span in () if self._dead else unusable:
                self._unpin(span, now)
        return freed

    def dropped(self, block: Block, now: int, reason: str = "gone") -> None:
        """Remove a block that the engine has lost. O(blocks cached below it).

        The blocks below it leave the policy too: they cannot be hit, and are the first victims.
        If the lost block is stored again, and a request hits blocks below it, these are
        inserted again. `on_remove` of the policy gets the `reason`.
        """
        if self._dead is not None:
            raise self._dead
        self.now = now = now if now > self.now else self.now
        if self._orphans.pop(block, None) is not None:
            return
        for span in self._branch(block):
            # The blocks below it have left, so all pins are its own.
            pins, name = span.ref_count, span.block
            if pins:
                span.ref_count = 1
                self._unpin(span, now)
            self._remove(span, reason)
            if name != block:
                self._orphans[name] = span, pins

    def branch(self, block: Block) -> list[Block]:
        """Return a block and all blocks cached below it, leaves first. O(those)."""
        return [span.block for span in self._branch(block)]

    def expired(self, block: Block, now: int) -> bool:
        """Return True if a block has expired: the engine must not hit it, but drop it."""
        span = self._spans.get(block)
        if span is None or span.ref_count or not self._expires:
            return False
        expires = span.expires
        return expires is not None and expires <= now

    def check_integrity(self) -> None:
        """Check what no call checks, for tests of engines. O(blocks).

        An engine has stored no more blocks than it has, and what it has pinned and released
        has the order on which policies rely.

        Raises:
            AssertionError: it is not so; the message has the blocks or numbers.
            PolicyError: the policy has failed, and there is no fallback.
        """
        if self._dead is not None:
            raise self._dead
        _check(len(self) <= self.blocks, f"{len(self)} blocks are stored, of {self.blocks}")
        unpinned = 0
        for block, span in self._spans.items():
            below = (span.children or {}).values()
            pinned = sum(child.ref_count > 0 for child in below)
            later = [each for each in below if each.released_order > span.released_order]
            _check(pinned <= span.ref_count, f"{pinned} blocks below {block!r} are pinned")
            _check(not later or span.ref_count > 0, f"{block!r} was released before {later}")
            unpinned += not span.ref_count
        _check(unpinned == self._unpinned, f"{unpinned}, not {self._unpinned} are evictable")

    def clear(self) -> None:
        """Remove all blocks, pinned or not, and start again with a new policy."""
        self._begin(deepcopy(self._unused))

    # Calls for what happens to requests.

    def missed(self, request: Request, hit_blocks: int, now: int) -> None:
        """Record that `request` hits `hit_blocks` blocks, fewer than its prompt could."""
        self.now = now = now if now > self.now else self.now
        if self._on_miss is not None:
            self._call("on_miss", self._on_miss, request, hit_blocks, now)

    def queued(self, request: Request, now: int, *, front: bool = False) -> None:
        """Record that `request` enters the waiting queue: it arrived, or was preempted."""
        self.now = now = now if now > self.now else self.now
        if self._on_queued is not None:
            self._call("on_queued", self._on_queued, request, now, front=front)

    def dequeued(self, request: Request, now: int) -> None:
        """Record that `request` leaves the waiting queue."""
        self.now = now = now if now > self.now else self.now
        if self._on_dequeued is not None:
            self._call("on_dequeued", self._on_dequeued, request, now)

    def ended(self, request: Request, now: int) -> None:
        """Record the end of `request`, before its blocks are released."""
        self.now = now = now if now > self.now else self.now
        if self._on_end is not None:
            self._call("on_end", self._on_end, request, now)
        self.forget(request.id)

    def forget(self, request: Id) -> None:
        """Drop the admission of a request that has no blocks any more; another may follow."""
        self._orders.pop(request, None)

    # Inside.

    def _begin(self, policy: EvictionPolicy) -> None:
        """Reset to an empty cache with a new policy."""
        self._dead: PolicyError | None = None  # raised by later calls, without a fallback
        self._root = root_span(self._geometry)
        self._spans: dict[Block, _BlockSpan] = {}
        # Blocks cached below lost ones: their spans, and their numbers of pins.
        self._orphans: dict[Block, tuple[Span, int]] = {}
        self._orders: dict[Id | None, int] = {}
        self._last_id = self.released = self._admissions = self.now = 0
        self._unpinned = 0
        self._attach(policy)

    def _attach(self, policy: EvictionPolicy) -> None:
        """Make `policy` the one that chooses victims."""
        self.eviction = policy
        self._expires = policy.expires_spans
        self._on_insert = find_override(policy, "on_insert")
        self._on_access = find_override(policy, "on_access")
        self._on_pin = find_override(policy, "on_pin")
        self._on_release = find_override(policy, "on_release")
        self._on_leaf = find_override(policy, "on_leaf")
        self._on_remove = find_override(policy, "on_remove")
        self._on_miss = find_override(policy, "on_miss")
        self._on_queued = find_override(policy, "on_queued")
        self._on_dequeued = find_override(policy, "on_dequeued")
        self._on_end = find_override(policy, "on_end")
        self._call("attach", policy.attach, self.blocks, self._geometry.block_size)

    def _order(self, request: Id | None) -> int:
        """Return the serial number of the admission of `request`."""
        if request is None:
            self._admissions += 1
            return self._admissions
        if request not in self._orders:
            self.admitted(request)
        return self._orders[request]

    # A span has the pins of its block, and one more for each pinned child. So the spans above a
    # pinned one are pinned, and paths are pinned and released in the order of `KVCache`.

    def _pin(self, span: Span) -> None:
        """Pin a span, and if it had no pin the spans above it that have none."""
        while True:
            span.ref_count += 1
            if span.ref_count > 1:
                return
            self._unpinned -= 1
            if self._on_pin is not None:
                self._call("on_pin", self._on_pin, span)
            span = span.parent  # type: ignore[assignment]

    def _unpin(self, span: Span, now: int) -> None:
        """Remove a pin of a span; with its last one, also one of its parent."""
        while True:
            span.ref_count -= 1
            if span.ref_count:
                return
            self._unpinned += 1
            self.released += 1
            span.released_order = self.released
            if self._on_release is not None:
                try:
                    self._on_release(span, now)
                except FAILURES as error:
                    self._fail(policy_error(self.eviction, "on_release", error), error)
            if self._expires:
                self._call("on_release", raise_expiry, span, None, 0)
            span = span.parent  # type: ignore[assignment]

    def _pin_orphan(self, block: Block, pins: int) -> None:
        """Add `pins` to those of a block that is cached below a lost one."""
        if block not in self._orphans:
            raise _not_cached(block)
        span, before = self._orphans[block]
        if before + pins < 0:
            raise _not_pinned(block)
        self._orphans[block] = span, before + pins

    def _cached(self, block: Block) -> Span:
        """Return the span of a block that the policy has to know."""
        try:
            return self._spans[block]
        except KeyError:
            raise _not_cached(block) from None

    def _pinned(self, blocks: Sequence[Block]) -> list[Span]:
        """Return the spans of the blocks of a path, which its last block keeps pinned."""
        path = [self._cached(block) for block in blocks]
        if path and not path[-1].ref_count:
            raise _not_pinned(blocks[-1], "`pin` what a request hits before `hit`")
        return path

    def _branch(self, block: Block) -> list[_BlockSpan]:
        order: list[Any] = [self._cached(block)]
        for span in order:
            order.extend((span.children or {}).values())
        return order[::-1]

    def _adopt(self, blocks: Sequence[Block], now: int, request: Id | None) -> None:
        """Insert those of `blocks` again that had left because a block before them was lost."""
        parent: Block | None = None
        for block in blocks:
            if block in self._orphans:
                left, pins = self._orphans.pop(block)
                reset_lapsed_priority(left, now)
                self.stored_run(
                    (block,), parent, now, path=left.path_keys, start=left.start,
                    request=request, priority=left.priority,
                    priority_until=left.priority_until, tenant=left.tenant,
                )  # fmt: skip
                self._spans[block].ref_count = max(pins, 1)
                if not pins:
                    self._unpin(self._spans[block], now)
            parent = block

    def _victim(self, now: int) -> _BlockSpan:
        """Return the unpinned leaf that the policy chooses."""
        span: Any
        try:
            span = self.eviction.victim(now)
        except FAILURES as error:
            self._fail(policy_error(self.eviction, "victim", error), error)
            span = self.eviction.victim(now)
        if (why := self._why_not(span)) is not None:
            self._fail(wrong_answer(self.eviction, "victim()", why))
            span = self.eviction.victim(now)
        return span  # type: ignore[no-any-return]

    def _why_not(self, span: object) -> str | None:
        """Return why `span` is no victim; None if it is an unpinned leaf of this host."""
        if not isinstance(span, Span):
            why = "is no span"
        elif (
            not isinstance(span, _BlockSpan)
            or span.geometry is not self._geometry
            or span.parent is None
        ):
            why = "is not cached here"
        elif span.ref_count:
            why = "is pinned"
        elif span.children:
            why = "has children: only leaves can go"
        else:
            return None
        return f"{span!r}, which {why}; {self._unpinned} blocks are evictable"

    def _evict(  # noqa: C901 - one eviction, from top to bottom
        self, evicted: list[Block], count: int, now: int
    ) -> None:
        """Evict until there are `count` blocks in `evicted`, or until the policy fails.

        `_victim` and `_remove` inlined in one loop, which takes a quarter less time.
        """
        spans, geometry, before = self._spans, self._geometry, len(evicted)
        victim, on_remove, on_leaf = self.eviction.victim, self._on_remove, self._on_leaf
        method = "victim"
        try:
            while len(evicted) < count:
                span: Any = victim(now)
                if (
                    span.__class__ is not _BlockSpan
                    or span.ref_count
                    or span.children
                    or span.geometry is not geometry
                    or (parent := span.parent) is None
                ):
                    break
                block = span.block
                del spans[block]
                evicted.append(block)
                children: Any = parent.children
                if len(children) == 1:
                    children.clear()
                elif children.get(key := span.path_keys[span.start // geometry.ratio]) is span:
                    del children[key]
                else:
                    del children[key, span.id]  # a duplicate
                if on_remove is not None:
                    method = "on_remove"
                    on_remove(span, "capacity")
                    method = "victim"
                span.parent = None
                if on_leaf is not None and not (parent.children or parent.ref_count):
                    method = "on_leaf"
                    on_leaf(parent)
                    method = "victim"
        except FAILURES as error:
            self._unpinned -= len(evicted) - before
            if method == "on_remove":
                span.parent = None
            self._fail(policy_error(self.eviction, method, error), error)
        else:
            self._unpinned -= len(evicted) - before
            if len(evicted) < count:
                self._fail(wrong_answer(self.eviction, "victim()", str(self._why_not(span))))

    def _remove(self, span: _BlockSpan, reason: str) -> Block:
        """Remove an unpinned leaf; return its block.

        `on_remove` is called when the parent no longer has it as a child; `span.parent` is
        still set.
        """
        block = span.block
        del self._spans[block]
        self._unpinned -= 1
        parent: Span = span.parent  # type: ignore[assignment]
        children = parent.children
        assert children is not None
        if len(children) == 1:
            children.clear()
        elif children.get(key := self._key(span)) is span:
            del children[key]
        else:
            del children[key, span.id]  # a duplicate
        if self._on_remove is not None:
            try:
                self._on_remove(span, reason)
            except FAILURES as error:
                self._fail(policy_error(self.eviction, "on_remove", error), error)
        span.parent = None
        if not children and not parent.ref_count and self._on_leaf is not None:
            self._call("on_leaf", self._on_leaf, parent)
        return block

    def _key(self, span: Span) -> Key:
        return span.path_keys[span.start // self._geometry.ratio]

    def _call(self, method: str, hook: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Call a method of the policy, when the state of the host is consistent.

        Errors of `hook`, which may also read what the method has stored, are the method's.
        """
        try:
            return hook(*args, **more)
        except FAILURES as error:
            return self._fail(policy_error(self.eviction, method, error), error)

    def _fail(self, failure: PolicyError, error: BaseException | None = None) -> None:
        """Raise `failure`, or replace the policy by `lru`."""
        self.failures += 1
        if self.failure is None:
            self.failure = failure
        if not self._fallback:
            self._dead = failure
            raise failure from error
        if self.failures == 1:
            _log.warning("%s; least recently used blocks are evicted from now on", failure)
        lru: EvictionPolicy = resolve("eviction", "lru")
        self._unused = deepcopy(lru)
        self._attach(lru)
        unpinned = [span for span in self._spans.values() if not span.ref_count]
        for span in sorted(unpinned, key=attrgetter("released_order")):
            lru.on_release(span, 0)


def _check(holds: bool, message: str) -> None:  # noqa: FBT001 - a condition
    if not holds:
        raise AssertionError(message)


def _not_cached(block: Block) -> InputError:
    return InputError(f"block {block!r} is not cached: it was never stored, or has left")


def _not_pinned(block: Block, rule: str = "every `unpin` takes back one `pin`") -> InputError:
    return InputError(f"block {block!r} is not pinned: {rule}")


def extended_path(above: Span, keys: Sequence[Key]) -> Sequence[Key]:
    """Return the keys of the path to `above` and then `keys`, in a shared list if possible."""
    path: Any = above.path_keys
    if above.parent is None:  # the root, which has none
        return list(keys)
    first, own = (path.start, path.own) if isinstance(path, _Branch) else (0, path)
    start = above.end - first
    known = own[start : start + len(keys)]
    if known == list(keys[: len(known)]):
        own.extend(keys[len(known) :])
        return path  # type: ignore[no-any-return]
    # The list continues with other keys: this path needs a list of its own.
    if start > COPIED:
        return _Branch(path, above.end, list(keys))
    own = [*own[:start], *keys]
    return _Branch(path.trunk, first, own) if first else own


def _unpinned_above(spans: Iterable[Span]) -> int:
    """Return the number of spans that pins of `spans` would pin. O(those)."""
    counted: set[Span] = set()
    for span in spans:
        while not span.ref_count and span not in counted:
            counted.add(span)
            span = span.parent  # type: ignore[assignment]  # noqa: PLW2901
    return len(counted)


def _closed(path: list[Span]) -> list[Span]:
    """Return the spans of a path and all above them, parents before children.

    An engine with two blocks of a key may hit one of them, and a child of the other.
    """
    if all(below.parent is span for span, below in pairwise(path)):
        return path
    spans: dict[Span, None] = {}
    for span in path:
        above: Span | None = span
        while above is not None and above.parent is not None and above not in spans:
            spans[above] = None
            above = above.parent
    return sorted(spans, key=attrgetter("start"))
