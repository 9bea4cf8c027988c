"""A small engine that owns its blocks, with a hosted policy that chooses the victims."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import attrs

from kvcore.cache import EvictionPolicy
from kvcore.cache.hints import PriorityStep, priority_steps
from kvcore.errors import OutOfBlocks
from kvcore.request import DEFAULT_PRIORITY, Key, Request
from kvcore_hosting import PolicyHost


@attrs.define(eq=False)
class Running:
    """An open request.

    Attributes:
        request: the request.
        table: keys of the cached blocks that it uses, from its first on.
        hit_blocks: number of blocks that it hit.
        tokens, computed: number of tokens that have blocks, and of those that are computed.
        private: number of blocks that are not cached.
        priorities: retention priorities of its blocks.
    """

    request: Request
    table: list[Key]
    hit_blocks: int
    tokens: int
    computed: int
    private: int
    priorities: list[PriorityStep]


class HostedCache:
    """Opens, commits, extends and closes requests as a `KVCache` with `keys` accounting.

    A `PolicyHost` has the cached keys and chooses victims. Decisions must be those of a
    `KVCache` with spans of one block.

    Args:
        policy: the eviction policy.
        blocks: size of the pool.
        block_size: number of tokens of a block, and of a key.
        recompute: seconds to compute n tokens after a context of c; None: Llama-3-8B, H100.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        blocks: int,
        block_size: int,
        recompute: Callable[[int, int], float] | None,
    ) -> None:
        self.host = PolicyHost(policy, blocks, block_size, recompute=recompute)
        self.pool = SimpleNamespace(free_blocks=blocks)
        self._size = block_size

    def check_integrity(self) -> None:
        """Check that the free and the cached blocks are no more than the pool has."""
        assert 0 <= self.pool.free_blocks <= self.host.blocks - len(self.host)

    def open(
        self, request: Request, tokens: int | None, now: int, *, resumed: bool = False
    ) -> Running:
        """Admit `request`: pin the blocks it hits, and allocate those of its first chunk."""
        host, keys = self.host, request.keys
        hits: list[Key] = []
        stale = None
        for key in keys:
            if key not in host:
                break
            if host.expired(key, now):
                stale = key
                break
            hits.append(key)
        if tokens is None:
            tokens = (len(keys) - len(hits)) * self._size
        need = -(-tokens // self._size)
        unpinned = sum(not host.span(key).ref_count for key in hits)
        if need > self.pool.free_blocks + host.evictable - unpinned:
            msg = f"{need} blocks are more than there is room for"
            raise OutOfBlocks(msg)
        if stale is not None:
            self._drop(stale, now)
        host.admitted(request.id)
        for key in reversed(hits):
            host.pin(key)
        if len(hits) < len(keys) and not resumed:
            host.missed(request, len(hits), now)
        self._allocate(need, request, now)
        host.hit(hits, now, request.id, again=resumed)
        if hits and not resumed:
            host.hinted(hits[-1], request, now)
        cached = len(hits) * self._size
        steps = priority_steps(request, self._size) if request.retention else []
        return Running(request, hits, len(hits), cached + tokens, cached, need, steps)

    def extend(self, running: Running, tokens: int, now: int) -> None:
        """Allocate blocks for `tokens` more tokens."""
        blocks = -(-running.tokens // self._size)
        need = -(-(running.tokens + tokens) // self._size) - blocks
        if need > self.pool.free_blocks + self.host.evictable:
            msg = f"{need} blocks are more than there is room for"
            raise OutOfBlocks(msg)
        self._allocate(need, running.request, now)
        running.private += need
        running.tokens += tokens

    def commit(self, running: Running, tokens: int, now: int) -> None:
        """Record that `tokens` more are computed: full blocks with a key become cached."""
        host, table, request = self.host, running.table, running.request
        running.computed += tokens
        upto = min(running.computed // self._size, len(request.keys))
        switching = True
        while len(table) < upto:
            key = request.keys[len(table)]
            if switching and host.expired(key, now):
                self._drop(key, now)
            switching = switching and key in host
            if switching:
                host.pin(key)
                self.pool.free_blocks += 1
            else:
                priority, duration = self._priority(running, len(table))
                until = None if duration is None else now + duration
                host.stored(
                    key, table[-1] if table else None, now, request=request.id,
                    priority=priority, priority_until=until, tenant=request.tenant,
                )  # fmt: skip
            running.private -= 1
            table.append(key)

    def close(self, running: Running, now: int) -> None:
        """Release the blocks of `running`, deepest first."""
        self.pool.free_blocks += running.private
        self.host.ended(running.request, now)
        for key in reversed(running.table):
            self.host.unpin(key, now)

    def _allocate(self, need: int, request: Request, now: int) -> None:
        missing = max(0, need - self.pool.free_blocks)
        victims = self.host.victims(missing, now=now, requester=request.id)
        assert victims is not None
        self.pool.free_blocks += len(victims) - need

    def _drop(self, top: Key, now: int) -> None:
        """Drop expired blocks and all below them, leaves first."""
        branch = self.host.branch(top)
        for block in branch:
            self.host.dropped(block, now, reason="expired")
        self.pool.free_blocks += len(branch)

    @staticmethod
    def _priority(running: Running, block: int) -> tuple[int, int | None]:
        for end, priority, duration in running.priorities:
            if block < end:
                return priority, duration
        return DEFAULT_PRIORITY, None
