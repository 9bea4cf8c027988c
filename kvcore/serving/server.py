"""What schedulers may ask of a server."""

from __future__ import annotations

from kvcore.cache import KVCache
from kvcore.model import attended_pairs
from kvcore.policy import Batch, LatencyModel
from kvcore.request import Request
from kvcore.serving.batching import Batching
from kvcore.serving.steps import StepTimes
from kvcore.units import PICOSECONDS


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
        """Return the ns in which `sequences` sequences generate `tokens` tokens each."""
        if not tokens:
            return 0
        count = min(sequences, self._most)
        windows = self._windows
        reach = [
            context + 1 if window is None else min(context + 1, window) for window in windows
        ]
        growth = [count if window is None or context + 1 < window else 0 for window in windows]
        batch = Batch(0, (0,) * len(windows), count, tuple(count * pairs for pairs in reach))
        lines = self._latency.pieces(batch)
        return StepTimes(lines, batch.context, growth).total(tokens) // PICOSECONDS
