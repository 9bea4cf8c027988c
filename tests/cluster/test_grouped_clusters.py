"""Replicas with cache groups: what they decide, and what is refused."""

import pytest
from helpers.clusters import Longest, serve_cluster
from helpers.grouped_requests import GROUPS, grouped_requests
from helpers.serving import Bent, Even, Single

import kvcore
from kvcore import InputError
from kvcore.serving import Batching, simulate
from kvcore_lab.router_comparison import compare_routers
from kvcore_plugins.cache_groups import GroupedCache

LIMITS = {"max_tokens": 64, "max_seqs": 16}

SHORT = "zipf:requests=60,rate=20,prefixes=4,prefix_tokens=600,suffix_tokens=40"


@pytest.mark.parametrize("groups", GROUPS)
def test_a_cluster_of_one_with_groups_is_a_server(groups):
    """A cluster of one has the times and hits of a server."""
    served = grouped_requests(groups)
    cache = GroupedCache(GROUPS[groups], 90, checkpoint="chunk")
    batching = Batching(**LIMITS, watermark=0)
    alone = simulate(served, cache=cache, latency=Even(), batching=batching).log
    cluster = serve_cluster(
        served, 1, groups=GROUPS[groups], blocks=90, trace=False, **LIMITS
    ).result
    names = ("arrival", "admitted", "first_token", "finish", "hit")
    assert [sorted(getattr(cluster.log, name)) for name in names] == [
        sorted(getattr(alone, name)) for name in names
    ]
    assert cluster.lives[0][0].cache.evicted_blocks == cache.evicted_blocks > 0


@pytest.mark.parametrize("view", ["exact", "index"])
@pytest.mark.parametrize("groups", GROUPS)
def test_jumps_of_replicas_with_groups_change_no_decision(groups, view):
    """Routes, times and hits are those of replicas that run each step, through a failure."""
    runs = []
    for latency in (Bent, Single):
        router = Longest()
        run = serve_cluster(
            grouped_requests(groups, 80), 3, groups=GROUPS[groups], blocks=90, view=view,
            router=router, latency=latency, failures=["replica=1,at=200us,for=100us"],
            trace=False, **LIMITS,
        )  # fmt: skip
        log = run.result.log
        runs.append((router.saw, [*log.finish], [*log.hit]))
    assert runs[0] == runs[1]


def test_a_cluster_of_a_hybrid_model_has_its_groups():
    """Replicas of Gemma 3 have the blocks and the groups of one server, and hit."""
    result = kvcore.simulate_cluster(
        SHORT, replicas=2, model="gemma-3-12b", tensor_parallel=1, router="prefix-affinity"
    )
    assert all(isinstance(lives[0].cache, GroupedCache) for lives in result.lives)
    assert result.hit_ratio.token > 0.5


def test_routers_are_compared_with_one_cache_of_groups():
    """The cache of all replicas is one of groups too, for which no optimum is known."""
    comparison = compare_routers(
        SHORT, "round-robin", 2, model="gemma-3-12b", tensor_parallel=1, blocks=600
    )
    (shared,) = comparison.shared
    assert 0 < comparison.rows[0].hit_ratio <= shared.hit_ratio
    assert shared.optimum is None


@pytest.mark.parametrize("prefix", [2048, 40_000])
@pytest.mark.parametrize("model", ["gemma-3-12b", "gpt-oss-20b", "qwen3-next-80b-a3b"])
def test_one_replica_with_pools_of_layers_shares_one_cache(model, prefix):
    """One replica that serves requests one by one hits what the one cache of pools hits.

    Prompts of several chunks, too. No optimum is known.
    """
    comparison = compare_routers(
        f"zipf:requests=100,rate=0.02,prefixes=8,prefix_tokens={prefix},suffix_tokens=256,"
        "output_tokens=1,key_tokens=16",
        "round-robin",
        1,
        model=model,
        device="h200",
        like="sglang",
        memory=f"{prefix // 256}GiB",
    )
    (row,), (shared,) = comparison.rows, comparison.shared
    assert 0 < row.hit_ratio == shared.hit_ratio
    assert shared.optimum is row.share_of_optimum is None


def test_a_cache_of_pools_replays_the_first_blocks_of_a_prompt_that_is_too_long():
    """A prompt of more blocks than the one cache has keeps its first ones there, and hits."""
    comparison = compare_routers(
        "zipf:requests=20,rate=1,prefixes=1,prefix_tokens=20480,suffix_tokens=256,key_tokens=16",
        "round-robin",
        1,
        model="gemma-3-12b",
        device="h200",
        like="sglang",
        memory="2GiB",
    )
    assert comparison.rows[0].hit_ratio is None
    assert comparison.shared[0].hit_ratio > 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"view": "events", "router": "prefix-affinity"},
            "whose blocks are not reported: give view=index",
        ),
        (
            {"replicas": 4, "disaggregate": "prefill=2,decode=2"},
            "groups, whose K/V has no transfer",
        ),
        (
            {"like": "sglang", "disaggregate": "prefill=1,decode=1"},
            "pools of layers, whose K/V has no transfer",
        ),
    ],
)
def test_what_needs_one_group_is_refused(options, why):
    """Views of reported blocks, and split phases, say that they need one group."""
    with pytest.raises(InputError, match=why):
        kvcore.simulate_cluster(
            SHORT, **{"replicas": 2, "model": "gemma-3-12b", "tensor_parallel": 1, **options}
        )
