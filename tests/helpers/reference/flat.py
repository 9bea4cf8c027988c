"""Published policies for single objects of one size, as in their papers."""

from __future__ import annotations

from collections import Counter, OrderedDict


class LRUK:
    """O'Neil, O'Neil and Weikum 1993, figure 2.1, with a bounded history of evicted pages.

    One thing is left out: a page in its correlated period may be evicted.
    """

    def __init__(self, size, *, k=2, correlated=0, history=1.0):
        """Store the size of the buffer; `history` is its share that evicted pages have."""
        self.size, self.k, self.correlated = size, k, correlated
        self.history = int(history * size)
        self.now = 0
        self.last: dict[object, int] = {}
        self.hist: dict[object, list[int]] = {}
        self.gone: OrderedDict[object, list[int]] = OrderedDict()

    def hits(self, page):
        """Return True if `page` hits, and store it if not."""
        self.now += 1
        if page in self.last:
            if self.now - self.last[page] > self.correlated:
                period = self.last[page] - self.hist[page][0]
                older = [time + period if time else 0 for time in self.hist[page][:-1]]
                self.hist[page] = [self.now, *older]
            self.last[page] = self.now
            return True
        if len(self.last) == self.size:
            victim = min(self.last, key=lambda page: (self.hist[page][-1], self.last[page]))
            del self.last[victim]
            self.gone[victim] = self.hist.pop(victim)
            self.gone.move_to_end(victim)
            if len(self.gone) > self.history:
                self.gone.popitem(last=False)
        self.hist[page] = [self.now, *self.gone.get(page, [0] * self.k)[:-1]]
        self.last[page] = self.now
        return False


class Counts:
    """The counts of an ideal frequency sketch, which never confuses two keys."""

    def __init__(self, period):
        """Store the number of uses after which counts are halved."""
        self.period = period
        self.uses = 0
        self.counts: Counter[object] = Counter()
        self.seen: set[object] = set()

    def add(self, key):
        """Count a use; the first one in a period is only marked as seen."""
        if key in self.seen:
            self.counts[key] = min(15, self.counts[key] + 1)
        self.seen.add(key)
        self.uses += 1
        if self.uses == self.period:
            self.uses //= 2
            self.seen.clear()
            for count in self.counts:
                self.counts[count] //= 2

    def estimate(self, key):
        """Return the estimated number of uses of `key`."""
        return self.counts[key] + (key in self.seen)


class TinyLFU:
    """Einziger, Friedman and Manes 2017 (W-TinyLFU): a window, and an SLRU behind a filter.

    A variant: the item that left the window last is compared when room is needed next. Uses
    are counted without error.
    """

    def __init__(self, size, *, window=0.01, protected=0.8, period=10):
        """Store the size of the cache, and the shares of window and protected segment."""
        self.size, self.counts = size, Counts(period * size)
        self.sizes = int(window * size), int(protected * (1 - window) * size)
        self.window: OrderedDict[object, None] = OrderedDict()
        self.probation: OrderedDict[object, None] = OrderedDict()
        self.protected: OrderedDict[object, None] = OrderedDict()
        self.trial: list[object] = []
        self.evicted = False

    def hits(self, item):
        """Return True if `item` hits, and store it if not."""
        segments = (self.window, self.probation, self.protected)
        inside = next((one for one in segments if item in one), None)
        if inside is None and sum(map(len, segments)) == self.size:
            self.evict()
        if item in self.trial:
            self.trial.remove(item)
        self.counts.add(item)
        if inside is None or inside is self.window:
            self.window[item] = None
            self.window.move_to_end(item)
        else:
            del inside[item]
            self.protected[item] = None
        if len(self.window) > self.sizes[0]:
            candidate, _ = self.window.popitem(last=False)
            self.probation[candidate] = None
            self.trial = [candidate] if self.evicted else [*self.trial, candidate]
            self.evicted = False
        if len(self.protected) > self.sizes[1]:
            demoted, _ = self.protected.popitem(last=False)
            self.probation[demoted] = None
        return inside is not None

    def evict(self):
        """Evict the less used of two: the least recent item, and the first on trial."""
        self.evicted = True
        segment = self.probation or self.protected or self.window
        victim = next(iter(segment))
        if self.trial:
            candidate = self.trial.pop(0)
            if self.counts.estimate(candidate) <= self.counts.estimate(victim):
                segment, victim = self.probation, candidate
        del segment[victim]
        if victim in self.trial:
            self.trial.remove(victim)
