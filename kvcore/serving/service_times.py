"""Estimates of times of service, by a cache and a latency model, for schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvcore.cache import KVCache
from kvcore.models.cost import attended_pairs
from kvcore.request import Request
from kvcore.serving.decode_batch import StepTimes
from kvcore.serving.latency import LatencyModel, LinearPiece, StepWork, decode_lines
from kvcore.units import PS_PER_NS

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
