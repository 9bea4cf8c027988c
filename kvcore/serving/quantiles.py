"""Exact means and percentiles: of samples, of weighted samples, of arithmetic progressions.

A percentile is the nearest rank: the smallest sample that at least p % of the samples do not
exceed. Samples are integers; seconds come in at the very end.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, compress
from operator import mul
from typing import TypeAlias

Distribution: TypeAlias = dict[str, float]
"""`mean`, `p50`, `p90`, `p95` and `p99`."""

Progression: TypeAlias = tuple[int, int, int, int]
"""(first value, what each next one is larger, values, how often each of them occurs)."""

PERCENTS = (50, 90, 95, 99)

COMPACT_FROM = 2**16
"""Progressions from which on those that are a single value are merged."""

FEW = 512
"""Values that are sorted rather than narrowed down any further."""


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


def weighted_distribution(
    samples: Sequence[int], weights: Sequence[int], unit: int
) -> Distribution | None:
    """Return the distribution of `samples`, each of which occurs as often as its weight."""
    order = sorted(range(len(samples)), key=samples.__getitem__)
    upto = list(accumulate(map(weights.__getitem__, order)))
    if not upto or not upto[-1]:
        return None
    count = upto[-1]
    places = {p: bisect_left(upto, nearest_rank(p, count)) for p in PERCENTS}
    found = {f"p{p}": samples[order[place]] / unit for p, place in places.items()}
    return {"mean": sum(map(mul, samples, weights)) / (count * unit), **found}


class Progressions:
    """A multiset of integers, kept as ascending arithmetic progressions.

    Memory is 32 bytes a progression; of those that are one value, equal ones are merged.
    """

    __slots__ = ("_compact_at", "_numbers")

    def __init__(self) -> None:
        """Start empty."""
        self._numbers = array("q")
        self._compact_at = 4 * COMPACT_FROM

    def __len__(self) -> int:
        """Return how many progressions there are."""
        return len(self._numbers) // 4

    @property
    def count(self) -> int:
        """How many samples there are."""
        return sum(map(mul, self._numbers[2::4], self._numbers[3::4]))

    def add(self, first: int, step: int, count: int, weight: int) -> None:
        """Put in `count` values from `first` on, each `weight` times. `step` is 0 or more."""
        numbers = self._numbers
        if step and count > 1:
            numbers.extend((first, step, count, weight))
        else:
            numbers.extend((first, 0, 1, count * weight))
        if len(numbers) >= self._compact_at:
            self._compact()

    def distribution(self, unit: int) -> Distribution | None:
        """Return mean and percentiles, exact; None without samples.

        Two sorts bracket a percentile between the progressions that begin and those that
        end below it. Only those that reach into the bracket are looked at, and halved by
        value until few samples are left to sort: O(n log n) for n progressions, whatever
        their lengths.
        """
        firsts, steps, counts, weights = (self._numbers[place::4] for place in range(4))
        masses = list(map(mul, counts, weights))
        total = sum(masses)
        if not total:
            return None
        rises = [step * (count - 1) for step, count in zip(steps, counts, strict=True)]
        lasts = [first + rise for first, rise in zip(firsts, rises, strict=True)]
        doubled = sum(
            mass * (first + last)
            for mass, first, last in zip(masses, firsts, lasts, strict=True)
        )
        found = {"mean": doubled / (2 * total * unit)}
        begun, ended = _Ordered(firsts, masses), _Ordered(lasts, masses)
        rows = list(zip(firsts, steps, counts, weights, strict=True))
        for percent in PERCENTS:
            rank = nearest_rank(percent, total)
            low, high = begun.at(rank), ended.at(rank)
            reach = [first <= high and last >= low for first, last in zip(firsts, lasts)]  # noqa: B905 - faster
            value = _select(compress(rows, reach), rank - ended.below(low), low, high)
            found[f"p{percent}"] = value / unit
        return found

    def _compact(self) -> None:
        """Merge equal single values. The next time is when there are twice as many."""
        points: Counter[int] = Counter()
        kept = array("q")
        numbers = iter(self._numbers)
        for row in zip(numbers, numbers, numbers, numbers, strict=True):
            first, step, _, weight = row
            if step:
                kept.extend(row)
            else:
                points[first] += weight
        for value, weight in points.items():
            kept.extend((value, 0, 1, weight))
        self._numbers = kept
        self._compact_at = max(2 * len(kept), 4 * COMPACT_FROM)


class _Ordered:
    """Values in order, with the weight up to each."""

    def __init__(self, values: Sequence[int], weights: Sequence[int]) -> None:
        order = sorted(range(len(values)), key=values.__getitem__)
        self._values = list(map(values.__getitem__, order))
        self._upto = list(accumulate(map(weights.__getitem__, order)))

    def at(self, rank: int) -> int:
        """Return the value of that rank."""
        return self._values[bisect_left(self._upto, rank)]

    def below(self, value: int) -> int:
        """Return the weight of the values below `value`."""
        place = bisect_left(self._values, value)
        return self._upto[place - 1] if place else 0


def _select(rows: Iterable[Progression], rank: int, low: int, high: int) -> int:
    """Return the value of that rank in `rows`; it is one from `low` to `high`."""
    below, rest = _split(rows, low - 1)
    rank -= _mass(below)
    live, _ = _split(rest, high)
    while sum(count for _, _, count, _ in live) > max(FEW, 2 * len(live)):
        middle = (low + high) // 2
        below, rest = _split(live, middle)
        mass = _mass(below)
        if rank <= mass:
            live, high = below, middle
        else:
            live, low, rank = rest, middle + 1, rank - mass
    values = sorted(
        (first + step * place, weight)
        for first, step, count, weight in live
        for place in range(count)
    )
    upto = list(accumulate(weight for _, weight in values))
    return values[bisect_left(upto, rank)][0]


def _split(rows: Iterable[Progression], at: int) -> tuple[list[Progression], list[Progression]]:
    """Return the parts of `rows` up to the value `at`, and those above it."""
    lower, upper = [], []
    for row in rows:
        first, step, count, weight = row
        fit = 0 if first > at else (at - first) // step + 1 if step else count
        if fit >= count:
            lower.append(row)
        elif not fit:
            upper.append(row)
        else:
            lower.append((first, step, fit, weight))
            upper.append((first + step * fit, step, count - fit, weight))
    return lower, upper


def _mass(rows: Iterable[Progression]) -> int:
    return sum(count * weight for _, _, count, weight in rows)
