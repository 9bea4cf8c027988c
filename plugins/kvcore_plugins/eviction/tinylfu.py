"""W-TinyLFU: a window, and a main part that only more frequent spans enter."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar, NamedTuple

import attrs
from attrs.validators import ge, le

from kvcore import Request, ScoreEviction, Span
from kvcore.blake2 import blake2b
from kvcore.request import Key
from kvcore_plugins.bounds import bounded
from kvcore_plugins.eviction.first_use import FirstUses

PROBATION, PROTECTED, WINDOW = range(3)
"""The segments, in the order in which they are searched for a victim."""


class Position(NamedTuple):
    """The segment of a span, and its serial number in the order of that segment."""

    segment: int = WINDOW
    order: int = 0


@attrs.define(slots=False, eq=False, repr=False, on_setattr=attrs.setters.NO_OP)
class TinyLFU(ScoreEviction):
    """Admit new spans to the main part only if they are used more often than its victim.

    New spans enter the window, an LRU of a small share of the pool. While the window is larger
    than its share, its least recent span moves to the main part, a segmented LRU: to the recent
    end of probation, as a *candidate*. At the next eviction the least recent span of the main
    part, the *victim* (of probation, else of the protected segment), is compared with the
    oldest candidate that is a leaf: the less frequent one is evicted, at a tie the candidate.
    A hit in the main part moves a span to the protected segment, whose least recent spans move
    back to probation.

    Frequencies are those of block keys in a `FrequencySketch`, sized by the pool, whose
    counts are halved after `period` uses for each key of the pool.

    Fitted to spans and leaves: a use of a span is a use of each of its keys; its frequency
    is that of its last key, the one that would leave. Only leaves are candidates. The
    published policy compares when it inserts; here a new span is cached in any case, and
    compared at the next eviction. A partly evicted span stays the victim until it has left or
    is used. Segments contain whole, unpinned spans, and their sizes are blocks. O(log leaves)
    per event, O(keys) for a use.

    `span.data` is the `Position` of the span.

    Options:
        window: the share of the pool for the window, 0 to 1.
        protected: the share of the main part for the protected segment, 0 to 1.
        period: uses after which counts are halved, for each key that the pool can hold.

    Source: Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission
    policy", ACM ToS 2017 (W-TinyLFU).
    """

    name: ClassVar[str] = "tinylfu"

    window: float = bounded(0.01, "a share, 0 to 1", ge(0), le(1))
    protected: float = bounded(0.8, "a share, 0 to 1", ge(0), le(1))
    period: int = bounded(10, "1 or more uses a key", ge(1))

    _sketch: FrequencySketch | None = attrs.field(default=None, init=False)
    _compared = False
    _last_order = 0

    def attach(self, blocks: int, block_size: int) -> None:
        """Compute the capacities and create the segments."""
        super().attach(blocks, block_size)
        main = self.protected * (1 - self.window)
        self._capacity = {WINDOW: int(self.window * blocks), PROTECTED: int(main * blocks)}
        self._segments: dict[int, OrderedDict[Span, None]] = {
            WINDOW: OrderedDict(),
            PROTECTED: OrderedDict(),
        }
        self._blocks_in = {WINDOW: 0, PROTECTED: 0}
        self._candidates: OrderedDict[Span, None] = OrderedDict()
        self._loser: Span | None = None
        self._uses = FirstUses(follows=self.one_path)

    def on_insert(self, span: Span, now: int) -> None:
        """Assign `span` to the window, and count a use: not if a request returns to it."""
        span.data = Position()
        self._count(span, self._uses.count(span, span.start))

    def on_extend(self, span: Span, blocks: int) -> None:
        """Count a use of the blocks that were appended."""
        self._count(span, self._uses.count(span, span.end - blocks))

    def on_access(self, span: Span, now: int) -> None:
        """Promote `span` if it is in the main part, and count a use."""
        if span.data.segment == PROBATION:
            span.data = span.data._replace(segment=PROTECTED)
        self._uses.count(span, span.start)
        self._count(span, span.start)

    def on_end(self, request: Request, now: int) -> None:
        """Forget how far the request had come."""
        self._uses.end(request)

    def on_split(self, upper: Span, lower: Span) -> None:
        """Assign both halves to one segment; the upper is pinned and so in no order."""
        upper.data = lower.data
        if lower in self._segments.get(lower.data.segment, ()):
            self._blocks_in[lower.data.segment] -= upper.blocks
        super().on_split(upper, lower)

    def on_pin(self, span: Span) -> None:
        """Remove `span` from its segment."""
        self._take_out(span)
        super().on_pin(span)

    def on_release(self, span: Span, now: int) -> None:
        """Append `span` to its segment; move spans on if a segment is too large."""
        self._append(span, span.data.segment)
        super().on_release(span, now)
        for segment in (WINDOW, PROTECTED):
            while self._blocks_in[segment] > self._capacity[segment]:
                self._move_on(segment)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Subtract the blocks that left."""
        if span.data.segment in self._blocks_in:
            self._blocks_in[span.data.segment] -= blocks
        super().on_trim(span, blocks)

    def on_remove(self, span: Span, reason: str) -> None:
        """Remove `span` from its segment."""
        self._take_out(span)
        super().on_remove(span, reason)

    def score(self, span: Span, now: int) -> Position:
        """Return the segment of `span`, and its place in the order of that."""
        position: Position = span.data
        return position

    def victim(self, now: int) -> Span:
        """Return the less frequent of candidates and victim."""
        if self._loser is None:
            self._compared = True
            self._loser = self._least_frequent(super().victim(now))
        return self._loser

    def _least_frequent(self, victim: Span) -> Span:
        """Return `victim`, or the oldest candidate if its frequency is not higher."""
        while self._candidates:
            candidate, _ = self._candidates.popitem(last=False)
            if candidate.is_leaf:
                admitted = self._frequency(candidate) > self._frequency(victim)
                return victim if admitted else candidate
        return victim

    def _frequency(self, span: Span) -> int:
        assert self._sketch is not None
        return self._sketch.estimate(span.path_keys[(span.end - 1) // span.geometry.ratio])

    def _count(self, span: Span, start: int) -> None:
        """Count a use of each key that begins in the blocks of `span` from `start` on."""
        ratio = span.geometry.ratio
        if self._sketch is None:
            keys = max(1, self.blocks // ratio)
            self._sketch = FrequencySketch(keys, self.period * keys)
        for key in span.path_keys[-(-start // ratio) : -(-span.end // ratio)]:
            self._sketch.add(key)

    def _append(self, span: Span, segment: int) -> None:
        self._last_order += 1
        span.data = Position(segment, self._last_order)
        if segment in self._segments:
            self._segments[segment][span] = None
            self._blocks_in[segment] += span.blocks

    def _move_on(self, segment: int) -> None:
        """Move the least recent span of `segment` to probation, from the window as a candidate.

        Candidates from before the last eviction are dropped: it has decided about them.
        """
        span, _ = self._segments[segment].popitem(last=False)
        self._blocks_in[segment] -= span.blocks
        self._append(span, PROBATION)
        self.rescore(span)
        if segment == WINDOW:
            if self._compared:
                self._candidates.clear()
                self._compared = False
            self._candidates[span] = None

    def _take_out(self, span: Span) -> None:
        segment = span.data.segment
        if segment in self._segments:
            del self._segments[segment][span]
            self._blocks_in[segment] -= span.blocks
        self._candidates.pop(span, None)
        if span is self._loser:
            self._loser = None


ROWS = 4
"""Rows of the count-min sketch."""

MAX_COUNT = 15

DOORKEEPER_BITS = 8
"""Bits of the doorkeeper for each use in a period: with three hashes, 3 % are false."""

_HALVES = bytes(count >> 1 for count in range(256))


class FrequencySketch:
    """Counts the uses of about `keys` keys, up to 16, with an error that is never negative.

    The first use in a period is stored by the doorkeeper only, a Bloom filter; later ones
    count in a count-min sketch of 4 rows. After `period` uses the counts are halved and the
    doorkeeper is emptied. Keys are distinguished by a hash of their text form, the same in
    every run. O(1) a call, except the ageing, which is O(keys) every `period` uses. Memory:
    4 to 8 bytes a key, and 1 to 2 bytes a use in a period.

    Source: Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission
    policy", ACM ToS 2017, section 3; Cormode and Muthukrishnan, J. Algorithms 2005.
    """

    __slots__ = ("_counts", "_doorkeeper", "_uses", "_width", "period")

    def __init__(self, keys: int, period: int) -> None:
        """Create a sketch with all counts 0."""
        self.period = max(1, period)
        self._uses = 0
        self._width = _power_of_two(keys)
        self._counts = bytearray(ROWS * self._width)
        self._doorkeeper = bytearray(_power_of_two(DOORKEEPER_BITS * self.period) // 8)

    def add(self, key: Key) -> None:
        """Count a use of `key`."""
        first, step = _hashes(key)
        stored, bits = self._doorkeeper, self._bits(first, step)
        if all(stored[bit >> 3] >> (bit & 7) & 1 for bit in bits):
            counts = self._counts
            for cell in self._cells(first, step):
                if counts[cell] < MAX_COUNT:
                    counts[cell] += 1
        else:
            for bit in bits:
                stored[bit >> 3] |= 1 << (bit & 7)
        self._uses += 1
        if self._uses == self.period:
            self._uses //= 2
            self._counts = self._counts.translate(_HALVES)
            self._doorkeeper = bytearray(len(self._doorkeeper))

    def estimate(self, key: Key) -> int:
        """Return about how often `key` was used, 0 to 16; older uses count less."""
        first, step = _hashes(key)
        counts, stored = self._counts, self._doorkeeper
        least = min([counts[cell] for cell in self._cells(first, step)])
        bits = self._bits(first, step)
        return least + all(stored[bit >> 3] >> (bit & 7) & 1 for bit in bits)

    def _cells(self, first: int, step: int) -> tuple[int, int, int, int]:
        """Return the place of a key's count in each row."""
        width = self._width
        rest = width - 1  # the width is a power of two
        return (
            first & rest,
            width + ((first + step) & rest),
            2 * width + ((first + 2 * step) & rest),
            3 * width + ((first + 3 * step) & rest),
        )

    def _bits(self, first: int, step: int) -> tuple[int, int, int]:
        """Return the bits of a key in the doorkeeper, by one hash each."""
        rest = 8 * len(self._doorkeeper) - 1
        return first & rest, (first + step) & rest, (first + 2 * step) & rest


def _hashes(key: Key) -> tuple[int, int]:
    """Return two hashes of `key`, the second odd, so that its multiples reach every place."""
    digest = blake2b(repr(key).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8]), int.from_bytes(digest[8:]) | 1


def _power_of_two(minimum: int) -> int:
    return 1 << max(3, (minimum - 1).bit_length())
