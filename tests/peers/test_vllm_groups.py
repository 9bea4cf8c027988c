"""vLLM's real cache manager beside the cache of groups, call by call.

`tox -e like-vllm` runs this with the installed package. `KVCORE_LIKE_STREAMS` is the number of
random streams, and `KVCORE_LIKE_FIRST` the first seed.
"""

from __future__ import annotations

import os
from collections import Counter
from hashlib import sha256
from math import lcm
from pathlib import Path
from warnings import catch_warnings

import orjson
import pytest
import torch
from helpers.group_streams import drive

from kvcore.models.catalogue import find_model
from kvcore_plugins.cache_groups.plan import groups_of

with catch_warnings(action="ignore"):  # from packages that vLLM imports
    from helpers.vllm_engine import LONG, cache_groups, compressed_specs, planned
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
    from vllm.v1.request import Request, RequestStatus

DATA = Path(__file__).parents[1] / "data"
CONFIGS = [
    orjson.loads(line) for line in (DATA / "model_configs.jsonl").read_bytes().splitlines()
]
FIRST = int(os.environ.get("KVCORE_LIKE_FIRST", "1000"))
STREAMS = int(os.environ.get("KVCORE_LIKE_STREAMS", "60"))


class VllmSide:
    """A stream's calls of vLLM's cache manager.

    Attributes:
        evicted: group and name of the evicted blocks, in order.
    """

    def __init__(self, pool):
        size = lcm(*(group.block_size for group in pool.groups))
        # Block 0 is never used.
        config = cache_groups(pool.blocks + 1, pool.groups, pool.interval)
        self._manager = KVCacheManager(
            config, LONG, size, pool.unit, max_in_flight_tokens=pool.chunk, enable_caching=True
        )
        self.evicted, self._requests, self._found, self._keys = [], {}, {}, {}
        self._unit = pool.unit
        blocks = self._manager.block_pool
        evict = blocks._maybe_evict_cached_block

        def watched(block):
            name = block.block_hash
            is_evicted = evict(block)
            if is_evicted:
                key = self._keys[bytes(get_block_hash(name))]
                self.evicted.append((get_group_id(name), key))
            return is_evicted

        blocks._maybe_evict_cached_block = watched

    def look_up(self, prompt):
        """Return the tokens that hit, and the junction."""
        made = self._requests[prompt.request.id] = self._request(prompt)
        self._manager.new_step_starts()
        blocks, tokens, junction = self._manager.get_computed_blocks(made)
        self._found[prompt.request.id] = blocks
        made.shared_prefix_boundary = junction
        return tokens, junction

    def _request(self, prompt):
        keys = [*prompt.request.keys, *prompt.request.output_keys]

        def hashes(job):
            known = keys[len(job.block_hashes) : job.num_tokens // self._unit]
            made = [sha256(repr(key).encode()).digest() for key in known]
            self._keys.update(zip(made, known, strict=True))
            return made

        return Request(
            request_id=str(prompt.request.id),
            prompt_token_ids=prompt.tokens[: prompt.request.prompt_tokens],
            sampling_params=SamplingParams(max_tokens=64, ignore_eos=True),
            pooling_params=None,
            arrival_time=prompt.request.arrival,
            block_hasher=hashes,
        )

    def allocate(self, prompt, computed, tokens, *, first):
        """Allocate for a chunk; return False if there is no room."""
        made = self._requests[prompt.request.id]
        if computed >= made.num_tokens:
            made.append_output_token_ids(prompt.tokens[computed])
        hit = (computed, self._found[prompt.request.id]) if first else (0, None)
        allocated = self._manager.allocate_slots(
            made, tokens, *hit, full_sequence_must_fit=first
        )
        if allocated is None:
            return False
        made.status = RequestStatus.RUNNING
        made.num_computed_tokens = computed + tokens
        self._manager.new_step_starts()
        return True

    def close(self, prompt):
        """Free the blocks of a request."""
        self._manager.free(self._requests.pop(prompt.request.id))

    @property
    def available(self):
        """Number of free blocks."""
        return self._manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize(
    ("codec", "dtype"), [("fp16", torch.float16), ("fp8-e4m3", torch.float8_e4m3fn)]
)
@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_groups_of_compressed_entries_are_those_of_vllms_planner(name, codec, dtype):
    """Groups, their blocks and the bytes of a block are those that vLLM plans for the config.

    In tensor parallelism each device has all of it.
    """
    config = next(row["config"] for row in CONFIGS if row["name"] == name)
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]
    plan = groups_of(find_model(name), 16, codec)
    sizes, block_bytes = planned(compressed_specs(ratios, dtype))
    assert [(group.layers, group.block_size) for group in plan.groups] == sizes
    assert plan.bytes_per_block == block_bytes
    assert groups_of(find_model(name), 16, codec, 8).bytes_per_block == 8 * block_bytes


def test_groups_decide_as_vllms_cache_manager():
    """Hits, junctions, refusals, free blocks and evicted names are those of vLLM."""
    counts = Counter()
    for seed in range(FIRST, FIRST + STREAMS):
        calls, hits, evicted = drive(seed, VllmSide)
        counts += Counter(streams=1, calls=calls, hits=hits, evicted=evicted)
    print("\nstreams of cache groups:", dict(counts))  # noqa: T201 - the figures of the claim
    assert counts["streams"] == STREAMS
