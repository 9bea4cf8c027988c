"""One stream of requests in three block pools: vLLM's, a host's, and a KVCache's.

Each pool serves the same requests, with several open at a time, and returns the digest of its
evictions. The order of calls is that of vLLM's `KVCacheManager`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from hashlib import sha256
from itertools import islice
from time import thread_time

import attrs

from kvcore import KVCache, OutOfBlocks, Request
from kvcore.plugins import resolve
from kvcore.testing.hosted import HostedCache
from kvcore_plugins.workload import Mooncake

SIZE = 512
"""Tokens of a block, and of a key of the trace."""

AHEAD = 8
"""Number of requests that wait."""


@attrs.define
class Outcome:
    """The decisions of a pool, and the time that it took.

    Attributes:
        digest: digest of the keys of the evicted blocks, in their order.
        evicted: number of evicted blocks.
        hit, tokens: number of hit tokens, and of tokens of all prompts.
        refused: number of requests that did not fit.
        seconds: CPU time of the pool, without making the requests.
    """

    digest: str = ""
    evicted: int = 0
    hit: int = 0
    tokens: int = 0
    refused: int = 0
    seconds: float = 0.0

    def decisions(self):
        """Return the fields that must be equal in two pools: all but the time."""
        return attrs.astuple(self)[:-1]


def conversations(requests: int | None = None) -> Iterable[Request]:
    """Yield the first requests of the bundled trace, with keys for full blocks alone.

    No prompt is of whole blocks, so no last block is computed twice, which vLLM would keep.
    Keys are the bytes of vLLM's hashes, and ids texts, since some policies hash them.
    """
    for request in islice(Mooncake(), requests):
        count = request.prompt_tokens // SIZE
        keys = [key.to_bytes(16, "big") for key in request.keys[:count]]
        yield attrs.evolve(request, id=str(request.id), keys=keys)


def serve(pool, requests: Iterable[Request], together: int = 8) -> Outcome:
    """Serve `requests`; one that does not fit waits until the oldest have ended.

    A policy knows the next few requests that wait.
    """
    found, open_, waiting = Outcome(), deque(), deque()
    coming = iter(requests)
    while True:
        for request in islice(coming, AHEAD - len(waiting)):
            waiting.append((request, pool.prepare(request)))
            pool.queue(waiting[-1][1], waiting[0][0].arrival)
        if not waiting:
            break
        request, prepared = waiting.popleft()
        now = request.arrival
        begin = thread_time()
        while (held := pool.open(prepared, now)) is None and open_:
            pool.close(open_.popleft(), now)
        if held is not None:
            open_.append(held)
            if len(open_) >= together:
                pool.close(open_.popleft(), now)
        found.seconds += thread_time() - begin
        found.tokens += request.prompt_tokens
        found.refused += held is None
    found.hit = pool.hit
    found.evicted, found.digest = len(pool.left), digest(pool.left)
    return found


def digest(keys: Iterable[bytes]) -> str:
    """Return the SHA-256 of keys in their order."""
    return sha256(b"".join(keys)).hexdigest()


def _recorded(hook, left):
    """Return an `on_remove` that appends the keys of removed spans to `left`."""

    def on_remove(span, reason):
        left.extend(span.keys())
        if hook is not None:
            hook(span, reason)

    return on_remove


class CachePool:
    """A `KVCache` with spans of one block."""

    def __init__(self, eviction: str, blocks: int) -> None:
        self.left, self.hit = [], 0
        prefix = resolve("prefix", "hashed:spans=block")
        self.cache = KVCache(blocks, SIZE, eviction=eviction, prefix=prefix)
        calls = self.cache.tree._callbacks
        calls.on_remove = _recorded(calls.on_remove, self.left)

    def prepare(self, request):
        """Return the request unchanged."""
        return request

    def queue(self, request, now):
        """Call `on_queued` of the policy for a request."""
        self.cache.eviction.on_queued(request, now)

    def open(self, request, now):
        """Admit a request and compute all of it; return None if it does not fit."""
        try:
            held = self.cache.open(request, None, now)
        except OutOfBlocks:
            return None
        self.cache.eviction.on_dequeued(request, now)
        self.hit += held.hit_blocks * SIZE
        self.cache.commit(held, held.tokens - held.computed, now)
        return held

    def close(self, held, now):
        """End a request."""
        self.cache.close(held, now)


class HostPool(CachePool):
    """A minimal engine whose evictions are chosen by a `PolicyHost`."""

    def __init__(self, eviction: str, blocks: int) -> None:
        self.left, self.hit = [], 0
        policy = resolve("eviction", eviction)
        recompute = KVCache(1, SIZE).geometry.recompute_seconds
        self.cache = HostedCache(policy, blocks, SIZE, recompute)
        self.cache.host._on_remove = _recorded(self.cache.host._on_remove, self.left)

    def queue(self, request, now):
        """Call the host for a request that waits."""
        self.cache.host.queued(request, now)

    def open(self, request, now):
        """Admit a request and compute all of it; return None if it does not fit."""
        hit = 0
        for key in request.keys:
            if key not in self.cache.host or self.cache.host.expired(key, now):
                break
            hit += SIZE
        tokens = request.prompt_tokens - hit
        try:
            held = self.cache.open(request, tokens, now)
        except OutOfBlocks:
            return None
        self.cache.host.dequeued(request, now)
        self.hit += hit
        self.cache.commit(held, tokens, now)
        return held
