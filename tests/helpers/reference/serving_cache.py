"""A prefix cache with one record per block, for a serving loop: a reference.

Generated blocks have keys of the workload, or names that one request alone knows. Pins and
demotion by clients are left out.
"""

from __future__ import annotations

from types import SimpleNamespace

from helpers.reference.block_cache import BlockCache


class ServingCache(BlockCache):
    """A cache with the methods of `KVCache` that a serving loop calls."""

    def __init__(self, blocks, block_size, policy, *, key_tokens):
        super().__init__(blocks, block_size, policy, key_tokens=key_tokens, recompute=None)
        self.tree = self
        self.shareable: dict[int, int] = {}

    @property
    def available_blocks(self):
        """Return the number of blocks that are free or can be evicted."""
        return self.free_blocks + sum(not block.holders for block in self.cached)

    @property
    def evicted_blocks(self):
        """Return the number of blocks that were evicted."""
        return sum(reason == "capacity" for reason, *_ in self.evicted)

    def make_room(self, blocks, _now):
        """Return True if as many blocks are free or evictable."""
        return blocks <= self.available_blocks

    def match(self, request, now, target=None):
        """Return how many blocks would hit, and how many of these no sequence holds."""
        hit, _ = self._match(request, now, target)
        unpinned = sum(not block.holders for block in hit)
        return SimpleNamespace(blocks=len(hit), unpinned_blocks=unpinned)

    def key(self, request, position):
        """Return the key of the block at `position`, or None."""
        index = ((position + 1) * self.block_size - 1) // self.key_tokens
        if request.output_keys:
            keys = [*request.keys[: request.prompt_tokens // self.key_tokens]]
            keys += request.output_keys
            return keys[index] if index < len(keys) else None
        if position >= request.prompt_tokens // self.block_size:
            return "generated", request.id, index
        return super().key(request, position)

    def limit(self, request, target):
        """Return the number of blocks that may hit: the last token is always computed."""
        return ((request.prompt_tokens if target is None else target) - 1) // self.block_size

    def open(self, request, first_tokens=None, now=0, *, resumed=False, target=None):
        """Admit a request, if the blocks it needs are free or can be evicted."""
        table = super().open(request, first_tokens, now, resumed=resumed, target=target)
        shareable = self.cacheable(request)
        if request.output_keys:
            keys = request.prompt_tokens // self.key_tokens + len(request.output_keys)
            shareable = keys * self.key_tokens // self.block_size
        elif table.hit_blocks > request.prompt_tokens // self.block_size:
            shareable = self.limit(request, target)
        share = request.hints.share
        if share is not None:
            shareable = min(shareable, share // self.block_size)
        self.shareable[table.id] = shareable
        return table

    def _shareable(self, table):
        """Return the number of blocks that a table may share."""
        return self.shareable[table.id]

    def close(self, table, now=0, *, preempted=False):
        """Release all blocks, the last first."""
        del preempted
        super().close(table, now)

    def publish(self, table, tokens, now):
        """Share the blocks that the next `tokens` tokens fill, unless the next is cached."""
        upto = min((table.computed + tokens) // self.block_size, self._shareable(table))
        parent = table.blocks[table.shared - 1] if table.shared else self.root
        if (self.key(table.request, table.shared), table.shared) not in parent.children:
            for position in range(table.shared, upto):
                self._publish(table, position, now)

    def keep_generated(self, table, tokens, now):
        """Cache generated blocks under names, as a run of their own after the prompt."""
        request = table.request
        is_private = request.output_keys or request.hints.share is not None
        if is_private or table.shared < request.prompt_tokens // self.block_size:
            return
        if table.shared:
            table.blocks[table.shared - 1].creator = None
        for position in range(table.shared, tokens // self.block_size):
            self._publish(table, position, now)
