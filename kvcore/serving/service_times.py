"""How long work takes by a latency model: decode steps in closed form, and estimates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isqrt
from typing import Final

from kvcore.cache import KVCache
from kvcore.models.cost import attended_pairs
from kvcore.request import Request
from kvcore.serving.latency import LatencyModel, LinearPiece, StepWork, decode_lines
from kvcore.units import PS_PER_NS


class StepTimes:
    """The times of consecutive decode steps of the same sequences, in picoseconds.

    Step i takes `max(a + b * i)` over a few lines, since the context grows by the same with
    every step. All methods are exact; they cost O(lines that are the maximum somewhere).

    Attributes:
        line: (a, b) of the only line; None: there are several.
    """

    __slots__ = ("_lines", "line")

    def __init__(
        self, pieces: Sequence[LinearPiece], context: Sequence[int], growth: Sequence[int]
    ) -> None:
        """Turn lines in the context into lines in the number of the step.

        Args:
            pieces: lines in the context.
            context: the context of the first step, by attention window.
            growth: tokens that each step adds to it.
        """
        self._lines: Sequence[tuple[int, int]] = ()
        if len(growth) == 1:
            start, more = context[0], growth[0]
            if len(pieces) == 1:
                a, b = pieces[0]
                self.line: tuple[int, int] | None = (a + b * start, b * more)
                return
            lines = [(a + b * start, b * more) for a, b in pieces]
        else:
            lines = [
                (
                    piece[0] + sum(b * c for b, c in zip(piece[1:], context, strict=True)),
                    sum(b * g for b, g in zip(piece[1:], growth, strict=True)),
                )
                for piece in pieces
            ]
        if len(lines) > 1:
            top, steepest = max(lines), max(line[1] for line in lines)
            if top[1] == steepest:
                lines = [top]
        self._lines, self.line = lines, lines[0] if len(lines) == 1 else None

    def segments(self, steps: int) -> Iterable[tuple[int, int, int]]:
        """Return (ps of the first step, ps that each adds, steps) of straight parts."""
        line = self.line
        return self._parts(steps) if line is None else ((*line, steps),)

    def total(self, steps: int) -> int:
        """Return the picoseconds that the first `steps` steps take together."""
        if self.line is not None:
            a, b = self.line
            return steps * a + b * (steps * (steps - 1) // 2)
        return sum(_sum(first, slope, count) for first, slope, count in self._parts(steps))

    def reach(self, time: int, most: int) -> int:
        """Return the number of steps (at least 1) until `time` ps have passed, or `most`."""
        if self.line is not None:
            a, b = self.line
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
        """Yield the straight parts of the first `steps` steps."""
        lines, step = self._lines, 0
        while step < steps:
            _, b, a = max((a + b * step, b, a) for a, b in lines)
            # Where a steeper line rises above this one.
            overtakes = [(a - c) // (d - b) + 1 for c, d in lines if d > b]
            end = min([*overtakes, steps])
            yield a + b * step, b, end - step
            step = end


def _sum(first: int, slope: int, count: int) -> int:
    """Return first + (first + slope) + ..., `count` terms."""
    return count * first + slope * (count * (count - 1) // 2)


def _steps_for(first: int, slope: int, count: int, time: int) -> int:
    """Return the fewest steps whose sum is at least `time`; `count` steps suffice."""
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


_STRETCH: Final = 256
"""Tokens of context that share one sample of a latency model without lines."""


class ServiceEstimates:
    """Estimates for schedulers (`ServiceTimes`), from the cache and the latency model."""

    def __init__(self, cache: KVCache, latency: LatencyModel, max_seqs: int) -> None:
        self._cache = cache
        self._latency = latency
        self._windows = latency.windows
        self._max_seqs = max_seqs
        self._decode_pieces: dict[int, Sequence[LinearPiece]] = {}

    def probe(self, request: Request, now: int) -> int:
        """Return how many prompt tokens of `request` would hit."""
        return self._cache.probe(request, now) * self._cache.geometry.block_size

    def prefill_ns(self, tokens: int, context: int) -> int:
        """Return the ns to prefill `tokens` tokens after `context` in a step of their own."""
        if not tokens:
            return 0
        windows = self._windows
        pairs = tuple(attended_pairs(context, tokens, window) for window in windows)
        work = StepWork(tokens, pairs, 0, (0,) * len(windows))
        return self._latency.duration(work) // PS_PER_NS

    def decode_ns(self, tokens: int, context: int, sequences: int) -> int:
        """Return the ns in which `sequences` sequences generate `tokens` tokens each.

        Exact for a latency model with lines. For one without, each token takes the time at the
        end of its stretch of contexts: the stretches are fixed, so that the remaining time
        never rises while tokens are generated.
        """
        count, end, time_ps = min(sequences, self._max_seqs), context + tokens, 0
        part = self._by_lines if self._latency.jumps else self._by_samples
        while context < end:
            context, took_ps = part(count, context, end)
            time_ps += took_ps
        return time_ps // PS_PER_NS

    def _by_lines(self, count: int, context: int, end: int) -> tuple[int, int]:
        """Return the next context at which a window fills, or `end`, and the ps up to it."""
        windows = self._windows
        full = (window - 1 for window in windows if window is not None)
        upto = min((at for at in full if context < at < end), default=end)
        growth = [count if window is None or context + 1 < window else 0 for window in windows]
        pieces = self._decode_pieces.get(count)
        if pieces is None:
            pieces = self._decode_pieces[count] = decode_lines(self._latency, count)
        times = StepTimes(pieces, self._step(count, context).context, growth)
        return upto, times.total(upto - context)

    def _by_samples(self, count: int, context: int, end: int) -> tuple[int, int]:
        """Return where the stretch of `context` ends, at most `end`, and the ps up to it."""
        border = (context // _STRETCH + 1) * _STRETCH
        upto = min(border, end)
        longest = self._latency.duration(self._step(count, border - 1))
        return upto, (upto - context) * longest

    def _step(self, count: int, context: int) -> StepWork:
        """Return a step in which `count` sequences of `context` tokens generate one more."""
        pairs = [min(context + 1, window or context + 1) for window in self._windows]
        return StepWork(0, (0,) * len(pairs), count, tuple(count * each for each in pairs))
