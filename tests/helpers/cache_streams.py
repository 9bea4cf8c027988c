"""Streams of requests for the caches of two systems, and what each of them hits of those.

A block is one unit on both sides: a block of kvcore, and a token of a cache with pages of one
token. A stream keeps several requests open, and closes the oldest for the next one.
"""

from __future__ import annotations

from collections import deque
from hashlib import sha256

import attrs

from kvcore import KVCache
from kvcore.plugins import Plugins


@attrs.frozen
class Stream:
    """How the requests of a trace are served.

    Attributes:
        workload: the trace, as a name with options.
        blocks: of the pool.
        opened: how many requests are open at a time.
        generates: whether each generates its output before it is closed, which stays cached.
        limit: number of first requests; None: all.
    """

    workload: str
    blocks: int
    opened: int = 1
    generates: bool = False
    limit: int | None = None

    def requests(self):
        """Yield the requests."""
        workload = Plugins().build("workload", self.workload)
        for number, request in enumerate(workload):
            if number == self.limit:
                return
            yield request


def hits_of(stream, cache):
    """Return how many blocks each request of `stream` hits in `cache`; -1: it has no room."""
    waiting, hits = deque(), []
    for request in stream.requests():
        need = -(-request.prompt_tokens // request.key_tokens)
        while waiting and (len(waiting) == stream.opened or need > cache.available()):
            cache.close(waiting.popleft(), generates=stream.generates)
        if need > cache.available():
            hits.append(-1)
            continue
        handle, hit = cache.open(request)
        hits.append(hit)
        waiting.append(handle)
    return hits


def digest(hits):
    """Return the sum of `hits` and a digest of each of them."""
    text = ",".join(map(str, hits))
    return sum(hits), sha256(text.encode()).hexdigest()[:16]


class Ours:
    """The cache of kvcore, with plugins as named."""

    def __init__(self, blocks, size, eviction, prefix):
        build = Plugins().build
        self.cache = KVCache(
            blocks, size, eviction=build("eviction", eviction), prefix=build("prefix", prefix)
        )

    def available(self):
        """Return how many blocks are free or can be evicted."""
        return self.cache.available_blocks

    def open(self, request):
        """Open a request and compute its prompt; return it, and the blocks that hit."""
        seq = self.cache.open(request)
        self.cache.commit(seq, seq.tokens - seq.computed)
        return seq, seq.hit_blocks

    def close(self, seq, *, generates):
        """Let a request generate, if there is room, and close it."""
        more = seq.request.output_tokens - 1
        need = -(-(seq.tokens + more) // self.cache.geometry.block_size) - seq.blocks
        if generates and more > 0 and need <= self.available():
            self.cache.extend(seq, more)
            self.cache.commit(seq, more)
            self.cache.keep_generated(seq, seq.tokens, 0)
        self.cache.close(seq)
