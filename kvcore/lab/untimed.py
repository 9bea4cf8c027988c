"""Untimed replay: one request after another, each there and gone in an instant."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from kvcore.cache import KVCache, Sequence
from kvcore.cache.stats import CacheStats
from kvcore.request import Request


def replay(requests: Iterable[Request], cache: KVCache) -> CacheStats:
    """Serve each of `requests` in `cache`; return its statistics. Else as `served`."""
    deque(served(requests, cache), maxlen=0)
    return cache.stats


def served(requests: Iterable[Request], cache: KVCache) -> Iterator[Sequence]:
    """Open, commit and close each of `requests` at its time of arrival; yield its sequence.

    A request longer than the pool keeps its leading blocks: it is opened with as many as
    the pool has, while its lookups are those of the whole request. O(spans touched) a
    request.

    Raises:
        InputError: a request that cannot be read, or whose keys the cache was not made for.
        PolicyError: the eviction policy failed.
    """
    size = cache.geometry.block_size
    room = cache.pool.blocks * size
    by_key = cache.geometry.count == "keys"
    open_, commit, close = cache.open, cache.commit, cache.close
    for request in requests:
        now = request.arrival
        tokens = len(request.keys) * request.key_tokens if by_key else request.prompt
        first = None if tokens <= room else room - cache.probe(request, now) * size
        seq = open_(request, first, now)
        commit(seq, seq.tokens - seq.computed, now)
        close(seq, now)
        yield seq
