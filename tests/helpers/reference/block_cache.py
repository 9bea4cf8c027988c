"""A prefix cache with one record per block and no spans: a reference for KVCache.

It decides as a block-level cache would: only leaves are evicted, one block at a time. It is
written to be obviously right, not fast. It shares no code with the cache that it checks, and
has the same methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from kvcore import InputError, OutOfBlocks, Request
from kvcore.request import DEFAULT_PRIORITY

FOREVER = float("inf")


@attrs.define(eq=False)
class Block:
    """A block, which is private to the sequences that hold it until it is cached.

    `history` lists the events of the block. The cache keeps adjacent blocks with equal
    histories as one span.
    """

    holders: set[int]
    place: tuple[Any, int] | None = None
    parent: Block | None = None
    children: dict[tuple[Any, int], Block] = attrs.Factory(dict)
    history: tuple[Any, ...] = ()
    creator: int | None = None
    created_order: int = 0
    created: int = 0
    last_hit_order: int = 0
    last_access: int = 0
    hit_count: int = 0
    released_order: int = 0
    priority: int = DEFAULT_PRIORITY
    until: float = FOREVER
    expires: float = FOREVER
    data: Any = None

    @property
    def position(self) -> int:
        """Return the number of blocks before this one."""
        return self.place[1]

    def promise(self, priority: int, until: float, now: int) -> None:
        """Raise the retention priority to `priority` until `until`."""
        self.lapse(now)
        self.priority, self.until = max((self.priority, self.until), (priority, until))

    def lapse(self, now: int) -> None:
        """Return to the default priority if the time of the current one is over."""
        if self.until <= now:
            self.priority, self.until = DEFAULT_PRIORITY, FOREVER

    def ancestors(self) -> Iterator[Block]:
        """Yield the cached blocks before this one, the last first, without the root."""
        block = self.parent
        while block.place is not None:
            yield block
            block = block.parent


@attrs.define(eq=False)
class Table:
    """An open sequence: its blocks, of which the first `shared` are cached."""

    id: int
    admission: int
    request: Request
    hit_blocks: int
    tokens: int
    computed: int
    shared: int
    blocks: list[Block]
    compacted: int = 0
    kept: int = 0


class BlockCache:
    """A cache with the methods of `KVCache`, and the attributes that a driver reads."""

    def __init__(
        self, blocks, block_size, policy, *, accounting="tokens", key_tokens, recompute
    ):
        self.blocks = blocks
        self.block_size = block_size
        self.key_tokens = key_tokens
        self.accounting = accounting
        self.policy = self.eviction = policy
        self.recompute = recompute
        self.pool = self.geometry = self
        self.tiers = None
        self.evicted: list[tuple[str, Any, int]] = []
        self.root = Block({0})
        self.cached: dict[Block, None] = {}
        self.sequences: dict[int, Table] = {}
        self.serial = self.admissions = self.births = self.releases = 0
        self.pins: list[tuple[int, int, list[Block]]] = []  # (end, serial, path)
        self.demoted: dict[Block, int] = {}  # with the release that it was demoted after
        policy.attach(self)

    # --- the prompt of a request ---

    def length(self, request):
        """Return the tokens of the prompt."""
        if self.accounting == "keys":
            return len(request.keys) * self.key_tokens
        return request.prompt_tokens

    def key(self, request, position):
        """Return the key of the block at `position`, or None."""
        last_token = (position + 1) * self.block_size - 1
        whole = self.key_tokens > self.block_size or not (last_token + 1) % self.key_tokens
        index = last_token // self.key_tokens
        return request.keys[index] if whole and index < len(request.keys) else None

    def cacheable(self, request):
        """Return the number of full blocks of the prompt that have a key."""
        full = self.length(request) // self.block_size
        return sum(self.key(request, position) is not None for position in range(full))

    def limit(self, request, target):
        """Return the number of blocks that may hit, without the last token in `tokens`.

        `target` is the number of tokens to be computed; None: those of the prompt.
        """
        if self.accounting == "keys":
            return self.cacheable(request)
        last = (request.prompt_tokens if target is None else target) - 1
        return min(self.cacheable(request), last // self.block_size)

    def hint(self, request, position):
        """Return the best (priority, duration) that the hints give the block at `position`."""
        start, end = position * self.block_size, (position + 1) * self.block_size
        hints = [
            (hint.priority, FOREVER if hint.duration is None else hint.duration)
            for hint in request.retention
            if hint.start < end and (hint.end is None or start < hint.end)
        ]
        return max(hints, default=(DEFAULT_PRIORITY, FOREVER))

    # --- pins of clients ---

    def pin(self, path, until, serial):
        """Pin the blocks of `path`, as many first ones as the pool has room for pins."""
        room = self.blocks // 2 - len(self._pinned())
        pinned = []
        for block in path:
            block.creator = None
            room -= block not in self._pinned()
            if room >= 0 and len(pinned) == block.position:
                pinned.append(block)
        if pinned:
            self.pins.append((until, serial, pinned))
            for block in pinned:
                block.holders.add(("pin", serial))

    def unpin(self, now):
        """End the pin that ends first."""
        pin = min(self.pins, key=lambda pin: pin[:2])
        self.pins.remove(pin)
        self._release(("pin", pin[1]), pin[2], now)

    def end_pins(self, now):
        """End the pins whose time is over."""
        while self.pins and min(pin[0] for pin in self.pins) <= now:
            self.unpin(now)

    def make_way(self, blocks, now):
        """End pins until `blocks` blocks are available, if there are as many without pins."""
        held = {b for t in self.sequences.values() for b in t.blocks}
        alone = [block for block in self._pinned() if block not in held]
        if blocks > self.available + len(alone):
            return
        while blocks > self.available:
            self.unpin(now)

    def make_room(self, blocks, now):
        """End pins for an open sequence that needs so many blocks, if there are too few."""
        if self.pins and blocks > self.available:
            self.end_pins(now)
            if len(self.sequences) == 1:
                self.make_way(blocks, now)
        return blocks <= self.available

    def _pinned(self):
        return {block for _, _, path in self.pins for block in path}

    # --- the methods of KVCache ---

    def probe(self, request, now=0):
        """Return the number of blocks that would hit."""
        return len(self._match(request, now)[0])

    def open(self, request, first_tokens=None, now=0, *, resumed=False, target=None):
        """Admit a request, if the blocks it needs are free or can be evicted."""
        self.end_pins(now)
        hit, expired = self._match(request, now, target)
        tokens = self.length(request) if target is None else target
        if first_tokens is not None:
            tokens = len(hit) * self.block_size + first_tokens
        need = self._blocks_for(tokens) - len(hit)
        if need > self.available - sum(not block.holders for block in hit):
            if self.pins and not self.sequences:
                self.make_way(self._blocks_for(tokens), now)
                if self._blocks_for(tokens) <= self.available:
                    return self.open(request, first_tokens, now, resumed=resumed, target=target)
            raise OutOfBlocks(request.id)
        self.serial += 1
        self.admissions += 1
        computed = len(hit) * self.block_size
        table = Table(
            self.serial,
            self.admissions,
            request,
            len(hit),
            tokens,
            computed,
            len(hit),
            list(hit),
        )
        self.sequences[table.id] = table
        if expired is not None:
            self._drop(expired)
        for block in hit:
            self._pin(block, table)
        self._allocate(table, need, now)
        for block in hit:
            block.last_access = now
            if not resumed:
                block.hit_count += 1
                block.last_hit_order = table.admission
                block.history += (("hit", table.id),)
                self.policy.on_access(block, now)
        if not resumed:
            self._raise_expiry(hit)
            self._promise(table, hit, now)
        return table

    def extend(self, table, tokens, now=0):
        """Allocate private blocks; a shared partial tail is copied."""
        need = self._blocks_for(table.tokens + tokens) - len(table.blocks)
        partial = tokens and table.tokens % self.block_size
        copied = bool(partial) and not self._writable(table.blocks[-1])
        if not self.make_room(need + copied, now):
            raise OutOfBlocks(table.request.id)
        tail = table.blocks[-1] if copied else None
        self._allocate(table, need + copied, now)
        if tail is not None:
            tail.holders.remove(table.id)
            table.blocks.remove(tail)
        table.tokens += tokens

    def commit(self, table, tokens, now=0):
        """Make computed blocks shareable, one by one."""
        if not 0 <= tokens <= table.tokens - table.computed:
            raise InputError(table.id)
        table.computed += tokens
        upto = min(table.computed // self.block_size, self._shareable(table))
        for position in range(table.shared, upto):
            self._publish(table, position, now)
        self._share_with_siblings(table)

    def close(self, table, now=0):
        """Release all blocks, the last first; pin or demote the shared ones if asked to."""
        del self.sequences[table.id]
        hints, shared = table.request.hints, table.blocks[: table.shared]
        if hints.pin is not None:
            self.pin(shared, now + hints.pin, table.id)
        self._release(table.id, table.blocks, now)
        if hints.demote:
            self._demote(shared)

    def compact(self, table, tokens, now=0):
        """Continue with `tokens` tokens, in blocks that no other table holds."""
        held, ahead = table.computed, table.tokens - table.computed
        if not 0 < tokens < held or held < table.shared * self.block_size:
            raise InputError(table.id)
        count = self._blocks_for(tokens + ahead)
        own = [b for b in table.blocks[table.shared :] if len(b.holders) == 1][:count]
        if not self.make_room(count - len(own), now):
            raise OutOfBlocks(table.request.id)
        before = list(table.blocks)
        self._allocate(table, count - len(own), now)
        new = table.blocks[len(before) :]
        self._release(table.id, [block for block in before if block not in own], now)
        table.blocks, table.shared, table.kept = own + new, 0, tokens
        table.tokens, table.computed = tokens + ahead, tokens
        table.compacted += held - tokens

    def _release(self, holder, blocks, now):
        """Release `blocks`, the last first."""
        released = []
        for block in reversed(blocks):
            block.holders.remove(holder)
            block.creator = None
            if block.place is not None and not block.holders:
                self.releases += 1
                block.released_order = self.releases
                block.history += (("released", holder),)
                released.append(block)
        self.policy.on_release(released, now)
        self._raise_expiry(released)

    def _demote(self, path):
        """Let the blocks of `path` that nothing else continues leave before all others."""
        for block in reversed(path):
            if block.holders or any(child not in path for child in block.children.values()):
                return
            self.demoted.pop(block, None)
            self.demoted[block] = block.released_order

    def fork(self, table, _now=0):
        """Return a new sequence that shares every block."""
        known = max(table.request.prompt_tokens, self._shareable(table) * self.block_size)
        beyond = table.tokens + table.compacted > known
        if table.computed < table.tokens and beyond:
            raise InputError(table.id)
        self.serial += 1
        child = attrs.evolve(table, id=self.serial, blocks=list(table.blocks))
        self.sequences[child.id] = child
        for block in child.blocks:
            self._pin(block, child)
        return child

    def rollback(self, table, tokens, _now=0):
        """Drop the newest tokens."""
        left = table.tokens - tokens
        if tokens and left < max(table.shared * self.block_size, table.kept):
            raise InputError(table.id)
        while len(table.blocks) > self._blocks_for(left):
            table.blocks.pop().holders.remove(table.id)
        table.tokens = left
        table.computed = min(table.computed, left)

    @property
    def free_blocks(self):
        """Return the number of blocks that are neither cached nor private."""
        private = {b for t in self.sequences.values() for b in t.blocks if b.place is None}
        return self.blocks - len(self.cached) - len(private)

    @property
    def available(self):
        """Return the number of blocks that are free or can be evicted."""
        return self.free_blocks + sum(not block.holders for block in self.cached)

    def check_integrity(self):
        """Check that tables are paths of the tree, and that no block is counted twice."""
        assert self.free_blocks >= 0
        for table in self.sequences.values():
            assert len(table.blocks) == self._blocks_for(table.tokens)
            parent = self.root
            for block in table.blocks[: table.shared]:
                assert block.parent is parent
                assert block in self.cached
                parent = block
            assert all(block.place is None for block in table.blocks[table.shared :])
        for block in self.cached:
            held = {t.id for t in self.sequences.values() if block in t.blocks}
            held |= {("pin", serial) for _, serial, path in self.pins if block in path}
            assert block.holders == held

    # --- details ---

    def _writable(self, block):
        """Return True if a holder may write to `block`, which is cached or not shared."""
        return block.place is not None or len(block.holders) == 1

    def _shareable(self, table):
        """Return the number of blocks that a table may share: none after a compaction."""
        share, most = table.request.hints.share, self.cacheable(table.request)
        shareable = most if share is None else min(most, share // self.block_size)
        return 0 if table.compacted else shareable

    def _blocks_for(self, tokens):
        return -(-tokens // self.block_size)

    def _match(self, request, now, target=None):
        """Return the cached blocks that the prompt hits, and the expired block after them."""
        hit, block = [], self.root
        for position in range(self.limit(request, target)):
            block = block.children.get((self.key(request, position), position))
            if block is None:
                break
            if block.expires <= now and not block.holders:
                return hit, block
            hit.append(block)
        return hit, None

    def _pin(self, block, table):
        block.holders.add(table.id)
        block.creator = None
        block.history += (("pinned", table.id),)

    def _allocate(self, table, count, now):
        for _ in range(count):
            if not self.free_blocks:
                self._evict(now)
            table.blocks.append(Block({table.id}))

    def _evict(self, now):
        victim = self._first_demoted()
        if victim is None:
            leaves = [b for b in self.cached if not b.holders and not b.children]
            victim = min(leaves, key=lambda b: (self.policy.score(b, now), b.released_order))
            self.policy.chosen(victim, now)
        self.policy.leaves(victim, now)
        self._take_out(victim, "capacity")

    def _first_demoted(self):
        """Return the leaf that was demoted first and not used since; None without one."""
        for block, released in [*self.demoted.items()]:
            if not block.holders and not block.children and block.released_order == released:
                return block
            del self.demoted[block]
        return None

    def _take_out(self, block, reason):
        del self.cached[block]
        self.demoted.pop(block, None)
        del block.parent.children[block.place]
        self.evicted.append((reason, *block.place))

    def _drop(self, block):
        for child in list(block.children.values()):
            self._drop(child)
        self._take_out(block, "expired")

    def _publish(self, table, position, now):
        """Cache the private block at `position`, or use the equal block that is cached."""
        parent = table.blocks[position - 1] if position else self.root
        place = (self.key(table.request, position), position)
        own, other = table.blocks[position], parent.children.get(place)
        table.shared = position + 1
        if other is not None and other.expires <= now and not other.holders:
            self._drop(other)
            other = None
        if other is not None:
            own.holders.remove(table.id)
            table.blocks[position] = other
            self._pin(other, table)
            self._promise(table, [other], now)
            return
        own.place, own.parent = place, parent
        parent.children[place] = own
        self.cached[own] = None
        priority, duration = self.hint(table.request, position)
        until = now + duration
        grows = parent.creator == table.id and parent.priority == priority
        if grows and parent.until <= until:
            for name in (
                "history",
                "created_order",
                "created",
                "last_hit_order",
                "last_access",
                "expires",
                "data",
            ):
                setattr(own, name, getattr(parent, name))
        else:
            self.births += 1
            own.created_order, own.created, own.last_access, own.last_hit_order = (
                self.births,
                now,
                now,
                table.admission,
            )
            own.history = (("born", own.created_order),)
            self.policy.on_insert(own, now)
            self._raise_expiry([own])
        parent.creator = None if parent is not self.root else parent.creator
        own.creator = table.id
        own.priority, own.until = priority, until
        for above in own.ancestors():
            above.promise(priority, until, now)

    def _share_with_siblings(self, table):
        """Move forked sequences with blocks that `table` published onto its path."""
        for other in self.sequences.values():
            path = table.blocks[other.shared : table.shared]
            common = [block.position for block in path if block in other.blocks]
            if other is not table and common:
                for block in path[: common[-1] + 1 - other.shared]:
                    other.blocks[block.position].holders.remove(other.id)
                    other.blocks[block.position] = block
                    self._pin(block, other)
                other.shared = common[-1] + 1

    def _raise_expiry(self, blocks):
        for block in blocks:
            for above in block.ancestors():
                above.expires = max(above.expires, block.expires)

    def _promise(self, table, hit, now):
        for block in hit:
            block.lapse(now)
            priority, duration = self.hint(table.request, block.position)
            if (priority, duration) != (DEFAULT_PRIORITY, FOREVER):
                block.promise(priority, now + duration, now)
        for block in reversed(hit):
            for above in block.ancestors():
                above.promise(block.priority, block.until, now)
