"""A histogram of bounded memory whose percentiles are at most 1 % too large."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate, compress, repeat
from operator import mul
from typing import Any

from kvcore.units import INT64_LIMIT

PERCENTS = (50, 90, 95, 99)
"""The percentiles of all reports, in the order of the fields of `Percentiles`."""

EXACT = 200
"""Values below this have a bucket each: one of two values would be wider than 1 % of them."""


@cache
def borders() -> list[int]:
    """Return the largest value of each bucket, ascending: about 6,000 values.

    From 1 to 2, 2 to 5 and 5 to 10 times a power of ten, their distances are 0.01, 0.02 and
    0.05 times that power. So they are round numbers, and contain 1, 2, 5, 10, 20, ...
    """
    largest, decade = list(range(EXACT)), EXACT // 2
    while largest[-1] < INT64_LIMIT:
        step = decade // 100
        for first, after, wide in ((2, 5, 2), (5, 10, 5), (10, 20, 10)):
            largest.extend(range(first * decade, after * decade, wide * step))
        decade *= 10
    return largest


def nearest_rank(percent: int, count: int) -> int:
    """Return the rank, from 1, of a percentile among `count` ordered samples."""
    return max(1, -(-percent * count // 100))


class Histogram:
    """A multiset of integers from 0 on, each with a weight, in buckets of about 1 %.

    Weight, sum and maximum are exact. The width of a bucket is at most 1 % of its values, and
    values below 200 have a bucket each. A percentile is the largest value of its bucket, or
    the maximum if that is lower: never too small, and at most 1 % too large. The number of
    samples up to a border, such as 1, 2 or 5 times a power of ten, is exact.

    A sample costs O(1): a bisection among `borders()`. Memory is one number for each bucket
    in use, about 6,000 at most.

    Source: HdrHistogram (Tene) and DDSketch (Masson, Rim and Lee, 2019) have fixed buckets of
    bounded relative error; the borders there are powers of 2, or of a base, and round numbers
    here.

    Attributes:
        weight: sum of the weights of all samples.
        total: sum of values times weights.
        high: the largest sample.
    """

    __slots__ = ("_borders", "_weights", "high", "total", "weight")

    def __init__(self) -> None:
        """Create a histogram without samples."""
        self.weight = self.total = self.high = 0
        self._borders = borders()
        self._weights: defaultdict[int, int] = defaultdict(int)

    def extend(self, values: Sequence[int], weights: Sequence[int]) -> None:
        """Add each of `values`, of which there is one or more, as many times as its weight."""
        self._sum_up(sum(weights), sum(map(mul, values, weights)), max(values))
        # All buckets lie between those of the least and of the greatest value; as many values
        # share few of them, those of equal bucket and weight are counted together.
        borders, counts = self._borders, self._weights
        first = bisect_left(borders, min(values))
        last = bisect_left(borders, max(values), first)
        buckets = map(bisect_left, repeat(borders), values, repeat(first), repeat(last))
        for (bucket, weight), times in Counter(zip(buckets, weights, strict=True)).items():
            counts[bucket] += weight * times

    def add_ascending(self, times: Sequence[int], since: int) -> None:
        """Add the difference from `since` to each of `times`, one or more, which ascend.

        O(buckets between the first and the last), and one addition for each time.
        """
        count, last = len(times), times[-1] - since
        self._sum_up(count, sum(times) - count * since, last)
        borders, counts = self._borders, self._weights
        bucket, done = bisect_left(borders, times[0] - since), 0
        while borders[bucket] < last:
            upto = bisect_right(times, borders[bucket] + since, done)
            counts[bucket] += upto - done
            done = upto
            bucket = bisect_left(borders, times[done] - since, bucket)
        counts[bucket] += count - done

    def add_progression(self, first: int, step: int, count: int, weight: int) -> None:
        """Add `first`, `first + step`, ... (`count` values), each `weight` times.

        `step` and `count` are above 0. Costs O(buckets between the first and the last value).
        """
        last = first + step * (count - 1)
        self._sum_up(count * weight, weight * (first + last) * count // 2, last)
        borders, counts = self._borders, self._weights
        bucket, done = bisect_left(borders, first), 0
        while borders[bucket] < last:
            upto = (borders[bucket] - first) // step + 1
            counts[bucket] += (upto - done) * weight
            done = upto
            bucket = bisect_left(borders, first + step * done, bucket)
        counts[bucket] += (count - done) * weight

    def add_weights(self, weights: bytes, weight: int, total: int, high: int) -> None:
        """Add samples that the core in C has counted, with their weight, sum and maximum.

        `weights` has the weight in each bucket, as machine integers of 8 bytes.
        """
        self._sum_up(weight, total, high)
        counts = memoryview(weights).cast("q").tolist() if weight else ()
        for bucket in compress(range(len(counts)), counts):  # few buckets have any
            self._weights[bucket] += counts[bucket]

    def merge(self, other: Histogram) -> None:
        """Add the samples of another histogram. O(its buckets)."""
        self._sum_up(other.weight, other.total, other.high)
        for bucket, weight in other._weights.items():
            self._weights[bucket] += weight

    def _sum_up(self, weight: int, total: int, high: int) -> None:
        """Add samples to the exact figures, though not to the buckets."""
        self.weight += weight
        self.total += total
        self.high = max(self.high, high)

    def at_most(self, bounds: Iterable[int]) -> list[int]:
        """Return for each of `bounds` the number of samples up to it.

        It is exact for borders; for another bound the samples in its bucket are not counted.
        """
        buckets = sorted(self._weights)
        upto = list(accumulate((self._weights[bucket] for bucket in buckets), initial=0))
        ends = (bisect_right(self._borders, bound) for bound in bounds)
        return [upto[bisect_left(buckets, end)] for end in ends]

    def percentiles(self) -> dict[str, int] | None:
        """Return `p50`, `p90`, `p95` and `p99`, by nearest rank; None without samples."""
        if not self.weight:
            return None
        buckets = sorted(self._weights)
        upto = list(accumulate(self._weights[bucket] for bucket in buckets))
        values = {}
        for percent in PERCENTS:
            rank = nearest_rank(percent, self.weight)
            border = self._borders[buckets[bisect_left(upto, rank)]]
            values[f"p{percent}"] = min(border, self.high)
        return values

    def as_dict(self, unit: int, bounds: Iterable[int], counted: str) -> dict[str, Any] | None:
        """Return the JSON object of the histogram in units of `unit`; None without samples.

        Its weight is under the name of what is counted, such as `blocks`; `buckets` maps each
        of `bounds`, in units, to the weight up to the bound.
        """
        percentiles = self.percentiles()
        if percentiles is None:
            return None
        bounds = list(bounds)
        names = (f"{bound / unit:.15g}" for bound in bounds)
        return {
            counted: self.weight,
            "sum": self.total / unit,
            "mean": self.total / (self.weight * unit),
            **{name: value / unit for name, value in percentiles.items()},
            "buckets": dict(zip(names, self.at_most(bounds), strict=True)),
        }
