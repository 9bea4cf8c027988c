"""vLLM's own CPU tier, with its own LRU or with a hosted policy."""

from __future__ import annotations

from collections import deque
from hashlib import sha256
from inspect import signature
from itertools import islice

import attrs
from helpers import vllm_engine  # noqa: F401 - stands in for packages that vLLM imports
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from kvcore import KVCache
from kvcore.plugins import resolve
from kvcore.testing.harness import RecordingPolicy
from kvcore.testing.hosted import HostedCache
from kvcore_plugins.workload import Mooncake

SIZE = 512
"""Tokens of a chunk, and of a key of the trace."""

PASSES_REQUESTS = "req_context" in signature(CachePolicy.insert).parameters
"""Whether this release of vLLM passes the request for which a chunk is stored."""


def conversations(requests=None):
    """Yield the first requests of the bundled trace that have a full chunk.

    Their keys are those of full chunks. Their ids are texts, as vLLM's are: some policies hash
    them. They have no answers, of which a tier does not hear.
    """
    for request in islice(Mooncake(), requests):
        keys = request.keys[: request.prompt_tokens // SIZE]
        if keys:
            keys = [*map(offload_key, keys)]
            yield attrs.evolve(request, id=str(request.id), keys=keys, output_tokens=0)


def offload_key(key, group=0):
    """Return vLLM's key of a chunk."""
    return make_offload_key(key.to_bytes(32, "big"), group)


@attrs.define
class Outcome:
    """The decisions of a tier: digest and number of evictions in order, hits and refusals."""

    digest: str = ""
    evicted: int = 0
    hits: int = 0
    refused: int = 0


class VllmTier:
    """vLLM's manager of a CPU tier, with the policy `eviction`; None: vLLM's `native` one."""

    def __init__(self, eviction, blocks, monkeypatch, native="lru"):
        self.now = 0
        if eviction is None:
            self.manager = CPUOffloadingManager(blocks, native)
            return
        monkeypatch.setenv("KVCORE_EVICTION", eviction)
        self.manager = CPUOffloadingManager(blocks, "KvcorePolicy", "kvcore_vllm")
        self.manager._policy.clock = lambda: self.now

    @property
    def policy(self):
        """The policy object of the manager."""
        return self.manager._policy

    def context(self, request):
        """Return vLLM's context of a request, which begins."""
        context = ReqContext(req_id=request.id)
        for index, key in enumerate(request.keys, 1):
            context.set_offload_key_position(key, index * SIZE)
        self.manager.on_new_request(context)
        return context

    def open(self, request, *, loads=False):
        """Offer all chunks of a request; return its context, its hits and the victims.

        With `loads` the hit chunks are loaded, and only the others offered.
        """
        self.now, manager, keys = request.arrival, self.manager, request.keys
        context, hit = self.context(request), 0
        while hit < len(keys) and manager.lookup(keys[hit], context) == LookupResult.HIT:
            hit += 1
        if loads and hit:
            manager.prepare_load(keys[:hit], context)
            manager.complete_load(keys[:hit], context)
            keys = keys[hit:]
        stored = manager.prepare_store(keys, context) if keys else None
        if stored is not None and stored.keys_to_store:
            manager.complete_store(stored.keys_to_store, context)
        if stored is None:
            return context, hit, None if keys else []
        return context, hit, stored.evicted_keys

    def close(self, context):
        """End a request."""
        self.manager.on_request_finished(context)


class _Replayed:
    """A `KVCache` or a `HostedCache` whose evictions are recorded.

    It serves requests as the tier does: all chunks of a prompt are offered at once.
    """

    def __init__(self, eviction, make):
        self.policy = RecordingPolicy(resolve("eviction", eviction))
        self.cache = make(self.policy)
        self.now = 0

    def open(self, request):
        """Serve a request; return its handle, its hits and the victims."""
        self.now = request.arrival
        opened = self.cache.open(request, None, self.now)
        self.cache.commit(opened, opened.tokens - opened.computed, self.now)
        left = [key for _, key, _ in self.policy.evicted]
        self.policy.evicted.clear()
        return opened, opened.hit_blocks, left

    def close(self, opened):
        """End a request."""
        self.cache.close(opened, self.now)


def cache_tier(eviction, blocks):
    """Return a `KVCache` with spans of one block."""
    return _Replayed(
        eviction,
        lambda policy: KVCache(
            blocks, SIZE, accounting="keys", eviction=policy,
            prefix=resolve("prefix", "hashed:spans=block"),
        ),
    )  # fmt: skip


def host_tier(eviction, blocks):
    """Return a `HostedCache` of the policy."""
    return _Replayed(eviction, lambda policy: HostedCache(policy, blocks, SIZE, None))


def serve(tier, requests, together=1, **options):
    """Serve `requests` with up to `together` open at a time; return the outcome."""
    outcome, digest, opened = Outcome(), sha256(), deque()
    for request in requests:
        handle, hit, left = tier.open(request, **options)
        outcome.hits += hit
        outcome.refused += left is None
        for key in left or ():
            digest.update(key)
            outcome.evicted += 1
        opened.append(handle)
        if len(opened) == together:
            tier.close(opened.popleft())
    outcome.digest = digest.hexdigest()
    return outcome
