"""vLLM's own block pool, with its own LRU or with a hosted policy."""

from __future__ import annotations

from types import SimpleNamespace

from helpers.block_pools import SIZE
from helpers.vllm_engine import Hashes, cache_manager
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from kvcore.plugins import resolve
from kvcore_vllm.block_pool import host_blocks


class _Tokens:
    """The tokens of a prompt, of which only their number is read."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        """Return the number of tokens."""
        return self.count

    def copy(self):
        """Return the same object."""
        return self


class VllmPool:
    """vLLM's cache manager with a pool of `blocks` blocks and one that it never uses.

    Args:
        eviction: a policy; None: vLLM's own LRU.
        blocks: number of blocks in the pool.
        trace: path of a recording; None: no recording.
        watched: whether evictions are recorded in `left`, which takes time.

    Attributes:
        manager: vLLM's cache manager.
        host: the host of the policy; None: vLLM's own LRU.
        left: keys of the evicted blocks, in their order.
        hit: number of tokens that hit.
    """

    def __init__(self, eviction, blocks, *, trace=None, watched=True) -> None:
        self.manager = cache_manager(blocks + 1, SIZE)
        self.left, self.hit, self.now = [], 0, 0
        pool = self.manager.block_pool
        if watched:
            self.hashes = pool.cached_block_hash_to_block = Hashes()
        self.host = None
        if eviction is not None:
            settings = SimpleNamespace(
                eviction=eviction, trace=trace, build=lambda: resolve("eviction", eviction)
            )
            self.host = host_blocks(self.manager, settings, lambda: self.now)
        if not watched:
            return
        remove = pool._remove_cached_block_hashes

        def removed(block):
            hashes = remove(block)
            self.left += [each[:-4] for each in hashes]
            return hashes

        pool._remove_cached_block_hashes = removed

    def prepare(self, request):
        """Return the request in vLLM's form, with meaningless tokens."""
        return Request(
            request_id=request.id,
            prompt_token_ids=_Tokens(request.prompt_tokens),
            sampling_params=SamplingParams(max_tokens=1, ignore_eos=True),
            pooling_params=None,
            block_hasher=lambda job: [] if job.block_hashes else request.keys,
        )

    def queue(self, request, now):
        """Call the hosted policy, if any, for a request that waits."""
        self.now = now
        if self.host is not None:
            self.manager.queued(request)

    def open(self, request, now):
        """Admit a request and compute all of it; return None if it does not fit."""
        self.now = now
        manager = self.manager
        blocks, hit, _ = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, request.num_tokens - hit, hit, blocks) is None:
            return None
        self.hit += hit
        request.num_computed_tokens = request.num_tokens
        request.status = RequestStatus.RUNNING
        return request

    def close(self, request, now):
        """End a request."""
        request.status = RequestStatus.FINISHED_STOPPED
        self.manager.free(request)
