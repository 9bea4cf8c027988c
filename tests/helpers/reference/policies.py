"""The eviction policies at block level: what each score means for a single block."""

from __future__ import annotations

from decimal import Context, Decimal
from itertools import groupby

EXACT = Context(prec=60)
# Sums that are equal on paper must compare equal, whatever the last digits are.
ROUNDED = Context(prec=8)


class LRU:
    """The block unused the longest; what the others derive from."""

    kind = "reference"
    lookahead = 0

    def on_queued(self, request, now):
        """Learn that `request` will come."""

    def on_dequeued(self, request, now):
        """Learn that `request` has come."""

    def attach(self, cache):
        """Learn whose blocks they are."""
        self.cache = cache

    def on_insert(self, block, now):
        """Learn that `block` was committed and continues no run of its creator."""

    def on_access(self, block, now):
        """Learn that another request hit `block`."""

    def on_release(self, blocks, now):
        """Learn that `blocks` lost their last pin, in this order."""

    def leaves(self, block, now):
        """Learn that `block` is about to be evicted."""

    def score(self, block, _now):
        """Return what orders the leaves, the lowest first; the less recent among equals."""
        return block.released_order


class FIFO(LRU):
    """The block of the oldest run."""

    def score(self, block, _now):
        """Return the serial of its run's creation."""
        return block.created_order


class MRU(LRU):
    """The block used most recently."""

    def score(self, block, _now):
        """Return its recency, the highest first."""
        return -block.released_order


class Plain(LRU):
    """LFU without decay."""

    def score(self, block, _now):
        """Return the number of uses."""
        return block.hit_count


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

    def on_insert(self, block, now):
        """Count the first use."""
        block.data = self.use(block, now)

    def on_access(self, block, now):
        """Add a use."""
        block.data = EXACT.add(block.data, self.use(block, now))

    def score(self, block, _now):
        """Return the sum of its uses."""
        return ROUNDED.plus(block.data)

    def use(self, block, now):
        """Return what a use counts now."""
        moment = Decimal(now if self.unit == "ns" else block.last_hit_order)
        return EXACT.power(self.growth, EXACT.divide(moment, self.period))


class Touches(LRU):
    """LFU whose uses fade with the block's own uses: score = score · decay + 1."""

    def __init__(self, decay):
        """Take the factor per use."""
        self.decay = Decimal(decay)

    def on_insert(self, block, now):
        """Count the first use."""
        del now
        block.data = Decimal(1)

    def on_access(self, block, now):
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

    def on_insert(self, block, now):
        """Put it on probation."""
        del now
        block.data = (False, 0)

    def on_access(self, block, now):
        """Promote it."""
        del now
        block.data = (True, 0)

    def on_release(self, blocks, now):
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

    def on_insert(self, block, now):
        """Remember the age."""
        del now
        block.data = self.age

    def on_access(self, block, now):
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
        return block.data + (block.hit_count + 1) * seconds


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

    def on_insert(self, block, now):
        """Start its time."""
        block.expires = now + self.lifetime

    def on_access(self, block, now):
        """Start its time again."""
        block.expires = now + self.lifetime

    def on_release(self, blocks, now):
        """Start their time again."""
        for block in blocks:
            block.expires = now + self.lifetime


class Lookahead(LRU):
    """What none of the next requests needs, then what is needed last."""

    def __init__(self, requests):
        """Take how many requests ahead to look."""
        self.lookahead = requests
        self.waiting = []

    def on_queued(self, request, now):
        """Put it behind the others."""
        del now
        self.waiting.append(request)

    def on_dequeued(self, request, now):
        """Take it out."""
        del now
        self.waiting.remove(request)

    def score(self, block, _now):
        """Return whether it is needed, and by whom, the last the lowest."""
        turns = [-n for n, request in enumerate(self.waiting) if block.place[0] in request.keys]
        return (bool(turns), max(turns, default=0))


class LRUK(LRU):
    """The block whose k-th last use is the longest ago; nothing is ever forgotten.

    `data` is (latest use, latest use that counts, the ones before it).
    """

    def __init__(self, k=2, correlated=0):
        """Take which use counts, and how soon after another one it does not."""
        self.k = k
        self.correlated = correlated
        self.past = {}

    def on_insert(self, block, now):
        """Shift its past by one."""
        del now
        _, *uses = self.past.get(block.place[0], [None])
        block.data = [block.last_hit_order, block.last_hit_order, *uses]

    def on_access(self, block, now):
        """Shift its past by one, and close up the period that ends."""
        del now
        last, *uses = block.data
        if block.last_hit_order - last > self.correlated:
            uses = [block.last_hit_order, *(use + last - uses[0] for use in uses)]
        block.data = [block.last_hit_order, *uses]

    def leaves(self, block, now):
        """Remember its past."""
        del now
        self.past[block.place[0]] = block.data

    def score(self, block, _now):
        """Return its k-th last use, 0 if there is none."""
        return block.data[self.k] if len(block.data) > self.k else 0


class TailLRU(LRU):
    """What its conversation can do without, first; `data` is how far that reaches."""

    def __init__(self, threshold, turn, *, seconds=False):
        """Take the threshold, in tokens or seconds, and the tokens of the next turn."""
        self.threshold = threshold
        self.turn = turn
        self.seconds = seconds

    def on_release(self, blocks, now):
        """Let all before a block reach as far as that."""
        del now
        for block in blocks:
            for one in (block, *block.ancestors()):
                one.data = max(one.data or 0, block.position + 1)

    def score(self, block, _now):
        """Return whether without its key's blocks the next turn would be late."""
        size, ratio = self.cache.block_size, self.cache.key_tokens // self.cache.block_size
        cached = block.position // max(ratio, 1) * max(ratio, 1) * size
        missing = block.data * size - cached + self.turn
        return (self.cache.recompute(cached, missing) if self.seconds else missing) > (
            self.threshold
        )
