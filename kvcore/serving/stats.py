"""Exact means and percentiles: of samples, and of weighted arithmetic progressions.

A percentile is the nearest rank: the smallest sample that at least p % of the samples do not
exceed. Samples are integers; seconds come in at the very end.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, compress, count, repeat
from operator import add, and_, gt, mul, neg
from typing import Any, TypeAlias

from kvcore.units import NS_PER_S

Distribution: TypeAlias = dict[str, float]
"""`mean`, `p50`, `p90`, `p95` and `p99`."""


Points: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Columns: values, and how often each of them occurs."""


Ramps: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
"""Columns of ascending progressions: first value, last value, step, samples in all."""


Ramp: TypeAlias = tuple[int, int, int, int]
"""A row of them."""


PERCENTS = (50, 90, 95, 99)


COMPACT_FROM = 2**16
"""Single values from which on equal ones are merged."""


SAMPLE, APART = 127, 256
"""How many values of a column are in its sample at most, and one of how many at least.

There are as many cuts as samples at most, and a cell is a byte: enough for two columns.
"""


MOST_CELLS = 2**63 - 1
"""No value is larger: they are in arrays."""


def nearest_rank(percent: int, count: int) -> int:
    """Return the rank, from 1, of a percentile among `count` samples in order."""
    return max(1, -(-percent * count // 100))


def distribution(samples: Iterable[int], unit: int) -> Distribution | None:
    """Return the distribution of `samples`, in which `unit` is 1; None without samples."""
    ordered = sorted(samples)
    if not ordered:
        return None
    count = len(ordered)
    ranks = {percent: nearest_rank(percent, count) for percent in PERCENTS}
    found = {f"p{percent}": ordered[rank - 1] / unit for percent, rank in ranks.items()}
    return {"mean": sum(ordered) / (count * unit), **found}


class Progressions:
    """A multiset of integers, kept as single values and ascending arithmetic progressions.

    Memory is 16 bytes a single value, equal ones being merged, and 32 a progression.
    """

    __slots__ = ("_compact_at", "_firsts", "_lasts", "_masses", "_steps", "_values", "_weights")

    def __init__(self) -> None:
        """Start empty."""
        self._values, self._weights = array("q"), array("q")
        self._firsts, self._lasts = array("q"), array("q")
        self._steps, self._masses = array("q"), array("q")
        self._compact_at = COMPACT_FROM

    def __len__(self) -> int:
        """Return how many single values and progressions there are."""
        return len(self._values) + len(self._firsts)

    @property
    def count(self) -> int:
        """How many samples there are."""
        return sum(self._weights) + sum(self._masses)

    def add(self, first: int, step: int, count: int, weight: int) -> None:
        """Put in `count` values from `first` on, each `weight` times. `step` is 0 or more."""
        if step and count > 1:
            self._firsts.append(first)
            self._lasts.append(first + step * (count - 1))
            self._steps.append(step)
            self._masses.append(count * weight)
        else:
            self._values.append(first)
            self._weights.append(count * weight)
            if len(self._values) >= self._compact_at:
                self._compact()

    def distribution(self, unit: int) -> Distribution | None:
        """Return mean and percentiles, exact; None without samples.

        Costs O(progressions), whatever their lengths, times the logarithm of their range for
        those that reach over a percentile; 1 byte of memory each, 11 if it spans cells.
        """
        ramps = self._firsts, self._lasts, self._steps, self._masses
        return _distribution((self._values, self._weights), ramps, unit)

    def _compact(self) -> None:
        """Merge equal single values. The next time is when there are twice as many."""
        weights: Counter[int] = Counter()
        for value, weight in zip(self._values, self._weights, strict=True):
            weights[value] += weight
        self._values = array("q", weights.keys())
        self._weights = array("q", weights.values())
        self._compact_at = max(2 * len(weights), COMPACT_FROM)


def _distribution(points: Points, ramps: Ramps, unit: int) -> Distribution | None:
    """Return the distribution of points and ramps together; None without samples."""
    (values, weights), (firsts, lasts, _, masses) = points, ramps
    total = sum(weights) + sum(masses)
    if not total:
        return None
    doubled = 2 * sum(map(mul, values, weights))
    doubled += sum(map(mul, map(add, firsts, lasts), masses))
    cells = _Cells(points, ramps)
    found = {f"p{p}": cells.at(nearest_rank(p, total)) / unit for p in PERCENTS}
    return {"mean": doubled / (2 * total * unit), **found}


class _Cells:
    """Points and ramps by cell: by how many values of a sample, the cuts, they are above.

    What is below a cell is known, so that a percentile is looked for among those in its own.
    What the sample holds twice has a cell to itself, so that it need not be looked at either,
    however often it occurs.
    """

    def __init__(self, points: Points, ramps: Ramps) -> None:
        """Sort the columns into cells."""
        (values, weights), (firsts, lasts, _, masses) = points, ramps
        sample = Counter([*_sample(values), *_sample(firsts)])
        often = (value - 1 for value, times in sample.items() if times > 1)
        cuts = sorted({*sample, *often})
        self._points, self._ramps, self._cuts = points, ramps, cuts
        self._of_points = _cells(cuts, values)
        self._of_ramps = _cells(cuts, firsts)
        begun = [0] * (len(cuts) + 1)
        _add_up(begun, self._of_points, weights)
        _add_up(begun, self._of_ramps, masses)
        # Those that end in another cell than they begin in are kept apart.
        tops = map([*cuts, MOST_CELLS].__getitem__, self._of_ramps)
        self._crossing = crossing = array("q", compress(count(), map(gt, lasts, tops)))
        self._from = bytes(map(self._of_ramps.__getitem__, crossing))
        self._to = _cells(cuts, map(lasts.__getitem__, crossing))
        ended = begun[:]
        _add_up(ended, self._from, map(neg, map(masses.__getitem__, crossing)))
        _add_up(ended, self._to, map(masses.__getitem__, crossing))
        self._begun = list(accumulate(begun))
        self._below = list(accumulate(ended, initial=0))

    def at(self, rank: int) -> int:
        """Return the sample of that rank."""
        # It is no lower than where so many have begun, and no higher than where they ended.
        low, high = bisect_left(self._begun, rank), bisect_left(self._below, rank) - 1
        cuts, (values, weights) = self._cuts, self._points
        if low == high and 0 < low < len(cuts) and cuts[low] - cuts[low - 1] == 1:
            return cuts[low]
        points = sorted(_places(self._of_points, low, high), key=values.__getitem__)
        ordered = list(map(values.__getitem__, points))
        upto = list(accumulate(map(weights.__getitem__, points), initial=0))
        from_below, into = _marks(0, low - 1), _marks(low, 255)
        reach = map(and_, self._from.translate(from_below), self._to.translate(into))
        rows = [*_places(self._of_ramps, low, high), *compress(self._crossing, reach)]
        ramps = list(
            zip(*(map(column.__getitem__, rows) for column in self._ramps), strict=True)
        )
        return _select(ordered, upto, ramps, rank - self._below[low])


def _sample(values: Sequence[int]) -> Sequence[int]:
    """Return a few of the values, evenly spaced."""
    return values[:: max(APART, len(values) // SAMPLE + 1)]


def _cells(cuts: Sequence[int], values: Iterable[int]) -> bytes:
    """Return for each value how many cuts it is above."""
    return bytes(map(bisect_left, repeat(cuts), values))


def _add_up(sums: list[int], cells: bytes, weights: Iterable[int]) -> None:
    """Add each weight to the sum of its cell."""
    for cell, weight in zip(cells, weights, strict=True):
        sums[cell] += weight


def _marks(low: int, high: int) -> bytes:
    """Return the table that translates cells from `low` to `high` to 1, all others to 0."""
    return bytes(low) + bytes([1]) * (high - low + 1) + bytes(255 - high)


def _places(cells: bytes, low: int, high: int) -> Iterator[int]:
    """Yield the places of the cells from `low` to `high`."""
    marked = cells.translate(_marks(low, high))
    place = marked.find(1)
    while place >= 0:
        yield place
        place = marked.find(1, place + 1)


def _select(values: list[int], upto: list[int], ramps: list[Ramp], rank: int) -> int:
    """Return the sample of that rank among ramps and points.

    Halves the range of values until no ramp is in it. `values` are those of the points in
    order, and `upto` says how many samples the first of them are.
    """
    low = min([*values[:1], *(first for first, _, _, _ in ramps)])
    high = max([*values[-1:], *(last for _, last, _, _ in ramps)])
    while ramps and low < high:
        middle = (low + high) // 2
        mass, ended = upto[bisect_right(values, middle)], 0
        begun, rest = [], []
        for ramp in ramps:
            first, last, step, samples = ramp
            if first <= middle:
                begun.append(ramp)
            if last <= middle:
                ended += samples
            else:
                rest.append(ramp)
                if first <= middle:
                    weight = samples // ((last - first) // step + 1)
                    mass += weight * ((middle - first) // step + 1)
        if rank <= mass + ended:
            ramps, high = begun, middle
        else:
            ramps, low, rank = rest, middle + 1, rank - ended
    return low if ramps else values[bisect_left(upto, rank) - 1]


MOST = 512
"""Samples that are kept. When there are as many, every second one is dropped."""


class PoolTimeline:
    """What the blocks of a pool are used for, from event to event.

    A block is *active* if a sequence holds it, *cached* if only the prefix cache does, so
    that it can be evicted, else *free*. What is told at an event counts until the next.
    Means and the peak are those of all events; the samples are thinned out evenly in time.

    Attributes:
        blocks: in the pool.
        peak: the most active blocks at any event.
    """

    def __init__(self, blocks: int) -> None:
        """Start with a pool that is free."""
        self.blocks = blocks
        self.peak = 0
        self._now = self._active = self._cached = 0
        self._active_area = self._cached_area = 0
        self._due = self._interval = 0
        self._times, self._actives, self._cacheds = array("q"), array("i"), array("i")

    def add(self, now: int, free: int, evictable: int) -> None:
        """Take in the state of the pool after an event at `now` (ns)."""
        held = now - self._now
        self._active_area += held * self._active
        self._cached_area += held * self._cached
        self._now, self._cached = now, evictable
        self._active = active = self.blocks - free - evictable
        if active > self.peak:
            self.peak = active
        if now >= self._due:
            self._times.append(now)
            self._actives.append(active)
            self._cacheds.append(evictable)
            if len(self._times) == MOST:
                self._thin_out()
            self._due = now + self._interval

    def summary(self, first: int, end: int) -> dict[str, Any]:
        """Return peak, means from `first` to `end` in ns (None if they are one), and samples.

        Before `first` nothing was active or cached; `end` is no earlier than the last event.
        """
        span, since = end - first, end - self._now
        times, actives, cacheds = self._times[:], self._actives[:], self._cacheds[:]
        if times and times[-1] < self._now:
            times.append(self._now)
            actives.append(self._active)
            cacheds.append(self._cached)
        areas = (
            self._active_area + since * self._active,
            self._cached_area + since * self._cached,
        )
        active, cached = (area / span if span else None for area in areas)
        return {
            "blocks": self.blocks,
            "active": {"mean": active, "peak": self.peak},
            "cached": {"mean": cached},
            "timeline": {
                "t_s": [time / NS_PER_S for time in times],
                "active": actives.tolist(),
                "cached": cacheds.tolist(),
                "free": [self.blocks - a - c for a, c in zip(actives, cacheds, strict=True)],
            },
        }

    def _thin_out(self) -> None:
        del self._times[1::2], self._actives[1::2], self._cacheds[1::2]
        span = self._times[-1] - self._times[0]
        self._interval = max(2 * self._interval, span // (MOST // 2))
