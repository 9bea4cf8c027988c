"""LMCache's own back ends on CPU memory, and the same accesses in a cache of kvcore."""

from __future__ import annotations

import asyncio
import os
from hashlib import sha256
from threading import Thread

import torch
from helpers.engines import required, stand_in

required("lmcache")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
# What LMCache imports on the way to its back ends, and these do not call.
stand_in("aiofile", "cpuinfo", "cryptography", "nixl", "psutil")

from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.cache_controller.message import OpType  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.memory_allocators.mixed_memory_allocator import (  # noqa: E402
    MixedMemoryAllocator,
)
from lmcache.v1.pin_monitor import PinMonitor  # noqa: E402
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: E402

from kvcore import KVCache, Request  # noqa: E402
from kvcore.plugins import resolve  # noqa: E402
from kvcore_lmcache import register  # noqa: E402

CHUNK = 4096
"""Bytes of a chunk, which is as little as LMCache's allocator gives."""


def key_of(chunk):
    """Return LMCache's key of a chunk."""
    return CacheEngineKey("model", 1, 0, chunk, torch.uint8)


def digest(chunks):
    """Return the digest of chunks that were evicted."""
    return sha256(b"".join(chunk.to_bytes(16) for chunk in chunks)).hexdigest()


class CPU:
    """LMCache's CPU back end of `chunks` chunks.

    Attributes:
        evicted: the chunks that have left, in order.
        hits: how many chunks were hit.
        open: the chunks of requests that are open, which they have pinned.
    """

    def __init__(self, policy, chunks):
        register()
        config = LMCacheEngineConfig.from_defaults(cache_policy=policy, local_cpu=True)
        PinMonitor.GetOrCreate(config)
        memory = MixedMemoryAllocator(chunks * CHUNK)
        self.backend = LocalCPUBackend(config, None, "cpu", memory_allocator=memory)
        self.backend.batched_msg_sender = self
        self.policy = self.backend.cache_policy
        self.policy.clock = lambda: self.now
        self.evicted, self.hits, self.now = [], 0, 0
        self.open = []

    def add_kv_op(self, op_type, key):
        """Note what leaves."""
        if op_type is OpType.EVICT:
            self.evicted.append(key)

    def close(self):
        """Do nothing: the back end closes who counts for it."""

    def serve(self, chunks, *, together=1):
        """Look a prompt up, and store what has not been hit; `together` prompts are open."""
        backend, keys, hits = self.backend, [key_of(each) for each in chunks], 0
        for key in keys:
            if not backend.contains(key, pin=True):
                break
            hits += 1
        self.now += 1
        backend.touch_cache()
        self.hits += hits
        self.open.append(keys[:hits])
        while len(self.open) >= together:
            for key in self.open.pop(0):
                backend.unpin(key)
        for key in keys[hits:]:
            if not backend.contains(key):
                self.store(key)

    def store(self, key):
        """Store a chunk, if there is room."""
        self.now += 1
        data = self.backend.allocate(torch.Size([CHUNK]), torch.uint8, busy_loop=False)
        if data is not None:
            self.backend.submit_put_task(key, data)
            data.ref_count_down()


class Replay:
    """The same accesses, each a request of one chunk, in a `KVCache`."""

    def __init__(self, policy, chunks):
        self.evicted, self.hits, self.now, self.turn = [], 0, 0, 0
        policy = resolve("eviction", policy)
        replay, kind = self, type(policy)

        class Noting(kind):
            def on_remove(self, span, reason):
                replay.evicted.append(span.path_keys[span.start])
                super().on_remove(span, reason)

        policy.__class__ = Noting
        prefix = resolve("prefix", "hashed:spans=block")
        self.cache = KVCache(chunks, 1, eviction=policy, prefix=prefix, accounting="keys")

    def serve(self, chunks):
        """Hit the cached start of a prompt from its end on, and store the rest."""
        cached = [self.cached(each) for each in chunks]
        hits = next((n for n, each in enumerate(cached) if not each), len(chunks))
        self.now += 1
        self.hits += hits
        for chunk in reversed(chunks[:hits]):
            self.use(chunk)
        for chunk in chunks[hits:]:
            if not self.cached(chunk):
                self.now += 1
                self.use(chunk)

    def request(self, chunk):
        """Return a request of one chunk."""
        self.turn += 1
        return Request(
            id=self.turn, arrival=self.now, prompt_tokens=1, key_tokens=1, keys=[chunk]
        )

    def cached(self, chunk):
        """Return True if a chunk is cached."""
        return bool(self.cache.probe(self.request(chunk)))

    def use(self, chunk):
        """Serve a request of one chunk."""
        seq = self.cache.open(self.request(chunk), now=self.now)
        self.cache.commit(seq, seq.tokens - seq.computed, self.now)
        self.cache.close(seq, self.now)


class Loop:
    """An event loop in a thread."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def close(self):
        """Stop it."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
