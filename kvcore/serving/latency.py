"""The latency contract: how long a step takes, as a maximum of integer lines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from math import isqrt
from typing import Any, ClassVar, TypeAlias

import attrs

from kvcore.cache import KVCache
from kvcore.models.cost import attended_pairs
from kvcore.plugins.base import Plugin
from kvcore.request import Request
from kvcore.serving.batching import Batching
from kvcore.units import PS_PER_NS

Windows: TypeAlias = tuple[int | None, ...]
"""Attention windows in tokens, None for attention without a window."""


Line: TypeAlias = tuple[int, ...]
"""`(a, b)`: a + b x context picoseconds. With more attention windows `(a, b, c, ...)`."""


@attrs.define
class Batch:
    """What one step computes, as far as its time depends on it.

    Attributes:
        prefill: prompt tokens, of all chunks together.
        pairs: (query, key) pairs these attend to, by attention window.
        decode: sequences that generate a token.
        context: (query, key) pairs of those tokens, by attention window: without a window
            the lengths of the sequences, the new token included.
    """

    prefill: int = 0
    pairs: tuple[int, ...] = (0,)
    decode: int = 0
    context: tuple[int, ...] = (0,)


class LatencyModel(Plugin):
    """Says how long a step of a server takes.

    The time is the largest of a few lines in the context of the decoding sequences. Their
    coefficients are whole picoseconds, so that the core sums k steps in closed form and
    gets exactly what k single steps take. More work never takes less time.
    """

    kind: ClassVar[str] = "latency"
    jumps: ClassVar[bool] = True
    """Whether the lines hold while contexts grow. If not, they hold for `batch.context`
    alone, and every step is asked for by itself."""

    @property
    def windows(self) -> Windows:
        """The attention windows it tells apart: tokens, or None for no window."""
        return (None,)

    @abstractmethod
    def pieces(self, batch: Batch) -> Sequence[Line]:
        """Return the lines whose maximum is the time of `batch`, in picoseconds.

        A line has one slope for each of `windows`. Where `jumps` is true they depend on
        `prefill`, `pairs` and `decode` alone.
        """

    def duration(self, batch: Batch) -> int:
        """Return the picoseconds that `batch` takes."""
        context = batch.context
        if len(context) == 1:
            (pairs,), longest = context, 0
            for a, b in self.pieces(batch):
                time = a + b * pairs
                if time > longest:
                    longest = time
            return longest
        return max(
            line[0] + sum(b * c for b, c in zip(line[1:], context, strict=True))
            for line in self.pieces(batch)
        )

    def coefficients(self) -> dict[str, Any]:
        """Return what the model computes with, for the header of a trace."""
        return {}


STRETCH = 256
"""Tokens for which a latency model without lines is asked once."""


class ServiceTimes:
    """Answers schedulers: what would hit, and how long work would take by the latency model."""

    def __init__(self, cache: KVCache, latency: LatencyModel, batching: Batching) -> None:
        """Take the parts that know."""
        self._cache = cache
        self._latency = latency
        self._windows = latency.windows
        self._most = batching.max_seqs

    def probe(self, request: Request, now: int) -> int:
        """Return how many prompt tokens of `request` would hit."""
        return self._cache.probe(request, now) * self._cache.geometry.block_size

    def prefill_ns(self, tokens: int, context: int) -> int:
        """Return the ns to prefill `tokens` tokens after `context` in a step of their own."""
        if not tokens:
            return 0
        windows = self._windows
        pairs = tuple(attended_pairs(context, tokens, window) for window in windows)
        batch = Batch(tokens, pairs, 0, (0,) * len(windows))
        return self._latency.duration(batch) // PS_PER_NS

    def decode_ns(self, tokens: int, context: int, sequences: int) -> int:
        """Return the ns in which `sequences` sequences generate `tokens` tokens each.

        Exact by the lines of a latency model. One that has none is taken to need, for each
        token, what it needs at the end of a stretch of contexts: stretches lie fixed, so that
        the time left never rises while tokens are generated.
        """
        count, end, time = min(sequences, self._most), context + tokens, 0
        part = self._by_lines if self._latency.jumps else self._by_samples
        while context < end:
            context, took = part(count, context, end)
            time += took
        return time // PS_PER_NS

    def _by_lines(self, count: int, context: int, end: int) -> tuple[int, int]:
        """Return up to where no window fills, at most `end`, and the ps up to there."""
        windows = self._windows
        full = (window - 1 for window in windows if window is not None)
        upto = min((at for at in full if context < at < end), default=end)
        growth = [count if window is None or context + 1 < window else 0 for window in windows]
        batch = self._step(count, context)
        times = StepTimes(self._latency.pieces(batch), batch.context, growth)
        return upto, times.total(upto - context)

    def _by_samples(self, count: int, context: int, end: int) -> tuple[int, int]:
        """Return where the stretch of `context` ends, at most `end`, and the ps up to there."""
        border = (context // STRETCH + 1) * STRETCH
        upto = min(border, end)
        longest = self._latency.duration(self._step(count, border - 1))
        return upto, (upto - context) * longest

    def _step(self, count: int, context: int) -> Batch:
        """Return a step in which `count` sequences of `context` tokens generate one more."""
        pairs = [min(context + 1, window or context + 1) for window in self._windows]
        return Batch(0, (0,) * len(pairs), count, tuple(count * each for each in pairs))


class StepTimes:
    """The times of consecutive decode steps of the same sequences, in picoseconds.

    Step i takes `max(a + b * i)` over a few lines, since the context grows by as much with
    every step. All methods are exact; they cost O(lines that are the maximum somewhere).
    """

    __slots__ = ("_lines",)

    def __init__(
        self, lines: Sequence[Line], context: Sequence[int], growth: Sequence[int]
    ) -> None:
        """Take lines in the context, the context of the first step, and what a step adds."""
        if len(growth) == 1:
            (start,), (more,) = context, growth
            if len(lines) == 1:
                a, b = lines[0]
                self._lines: Sequence[Line] = ((a + b * start, b * more),)
                return
            lines = [(a + b * start, b * more) for a, b in lines]
        else:
            lines = [
                (
                    line[0] + sum(b * c for b, c in zip(line[1:], context, strict=True)),
                    sum(b * g for b, g in zip(line[1:], growth, strict=True)),
                )
                for line in lines
            ]
        if len(lines) > 1:
            top, steepest = max(lines), max(line[1] for line in lines)
            if top[1] == steepest:
                lines = [top]
        self._lines = lines

    def segments(self, steps: int) -> Iterable[tuple[int, int, int]]:
        """Return (time of the first step, what each adds to it, steps) of straight parts."""
        lines = self._lines
        if len(lines) == 1:
            a, b = lines[0]
            return ((a, b, steps),)
        return self._parts(steps)

    def total(self, steps: int) -> int:
        """Return what the first `steps` steps take together."""
        lines = self._lines
        if len(lines) == 1:
            a, b = lines[0]
            return steps * a + b * (steps * (steps - 1) // 2)
        return sum(_sum(first, slope, count) for first, slope, count in self._parts(steps))

    def reach(self, time: int, most: int) -> int:
        """Return how many steps (at least 1) it takes until `time` has passed, or `most`."""
        lines = self._lines
        if len(lines) == 1:
            a, b = lines[0]
            if most * a + b * (most * (most - 1) // 2) < time:
                return most
            return max(1, _steps_for(a, b, most, time))
        done = 0
        for first, slope, count in self._parts(most):
            whole = _sum(first, slope, count)
            if whole >= time:
                return max(1, done + _steps_for(first, slope, count, time))
            time -= whole
            done += count
        return most

    def _parts(self, steps: int) -> Iterator[tuple[int, int, int]]:
        lines, step = self._lines, 0
        while step < steps:
            _, b, a = max((a + b * step, b, a) for a, b in lines)
            # Where a steeper line rises above this one.
            overtakes = [(a - c) // (d - b) + 1 for c, d in lines if d > b]
            end = min([*overtakes, steps])
            yield a + b * step, b, end - step
            step = end


def _sum(first: int, slope: int, count: int) -> int:
    return count * first + slope * (count * (count - 1) // 2)


def _steps_for(first: int, slope: int, count: int, time: int) -> int:
    """Return the fewest of `count` steps whose sum is at least `time`, which all reach."""
    if time <= 0:
        return 0
    if not slope:
        return -(-time // first)
    # first·k + slope·k(k-1)/2 = time, rounded down; the root may fall one short.
    p = 2 * first - slope
    steps = (isqrt(p * p + 8 * slope * time) - p) // (2 * slope)
    steps = min(max(steps, 0), count)
    while _sum(first, slope, steps) < time:
        steps += 1
    return steps
