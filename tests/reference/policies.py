"""The eviction policies at block level: what each score means for a single block."""

from __future__ import annotations

from decimal import Context, Decimal
from itertools import groupby

EXACT = Context(prec=60)
# Sums that are equal on paper must compare equal, whatever the last digits are.
ROUNDED = Context(prec=8)


class LRU:
    """The block unused the longest; what the others derive from."""

    def attach(self, cache):
        """Learn whose blocks they are."""
        self.cache = cache

    def inserted(self, block, now):
        """Learn that `block` was committed and continues no run of its creator."""

    def accessed(self, block, now):
        """Learn that another request hit `block`."""

    def released(self, blocks, now):
        """Learn that `blocks` lost their last pin, in this order."""

    def leaves(self, block, now):
        """Learn that `block` is about to be evicted."""

    def score(self, block, _now):
        """Return what orders the leaves, the lowest first; the less recent among equals."""
        return block.recency


class FIFO(LRU):
    """The block of the oldest run."""

    def score(self, block, _now):
        """Return the serial of its run's creation."""
        return block.born


class MRU(LRU):
    """The block used most recently."""

    def score(self, block, _now):
        """Return its recency, the highest first."""
        return -block.recency


class Plain(LRU):
    """LFU without decay."""

    def score(self, block, _now):
        """Return the number of uses."""
        return block.hits


class Fading(LRU):
    """LFU whose uses fade with time (`ns`) or with opens (`opened`).

    A use at moment t counts growth^(t / period). To divide all by growth^(now / period),
    which is what fading means, would change no order.
    """

    def __init__(self, unit, growth, period=1):
        """Take the unit of moments, and that a use counts `growth` times more per period."""
        self.unit = unit
        self.growth = Decimal(growth)
        self.period = Decimal(period)

    def inserted(self, block, now):
        """Count the first use."""
        block.data = self.use(block, now)

    def accessed(self, block, now):
        """Add a use."""
        block.data = EXACT.add(block.data, self.use(block, now))

    def score(self, block, _now):
        """Return the sum of its uses."""
        return ROUNDED.plus(block.data)

    def use(self, block, now):
        """Return what a use counts now."""
        moment = Decimal(now if self.unit == "ns" else block.opened)
        return EXACT.power(self.growth, EXACT.divide(moment, self.period))


class Touches(LRU):
    """LFU whose uses fade with the block's own uses: score = score · decay + 1."""

    def __init__(self, decay):
        """Take the factor per use."""
        self.decay = Decimal(decay)

    def inserted(self, block, now):
        """Count the first use."""
        del now
        block.data = Decimal(1)

    def accessed(self, block, now):
        """Let the past fade and add a use."""
        del now
        block.data = EXACT.add(EXACT.multiply(block.data, self.decay), 1)

    def score(self, block, _now):
        """Return what is left of its uses."""
        return ROUNDED.plus(block.data)


class SLRU(LRU):
    """Blocks used once before blocks used again, the least recent first.

    `data` is (whether protected, serial of entering the segment; 0 while pinned). Segments
    hold unpinned blocks. Adjacent blocks of one history move together.
    """

    def __init__(self, protected=0.5):
        """Take the protected segment's share of the pool."""
        self.share = protected

    def attach(self, cache):
        """Work out the protected segment's capacity."""
        super().attach(cache)
        self.capacity = int(self.share * cache.blocks)
        self.entered = 0

    def inserted(self, block, now):
        """Put it on probation."""
        del now
        block.data = (False, 0)

    def accessed(self, block, now):
        """Promote it."""
        del now
        block.data = (True, 0)

    def released(self, blocks, now):
        """Enter them run by run, demoting what does not fit after each."""
        del now
        for block in blocks:
            block.data = (block.data[0], 0)
        for _, run in groupby(blocks, key=lambda block: block.history):
            for block in run:
                self._enter(block, protected=block.data[0])
            self._demote()

    def score(self, block, _now):
        """Return probation before protection, then the order of entering."""
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
            run = [oldest]
            while run[-1].parent.history == oldest.history:
                run.append(run[-1].parent)
            for block in run:
                self._enter(block, protected=False)


class Cost(LRU):
    """GreedyDual: the age at its last use + uses · seconds to recompute the block."""

    def attach(self, cache):
        """Start at age 0."""
        super().attach(cache)
        self.age = 0.0

    def inserted(self, block, now):
        """Remember the age."""
        del now
        block.data = self.age

    def accessed(self, block, now):
        """Remember the age."""
        del now
        block.data = self.age

    def leaves(self, block, now):
        """Age to the score of what is evicted."""
        self.age = max(self.age, self.score(block, now))

    def score(self, block, _now):
        """Return its value."""
        size = self.cache.block_size
        seconds = self.cache.recompute(block.position * size, size)
        return block.data + (block.hits + 1) * seconds


class Priority(LRU):
    """The block of the lowest retention priority."""

    def score(self, block, now):
        """Return the priority that holds now."""
        return block.priority if now < block.until else 35


class TTL(LRU):
    """LRU whose blocks expire after `lifetime` ns without use."""

    def __init__(self, lifetime):
        """Take the lifetime."""
        self.lifetime = lifetime

    def inserted(self, block, now):
        """Start its time."""
        block.expires = now + self.lifetime

    def accessed(self, block, now):
        """Start its time again."""
        block.expires = now + self.lifetime

    def released(self, blocks, now):
        """Start their time again."""
        for block in blocks:
            block.expires = now + self.lifetime
