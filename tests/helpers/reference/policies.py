"""The eviction policies at block level, defined by the score of a single block."""

from __future__ import annotations

from decimal import Context, Decimal
from itertools import groupby

EXACT = Context(prec=60)
# Sums that are equal in exact arithmetic must compare equal.
ROUNDED = Context(prec=8)


class LRU:
    """The least recently used block first; the base of the other policies."""

    kind = "reference"
    lookahead = 0

    def on_queued(self, request, now):
        """Called when `request` enters the queue."""

    def on_dequeued(self, request, now):
        """Called when `request` leaves the queue."""

    def attach(self, cache):
        """Store the cache of the blocks."""
        self.cache = cache

    def on_insert(self, block, now):
        """Called when `block` was committed and begins a new run."""

    def on_access(self, block, now):
        """Called when another request hit `block`."""

    def on_release(self, blocks, now):
        """Called when `blocks` lost their last pin, in this order."""

    def chosen(self, block, now):
        """Called when `block` is about to be evicted, as its score is the lowest."""

    def leaves(self, block, now):
        """Called when `block` is about to be evicted, by its score or since it is demoted."""

    def score(self, block, _now):
        """Return the sort key of a leaf, the lowest first; equals in the order of release."""
        return block.released_order


class FIFO(LRU):
    """The block of the oldest run first."""

    def score(self, block, _now):
        """Return the order in which the block's run was created."""
        return block.created_order


class MRU(LRU):
    """The most recently used block first."""

    def score(self, block, _now):
        """Return the order of the block's release, negated."""
        return -block.released_order


class Plain(LRU):
    """LFU without decay."""

    def score(self, block, _now):
        """Return the number of hits."""
        return block.hit_count


class Fading(LRU):
    """LFU whose uses fade with time (`ns`) or with opens (`opened`).

    A use at moment t counts growth^(t / period). To divide all by growth^(now / period), which
    is what fading means, would not change the order.
    """

    def __init__(self, unit, growth, period=1):
        """Store the unit of moments, and the factor `growth` of a use per period."""
        self.unit = unit
        self.growth = Decimal(growth)
        self.period = Decimal(period)

    def on_insert(self, block, now):
        """Count the first use."""
        block.data = self.use(block, now)

    def on_access(self, block, now):
        """Add a use."""
        block.data = EXACT.add(block.data, self.use(block, now))

    def score(self, block, _now):
        """Return the sum of the block's uses."""
        return ROUNDED.plus(block.data)

    def use(self, block, now):
        """Return the weight of a use now."""
        moment = Decimal(now if self.unit == "ns" else block.last_hit_order)
        return EXACT.power(self.growth, EXACT.divide(moment, self.period))


class Touches(LRU):
    """LFU whose uses fade with the block's own uses: score = score · decay + 1."""

    def __init__(self, decay):
        """Store the factor per use."""
        self.decay = Decimal(decay)

    def on_insert(self, block, now):
        """Count the first use."""
        del now
        block.data = Decimal(1)

    def on_access(self, block, now):
        """Multiply the count by the decay, and add a use."""
        del now
        block.data = EXACT.add(EXACT.multiply(block.data, self.decay), 1)

    def score(self, block, _now):
        """Return the decayed count of uses."""
        return ROUNDED.plus(block.data)


class SLRU(LRU):
    """Blocks used once before blocks used again, the least recent first.

    `data` is (whether protected, serial of entering the segment; 0 while pinned). Segments
    hold unpinned blocks. Adjacent blocks of one history move together.
    """

    def __init__(self, protected=0.5):
        """Store the protected segment's share of the pool."""
        self.share = protected

    def attach(self, cache):
        """Compute the protected segment's capacity."""
        super().attach(cache)
        self.capacity = int(self.share * cache.blocks)
        self.entered = 0

    def on_insert(self, block, now):
        """Put the block on probation."""
        del now
        block.data = (False, 0)

    def on_access(self, block, now):
        """Promote the block."""
        del now
        block.data = (True, 0)

    def on_release(self, blocks, now):
        """Enter the blocks run by run, and demote those that do not fit after each run."""
        del now
        for block in blocks:
            block.data = (block.data[0], 0)
        for _, run in groupby(blocks, key=lambda block: block.history):
            for block in run:
                self._enter(block, protected=block.data[0])
            self._demote()

    def score(self, block, _now):
        """Return a key that sorts probation before protection, then by order of entering."""
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
    """GreedyDual: the age at the last use, plus uses times the seconds to recompute."""

    def attach(self, cache):
        """Start with age 0."""
        super().attach(cache)
        self.age = 0.0

    def on_insert(self, block, now):
        """Store the current age."""
        del now
        block.data = self.age

    def on_access(self, block, now):
        """Store the current age."""
        del now
        block.data = self.age

    def chosen(self, block, now):
        """Raise the age to the score of the victim."""
        self.age = max(self.age, self.score(block, now))

    def score(self, block, _now):
        """Return the block's value."""
        size = self.cache.block_size
        seconds = self.cache.recompute(block.position * size, size)
        return block.data + (block.hit_count + 1) * seconds


class Priority(LRU):
    """The block of the lowest retention priority first."""

    def score(self, block, now):
        """Return the current priority."""
        return block.priority if now < block.until else 35


class TTL(LRU):
    """LRU whose blocks expire after `lifetime` ns without use."""

    def __init__(self, lifetime):
        """Store the lifetime in ns."""
        self.lifetime = lifetime

    def on_insert(self, block, now):
        """Start the block's lifetime."""
        block.expires = now + self.lifetime

    def on_access(self, block, now):
        """Restart the block's lifetime."""
        block.expires = now + self.lifetime

    def on_release(self, blocks, now):
        """Restart the lifetime of all blocks."""
        for block in blocks:
            block.expires = now + self.lifetime


class Lookahead(LRU):
    """Blocks that none of the next requests needs first, then the block needed last."""

    def __init__(self, requests):
        """Store the number of next requests that are considered."""
        self.lookahead = requests
        self.waiting = []

    def on_queued(self, request, now):
        """Add the request to the end of the queue."""
        del now
        self.waiting.append(request)

    def on_dequeued(self, request, now):
        """Remove the request from the queue."""
        del now
        self.waiting.remove(request)

    def score(self, block, _now):
        """Return whether the block is needed, and the negated place of the last need."""
        turns = [-n for n, request in enumerate(self.waiting) if block.place[0] in request.keys]
        return (bool(turns), max(turns, default=0))


class LRUK(LRU):
    """The block whose k-th last use is the oldest first; the history is unbounded.

    `data` is (latest use, latest use that counts, the ones before it).
    """

    def __init__(self, k=2, correlated=0):
        """Store k, and the period in which further uses do not count."""
        self.k = k
        self.correlated = correlated
        self.past = {}

    def on_insert(self, block, now):
        """Add a use to the history of the block's key."""
        del now
        _, *uses = self.past.get(block.place[0], [None])
        block.data = [block.last_hit_order, block.last_hit_order, *uses]

    def on_access(self, block, now):
        """Add a use, and shift the earlier ones by the correlated period that ends."""
        del now
        last, *uses = block.data
        if block.last_hit_order - last > self.correlated:
            uses = [block.last_hit_order, *(use + last - uses[0] for use in uses)]
        block.data = [block.last_hit_order, *uses]

    def leaves(self, block, now):
        """Store the history of the victim by its key."""
        del now
        self.past[block.place[0]] = block.data

    def score(self, block, _now):
        """Return the block's k-th last use, 0 if there is none."""
        return block.data[self.k] if len(block.data) > self.k else 0


class TailLRU(LRU):
    """Blocks whose loss would not delay the next turn of their conversation first.

    `data` is the number of blocks that the conversation reaches.
    """

    def __init__(self, threshold, turn, *, seconds=False):
        """Store the threshold, in tokens or seconds, and the tokens of the next turn."""
        self.threshold = threshold
        self.turn = turn
        self.seconds = seconds

    def on_release(self, blocks, now):
        """Raise the reach of each block, and of all blocks before it, to its end."""
        del now
        for block in blocks:
            for one in (block, *block.ancestors()):
                one.data = max(one.data or 0, block.position + 1)

    def score(self, block, _now):
        """Return True if the next turn would be late without the blocks of the key."""
        size, ratio = self.cache.block_size, self.cache.key_tokens // self.cache.block_size
        cached = block.position // max(ratio, 1) * max(ratio, 1) * size
        missing = block.data * size - cached + self.turn
        return (self.cache.recompute(cached, missing) if self.seconds else missing) > (
            self.threshold
        )
