"""vLLM's scheduler without a model, driven in virtual time, and its cache manager.

vLLM is installed without its dependencies. Modules that its scheduler never calls, or that need
a GPU or a server, are replaced by empty ones.
"""

from __future__ import annotations

import os
from collections import deque
from hashlib import sha256
from math import lcm
from types import SimpleNamespace
from unittest.mock import patch

import attrs
import torch
from helpers.engines import stand_in
from helpers.step_lists import STEP_NS, Server, Step, block_name

# vLLM imports these packages with its scheduler, which does not call them.
stand_in(
    "cbor2",
    "cloudpickle",
    "cpuinfo",
    "llguidance",
    "psutil",
    "pybase64",
    "uvloop",
    "vllm.parser",
    "vllm.reasoning",
    "xgrammar",
)

from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.core.block_pool import BlockHashToBlockMap  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_planning import (  # noqa: E402
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.request import RequestStatus as Status  # noqa: E402

LONG = 1 << 20
"""Tokens of the longest sequence if a server sets no limit."""


@attrs.frozen
class Run:
    """The record of a run of vLLM.

    Attributes:
        steps: the steps of vLLM.
        duplicates: numbers of the steps that cached a block whose content was cached already.
        over: number of preemptions of requests whose last token was being computed; no step
            lists them.
    """

    steps: list[Step]
    duplicates: list[int]
    over: int


def run(server: Server, scheduler: type | None = None) -> Run:
    """Serve the requests of `server` by vLLM's scheduler, in steps of `STEP_NS`.

    `scheduler` is another class to use instead.
    """
    return Driver(server, scheduler).run()


def evictions(server: Server, eviction: str) -> list[str]:
    """Return the names of the blocks that vLLM evicts by a policy of kvcore, in this order."""
    from kvcore_vllm import Scheduler, SyncScheduler  # noqa: PLC0415 - needs the adapter

    size, evicted = server.block_size, []
    names = {
        _hash(request, block, size): block_name(request, block, size)
        for request in server.requests
        for block in range((request.prompt_tokens + request.output_tokens) // size)
    }
    with patch.dict(os.environ, {"KVCORE_EVICTION": eviction}):
        driver = Driver(server, Scheduler if server.lag else SyncScheduler)
    evict = driver.pool._maybe_evict_cached_block

    def record(block):
        if block.block_hash is not None:
            evicted.append(names[block.block_hash[:32]])
        return evict(block)

    driver.pool._maybe_evict_cached_block = record
    driver.run()
    assert not driver.pool.free_block_queue.host.failures
    return evicted


def full_attention(blocks: int, block_size: int) -> KVCacheConfig:
    """Return the config of a pool with one group of blocks for full attention."""
    attention = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float16
    )
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
    )


def cache_groups(blocks: int, groups, interval: int | None) -> KVCacheConfig:
    """Return the config of a pool with these cache groups."""
    sizes = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float16}

    def spec(group):
        size = group.block_size
        if group.kind == "full":
            return FullAttentionSpec(block_size=size, **sizes)
        if group.kind == "chunk":
            return ChunkedLocalAttentionSpec(
                block_size=size, attention_chunk_size=group.window, **sizes
            )
        if group.kind == "window":
            return SlidingWindowSpec(block_size=size, sliding_window=group.window, **sizes)
        shapes, dtypes = ((2, size),), (torch.float16,)
        return MambaSpec(
            block_size=size, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align"
        )

    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer {index}"], spec(group))
            for index, group in enumerate(groups)
        ],
        prefix_cache_retention_interval=interval,
    )


def compressed_specs(ratios: list[int], dtype: torch.dtype) -> dict[str, KVCacheSpec]:
    """Return what vLLM's layers of DeepSeek V4 keep, by the ratio of each, in plain rows.

    Its module needs packages that are not installed: the numbers are those of
    `CompressorStateCache`, `DeepseekV4SWACache`, `DeepseekV4IndexerCache` and
    `DeepseekV4Attention`.
    """
    one_head = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 512}

    def window(size: int, width: int, tokens: int, dtype: torch.dtype) -> KVCacheSpec:
        return SlidingWindowMLASpec(
            block_size=size, head_size=width, dtype=dtype, sliding_window=tokens, **one_head
        )

    def entries(ratio: int, width: int, dtype: torch.dtype) -> KVCacheSpec:
        return MLAAttentionSpec(
            block_size=256, head_size=width, dtype=dtype, tokens_per_state=ratio, **one_head
        )

    specs = {}
    for layer, ratio in enumerate(ratios):
        specs[f"{layer} window"] = window(64, 512, 128, dtype)
        if ratio:
            specs[f"{layer} entries"] = entries(ratio, 512, dtype)
        if ratio == 4:
            specs[f"{layer} index"] = entries(4, 132, torch.uint8)
            specs[f"{layer} index state"] = window(4, 4 * 128, 8, torch.float32)
            specs[f"{layer} state"] = window(4, 4 * 512, 8, torch.float32)
        elif ratio:
            specs[f"{layer} state"] = window(8, 2 * 512, 128, torch.float32)
    return specs


def planned(specs: dict[str, KVCacheSpec]) -> tuple[list[tuple[int, int]], int]:
    """Return layers and block size of the groups that vLLM plans, and the bytes of a block."""
    config = VllmConfig(
        scheduler_config=SchedulerConfig(max_model_len=LONG, is_encoder_decoder=False),
        cache_config=CacheConfig(block_size=256),
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    # That of the backends of these layers: blocks outermost.
    config.cache_config.kv_cache_layout = "BLHNC"
    groups = get_kv_cache_groups(config, specs)
    pool = get_kv_cache_config_from_groups(config, groups, 2**40)
    sizes = [(len(group.layer_names), group.kv_cache_spec.block_size) for group in groups]
    return sizes, pool.kv_cache_tensors[0].size // pool.num_blocks


def cache_manager(blocks: int, block_size: int, **options) -> KVCacheManager:
    """Return vLLM's cache manager for a pool with full attention; it never uses one block."""
    layers = full_attention(blocks, block_size)
    return KVCacheManager(layers, LONG, block_size, block_size, **options)


class Hashes(BlockHashToBlockMap):
    """A map of cached blocks by hash that counts blocks with a hash already in it."""

    duplicates = 0

    def insert(self, key, block):
        """Insert a block, and count it if its hash is in the map."""
        self.duplicates += self.get_one_block(key) is not None
        super().insert(key, block)


class Driver:
    """A driver that sends requests to a scheduler, and answers each plan with tokens.

    An asynchronous engine keeps two plans: one runs while the other is made. A step takes the
    same time, whatever its plan computes; an empty one takes none.
    """

    def __init__(self, server, kind=None):
        self.server = server
        self.scheduler = make_scheduler(server, kind)
        self.hashes = Hashes()
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.pool.cached_block_hash_to_block = self.hashes
        longest = server.options.get("max_model_len") or LONG  # vLLM's front end refuses others
        self.arrivals = deque(
            request for request in server.requests if request.prompt_tokens < longest
        )
        self.lost = []
        self.steps, self.duplicates, self.over = [], [], 0

    def run(self):
        """Serve all requests, and return the record."""
        plans, depth = deque(), 1 + self.server.lag
        now = idle = 0  # idle: when the plans made so far will have run
        while True:
            while self.arrivals and self.arrivals[0].arrival <= now:
                self.scheduler.add_request(make_request(self.arrivals.popleft(), self.server))
            if self.scheduler.has_requests():
                plan, output = self.plan()
                idle = max(now, idle) + STEP_NS * bool(plan.num_scheduled_tokens)
                plans.append((idle, plan, output))
                if len(plans) < depth and plan.num_scheduled_tokens:
                    continue
            elif not plans:
                if not self.arrivals:
                    return Run(self.steps, self.duplicates, self.over)
                now = max(now, self.arrivals[0].arrival)
                continue
            now, plan, output = plans.popleft()
            self.scheduler.update_from_output(plan, output)
            if plans and plans[0][1].num_scheduled_tokens:
                self.correct()

    def correct(self):
        """Correct the latest recorded step, now that the step before it has ended.

        A request that was preempted while its last token was computed is finished, and not
        preempted.
        """
        step, known = self.steps[-1], self.scheduler.requests
        lost = [each for each in step.preempted if _name(each) in known]
        free = self.pool.get_num_free_blocks()
        self.over += len(step.preempted) - len(lost)
        self.steps[-1] = attrs.evolve(step, preempted=lost, free=free)

    def plan(self):
        """Make and record a plan; return it with the tokens that a model would return."""
        scheduler, before = self.scheduler, self.hashes.duplicates
        running = scheduler.running.copy()
        plan = scheduler.schedule()
        tokens = plan.num_scheduled_tokens
        # Preemptions of an empty plan are recorded with the next plan.
        self.lost += [
            int(each.request_id) for each in running if each.status == Status.PREEMPTED
        ]
        if tokens:
            named = {int(name): count for name, count in tokens.items()}
            admitted = {
                int(each.request_id): each.num_computed_tokens - tokens[each.request_id]
                for each in scheduler.running
                if each not in running
            }
            lost, self.lost = sorted(self.lost), []
            free = self.pool.get_num_free_blocks()
            if self.hashes.duplicates > before:
                self.duplicates.append(len(self.steps))
            self.steps.append(Step(named, admitted, lost, free))
        prefills = (scheduler.requests[name].is_prefill_chunk for name in tokens)
        sampled = [[] if prefill else [0] for prefill in prefills]
        places = {name: index for index, name in enumerate(tokens)}
        return plan, ModelRunnerOutput([*tokens], places, sampled)


def make_scheduler(server, kind=None, **caching):
    """Return a scheduler of vLLM, or of the class `kind`, with the options of `server`."""
    longest = server.options.get("max_model_len") or LONG
    options = {
        "scheduler_reserve_full_isl": server.options.get("reserve") != "first-chunk",
        "long_prefill_token_threshold": server.options.get("max_chunk") or 0,
    }
    scheduling = SchedulerConfig(
        # Without chunks this may not exceed a step; the scheduler reads it from the model.
        max_model_len=longest if server.chunked else server.max_tokens,
        is_encoder_decoder=False,
        max_num_batched_tokens=server.max_tokens,
        max_num_seqs=server.max_seqs,
        enable_chunked_prefill=server.chunked,
        policy="priority" if server.by_priority else "fcfs",
        watermark=server.watermark,
        async_scheduling=bool(server.lag),
        **options,
    )
    if any(group.kind == "state" for group in server.groups):
        caching["mamba_cache_mode"] = "align"
    caching = CacheConfig(
        block_size=server.block_size, **{"enable_prefix_caching": True, **caching}
    )
    config = VllmConfig(
        scheduler_config=scheduling, cache_config=caching, device_config=DeviceConfig("cpu")
    )
    caching.num_gpu_blocks = server.blocks
    # The attributes of a model that the scheduler reads.
    config.model_config = SimpleNamespace(
        max_model_len=longest,
        runner_type="generate",
        uses_mrope=False,
        is_encoder_decoder=False,
        is_diffusion=False,
        supports_multimodal_inputs=False,
        multimodal_config=None,
        return_sampling_mask=False,
    )
    layers, size = full_attention(server.blocks, server.block_size), server.block_size
    if server.groups:
        layers = cache_groups(server.blocks, server.groups, server.interval)
        size = lcm(*(group.block_size for group in server.groups))
    grammar = SimpleNamespace(accept_tokens=lambda *_: True)
    kind = kind or scheduling.get_scheduler_cls()
    return kind(config, layers, grammar, block_size=size, hash_block_size=server.block_size)


def make_request(request, server):
    """Return `request` for vLLM, with meaningless tokens and hashes by its keys."""

    def hashes(job):
        done, full = len(job.block_hashes), job.num_tokens // server.block_size
        return [_hash(request, block, server.block_size) for block in range(done, full)]

    return Request(
        request_id=_name(request.id),
        prompt_token_ids=[0] * request.prompt_tokens,
        sampling_params=SamplingParams(max_tokens=request.output_tokens, ignore_eos=True),
        pooling_params=None,
        arrival_time=request.arrival,
        priority=-request.priority,
        block_hasher=hashes,
    )


def _name(number):
    """Return the id of a request as a text that sorts as its number."""
    return f"{number:06}"


def _hash(request, block, block_size):
    """Return the hash of a block by its key, or by its request if it has none."""
    return sha256(block_name(request, block, block_size).encode()).digest()
