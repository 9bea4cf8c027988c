"""The model of `hazard`: chances by class and age, learned online, and the order of leaves."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import isqrt
from operator import add, mul, truediv
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from kvcore import EvictionPolicy, InputError, Span
from kvcore.files import atomic_file
from kvcore.request import Key
from kvcore.units import NS_PER_S

_BUCKETS = 33
ENDS = [isqrt(1 << (60 + half)) for half in range(_BUCKETS - 1)]
"""Ages in ns fall in buckets: to 2^30 (1.1 s), sqrt(2) times that, ..., 2^45.5 (14 h)."""

_WIDTHS = [
    (end - start) / NS_PER_S
    for start, end in zip([0, *ENDS], [*ENDS, 2 * ENDS[-1]], strict=True)
]
_GROUP = 3
"""Buckets that share a factor."""

_TAIL = [0.5] + [0.15] * (_BUCKETS - 1)
"""Hazards without observations: a heavy tail, by which older waits are less likely to end."""

_TAIL_WAITS = 16.0
"""Waits that this counts for."""

_CAP, _ALIVE = 0.95, 1e-6
"""The maximum of a hazard; the minimum of the chance that a wait goes on."""

_FADE = 16_000
"""Waits after which all counts are halved."""

_GROWTH, _STEP = 3, 6000
"""The model is fitted when a third more waits, or this number, have been counted."""

_SCANS = 16
"""Of the leaves, the share that are candidates after a scan."""

_FORMAT, _VERSION, _FILE_BYTES, _MOST = "kvcore hazard counts", 1, 1 << 26, 1e12

Row: TypeAlias = list[float]
"""Numbers by bucket of age, or by group of buckets."""


class Waits:
    """Counts of waits by age.

    Attributes:
        values: for a class, the value of each part that its waits have in common.
        pool: for a class, the counts by bucket of all waits, whose hazards its factors
            multiply; for these counts, themselves.
        ended: the waits that ended with a use.
        left: the waits whose ghosts were dropped.
        waiting: `left`, and at the latest fit the waits that went on.
        hazards: for a pool, the share of the waits that reach a bucket which end in it.
        indices: for a class, the Gittins index by bucket; None after a fit.
    """

    __slots__ = ("ended", "hazards", "indices", "left", "pool", "values", "waiting")

    def __init__(self, pool: Waits | None = None, values: tuple[Any, ...] = ()) -> None:
        """Create empty counts, by group for a class with a pool, and else by bucket."""
        size = _BUCKETS if pool is None else _BUCKETS // _GROUP
        self.ended, self.left, self.waiting = ([0.0] * size for _ in range(3))
        self.hazards, self.indices = _TAIL, list[float]()
        self.pool, self.values = pool or self, values


class Wait:
    """The time since a use of a span, which ends with the next one; ghosts share it.

    Attributes:
        turns: the number of requests of the conversation when the span was computed.
        pause: ns between the last two uses; -1 before there are two.
        maker: the id of the request that computed the span.
        since: the time in ns at which the use ended.
        conversation: a hash of the first key of the conversation.
        counts: whether it is counted: of the spans of a request, the first is.
        kind: its class; None while the span is in use.
        last: whether the last key of the prompt is to be evicted by itself.
        last_key: that key, once it is evicted.
        ghost: the first of the other evicted keys.
        entry: serial number of the span in the order of leaves; 0 outside.
    """

    __slots__ = (
        "conversation", "counts", "entry", "ghost", "kind", "last", "last_key", "maker",
        "pause", "since", "turns",
    )  # fmt: skip

    def __init__(
        self, turns: int, pause: int, since: int, maker: int | str, conversation: int
    ) -> None:
        self.turns, self.pause, self.since = turns, pause, since
        self.maker, self.conversation = maker, conversation
        self.counts, self.last, self.entry = True, False, 0
        self.kind: Any = None
        self.last_key: Key = None
        self.ghost: Key = None

    def next(self, pause: int, since: int) -> Wait:
        """Return the wait that follows."""
        wait = Wait(self.turns, pause, since, self.maker, self.conversation)
        wait.counts = self.counts
        return wait


class Model:
    """Hazards of waits by class and age, learned online, and the indices that follow."""

    def __init__(self, prior: float) -> None:
        """Create a model without observations; `prior` is the option of `Hazard`."""
        self.prior = prior
        self.all, self.passed = Waits(), Waits()
        self.passed_by = Waits(self.passed)
        self.classes: dict[tuple[Any, ...], Waits] = {}
        self.factors: list[dict[Any, Row]] = []
        # Of last keys, those that were used with the rest, and those that were not.
        self.whole, self.parted, self.last_chance = 4.0, 0.5, 0.9
        self.counted = self.fit_at = 0
        self.fade_at = _FADE

    def count(self, wait: Wait, now: int, *, used: bool = True) -> None:
        """Count a wait that ended with a use, or else is observed no longer."""
        if wait.counts:
            kind, bucket = wait.kind, bisect_right(ENDS, now - wait.since)
            pool = kind.pool
            (pool.ended if used else pool.left)[bucket] += 1
            (kind.ended if used else kind.left)[bucket // _GROUP] += 1
            self.counted += 1

    def count_last(self, *, used: bool) -> None:
        """Count a last key that was used together with the rest of its span, or not."""
        if used:
            self.whole += 1
        else:
            self.parted += 1

    def indices(self, kind: Waits) -> Row:
        """Return the Gittins index of `kind` by bucket, computed once after a fit."""
        hazards, factors = kind.pool.hazards, self._factors(kind)
        if factors is not None:
            hazards = list(map(mul, hazards, [f for f in factors for _ in range(_GROUP)]))
            hazards = [min(hazard, _CAP) for hazard in hazards]
        kind.indices = gittins(hazards)
        return kind.indices

    def fit(self, waits: list[Wait], now: int) -> None:
        """Fit hazards and factors to all waits so far, of which `waits` go on."""
        kinds = list(self.counts())
        for kind in kinds:
            kind.waiting, kind.indices = kind.left[:], []
        for wait in waits:
            kind, bucket = wait.kind, bisect_right(ENDS, now - wait.since)
            kind.pool.waiting[bucket] += 1
            kind.waiting[bucket // _GROUP] += 1
        _fit_hazards(self.all, _TAIL)
        _fit_hazards(self.passed, self.all.hazards)
        self._fit_factors()
        self.last_chance = self.whole / (self.whole + self.parted or 1.0)
        step = max(_STEP, len(waits) // 2)
        self.fit_at = self.counted + min(self.counted // _GROWTH + 32, step)
        if self.counted > self.fade_at:
            self.fade_at = self.counted + _FADE
            self.whole, self.parted = self.whole / 2, self.parted / 2
            for kind in kinds:
                kind.ended = [count / 2 for count in kind.ended]
                kind.left = [count / 2 for count in kind.left]
            self.classes = {
                values: kind
                for values, kind in self.classes.items()
                if sum(kind.ended) + sum(kind.waiting) > 1
            }

    def counts(self) -> Iterator[Waits]:
        """Yield all counts: the two pools, what was passed by, and the classes."""
        yield from (self.all, self.passed, self.passed_by)
        yield from self.classes.values()

    def restore(self, counts: dict[str, Any]) -> None:
        """Begin with the counts that `read_counts` has returned."""
        self.whole, self.parted = counts["last"]
        for values, _, _ in counts["waits"][3:]:
            self.classes[tuple(values)] = Waits(self.all, tuple(values))
        for kind, (_, ended, left) in zip(self.counts(), counts["waits"], strict=True):
            kind.ended, kind.left = ended, left
        for _ in range(3):  # factors begin with those of the fit before
            self.fit([], 0)

    def _factors(self, kind: Waits) -> Row | None:
        """Return the product of the factors of the values of a class; None without any."""
        product: Row | None = None
        for factors, value in zip(self.factors, kind.values, strict=False):
            row = factors.get(value)
            if row is not None:
                product = row if product is None else list(map(mul, product, row))
        return product

    def _fit_factors(self) -> None:
        """Fit factors by value and group: one sweep over the parts, from the latest factors.

        A factor is the ratio of the waits that ended to those that were to be expected by the
        other factors, with a gamma prior of mean 1: over all ages, then by group.
        """
        expected, prior = self._expected(), self.prior
        parts: list[dict[Any, list[Waits]]] = [{} for _ in next(iter(self.classes), ())]
        for kind in self.classes.values():
            for classes, value in zip(parts, kind.values, strict=True):
                classes.setdefault(value, []).append(kind)
        self.factors = self.factors or [{} for _ in parts]
        for factors, classes in zip(self.factors, parts, strict=True):
            if len(classes) == 1:
                continue  # it would repeat the hazards of all
            for value, members in classes.items():
                ended = list(map(sum, zip(*[kind.ended for kind in members], strict=True)))
                due = list(map(sum, zip(*[expected[kind] for kind in members], strict=True)))
                old = factors.get(value)
                if old is not None:
                    due = list(map(truediv, due, old))
                ratio = (sum(ended) + prior) / (sum(due) + prior)
                row = [
                    ratio * (count + prior) / (ratio * before + prior)
                    for count, before in zip(ended, due, strict=True)
                ]
                factors[value] = row
                steps = row if old is None else list(map(truediv, row, old))
                for kind in members:
                    expected[kind] = list(map(mul, expected[kind], steps))

    def _expected(self) -> dict[Waits, Row]:
        """Return by class the waits that were to end in each group by hazards and factors.

        A wait that stops in a group has gone through a part of it: the mean of all waits.
        """
        through, until_end, until_stop = list[float](), list[float](), list[float]()
        for first in range(0, _BUCKETS, _GROUP):
            group = slice(first, first + _GROUP)
            sums = [0.0, *accumulate(self.all.hazards[group])]
            ended, waiting = self.all.ended[group], self.all.waiting[group]
            through.append(sums[-1])
            until_end.append(sum(map(mul, ended, sums[1:])) / (sum(ended) or 1))
            until_stop.append(sum(map(mul, waiting, sums)) / (sum(waiting) or 1))
        expected = {}
        for kind in self.classes.values():
            stops = list(map(add, kind.ended, kind.waiting))
            later = [*accumulate(stops[:0:-1], initial=0.0)][::-1]
            here = map(add, map(mul, kind.ended, until_end), map(mul, kind.waiting, until_stop))
            row: Row = list(map(add, map(mul, later, through), here))
            factors = self._factors(kind)
            expected[kind] = row if factors is None else list(map(mul, row, factors))
        return expected


class LeafOrder(EvictionPolicy):
    """Evicts the leaf with the lowest index of a model.

    A scan computes the indices of all leaves; the lowest are the candidates, and so are leaves
    that come later with an index as low. The next scan follows when these are used up, or when
    the ages of the leaves have grown by a share. O(leaves) for each share of them that leaves.
    """

    def follow(self, model: Model) -> None:
        """Use the indices of `model`; create the empty order."""
        self.model = model
        self._leaves: dict[Span, Wait] = {}
        self._candidates: list[tuple[float, int, int, Span, Wait]] = []
        self._limit = 0.0
        self._now = self._entries = self._scan_at = self._fit_at = 0

    def enter(self, span: Span, wait: Wait) -> None:
        """Insert a leaf, or move it when its wait has changed."""
        self._leaves[span] = wait
        self._entries = wait.entry = entry = self._entries + 1
        indices = wait.kind.indices or self.model.indices(wait.kind)
        index = indices[bisect_right(ENDS, self._now - wait.since)]
        if wait.last:
            index *= self.model.last_chance
        if index <= self._limit:
            heappush(self._candidates, (index, wait.since, entry, span, wait))

    def leave(self, span: Span) -> None:
        """Remove a leaf."""
        self._leaves.pop(span).entry = 0

    def on_pin(self, span: Span) -> None:
        """Remove `span` from the order."""
        if not span.children:
            self.leave(span)

    def on_leaf(self, span: Span) -> None:
        """Insert a span that has become a leaf."""
        self.enter(span, span.data)

    def evictable_blocks(self, span: Span) -> int:
        """Return the blocks of the last key while that goes by itself, else all."""
        blocks = span.end - span.start
        if span.data.last:
            return min((span.end - 1) % span.geometry.ratio + 1, blocks)
        return blocks

    def victim(self, now: int) -> Span:
        """Return the candidate with the lowest index."""
        self._now = now
        if now >= self._scan_at or self._fit_at != self.model.fit_at:
            self._scan(now)
        while True:
            candidates = self._candidates
            while candidates:
                _, _, entry, span, wait = candidates[0]
                if wait.entry == entry:
                    return span
                heappop(candidates)
            self._scan(now)

    def _scan(self, now: int) -> None:
        """Find the candidates."""
        model, leaves = self.model, self._leaves
        chances, waits = (1.0, model.last_chance), list(leaves.values())
        ages = [now - wait.since for wait in waits]
        indices = [
            (wait.kind.indices or model.indices(wait.kind))[bisect_right(ENDS, age)]
            * chances[wait.last]
            for wait, age in zip(waits, ages, strict=True)
        ]
        self._fit_at = model.fit_at
        self._scan_at = now + 1 + sum(ages) // (_SCANS * len(ages))
        self._limit = limit = sorted(indices)[len(ages) // _SCANS]
        self._candidates = [
            (index, wait.since, wait.entry, span, wait)
            for index, (span, wait) in zip(indices, leaves.items(), strict=True)
            if index <= limit
        ]
        heapify(self._candidates)


def _fit_hazards(waits: Waits, prior: Row) -> None:
    """Compute the hazards of a pool, near `prior` where few waits reached a bucket."""
    reached = [*accumulate(map(add, waits.ended[::-1], waits.waiting[::-1]))][::-1]
    waits.hazards = [
        (end + _TAIL_WAITS * before) / (reach - stop + _TAIL_WAITS)
        for end, stop, reach, before in zip(
            waits.ended, waits.waiting, reached, prior, strict=True
        )
    ]


def gittins(hazards: Row) -> Row:
    """Return by bucket the best chance of an end per expected second of waiting for it.

    The best over all ages at which to give up: the slopes of the least concave majorant of
    chance over seconds, drawn from the right. O(buckets).
    """
    alive = [*accumulate([1 - hazard for hazard in hazards], mul, initial=1.0)]
    seconds = [
        max(reach, _ALIVE) * width * (1 - hazard / 2)
        for reach, width, hazard in zip(alive, _WIDTHS, hazards, strict=False)
    ]
    ages = [*accumulate(seconds, initial=0.0)]
    right, below, hull, indices = (
        ages.pop(),
        alive.pop(),
        list[tuple[float, float]](),
        list[float](),
    )
    for age, reach in zip(reversed(ages), reversed(alive), strict=True):
        best = (reach - below) / (right - age)
        while hull:
            slope = (reach - hull[-1][1]) / (hull[-1][0] - age)
            if slope < best:
                break
            best, (right, below) = slope, hull.pop()
        indices.append(best)
        hull.append((right, below))
        right, below = age, reach
    return indices[::-1]


def write_counts(path: Path, model: Model, by: str) -> None:
    """Write the counts of `model` as JSON, for `read_counts`; the file is whole or absent."""
    rows = [(list(kind.values), kind.ended, kind.left) for kind in model.counts()]
    last = [model.whole, model.parted]
    document = {"format": _FORMAT, "version": _VERSION, "by": by, "last": last, "waits": rows}
    with atomic_file(path) as file:
        file.write(orjson.dumps(document).decode())


def read_counts(path: Path, by: str) -> dict[str, Any]:
    """Return the counts in a file of `write_counts`, for `Model.restore`.

    Raises:
        InputError: there are none, or those of other classes or of another version.
    """
    document: Any = None
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES)
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    else:
        with suppress(ValueError):  # a longer file is cut, and so no JSON either
            document = orjson.loads(data)
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            why = "has no counts of hazard"
        elif (document.get("version"), document.get("by")) != (_VERSION, by):
            why = f"has version {document.get('version')} and by={document.get('by')}"
        elif not _is_sound(document):
            why = "is damaged"
        else:
            return document
    msg = f"hazard: load={path} {why}; name a file of save= with by={by}, or leave it out"
    raise InputError(msg)


def _is_sound(document: dict[str, Any]) -> bool:
    """Return True if a document has rows of counts of the right lengths."""
    parts = len(document["by"].split("+"))
    try:
        sizes = [(0, _BUCKETS)] * 2 + [(0, _BUCKETS // _GROUP)]
        sizes += [(parts, _BUCKETS // _GROUP)] * (len(document["waits"]) - len(sizes))
        rows = [(document["last"], 2)]
        for (values, ended, left), (width, size) in zip(document["waits"], sizes, strict=True):
            rows += [(ended, size), (left, size)]
            if len(values) != width or not {*map(type, values)} <= {int, str, type(None)}:
                return False
        classes = {tuple(values) for values, _, _ in document["waits"][3:]}
        return len(classes) == len(document["waits"]) - 3 and all(
            len(row) == size
            and all(type(count) in (int, float) and 0 <= count < _MOST for count in row)
            for row, size in rows
        )
    except (KeyError, TypeError, ValueError):
        return False
