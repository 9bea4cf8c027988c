"""One stream of requests, in order, through three block pools: vLLM's, a host's, a KVCache's.

Each evicts for the same requests, so many of which are open at a time, and gives the digest of
what it evicts. The order of calls is that of vLLM's `KVCacheManager`.
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
"""Requests that wait."""


@attrs.define
class Outcome:
    """What a pool did.

    Attributes:
        digest: over the keys of the blocks that it evicted, in their order.
        evicted: how many.
        hit, tokens: tokens that hit, and those of all prompts.
        refused: requests that did not fit.
        seconds: CPU time that the pool took, without making the requests.
    """

    digest: str = ""
    evicted: int = 0
    hit: int = 0
    tokens: int = 0
    refused: int = 0
    seconds: float = 0.0

    def decisions(self):
        """Return what must be the same in two pools."""
        return attrs.astuple(self)[:-1]


def conversations(requests: int | None = None) -> Iterable[Request]:
    """Return the first requests of the bundled trace, with keys for full blocks alone.

    No prompt is of whole blocks, so no last block is computed twice, which vLLM would keep.
    Keys are the bytes of vLLM's hashes, and ids texts, since some policies hash them.
    """
    for request in islice(Mooncake(), requests):
        count = request.prompt_tokens // SIZE
        keys = [key.to_bytes(16, "big") for key in request.keys[:count]]
        yield attrs.evolve(request, id=str(request.id), keys=keys)


def serve(pool, requests: Iterable[Request], together: int = 8) -> Outcome:
    """Serve `requests`; one that does not fit waits until the oldest have ended.

    Of those that wait, a policy knows the next few.
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
    """Return an `on_remove` that writes down the keys of what leaves."""

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
        self.cache.tree._on_remove = _recorded(self.cache.tree._on_remove, self.left)

    def prepare(self, request):
        """Return the request."""
        return request

    def queue(self, request, now):
        """Let a request wait."""
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
    """An engine of a few lines, and a host."""

    def __init__(self, eviction: str, blocks: int) -> None:
        self.left, self.hit = [], 0
        policy = resolve("eviction", eviction)
        recompute = KVCache(1, SIZE).geometry.recompute_seconds
        self.cache = HostedCache(policy, blocks, SIZE, recompute)
        self.cache.host._on_remove = _recorded(self.cache.host._on_remove, self.left)

    def queue(self, request, now):
        """Let a request wait."""
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
