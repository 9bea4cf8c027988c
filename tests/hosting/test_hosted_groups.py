"""Eviction policies on cache groups: LRU as without a host, others as in vLLM's pool."""

from random import Random

import attrs
import orjson
import pytest
from helpers.group_streams import CacheSide, Pool, drive
from helpers.step_lists import HOSTED, POLICIES, checksum, hosted_server, kvcore_evictions

import kvcore
from kvcore import HostedGroups, InputError, Request
from kvcore_plugins.cache_groups import LayerGroup
from kvcore_plugins.eviction import LRU, TTL
from kvcore_plugins.workload import Mooncake

STREAMS = 200

BY_VLLM = orjson.loads(HOSTED.read_bytes())


class Hosted(LRU):
    """LRU that a host calls."""

    name = "hosted"


class Copied(Exception):
    """Raised when two blocks of a group of full attention have one name."""


class Watched(HostedGroups):
    """Hosted groups until the first copy, below which a host pins other blocks than a pool."""

    def _stored(self, seq, group, copies):
        super()._stored(seq, group, copies)
        if self.groups[group].kind == "full" and any(copies.values()):
            raise Copied


@pytest.mark.slow
def test_lru_on_a_host_decides_as_without():
    """Hits, refusals, free blocks and evictions of streams equal those of a `GroupedCache`."""
    evicted = 0
    for seed in range(STREAMS):
        pool = Pool.random(Random(f"groups/{seed}"))
        if len({group.block_size for group in pool.groups}) > 1:
            continue
        side = CacheSide(pool, Watched, eviction=Hosted)
        try:
            drive(seed, lambda _, side=side: side)
        except Copied:
            side.cache.check_integrity()
        evicted += len(side.evicted)
    assert evicted > 5_000


@pytest.mark.parametrize("seed", BY_VLLM)
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_on_one_group_evict_as_in_vllm(seed, policy):
    """On a group of full attention a policy evicts what it evicted in vLLM, in its order."""
    server = hosted_server(int(seed))
    group = LayerGroup("full", server.block_size)
    evicted = kvcore_evictions(attrs.evolve(server, groups=[group]), policy)
    assert checksum(evicted) == BY_VLLM[seed][policy]


def test_spans_of_windows_have_their_positions():
    """A block of a window is a span below the root, at its position, with the keys there."""
    groups = [LayerGroup("full", 4), LayerGroup("window", 4, window=5)]
    cache = HostedGroups(groups, 20, eviction=Hosted, key_tokens=8)
    seq = cache.open(Request(id="a", prompt_tokens=17, keys=(1, 2), key_tokens=8))
    cache.commit(seq, 17, 0)
    full, window = (table.blocks for table in seq.tables)
    spans = [cache.host.span(block) for block in (full[3], window[3])]
    assert [(span.start, span.depth, span.path_keys[span.start // 2]) for span in spans] == [
        (3, 12, 2),
        (3, 12, 2),
    ]
    assert [span.parent.parent is None for span in spans] == [False, True]


def test_a_policy_changes_what_a_hybrid_model_evicts():
    """Hybrid models are simulated with any policy, and a better one than LRU hits more."""
    requests = [request for request in Mooncake() if request.prompt_tokens < 6_000][:400]
    runs = [
        kvcore.simulate(
            requests, model="gpt-oss-20b", blocks=400, block_size=128, eviction=eviction
        )
        for eviction in ("lru", "hazard:guard=false", "arc")
    ]
    assert all(type(run.cache) is HostedGroups for run in runs[1:])
    lru, _, arc = (run.hit_ratio.token for run in runs)
    assert arc > 1.02 * lru


@pytest.mark.parametrize(
    ("groups", "eviction", "why"),
    [
        ([LayerGroup("full", 4)], TTL, "lets blocks expire"),
        ([LayerGroup("full", 4), LayerGroup("state", 8)], Hosted, "sees blocks of one size"),
    ],
)
def test_what_a_policy_cannot_order_is_refused(groups, eviction, why):
    """Policies with spans that expire, and groups with blocks of several sizes, are refused."""
    with pytest.raises(InputError, match=why):
        HostedGroups(groups, 20, eviction=eviction)
