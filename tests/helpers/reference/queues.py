"""Queue policies for flat objects of one size, as published, without regard for speed."""

from __future__ import annotations

from collections import OrderedDict


class SIEVE:
    """SIEVE by algorithm 1 of its paper."""

    def __init__(self, size):
        """Store the number of objects."""
        self.size, self.queue, self.visited, self.hand = size, [], {}, None

    def hits(self, key):
        """Return True if `key` hits, and store it if not."""
        if key in self.visited:
            self.visited[key] = True
            return True
        if len(self.queue) == self.size:
            self.make_room()
        self.queue.append(key)
        self.visited[key] = False
        return False

    def make_room(self):
        """Move the hand from the oldest towards the newest, and evict where it stops."""
        at = 0 if self.hand is None else self.queue.index(self.hand)
        while self.visited[self.queue[at]]:
            self.visited[self.queue[at]] = False
            at = (at + 1) % self.size
        self.hand = self.queue[at + 1] if at + 1 < self.size else None
        del self.visited[self.queue.pop(at)]


class S3FIFO:
    """S3-FIFO by algorithm 1 of its paper.

    Where the paper is unspecific it follows the authors' simulator: uses begin at 0 in the main
    queue, a move to it evicts nothing, and a search in the small queue ends with a victim or
    with the end of the queue.
    """

    def __init__(self, size, *, small=0.1, ghost=0.9, promote=2):
        """Store the number of objects, the shares, and the hits that promote."""
        self.size, self.promote = size, promote
        self.share, self.remembered = small * size, int(ghost * size)
        self.small, self.main, self.ghosts = OrderedDict(), OrderedDict(), OrderedDict()

    def hits(self, key):
        """Return True if `key` hits, and store it if not."""
        queue = self.small if key in self.small else self.main
        if key in queue:
            queue[key] = min(queue[key] + 1, 3)
            return True
        if len(self.small) + len(self.main) == self.size:
            self.make_room()
        queue = self.main if key in self.ghosts else self.small
        self.ghosts.pop(key, None)
        queue[key] = 0
        return False

    def make_room(self):
        """Evict one object."""
        if len(self.small) >= self.share or not self.main:
            while self.small:
                key, uses = self.small.popitem(last=False)
                if uses < self.promote:
                    self.ghosts[key] = None
                    if len(self.ghosts) > self.remembered:
                        self.ghosts.popitem(last=False)
                    return
                self.main[key] = 0
        key, uses = self.main.popitem(last=False)
        while uses:
            self.main[key] = uses - 1
            key, uses = self.main.popitem(last=False)


class ARC:
    """ARC by figure 4 of its paper."""

    def __init__(self, size):
        """Store the number of objects."""
        self.size, self.target = size, 0.0
        self.once, self.again = OrderedDict(), OrderedDict()
        self.once_gone, self.again_gone = OrderedDict(), OrderedDict()

    def hits(self, key):
        """Return True if `key` hits, and store it if not."""
        if key in self.once or key in self.again:
            self.once.pop(key, None)
            self.again.pop(key, None)
            self.again[key] = None
            return True
        if key in self.once_gone or key in self.again_gone:
            self.readmit(key)
        else:
            self.admit(key)
        return False

    def readmit(self, key):
        """Store the object of a ghost, and adapt the target."""
        returns = key in self.again_gone
        once, again = len(self.once_gone), len(self.again_gone)
        if returns:
            self.target = max(self.target - max(1, once / again), 0)
        else:
            self.target = min(self.target + max(1, again / once), self.size)
        self.replace(returns=returns)
        del (self.again_gone if returns else self.once_gone)[key]
        self.again[key] = None

    def admit(self, key):
        """Store a new object."""
        known = len(self.once) + len(self.once_gone)
        total = known + len(self.again) + len(self.again_gone)
        if len(self.once) == self.size:
            self.once.popitem(last=False)
        elif known == self.size:
            self.once_gone.popitem(last=False)
            self.replace()
        elif total >= self.size:
            if total == 2 * self.size:
                self.again_gone.popitem(last=False)
            self.replace()
        self.once[key] = None

    def replace(self, *, returns=False):
        """Evict one object; `returns`: in favour of a ghost of the frequent objects."""
        held = len(self.once)
        above = held > self.target or (returns and held == self.target)
        if (held and above) or not self.again:
            self.once_gone[self.once.popitem(last=False)[0]] = None
        else:
            self.again_gone[self.again.popitem(last=False)[0]] = None
