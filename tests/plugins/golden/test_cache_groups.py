"""Cache groups that vLLM's own planner makes, and requests that fit into them."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import attrs
import pytest

from kvcore.errors import InputError
from kvcore.models.catalogue import MODELS, find_model
from kvcore.models.layers import LayerCache
from kvcore.models.memory import KVLayout
from kvcore.models.spec import ModelSpec
from kvcore_plugins.cache_groups.plan import groups_of

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.mark.parametrize(
    ("name", "groups", "size", "blocks", "of_request", "requests"),
    [
        ("gemma-3-12b", {("window", 8, 16): 5, ("full", 8, 16): 1}, MIB, 46_080, 2_373, 19.4),
        (
            "gemma-3-27b",
            {("window", 9, 16): 4, ("window", 8, 16): 2, ("full", 10, 16): 1},
            1280 * KIB,
            36_864,
            2_438,
            15.1,
        ),
        (
            "gpt-oss-20b",
            {("window", 12, 16): 1, ("full", 12, 16): 1},
            384 * KIB,
            122_880,
            2_057,
            59.7,
        ),
        (
            "gpt-oss-120b",
            {("window", 18, 16): 1, ("full", 18, 16): 1},
            576 * KIB,
            81_920,
            2_057,
            39.8,
        ),
        (
            "qwen3-next-80b-a3b",
            {("state", 12, 1056): 3, ("full", 12, 1056): 1},
            24 * MIB + 768 * KIB,
            1_861,
            38,
            49.0,
        ),
        (
            "deepseek-v4-flash",
            {
                ("window", 22, 64): 1,
                ("window", 21, 64): 1,
                ("compressed", 62, 256): 1,
                ("state", 42, 4): 1,
                ("state", 20, 8): 1,
            },
            1_600_000,
            30_198,
            154,
            196.1,
        ),
        (
            "deepseek-v4-pro",
            {
                ("window", 31, 64): 1,
                ("window", 30, 64): 1,
                ("compressed", 91, 256): 1,
                ("state", 31, 8): 1,
                ("state", 60, 4): 1,
            },
            2_290_688,
            21_093,
            154,
            137.0,
        ),
    ],
)
def test_groups_are_those_of_vllm(name, groups, size, blocks, of_request, requests):
    """In 45 GiB a model has the groups, blocks and requests of 32k tokens that vLLM plans.

    Made by `get_kv_cache_groups` of vLLM 0.33, in bf16 on one device.
    """
    plan = groups_of(find_model(name), 16)
    made = Counter(
        (caches[0].kind, group.layers, group.block_size)
        for group, caches in zip(plan.groups, plan.caches, strict=True)
    )
    assert made == groups
    assert plan.bytes_per_block == size
    assert plan.blocks_for(32_768) == of_request
    assert round(blocks / of_request, 1) == requests
    assert plan.blocks_in(45 * GIB) == blocks


@pytest.mark.parametrize(("block_size", "planned"), [(16, 256), (512, 256), (24, 768)])
def test_compressed_entries_have_whole_kernel_blocks(block_size, planned):
    """Entries have blocks of 256 tokens, and more only where keys would not fit these."""
    plan = groups_of(find_model("deepseek-v4-flash"), block_size)
    assert max(group.block_size for group in plan.groups) == planned


@pytest.mark.parametrize("name", MODELS)
def test_groups_hold_what_layers_keep(name):
    """A request takes no less in groups than its layers keep, and all layers are in a group."""
    model = find_model(name)
    plan = groups_of(model)
    kept = KVLayout(model).request_bytes(32_768)
    assert plan.bytes_per_block * plan.blocks_for(32_768) >= kept
    grouped = Counter()
    for cache in chain(*plan.caches):
        grouped[attrs.evolve(cache, layers=1)] += cache.layers
    caches = [cache for cache in model.layer_caches if cache.kind != "shared"]
    assert grouped == {attrs.evolve(cache, layers=1): cache.layers for cache in caches}


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3.2", "mistral-7b-v0.1"])
def test_layers_that_keep_as_many_tokens_are_one_group(name):
    """Layers that all keep all tokens, or one window, share a block table."""
    plan, layout = groups_of(find_model(name)), KVLayout(find_model(name))
    assert len(plan.groups) == 1
    assert plan.bytes_per_block == layout.bytes_per_block


@pytest.mark.parametrize("devices", [2, 8, 16])
def test_devices_that_share_a_model_have_its_groups(devices):
    """Heads in several copies make blocks larger, on all devices together."""
    model = find_model("gemma-3-12b")
    alone, shared = groups_of(model), groups_of(model, devices=devices)
    assert shared.groups == alone.groups
    assert shared.bytes_per_block == alone.bytes_per_block * max(1, devices // 8)


def test_attention_with_fewer_bytes_has_more_tokens_in_a_block():
    """Gemma 4's full layers have half the bytes a token, thus 32 tokens in a block of 16."""
    plan = groups_of(find_model("gemma-4-26b-a4b"))
    sizes = {(group.kind, group.block_size) for group in plan.groups}
    assert sizes == {("window", 16), ("full", 32)}


@pytest.mark.parametrize(
    ("caches", "problem"),
    [
        (("full", 6, 4), "blocks of its layers cannot be made equal"),
        (
            ("cross", 8, 8),
            "there is no rule for the cache group of 1 layer, 5 tokens of another",
        ),
        (
            ("compressed", 8, 8),
            "there is no rule for compressed entries without an indexer",
        ),
    ],
)
def test_layers_without_a_rule_are_refused(caches, problem):
    """Layers whose blocks cannot be equal, or that no rule is for, raise InputError."""
    kind, key, value = caches
    window = 5 if kind == "cross" else None
    other = LayerCache(
        kind=kind, layers=1, kv_heads=1, key_dim=key, value_dim=value, window=window,
        ratio=4 if kind == "compressed" else 1,
    )  # fmt: skip
    short = LayerCache(kind="window", layers=2, kv_heads=1, key_dim=8, value_dim=8, window=9)
    model = ModelSpec(
        name="toy", layers=3, query_heads=1, kv_heads=1, head_dim=8, hidden_size=8,
        parameters=10, caches=(short, other),
    )  # fmt: skip
    with pytest.raises(InputError, match=f"toy: {problem}"):
        groups_of(model)
