"""A reference of cache groups: blocks with ids in lists, and each rule as it is said."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import lcm


class GroupModel:
    """The pool of a `GroupedCache`, block by block.

    Attributes:
        queue: the free blocks, the next one first.
        evicted: group and name of the evicted blocks, in order.
    """

    def __init__(self, groups, blocks, interval, in_flight):
        self.groups, self.interval, self.in_flight = groups, interval, in_flight
        self.size = lcm(*(group.block_size for group in groups))
        self.queue = list(range(blocks))
        self.evicted = []
        self._names = {}
        self._copies = defaultdict(list)  # by group and name, the oldest first
        self._holders = Counter()
        self._tables = {}  # by request and group: block by position
        self._ends = {}  # by request and group: blocks of its length so far, and named ones

    # Which prefix hits.

    def look_up(self, names, tokens):
        """Return the longest prefix of fewer than `tokens` tokens, and the junction."""
        lengths = range((tokens - 1) // self.size * self.size, -1, -self.size)
        hit = next(length for length in lengths if self._serve(names, length, self.groups))
        kinds = sorted(self.groups, key=lambda group: group.kind != "full")
        alike = [group for group in self.groups if group == kinds[0]]
        alone = next(length for length in lengths if self._serve(names, length, alike))
        return hit, alone if alone > hit else 0

    def _serve(self, names, length, groups):
        """Return True if these groups have what the tokens after `length` need."""
        return all(
            self._oldest(index, names[group.block_size], position) is not None
            for index, group in enumerate(self.groups)
            if group in groups
            for position in range(_passed(group, length), length // group.block_size)
        )

    def _oldest(self, index, names, position):
        copies = self._copies.get((index, names[position])) if position < len(names) else None
        return copies[0] if copies else None

    # One chunk of a request.

    def allocate(self, request, names, computed, tokens, prompt, junction, *, first):
        """Allocate for a chunk after `computed` tokens; return False if there is no room.

        If it is the `first` one these have hit, and the whole prompt needs room.
        """
        if first:
            held = [
                [
                    self._oldest(index, names[group.block_size], position)
                    for position in range(
                        _passed(group, computed), computed // group.block_size
                    )
                ]
                for index, group in enumerate(self.groups)
            ]
            idle = sum(not self._holders[block] for hit in held for block in hit)
            if self._fresh(computed, prompt, whole=True) + idle > len(self.queue):
                return False
            if self._fresh(computed, computed + tokens) + idle > len(self.queue):
                return False
            self._open(request, computed, held)
        else:
            self._free_passed(request, computed)
            if self._missing(request, computed + tokens) > len(self.queue):
                return False
        for index, group in enumerate(self.groups):
            end = -(-(computed + tokens) // group.block_size)
            length, named = self._ends[request][index]
            new = range(max(length, end - 1) if group.kind == "state" else length, end)
            for position in new:
                self._tables[request][index][position] = self._take()
            self._ends[request][index] = max(length, end), named
        self._name(request, names, computed + tokens, prompt, junction)
        return True

    def _fresh(self, hit, upto, *, whole=False):
        """Return how many new blocks a request needs that has hit `hit` tokens."""
        total = 0
        for group in self.groups:
            end = -(-upto // group.block_size)
            if whole and group.kind == "window":
                kept = group.window - 1 + self.in_flight
                end = min(end, -(-kept // group.block_size) + 1)
            if whole and group.kind == "chunk":
                end = min(end, -(-(group.window + self.in_flight) // group.block_size))
            new = max(0, end - hit // group.block_size)
            total += min(new, 1) if group.kind == "state" else new
        return total

    def _missing(self, request, upto):
        total = 0
        for group, (length, _) in zip(self.groups, self._ends[request], strict=True):
            new = max(0, -(-upto // group.block_size) - length)
            total += min(new, 1) if group.kind == "state" else new
        return total

    def _open(self, request, hit, held):
        self._tables[request], self._ends[request] = [], []
        for group, blocks in zip(self.groups, held, strict=True):
            for block in blocks:
                if not self._holders[block]:
                    self.queue.remove(block)
                self._holders[block] += 1
            first = _passed(group, hit)
            self._tables[request].append(dict(enumerate(blocks, first)))
            self._ends[request].append((hit // group.block_size,) * 2)

    def _take(self):
        block = self.queue.pop(0)
        name = self._names.pop(block, None)
        if name is not None:
            self.evicted.append(name)
            self._copies[name].remove(block)
        self._holders[block] = 1
        return block

    def _name(self, request, names, upto, prompt, junction):
        """Give names to the full blocks at which a request may resume."""
        if len(self.groups) > 1:
            upto -= upto % self.size
        for index, group in enumerate(self.groups):
            own = names[group.block_size]
            length, named = self._ends[request][index]
            end = min(upto // group.block_size, len(own))
            for position in range(named, end):
                block = self._tables[request][index].get(position)
                if block is not None and self._keeps(group, position, prompt, junction):
                    self._names[block] = index, own[position]
                    self._copies[index, own[position]].append(block)
            self._ends[request][index] = length, max(named, end)

    def _keeps(self, group, position, prompt, junction):
        """Return True if a request that resumes where it may needs this block."""
        end = (position + 1) * group.block_size
        if group.kind in ("full", "chunk"):
            return True
        if self.interval is None:
            resumes = range(self.size, end + self.in_flight + self.size * 99, self.size)
            if group.kind == "state":
                return True
        else:
            resumes = {each // self.size * self.size for each in (prompt - 1, junction)}
            if self.interval:
                far = end + (_need(group) + 1) * group.block_size + self.interval
                resumes.update(range(self.interval, far, self.interval))
        last = _need(group) * group.block_size
        return any(end <= resume < end + last for resume in resumes)

    # What is given back.

    def _free_passed(self, request, computed):
        for group, table in zip(self.groups, self._tables[request], strict=True):
            passed = [position for position in table if position < _passed(group, computed)]
            self._release([table.pop(position) for position in sorted(passed, reverse=True)])

    def close(self, request):
        """Free all blocks of a request."""
        for table in self._tables.pop(request, []):
            self._release([table[position] for position in sorted(table, reverse=True)])

    def _release(self, blocks):
        """Free blocks without another holder: those without a name are the next ones."""
        first = []
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                (self.queue if block in self._names else first).append(block)
        # Which of them is taken next makes no difference.
        self.queue[:0] = first


def _need(group):
    """Return how many blocks before a position a request needs that resumes there."""
    return 1 if group.kind == "state" else -(-(group.window - 1) // group.block_size)


def _passed(group, tokens):
    """Return how many first blocks no token after the first `tokens` needs."""
    if group.kind == "full" or not tokens:
        return 0
    if group.kind == "chunk":
        return tokens // group.window * group.window // group.block_size
    kept = 1 if group.kind == "state" else group.window - 1
    return max(0, tokens - kept) // group.block_size
