"""Tiers below cache groups with one record per block: a reference for their contents and loads.

It is told what happens in the pool, and shares no code with the tiers that it checks. A block
is its group, its name, and nothing else; a text is a list of names a group.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs

NS = 10**9


@attrs.define(eq=False)
class Memory:
    """The blocks of a tier, each with the time of its last use.

    `counts` has what the statistics of a tier count, by their names.
    """

    rules: dict[str, Any]
    sizes: list[int]
    below: Memory | None = None
    used: dict[tuple, int] = attrs.Factory(dict)
    hits: dict[tuple, int] = attrs.Factory(dict)
    kept: set[tuple] = attrs.Factory(set)
    free_at: int = 0
    clock: int = 0
    counts: Counter[str] = attrs.Factory(Counter)

    def touch(self, block):
        """Record a use of a block."""
        self.clock += 1
        self.used[block] = self.clock

    def hit(self, blocks, now):
        """Count a hit of blocks above; store those that were hit often enough."""
        uses = self.rules["write"]
        if type(uses) is int:
            for block in blocks:
                self.hits[block] = self.hits.get(block, 0) + 1
            self.store([block for block in blocks if self.hits[block] >= uses], now)

    def store(self, blocks, now):
        """Write the blocks that are missing, in order, as far as there is room."""
        new = [block for block in dict.fromkeys(blocks) if block not in self.used]
        for block in dict.fromkeys(blocks):
            if block in self.used:
                self.touch(block)
        if max(0, self.free_at - now) > self.rules["max_wait"]:
            self.counts["skipped"] += len(new)
            return
        fits = new[: self.rules["slots"] - len(self.kept)]
        self.counts["refused"] += len(new) - len(fits)
        new = fits
        excess = len(self.used) + len(new) - self.rules["slots"]
        victims = sorted(set(self.used) - self.kept, key=self.used.get)[: max(0, excess)]
        if self.below is not None and self.below.rules["write"] == "evict":
            self.below.store(victims, now)
        self.counts["capacity"] += len(victims)
        for block in victims:
            self.remove(block)
            if self.below is not None:
                self.below.hits.pop(block, None)
        for block in new:
            self.touch(block)
        self.counts["stored"] += len(new)
        self.move(new, "write", now)
        if self.below is not None and self.below.rules["write"] == "through":
            self.below.store(new, now)

    def remove(self, block):
        """Remove a block."""
        del self.used[block]

    def move(self, blocks, way, now):
        """Queue the transfer of `blocks`."""
        if blocks:
            self.counts["busy_ns"] += self.takes(blocks, way)
            self.free_at = max(self.free_at, now) + self.takes(blocks, way)

    def takes(self, blocks, way):
        """Return the ns for which a transfer of `blocks` occupies the link."""
        size = sum(self.sizes[group] for group, _ in blocks)
        return -(-size * NS // self.rules[way + "_bandwidth"])


def longest(groups, texts, target, there):
    """Return the longest prefix below `target` at whose end all groups have what they need.

    Tried from the longest one down; `texts` has the names of each group's blocks.
    """
    unit = max(group.block_size for group in groups)
    for tokens in range((target - 1) // unit * unit, 0, -unit):
        if all(block in there for block in needed(groups, texts, tokens) or [None]):
            return tokens
    return 0


def needed(groups, texts, tokens):
    """Return the blocks that the token after `tokens` tokens needs; [None]: they have none."""
    blocks = []
    for index, (group, names) in enumerate(zip(groups, texts, strict=True)):
        size, end = group.block_size, tokens // group.block_size
        first = 0
        if group.kind == "window":
            first = max(0, tokens - group.window + 1) // size
        elif group.kind == "state":
            first = end - 1
        if end > len(names):
            return [None]
        blocks += [(index, name) for name in names[first:end]]
    return blocks
