"""LMCache's own back ends on CPU memory, and a KVCache that replays the same accesses."""

from __future__ import annotations

import asyncio
import os
from hashlib import sha256
from threading import Event, RLock, Thread
from unittest.mock import Mock

import torch
from helpers.engines import required, stand_in

required("lmcache")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
# LMCache imports these packages with its back ends, which do not call them.
stand_in("aiofile", "cpuinfo", "cryptography", "nixl", "psutil")

from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.cache_controller.message import OpType  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.memory_allocators.mixed_memory_allocator import (  # noqa: E402
    MixedMemoryAllocator,
)
from lmcache.v1.pin_monitor import PinMonitor  # noqa: E402
from lmcache.v1.storage_backend.cache_policy import get_cache_policy  # noqa: E402
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: E402
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend  # noqa: E402
from lmcache.v1.storage_backend.nixl_storage_backend import (  # noqa: E402
    NixlStaticStorageBackend,
)

from kvcore import KVCache, Request  # noqa: E402
from kvcore.plugins import resolve  # noqa: E402
from kvcore_lmcache import register  # noqa: E402
from kvcore_plugins.eviction import ARC  # noqa: E402

CHUNK = 4096
"""Bytes of a chunk: the least that LMCache's allocator gives."""

SHAPE = torch.Size([2, 1, CHUNK // 16, 8])
"""Keys and values of one layer, in LMCache's order."""


def key_of(chunk):
    """Return LMCache's key of a chunk."""
    return CacheEngineKey("model", 1, 0, chunk, torch.uint8)


def digest(chunks):
    """Return the digest of evicted chunks."""
    return sha256(b"".join(chunk.to_bytes(16) for chunk in chunks)).hexdigest()


class CPU:
    """LMCache's CPU back end of `chunks` chunks.

    Attributes:
        evicted: the evicted chunks, in order.
        hits: number of chunks that were hit.
        open: the chunks that each open request has pinned.
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
        """Record an evicted chunk."""
        if op_type is OpType.EVICT:
            self.evicted.append(key)

    def close(self):
        """Do nothing; the back end closes its message sender."""

    def serve(self, chunks, *, together=1, batch=False):
        """Look up a prompt and store its missing chunks, with up to `together` open prompts.

        In a `batch`, room is made for all of it first, as LMCache's engine does.
        """
        backend, keys, hits = self.backend, [key_of(chunk) for chunk in chunks], 0
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
        if batch:
            self.store(*[key for key in keys[hits:] if not backend.contains(key)])
            return
        for key in keys[hits:]:
            if not backend.contains(key):
                self.store(key)

    def store(self, *keys):
        """Store as many chunks as there is room for."""
        self.now += 1
        data = [self.backend.allocate(SHAPE, torch.uint8, busy_loop=False) for _ in keys]
        data = [each for each in data if each is not None]
        self.backend.batched_submit_put_task(keys[: len(data)], data)
        for each in data:
            each.ref_count_down()


class Replay:
    """A `KVCache` that serves the same accesses, each as a request of one chunk."""

    def __init__(self, policy, chunks):
        self.evicted, self.hits, self.now, self.turn = [], 0, 0, 0
        policy = LateARC() if policy == "arc" else resolve("eviction", policy)
        replay, kind = self, type(policy)

        class Noting(kind):
            def on_remove(self, span, reason):
                replay.evicted.append(span.path_keys[span.start])
                super().on_remove(span, reason)

        policy.__class__ = Noting
        prefix = resolve("prefix", "hashed:spans=block")
        self.cache = KVCache(chunks, 1, eviction=policy, prefix=prefix, accounting="keys")

    def serve(self, chunks):
        """Hit the cached start of a prompt, the last chunk first, and store the rest."""
        cached = [self.cached(chunk) for chunk in chunks]
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


class LateARC(ARC):
    """ARC that handles a miss after the room for it is made, as a policy in LMCache does."""

    missed = None

    def on_miss(self, request, hit_blocks, now):
        """Keep the miss for `on_insert`."""
        self.missed = request, hit_blocks, now

    def on_insert(self, span, now):
        """Handle the miss, and then the new span."""
        super().on_miss(*self.missed)
        super().on_insert(span, now)


class _Served:
    """A back end below LMCache's CPU memory, with an event loop in a thread.

    Attributes:
        entries: the mapping that its policy has made.
        evicted: the evicted chunks, in order.
    """

    def __init__(self):
        self.memory = CPU("LRU", 100).backend
        self.loop = asyncio.new_event_loop()
        self.thread = Thread(target=self.loop.run_forever, daemon=True)
        self.evicted = []

    def __enter__(self):
        """Start the loop."""
        self.thread.start()
        return self

    def __exit__(self, *error):
        """Stop the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def use(self, chunk):
        """Read a chunk if it is stored; store it otherwise."""
        if self.backend.contains(key_of(chunk)):
            self.backend.get_blocking(key_of(chunk)).ref_count_down()
        else:
            self.put(chunk)

    def data(self, chunks):
        """Return memory objects for the data of chunks."""
        return [self.memory.allocate(SHAPE, torch.uint8) for _ in chunks]


class Disk(_Served):
    """LMCache's disk back end of `chunks` chunks."""

    def __init__(self, policy, chunks, path):
        super().__init__()
        config = LMCacheEngineConfig.from_defaults(
            cache_policy=policy,
            local_disk=str(path),
            max_local_disk_size=chunks * CHUNK / (1 << 30),
        )
        self.backend = LocalDiskBackend(config, self.loop, self.memory, "cpu")
        self.backend.batched_msg_sender = self
        self.policy, self.entries = self.backend.cache_policy, self.backend.dict

    def __exit__(self, *error):
        """Close the back end, and stop the loop."""
        self.backend.close()
        super().__exit__(*error)

    def put(self, chunk):
        """Store a chunk, and wait until it is written."""
        (data,) = self.data([chunk])
        written = Event()
        self.backend.submit_put_task(key_of(chunk), data, lambda _key: written.set())
        data.ref_count_down()
        assert written.wait(10)

    add_kv_op = CPU.add_kv_op
    close = CPU.close


class Nixl(_Served):
    """LMCache's NIXL back end of `chunks` chunks, whose transfers do nothing."""

    def __init__(self, policy, chunks, path):
        super().__init__()
        served, free = self, [*range(chunks)]

        class Backend(NixlStaticStorageBackend):
            def __init__(self):
                self.loop, self.progress_set = served.loop, set()
                self.key_lock, self.progress_lock = RLock(), RLock()
                self._local_cpu_backend = served.memory
                self.cache_policy = get_cache_policy(policy)
                self.key_dict = self.cache_policy.init_mutable_mapping()
                self.agent = Mock()
                self.pool = Mock(pop=free.pop, push=free.append)
                self.pool.get_num_available_descs = lambda: len(free)

            def remove(self, key, force=True):  # noqa: FBT002 - LMCache's
                served.evicted += [key.chunk_hash] * (not force)
                return super().remove(key, force)

        self.backend = Backend()
        self.policy, self.entries = self.backend.cache_policy, self.backend.key_dict

    def put(self, *chunks):
        """Store chunks, and wait until they are stored."""
        keys, data = [*map(key_of, chunks)], self.data(chunks)
        self.backend.batched_submit_put_task(keys, data)
        for each in data:
            each.ref_count_down()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(10)
