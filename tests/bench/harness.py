"""What the benchmarks share: the bundled trace, a flat LRU, medians of alternating runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

from kvcore import KVCache, Request
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix
from kvcore_plugins.workloads import Mooncake

POOL = 5_859
KEY_TOKENS = 512


def bundled() -> list[Request]:
    """Return the bundled trace in memory, so that reading it is not measured."""
    return list(Mooncake())


def flat_lru(requests: Sequence[Request], ratio: int, blocks: int) -> tuple[float, int]:
    """Run an `OrderedDict` LRU over the same blocks, with no idea of prefixes.

    Returns seconds and requests from the request at which the pool first was full.
    """
    order: OrderedDict[int, None] = OrderedDict()
    start, first = 0.0, -1
    hits = 0
    for number, request in enumerate(requests):
        prefix = True
        for key in request.keys:
            for part in range(ratio):
                block = key * ratio + part
                if block in order:
                    order.move_to_end(block)
                    hits += prefix
                else:
                    prefix = False
                    if len(order) >= blocks:
                        if first < 0:
                            start, first = perf_counter(), number
                        order.popitem(last=False)
                    order[block] = None
    return perf_counter() - start, len(requests) - first


def cache_lru(
    requests: Sequence[Request], ratio: int, blocks: int, *, ids: bool
) -> tuple[float, int]:
    """Run `KVCache` with LRU, open, commit, close; measured as `flat_lru` is."""
    size = KEY_TOKENS // ratio
    cache = KVCache(
        blocks,
        size,
        eviction=LRU(),
        prefix=Radix(),
        count="keys",
        key_tokens=KEY_TOKENS,
        ids=ids,
    )
    prefix = cache.prefix
    start, first = 0.0, -1
    for number, request in enumerate(requests):
        now = request.arrival
        begun = perf_counter() if first < 0 else 0.0
        seq = cache.open(request, None, now)
        cache.commit(seq, seq.tokens - seq.computed, now)
        cache.close(seq, now)
        if first < 0 and prefix.evicted:
            start, first = begun, number
    return perf_counter() - start, len(requests) - first


def medians(runs: int, *measures: Callable[[], float]) -> list[float]:
    """Run the measures in turn, `runs` times; return the median of each."""
    results: list[list[float]] = [[] for _ in measures]
    for _ in range(runs):
        for measure, result in zip(measures, results, strict=True):
            result.append(measure())
    return [median(result) for result in results]
