"""Untimed replay: each request is opened, committed and closed before the next."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, cast

from kvcore.cache import KVCache, Sequence
from kvcore.cache.native import core, known_plugins, why_not
from kvcore.cache.pool import MOST_BLOCKS
from kvcore.cache.residency import CacheStats
from kvcore.errors import InputError
from kvcore.plugins import find_override, policy_error
from kvcore.request import Request

if TYPE_CHECKING:
    from kvcore_plugins.cache_groups import GroupedCache
    from kvcore_plugins.layer_pools import PooledCache

__all__ = ["hits_of", "replay", "replay_groups", "replay_pools", "served", "with_loads"]

CHUNK = 8192
"""The most tokens of a chunk of a prompt in a replay of cache groups, or of pools of layers."""


def replay(requests: Iterable[Request], cache: KVCache) -> CacheStats:
    """Replay `requests` serially in `cache`; return the cache's statistics."""
    _, rest = replayed_in_c(requests, cache, keeps=False)
    deque(served(rest, cache), maxlen=0)
    return cache.stats


def replay_groups(
    requests: Iterable[Request], cache: GroupedCache, max_tokens: int = CHUNK
) -> list[int]:
    """Compute the prompts of `requests` serially in chunks; return the blocks that each hits.

    `on_queued` of the eviction policy is called as by `served`.
    """
    _stop_clock(cache.tiers)
    hits, size = [], cache.geometry.block_size
    for request in _announced(requests, cache):
        cache.now = max(cache.now, request.arrival)
        hits.append(cache.compute(request, max_tokens).tokens // size)
    return hits


def replay_pools(
    requests: Iterable[Request], cache: PooledCache, max_tokens: int = CHUNK
) -> CacheStats:
    """Compute the prompts of `requests` serially in chunks; return the cache's statistics.

    A request longer than the pool of full attention keeps its leading blocks. `on_queued` of
    the eviction policy is called as by `served`.
    """
    size = cache.geometry.block_size
    room, most = cache.pool.blocks * size, min(max_tokens, cache.longest_chunk or max_tokens)
    for request in _announced(requests, cache):
        now, length = request.arrival, min(request.prompt_tokens, room)
        chunk = min(most, length - cache.probe(request, now) * size)
        seq = cache.open(request, chunk, now)
        while chunk:
            cache.commit(seq, chunk, now)
            chunk = min(most, length - seq.computed)
            if chunk:
                cache.extend(seq, chunk, now)
        cache.close(seq, now)
    return cache.stats


def hits_of(
    requests: Iterable[Request], cache: KVCache, loaded: array[int] | None = None
) -> array[int]:
    """Replay `requests` serially in `cache`; return the number of blocks that each hits.

    In a cache with tiers, the number of blocks that are loaded for each is added to `loaded`;
    without tiers nothing is.
    """
    hits, rest = replayed_in_c(requests, cache, keeps=True)
    if loaded is None or cache.tiers is None:
        hits.extend(seq.hit_blocks for seq in served(rest, cache))
        return hits
    for seq, blocks in with_loads(rest, cache):
        hits.append(seq.hit_blocks)
        loaded.append(blocks)
    return hits


def replayed_in_c(
    requests: Iterable[Request], cache: KVCache, *, keeps: bool
) -> tuple[array[int], Iterator[Request]]:
    """Open, commit and close requests in a new cache, as many as the core in C takes.

    Returns the hit blocks of each of them, if the caller `keeps` these, and the other requests.

    Raises:
        PolicyError: the eviction policy failed.
    """
    hits, rest, native = array("q"), iter(requests), core()
    if native is not None and not why_not(cache):
        counted, left = native.replay(cache, rest, known_plugins(cache), keeps)
        hits.frombytes(counted)
        if left is not None:
            rest = chain((left,), rest)
    return hits, rest


def with_loads(requests: Iterable[Request], cache: KVCache) -> Iterator[tuple[Sequence, int]]:
    """Yield the sequences of `served`, each with the number of blocks loaded from tiers."""
    before, levels = 0, cast("Any", () if cache.tiers is None else cache.tiers.levels)
    for seq in served(requests, cache):
        loaded = sum(level.stats.hits for level in levels)
        yield seq, loaded - before
        before = loaded


def served(requests: Iterable[Request], cache: KVCache) -> Iterator[Sequence]:
    """Open, commit and close each of `requests` at its time of arrival; yield its sequence.

    In `tokens` accounting, an answer with output keys is cached behind its prompt.

    Blocks that miss in the pool and are in a tier below it are loaded, unless the tier has
    `load=never`. A load costs nothing and takes no time: without a clock a link has no queue.
    Nothing is loaded for a request longer than the pool.

    A request longer than the pool keeps its leading blocks: it is opened with as many blocks as
    the pool has, while its lookups are those of the whole request. O(spans touched) per
    request.

    `on_queued` of the eviction policy is called as if the next requests waited: if the
    policy's `lookahead` is n, a request and the n after it are queued before it is opened, in
    their order, and it is dequeued when it is closed. n requests are read ahead.

    Raises:
        InputError: a request cannot be read, or has keys that the cache was not made for; or
            two queued requests have the same id.
        PolicyError: the eviction policy failed.
    """
    size = cache.geometry.block_size
    room = cache.pool.blocks * size
    by_key = cache.geometry.accounting == "keys"
    open_, commit, close = cache.open, cache.commit, cache.close
    tiers = cache.tiers
    _stop_clock(tiers)
    for request in _announced(requests, cache):
        now = request.arrival
        tokens = len(request.keys) * request.key_tokens if by_key else request.prompt_tokens
        first = None if tokens <= room else room - cache.probe(request, now) * size
        seq = open_(request, first, now)
        if tiers is not None:
            # The time to prefill tokens, in no unit: fewer tokens take less time.
            load = tiers.load(seq, now, lambda tokens, context: tokens)  # noqa: ARG005
            if load is not None:
                tiers.finish(load, now)
        commit(seq, seq.tokens - seq.computed, now)
        if request.output_keys:
            # An answer with keys fills the blocks after the prompt, as it does under a clock.
            answer = min(seq.cacheable * size, room) - seq.tokens
            if answer > 0:
                cache.extend(seq, answer, now)
                commit(seq, answer, now)
        close(seq, now)
        yield seq


def _stop_clock(tiers: Any) -> None:
    """Set the times of transfers to 0 in the tiers below a cache, if there are some."""
    if tiers is not None:
        from kvcore_tiers.link import InstantLink  # noqa: PLC0415 - most replays have no tiers

        for level in tiers.levels:
            level.link = InstantLink()


def _announced(
    requests: Iterable[Request], cache: KVCache | GroupedCache | PooledCache
) -> Iterable[Request]:
    """Return `requests`, which the eviction policy is told of ahead if it wants to know."""
    queued = any(find_override(cache.eviction, f"on_{way}") for way in ("queued", "dequeued"))
    return _told(requests, cache) if queued else requests


def _told(requests: Iterable[Request], cache: Any) -> Iterator[Request]:
    """Yield `requests`; call `on_queued` of the policy for each, as far ahead as it looks."""
    eviction = cache.eviction
    coming, window, known = iter(requests), deque[Request](), set[int | str]()
    reach = None if eviction.lookahead is None else min(eviction.lookahead, MOST_BLOCKS) + 1
    now = 0
    while True:
        fresh = list(islice(coming, None if reach is None else reach - len(window)))
        window.extend(fresh)
        if not window:
            return
        now = max(now, window[0].arrival)
        for request in fresh:
            if request.id in known:
                msg = (
                    f"request {request.id!r} comes twice, and eviction plugin "
                    f"{eviction.name!r} is told of requests ahead, by id: give each its own"
                )
                raise InputError(msg)
            known.add(request.id)
            _notify(cache, "on_queued", request, now)
        yield window[0]
        known.remove(window[0].id)
        _notify(cache, "on_dequeued", window.popleft(), now)


def _notify(cache: KVCache | GroupedCache, method: str, request: Request, now: int) -> None:
    try:
        getattr(cache.eviction, method)(request, now)
    except BaseException as error:
        if not isinstance(cache, KVCache):
            raise policy_error(cache.eviction, method, error) from error
        raise cache.tree.fail(cache.eviction, method, error) from error
