"""The eviction policies at block level: what each score means for a single block."""

from __future__ import annotations

from decimal import Context, Decimal
from itertools import groupby

EXACT = Context(prec=60)
# Sums that are equal on paper must compare equal, whatever the last digits are.
ROUNDED = Context(prec=8)


class LRU:
    def attach(self, cache):
        self.cache = cache

    def inserted(self, block, now):
        """A block that starts a new run was committed."""

    def accessed(self, block, now):
        """Another request hit the block."""

    def released(self, blocks, now):
        """The last pin of `blocks` went, in this order."""

    def leaves(self, block, now):
        """The block is about to be evicted."""

    def score(self, block, now):
        return block.recency


class FIFO(LRU):
    def score(self, block, now):
        return block.born


class MRU(LRU):
    def score(self, block, now):
        return -block.recency


class Plain(LRU):
    """LFU without decay: the number of uses."""

    def score(self, block, now):
        return block.hits


class Fading(LRU):
    """LFU whose uses fade with time (`ns`) or with opens (`opened`).

    A use at moment t counts growth^(t / period). To divide all by growth^(now / period),
    which is what fading means, would change no order.
    """

    def __init__(self, unit, growth, period=1):
        self.unit = unit
        self.growth = Decimal(growth)
        self.period = Decimal(period)

    def weight(self, block, now):
        moment = Decimal(now if self.unit == "ns" else block.opened)
        return EXACT.power(self.growth, EXACT.divide(moment, self.period))

    def inserted(self, block, now):
        block.data = self.weight(block, now)

    def accessed(self, block, now):
        block.data = EXACT.add(block.data, self.weight(block, now))

    def score(self, block, now):
        return ROUNDED.plus(block.data)


class Touches(LRU):
    """LFU whose uses fade with the block's own uses: score = score · decay + 1."""

    def __init__(self, decay):
        self.decay = Decimal(decay)

    def inserted(self, block, now):
        block.data = Decimal(1)

    def accessed(self, block, now):
        block.data = EXACT.add(EXACT.multiply(block.data, self.decay), 1)

    def score(self, block, now):
        return ROUNDED.plus(block.data)


class SLRU(LRU):
    """`data` is (protected, serial of entering the segment).

    Segments hold unpinned blocks. Blocks of one history move together.
    """

    def __init__(self, protected=0.5):
        self.share = protected

    def attach(self, cache):
        super().attach(cache)
        self.capacity = int(self.share * cache.blocks)
        self.entered = 0

    def inserted(self, block, now):
        block.data = (False, 0)

    def accessed(self, block, now):
        block.data = (True, 0)

    def released(self, blocks, now):
        for block in blocks:
            block.data = (block.data[0], 0)
        for _, together in groupby(blocks, key=lambda block: block.history):
            for block in together:
                self._enter(block, protected=block.data[0])
            self._demote()

    def score(self, block, now):
        return block.data

    def _enter(self, block, *, protected):
        self.entered += 1
        block.data = (protected, self.entered)

    def _demote(self):
        while True:
            held = [b for b in self.cache.cached if not b.holders and b.data[0] and b.data[1]]
            if len(held) <= self.capacity:
                return
            oldest = min(held, key=lambda block: block.data)
            group = [oldest]
            while group[-1].parent.history == oldest.history:
                group.append(group[-1].parent)
            for block in group:
                self._enter(block, protected=False)


class Cost(LRU):
    """GreedyDual: age + uses · seconds to recompute, where the age is that of the last use."""

    def attach(self, cache):
        super().attach(cache)
        self.age = 0.0

    def inserted(self, block, now):
        block.data = self.age

    def accessed(self, block, now):
        block.data = self.age

    def leaves(self, block, now):
        self.age = max(self.age, self.score(block, now))

    def score(self, block, now):
        size = self.cache.block_size
        seconds = self.cache.recompute(block.position * size, size)
        return block.data + (block.hits + 1) * seconds


class Priority(LRU):
    def score(self, block, now):
        return block.priority if now < block.until else 35


class TTL(LRU):
    def __init__(self, lifetime):
        self.lifetime = lifetime

    def inserted(self, block, now):
        block.expires = now + self.lifetime

    def accessed(self, block, now):
        block.expires = now + self.lifetime

    def released(self, blocks, now):
        for block in blocks:
            block.expires = now + self.lifetime
