"""What schedulers may ask of a server."""

from __future__ import annotations

from kvcore.cache import KVCache
from kvcore.model import attended_pairs
from kvcore.policy import Batch, LatencyModel
from kvcore.request import Request
from kvcore.serving.batching import Batching
from kvcore.serving.steps import StepTimes
from kvcore.units import PICOSECONDS

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
        return self._latency.duration(batch) // PICOSECONDS

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
        return time // PICOSECONDS

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
