"""Survival: how likely waits are to end at an age, and what it is worth to wait on."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from math import isqrt, prod
from operator import add, mul, truediv
from typing import TypeAlias

import attrs

from kvcore.units import NS_PER_S
from kvcore_plugins.eviction.counts import Label, Tables

_BUCKETS, _GROUP, _GROUPS = 30, 3, 10
"""Buckets of age; those that share a factor; and groups of these."""

_ENDS = [isqrt(1 << (60 + half)) for half in range(_BUCKETS - 1)]
_WIDTHS = [(end - start) / NS_PER_S for start, end in pairwise([0, *_ENDS, 2 * _ENDS[-1]])]
"""Ages in ns fall in buckets: to 2^30 (1.1 s), sqrt(2) times that, ..., 2^44 (5 h)."""

age_bucket: Callable[[int], int] = partial(bisect_right, _ENDS)
"""Return the bucket of an age in ns: half an octave."""

_TAIL, _TAIL_WAITS = [0.5] + [0.15] * len(_ENDS), 16.0
"""Hazards without observations, and the waits that this counts for: a heavy tail, by which
older waits are less likely to end."""

_STEP, _FADE = 8000, 16_000
"""A fit is due when half as many waits more, or this number, are counted; then all fade."""

_CLASSES = 4000
"""Classes that are told apart."""

OTHER = -2
"""The value of each part for all other classes."""

Row: TypeAlias = list[float]
"""Numbers by bucket of age, or by group of buckets."""

_CAP, _TINY = 0.95, 1e-6
"""The maximum of a hazard; a chance that is left in any case, so that seconds go on."""


def hazards(
    ended: Sequence[float], left: Sequence[float], prior: list[float], weight: float
) -> list[float]:
    """Return by bucket the share of the waits that end in it, of those that reach it.

    Waits that `left` a bucket without an end, and open ones, have reached only the buckets
    before it.
    """
    reached = list(accumulate(reversed([a + b for a, b in zip(ended, left, strict=True)])))
    reached.reverse()
    return [
        (end + weight * before) / (reach - lost + weight)
        for end, lost, reach, before in zip(ended, left, reached, prior, strict=True)
    ]


def indices(hazards: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Return by bucket the Gittins index: the best chance of an end per expected second.

    The best over all ages at which to give up; the seconds are those until the end, or until
    then. `widths` are the seconds of each bucket. O(buckets).
    """
    shares = [hazard if hazard < _CAP else _CAP for hazard in hazards]  # faster than min()
    chances = [*accumulate([1 - share for share in shares], mul, initial=1.0)]
    seconds = [
        (chance + _TINY) * width * (1 - share / 2)
        for chance, width, share in zip(chances, widths, shares, strict=False)
    ]
    ages = [*accumulate(seconds, initial=0.0)]
    chance, age = chances[-1], ages[-1]
    # The best slopes are those of the concave hull of chances over ages: from the last bucket
    # on, each goes to a corner of the hull, and the corners below it are dropped.
    slopes, corners, best = [], [(0.0, 0.0, 0.0)], 0.0
    for start, since in zip(chances[-2::-1], ages[-2::-1], strict=True):
        slope = (start - chance) / (age - since)
        while slope < best:
            chance, age, best = corners.pop()
            slope = (start - chance) / (age - since)
        corners.append((chance, age, best))
        chance, age, best = start, since, slope
        slopes.append(slope)
    slopes.reverse()
    return slopes


@attrs.define(eq=False)
class WaitClass:
    """The waits with the same values of all parts.

    Attributes:
        label: these values.
        counts: by group of ages, waits that ended; then, those observed no longer.
        indices: by bucket of age, the Gittins index; None from a fit until it is needed.
    """

    label: Label
    counts: Row = attrs.field(factory=lambda: [0.0] * 2 * _GROUPS)
    indices: Row | None = None


class ProportionalHazards:
    """Hazards of waits by class and age, learned online, and the Gittins indices that follow.

    A class is a label of several parts. Its hazard is that of all waits times one factor for
    the value of each part, by groups of ages. With few observations the factors are near 1 and
    the hazard near a heavy tail.

    Args:
        prior: waits by which a factor is drawn to 1.
        parts: the number of parts.

    Attributes:
        counted, fit_at: waits that are counted, of which old ones fade, and those at which the
            next fit is due.

    Source: Cox, "Regression models and life-tables", 1972.
    """

    def __init__(self, prior: float, parts: int) -> None:
        """Create a model without observations."""
        self.prior, self.counted, self.fit_at = prior, 0, 0
        # By bucket: waits that ended; then, those observed no longer; and the hazards.
        self._counts, self._hazards = [0.0] * 2 * _BUCKETS, _TAIL
        self._classes: dict[Label, WaitClass] = {}
        self._factors: list[dict[int | str | None, Row]] = [{} for _ in range(parts)]

    def kind(self, label: Label) -> WaitClass:
        """Return the class of `label`; one for all others where there are too many."""
        kind = self._classes.get(label)
        if kind is None:
            if len(self._classes) >= _CLASSES:
                label = (OTHER,) * len(label)
            kind = self._classes.setdefault(label, WaitClass(label))
        return kind

    def count(self, kind: WaitClass, bucket: int, *, ended: bool) -> None:
        """Count a wait that ended in a bucket of age, or that is observed no longer."""
        if not ended:
            bucket += _BUCKETS  # the second half of both rows: as many groups behind
        self._counts[bucket] += 1
        kind.counts[bucket // _GROUP] += 1
        self.counted += 1

    def indices(self, kind: WaitClass) -> Row:
        """Return by bucket of age the Gittins index of the waits of a class."""
        columns = zip(*[self._product(kind.label)] * _GROUP, strict=True)
        factors = chain.from_iterable(columns)  # each as often as its group has buckets
        kind.indices = indices(list(map(mul, self._hazards, factors)), _WIDTHS)
        return kind.indices

    def fit(self, running: Iterable[tuple[WaitClass, int]]) -> None:
        """Fit hazards and factors to all waits; of those that go on, give class and bucket."""
        counts = self._counts[:]
        rows = {kind: kind.counts[:] for kind in self._classes.values()}
        for (kind, bucket), count in Counter(running).items():
            if kind in rows:
                counts[_BUCKETS + bucket] += count
                rows[kind][(_BUCKETS + bucket) // _GROUP] += count
        self._hazards = hazards(counts[:_BUCKETS], counts[_BUCKETS:], _TAIL, _TAIL_WAITS)
        self._fit_factors(rows)
        step = min(self.counted // 2 + 32, _STEP)
        if self.counted > _FADE:
            self.counted //= 2
            for fading in (self._counts, *(kind.counts for kind in rows)):
                fading[:] = [count / 2 for count in fading]
            self._classes = {kind.label: kind for kind, row in rows.items() if sum(row) > 1}
        self.fit_at = self.counted + step

    def tables(self) -> Tables:
        """Return all counts, for a file."""
        classes = {label: kind.counts for label, kind in self._classes.items()}
        return {"all": {(): self._counts}, "classes": classes}

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return the lengths of labels and rows in each of the tables."""
        return {"all": (0, 2 * _BUCKETS), "classes": (len(self._factors), 2 * _GROUPS)}

    def restore(self, tables: Tables) -> None:
        """Begin with the counts of a file."""
        self._counts = [*tables["all"][()]]
        for label, counts in tables["classes"].items():
            self._classes[label] = WaitClass(label, [*counts])
        for _ in range(3):  # factors begin with those of the fit before
            self.fit([])

    def _product(self, label: Label) -> Row:
        """Return the product of the factors of the values of a class."""
        rows = [
            factors[value]
            for factors, value in zip(self._factors, label, strict=True)
            if value in factors
        ]
        return list(map(prod, zip([1.0] * _GROUPS, *rows, strict=True)))

    def _fit_factors(self, rows: dict[WaitClass, Row]) -> None:
        """Fit factors by value and group: one sweep over the parts, from the latest factors.

        A factor is the ratio of the waits that ended to those that were to be expected by the
        other factors, with a gamma prior of mean 1: over all ages, then by group. As in an
        actuary's table, waits pass through a group as the mean of those that reach its ends.
        """
        expected, ended = {}, {}
        for kind, row in rows.items():
            stops = map(add, row[_GROUPS - 1 :: -1], row[: _GROUPS - 1 : -1])
            reached = list(accumulate(stops, initial=0.0))
            expected[kind] = list(map(add, reached, reached[1:]))[::-1]  # twice the mean
            ended[kind] = row[:_GROUPS]
        totals = zip(_sums(ended.values()), _sums(expected.values()), strict=True)
        rates = [ends / (exposed or 1) for ends, exposed in totals]
        for kind, row in expected.items():
            kind.indices = None
            expected[kind] = list(map(mul, map(mul, row, rates), self._product(kind.label)))
        for part, factors in enumerate(self._factors):
            classes = defaultdict[int | str | None, list[WaitClass]](list)
            for kind in rows:
                classes[kind.label[part]].append(kind)
            for value, kinds in classes.items() if len(classes) > 1 else ():
                ends = _sums([ended[kind] for kind in kinds])
                old = factors.get(value, [1.0] * _GROUPS)
                due = list(map(truediv, _sums([expected[kind] for kind in kinds]), old))
                ratio = (sum(ends) + self.prior) / (sum(due) + self.prior)
                factors[value] = row = [
                    ratio * (count + self.prior) / (ratio * before + self.prior)
                    for count, before in zip(ends, due, strict=True)
                ]
                steps = list(map(truediv, row, old))
                for kind in kinds:
                    expected[kind] = list(map(mul, expected[kind], steps))
            if len(factors) > _CLASSES:  # of values that no class has any more
                kept = {value: row for value, row in factors.items() if value in classes}
                self._factors[part] = kept


def _sums(rows: Iterable[Row]) -> Row:
    """Return the sums of the columns."""
    return list(map(sum, zip(*rows, strict=True)))
