"""One policy, four places: replayed, simulated, on real tensors, and inside vLLM.

Run it with `python examples/same_decisions.py`. The third place needs torch, the fourth vLLM
with `kvcore_vllm`, and no GPU; one that cannot be imported is left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import attrs

import kvcore
from kvcore import KVCache, Request, Trace
from kvcore_plugins.workload import Mooncake
from kvcore_replay.check import check_trace
from kvcore_replay.untimed import replay

BLOCKS, SIZE = 400, 16


def requests() -> list[Request]:
    """Return 240 short requests of the bundled trace, a minute apart, and 32 times shorter."""
    short = (request for request in Mooncake() if len(request.keys) <= SIZE)
    return [
        attrs.evolve(
            request,
            arrival=place * 60_000_000_000,
            prompt_tokens=len(request.keys) * SIZE + 1,
            output_tokens=1,
            key_tokens=SIZE,
        )
        for place, request in enumerate(islice(short, 240))
    ]


def cache(policy: str, trace: Trace) -> KVCache:
    """Return a cache whose spans are single blocks, as those of engines are."""
    return KVCache(BLOCKS, SIZE, eviction=policy, prefix="hashed:spans=block", trace=trace)


def replayed(policy: str, file: Path) -> None:
    """Open, compute and close one request after the other."""
    with Trace(file) as trace:
        replay(requests(), cache(policy, trace))


def simulated(policy: str, file: Path) -> None:
    """Serve them in simulated time."""
    with Trace(file) as trace:
        kvcore.simulate(requests(), cache=cache(policy, trace))


def computed(policy: str, file: Path) -> None:
    """Compute them: K/V of a tiny transformer, in real blocks on the CPU."""
    with Trace(file) as trace:
        kvcore.run(requests(), cache=cache(policy, trace))


def in_vllm(policy: str, file: Path) -> None:
    """Give them to vLLM's scheduler, whose block pool asks the policy; answer for a model."""
    from vllm.sampling_params import SamplingParams  # noqa: PLC0415
    from vllm.v1.outputs import ModelRunnerOutput  # noqa: PLC0415
    from vllm.v1.request import Request as VllmRequest  # noqa: PLC0415

    from kvcore_vllm import SyncScheduler  # noqa: PLC0415 - where vLLM is installed

    os.environ |= {"KVCORE_EVICTION": policy, "KVCORE_TRACE": str(file)}
    scheduler = SyncScheduler(*vllm_config(), block_size=SIZE)
    queue = scheduler.kv_cache_manager.block_pool.free_block_queue
    for request in requests():
        queue.clock = partial(int, request.arrival)
        hashes = [key.to_bytes(16, "big") for key in request.keys]
        scheduler.add_request(
            VllmRequest(
                request_id=str(request.id),
                prompt_token_ids=[0] * request.prompt_tokens,
                sampling_params=SamplingParams(max_tokens=1, ignore_eos=True),
                pooling_params=None,
                block_hasher=lambda job, hashes=hashes: hashes[len(job.block_hashes) :],
            )
        )
        while scheduler.has_unfinished_requests():
            plan = scheduler.schedule()
            names = [*plan.num_scheduled_tokens]
            places = {name: place for place, name in enumerate(names)}
            scheduler.update_from_output(plan, ModelRunnerOutput(names, places, [[0]]))
    scheduler.shutdown()


def vllm_config() -> tuple[Any, Any, Any]:
    """Return what vLLM's scheduler is made of, without a model: one group of full attention."""
    import torch  # noqa: PLC0415
    from vllm.config import (  # noqa: PLC0415
        CacheConfig,
        DeviceConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )

    scheduling = SchedulerConfig(
        max_model_len=1 << 14,
        is_encoder_decoder=False,
        max_num_batched_tokens=1 << 14,
        async_scheduling=False,
    )
    caching = CacheConfig(block_size=SIZE, enable_prefix_caching=True)
    config = VllmConfig(
        scheduler_config=scheduling, cache_config=caching, device_config=DeviceConfig("cpu")
    )
    caching.num_gpu_blocks = BLOCKS + 1  # one of them is never used
    # In place of the files of a model: what the scheduler asks of it.
    config.model_config = SimpleNamespace(
        max_model_len=1 << 14,
        runner_type="generate",
        uses_mrope=False,
        is_encoder_decoder=False,
        is_diffusion=False,
        supports_multimodal_inputs=False,
        multimodal_config=None,
        return_sampling_mask=False,
    )
    attention = FullAttentionSpec(
        block_size=SIZE, num_kv_heads=1, head_size=1, dtype=torch.float16
    )
    layers = KVCacheConfig(BLOCKS + 1, [], [KVCacheGroupSpec(["layer"], attention)])
    return config, layers, SimpleNamespace(accept_tokens=lambda *_: True)


PLACES = {"replay": replayed, "simulate": simulated, "tensors": computed, "vLLM": in_vllm}

NEEDED = {"tensors": ("torch",), "vLLM": ("vllm", "kvcore_vllm")}
"""The packages that a place needs beside kvcore."""


def main(policy: str = "arc", places: Iterable[str] = PLACES) -> None:
    """Print how many blocks each place evicts, and the digest of these in their order."""
    with TemporaryDirectory() as folder:
        for place in places:
            missing = [name for name in NEEDED.get(place, ()) if not find_spec(name)]
            if missing:
                print(f"{place:9}left out: needs {' and '.join(missing)}", file=sys.stderr)
                continue
            file = Path(folder, f"{place}.jsonl")
            PLACES[place](policy, file)
            evicted = check_trace(file).evictions
            print(f"{place:9}{evicted['blocks']:,} blocks evicted  {evicted['digest'][:32]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
