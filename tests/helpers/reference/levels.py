"""A pool with tiers and one record per block: a reference for requests one at a time.

It is written to be obviously right, shares no code with the cache that it checks, and is not
fast: LRU on every level, sets of blocks, and a brute-force choice of the blocks to load.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs

NS = 10**9


@attrs.define(eq=False)
class Memory:
    """The blocks of the pool or of a tier. A block is its path: a tuple of keys.

    `counts` has what the statistics of a tier count, by their names.
    """

    size: int
    rules: dict[str, Any] = attrs.Factory(dict)
    below: Memory | None = None
    used: dict[tuple, int] = attrs.Factory(dict)
    hits: dict[tuple, int] = attrs.Factory(dict)
    free_at: int = 0
    clock: int = 0
    counts: Counter[str] = attrs.Factory(Counter)

    def found(self, path):
        """Return the number of leading blocks of `path` that are stored here."""
        return next((n for n in range(len(path), 0, -1) if path[:n] in self.used), 0)

    def touch(self, path):
        """Record a use of all blocks of `path`, the last block first."""
        for end in range(len(path), 0, -1):
            self.clock += 1
            self.used[path[:end]] = self.clock

    def leaf(self, kept):
        """Return the least recently used leaf that is not in `kept`."""
        parents = {block[:-1] for block in self.used}
        leaves = [b for b in self.used if b not in parents and b != kept[: len(b)]]
        return min(leaves, key=self.used.get)

    def evict(self, kept, now):
        """Evict the least recently used leaf, to the level below if that takes victims."""
        block = self.leaf(kept)
        if self.below is not None and self.below.rules["write"] == "evict":
            self.below.store(block, now)
        self.counts["capacity"] += 1
        self.remove(block)

    def remove(self, block):
        """Remove a block and its hits."""
        del self.used[block]
        self.hits.pop(block, None)

    def move_out(self, path):
        """Remove `path` from its end on, up to a block that has another child."""
        while path and not any(b[:-1] == path for b in self.used):
            self.counts["moved"] += 1
            self.remove(path)
            path = path[:-1]

    def add(self, path, now):
        """Store the missing blocks of `path`; there is room for them."""
        new = path not in self.used
        for end in range(1, len(path) + 1):
            self.used.setdefault(path[:end], 0)
        if new and self.below is not None and self.below.rules["write"] == "through":
            self.below.store(path, now)

    def hit(self, path, now):
        """Count a hit of all blocks of `path`; store those hit often enough below."""
        for end in range(1, len(path) + 1):
            self.hits[path[:end]] = self.hits.get(path[:end], 0) + 1
        uses = None if self.below is None else self.below.rules["write"]
        if type(uses) is int:
            often = [n for n in range(1, len(path) + 1) if self.hits[path[:n]] >= uses]
            if often:
                self.below.store(path[: often[-1]], now)

    def store(self, path, now):
        """Write the missing blocks of `path`, as far as there is room."""
        here = self.found(path)
        if here == len(path) or max(0, self.free_at - now) > self.rules["max_wait"]:
            return
        path = path[: self.size]
        if here == len(path):
            return
        while len(self.used) + len(path) - here > self.size:
            self.evict(path[:here], now)
        self.counts["stored"] += len(path) - here
        self.move(len(path) - here, "write", now)
        self.add(path, now)
        self.touch(path)

    def move(self, blocks, way, now):
        """Queue a transfer of `blocks` blocks."""
        self.counts["busy_ns"] += self.takes(blocks, way)
        self.free_at = max(self.free_at, now) + self.takes(blocks, way)

    def takes(self, blocks, way):
        """Return the ns for which a transfer of `blocks` blocks occupies the link."""
        return -(-blocks * self.rules["slot"] * NS // self.rules[way + "_bandwidth"])

    def ready(self, blocks, now):
        """Return the time at which a load of `blocks` blocks would end."""
        return max(self.free_at, now) + self.takes(blocks, "read") + self.rules["latency"]


class Hierarchy:
    """A pool with the tiers below it."""

    def __init__(self, blocks, block_size, rules, prefill_ns):
        self.size, self.prefill_ns = block_size, prefill_ns
        self.memories = [Memory(blocks), *(Memory(rule["slots"], rule) for rule in rules)]
        for memory, below in zip(self.memories, self.memories[1:], strict=False):
            memory.below = below

    def serve(self, keys, tokens, now):
        """Serve a prompt at `now`; return the hit and the loaded blocks, and the load's end."""
        pool, *tiers = self.memories
        path = tuple(keys)
        limit = path[: (tokens - 1) // self.size]
        hit = pool.found(limit)
        for _ in range(-(-tokens // self.size) - hit - (pool.size - len(pool.used))):
            pool.evict(path[:hit], now)
        pool.hit(path[:hit], now)
        parts, end = [], hit
        for tier in tiers:
            upto = tier.found(limit)
            tier.counts["found"] += max(upto - end, 0)
            if upto > end and tier.rules["load"] != "never":
                parts.append((tier, end, upto))
                end = upto
        end = self.fastest(parts, hit, tokens, now)
        for tier, first, upto in parts:
            tier.counts["recomputed"] += upto - max(min(end, upto), first)
        parts = [(tier, first, min(upto, end)) for tier, first, upto in parts if first < end]
        ready = self.begin(parts, path, tokens, now)
        for tier, _, upto in parts:
            tier.touch(path[:upto])
            if tier.rules["keep"] == "exclusive":
                tier.move_out(path[:upto])
        later = ready + self.prefill_ns(tokens - end * self.size, end * self.size)
        if end > hit:
            pool.add(path[:end], ready)
        full = path[: tokens // self.size]
        if len(full) > end:
            pool.add(full, later)
        pool.touch(full)
        return hit, end - hit, ready

    def begin(self, parts, path, tokens, now):
        """Queue the loads of `parts`; return the time at which all are done."""
        ready = now
        for tier, _, upto in parts:
            tier.hit(path[:upto], now)
        for tier, first, upto in parts:
            done = tier.ready(upto - first, now)
            ready = max(ready, done)
            tier.counts.update(
                loads=1, loaded=upto - first, hits=upto - first, load_ns=done - now,
                wait_ns=max(0, tier.free_at - now),
                ratio_sum=(upto - first) / (tokens // self.size),
            )  # fmt: skip
            tier.move(upto - first, "read", now)
        return ready

    def fastest(self, parts, hit, tokens, now):
        """Return the end of the longest prefix to load among those of the least time."""
        always = [upto for tier, _, upto in parts if tier.rules["load"] == "always"]
        last = parts[-1][2] if parts else hit

        def took(end):
            loads = [
                tier.ready(min(upto, end) - first, now) - now
                for tier, first, upto in parts
                if first < end
            ]
            rest = self.prefill_ns(tokens - end * self.size, end * self.size)
            return max(loads, default=0) + rest, -end

        return min(range(max(always, default=hit), last + 1), key=took)
