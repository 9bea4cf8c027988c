"""Streams of requests for the caches of kvcore and SGLang, and their expected hits.

A block is one unit on both sides: a block of kvcore, and a token of a cache with pages of one
token. A stream keeps several requests open, and closes the oldest for the next one.
"""

from __future__ import annotations

import os
from collections import deque
from hashlib import sha256

import attrs

from kvcore.cache import KVCache
from kvcore.plugins import Plugins


@attrs.frozen
class Stream:
    """How the requests of a trace are served.

    Attributes:
        workload: the trace, as a name with options.
        blocks: number of blocks in the pool.
        opened: number of requests that are open at a time.
        generates: whether the output of a request is generated and cached before it is closed.
        limit: number of requests; None: all.
    """

    workload: str
    blocks: int
    opened: int = 1
    generates: bool = False
    limit: int | None = None

    def __str__(self):
        """Return the sizes of the stream, for the name of a test."""
        return f"{self.blocks}-{self.opened}{'-generates' * self.generates}"

    def requests(self):
        """Yield the requests of the workload, up to `limit`."""
        workload = Plugins().build("workload", self.workload)
        for index, request in enumerate(workload):
            if index == self.limit:
                return
            yield request


def hits_of(stream, cache):
    """Return the blocks that each request of `stream` hits in `cache`; -1 if it has no room."""
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
    """Return the sum and a digest of `hits`."""
    text = ",".join(map(str, hits))
    return sum(hits), sha256(text.encode()).hexdigest()[:16]


class KvcoreCache:
    """A cache of kvcore with given plugins."""

    @classmethod
    def like(cls, engine, blocks, **options):
        """Return a cache like that of `engine`, for keys of 512 tokens, with `options`."""
        options = Plugins().get("rules", engine).defaults | options
        return cls(blocks, 512, options["eviction"], options["prefix"])

    def __init__(self, blocks, size, eviction, prefix):
        build = Plugins().build
        self.cache = KVCache(
            blocks, size, eviction=build("eviction", eviction), prefix=build("prefix", prefix)
        )

    def available(self):
        """Return the number of blocks that are free or can be evicted."""
        return self.cache.available_blocks

    def open(self, request):
        """Open a request and compute its prompt; return its sequence and the blocks it hits."""
        seq = self.cache.open(request)
        self.cache.commit(seq, seq.tokens - seq.computed)
        return seq, seq.hit_blocks

    def close(self, seq, *, generates):
        """Close a request, after its output is generated if there is room for it."""
        more = seq.request.output_tokens - 1
        need = -(-(seq.tokens + more) // self.cache.geometry.block_size) - seq.blocks
        if generates and more > 0 and need <= self.available():
            self.cache.extend(seq, more)
            self.cache.commit(seq, more)
            self.cache.keep_generated(seq, seq.tokens, 0)
        self.cache.close(seq)


CONVERSATION = "mooncake"
"""The conversation trace that comes with kvcore."""

SYNTHETIC = f"mooncake:path={os.environ.get('KVCORE_MOONCAKE_SYNTHETIC')}"
"""Mooncake's synthetic trace, at the path in an environment variable."""

_KINDS = ((1, False), (16, False), (16, True))


def _streams(workload, found):
    """Return streams with their hits in SGLang's caches, from results by pool size."""
    return {
        Stream(workload, blocks, opened, generates): result
        for blocks, results in found.items()
        for (opened, generates), result in zip(_KINDS, results, strict=True)
    }


STREAMS = {
    CONVERSATION: _streams(
        CONVERSATION,
        {
            2048: [
                (16011, "056928674c71db63"),
                (15999, "94e1ceb17c04e379"),
                (15824, "a6548ea8308d2a50"),
            ],
            8192: [
                (53524, "a079b434017255ac"),
                (53524, "a079b434017255ac"),
                (52024, "b5d21a5b4dbb6d95"),
            ],
            32768: [
                (97357, "c8224a931a6258e9"),
                (97357, "c8224a931a6258e9"),
                (96404, "e47a2f7dd11e35c7"),
            ],
        },
    ),
    SYNTHETIC: _streams(
        SYNTHETIC,
        {
            2048: [
                (18308, "95b8e8d305558d53"),
                (18225, "d15006da8bcb3969"),
                (18225, "d15006da8bcb3969"),
            ],
            8192: [
                (46758, "b0ca58b9b8a8e1a2"),
                (46732, "a0bcfc6cf00f9033"),
                (46457, "308eed76043940c8"),
            ],
            32768: [
                (77121, "a95c64fa7c44527d"),
                (77121, "a95c64fa7c44527d"),
                (77046, "66127f07e49f858b"),
            ],
        },
    ),
}
"""The sum and the digest of the hits of SGLang 0.5.23, by trace and stream."""
