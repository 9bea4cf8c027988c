"""Eviction policies on cache groups: LRU as without a host, others as in vLLM's pool."""

from random import Random

import attrs
import orjson
import pytest
from helpers.group_streams import CacheSide, Pool, drive
from helpers.grouped_traces import requests
from helpers.step_lists import HOSTED, POLICIES, checksum, hosted_server, kvcore_evictions
from hypothesis import settings

import kvcore
from kvcore import HostedGroups, InputError, Request
from kvcore.serving import Batching, simulate
from kvcore_plugins.cache_groups import LayerGroup
from kvcore_plugins.eviction import LRU, TTL
from kvcore_plugins.workload import Mooncake

STREAMS = max(50, settings.default.max_examples // 25)

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


def test_lru_on_a_host_decides_as_without():
    """Hits, refusals, free blocks and evictions of streams equal those of a `GroupedCache`."""
    evicted = 0
    for seed in range(STREAMS):
        pool = Pool.random(Random(f"groups/{seed}"))
        side = CacheSide(pool, Watched, eviction=Hosted)
        try:
            drive(seed, lambda _, side=side: side)
        except Copied:
            side.cache.check_integrity()
        evicted += len(side.evicted)
    assert evicted > 25 * STREAMS


ROTATED = [(seed, POLICIES[n % 4 - by]) for n, seed in enumerate(BY_VLLM) for by in (0, 2)]
"""Servers with two policies, in turn: chunks, chats and lags do not depend on the policy."""


@pytest.mark.parametrize(("seed", "policy"), ROTATED)
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


def test_the_blocks_of_each_group_are_used_again():
    """Another request that stores evicted blocks uses those of a window, too, another time."""
    groups = [LayerGroup("full", 4), LayerGroup("window", 4, window=5)]
    cache = HostedGroups(groups, 20, eviction="lruk:history=4", key_tokens=8)
    for name, keys in (("a", (1, 2)), ("b", range(10, 14)), ("c", (1, 2))):
        asked = Request(id=name, prompt_tokens=8 * len(keys) + 1, keys=keys, key_tokens=8)
        seq = cache.open(asked)
        cache.commit(seq, asked.prompt_tokens, 0)
        if name != "c":
            cache.close(seq, 0)
    full, window = (cache.host.span(table.blocks[3]) for table in seq.tables)
    assert (full.data[2] > 0, window.data[2] > 0) == (True, True)


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


def test_smaller_blocks_stand_for_the_whole_ones_that_they_are_parts_of():
    """A policy sees blocks of half the size as two of one position, below those before them."""
    groups = [LayerGroup("full", 4), LayerGroup("window", 8, window=5)]
    cache = HostedGroups(groups, 20, eviction=Hosted, key_tokens=8)
    seq = cache.open(Request(id="a", prompt_tokens=17, keys=(1, 2), key_tokens=8))
    cache.commit(seq, 17, 0)
    full = seq.tables[0].blocks[:4]
    spans = [cache.host.span(block) for block in full]
    assert [(span.depth, span.tokens, span.path_keys[span.start]) for span in spans] == [
        *2 * [(0, 8, 1)],
        *2 * [(8, 8, 2)],
    ]
    assert [span.parent for span in spans[2:]] == spans[:2]


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_order_blocks_of_several_sizes(policy):
    """A policy that evicts blocks of three sizes knows those with a name, and no others."""
    groups = [LayerGroup("full", 4), LayerGroup("window", 16, 20), LayerGroup("state", 8)]
    cache = HostedGroups(groups, 120, eviction=policy, key_tokens=8)
    simulate(
        requests(Random(policy), 120),
        cache=cache,
        batching=Batching(max_tokens=64, max_seqs=16),
    )
    cache.check_integrity()
    assert cache.evicted_blocks > 100
    named = sorted(block for block, _ in cache._blocks)
    assert sorted(cache.host._spans.keys() | cache.host._orphans.keys()) == named


def test_policies_with_blocks_that_expire_are_refused():
    """A policy that lets spans expire is refused: names of groups hit until they leave."""
    with pytest.raises(InputError, match="lets blocks expire"):
        HostedGroups([LayerGroup("full", 4)], 20, eviction=TTL)


def test_a_request_without_blocks_has_no_admission():
    """A request that ends, or is preempted and may be aborted then, has no serial number."""
    cache = HostedGroups([LayerGroup("full", 4)], 8, eviction=Hosted)
    for index, preempted in enumerate((False, True)):
        request = Request(
            id=index, prompt_tokens=4, output_tokens=1, keys=[index], key_tokens=4
        )
        cache.close(cache.open(request, 4, 0), 1, preempted=preempted)
    assert not cache.host._orders


def test_a_sequence_that_is_closed_changes_no_host():
    """Closing a sequence for the second time is refused, before its host forgets a request."""
    cache = HostedGroups([LayerGroup("full", 4)], 8, eviction=Hosted, key_tokens=4)
    request = Request(id=1, prompt_tokens=8, keys=[1, 2], key_tokens=4)
    sequence = cache.open(request)
    cache.close(sequence, preempted=True)
    cache.open(request, resumed=True)
    known = dict(cache.host._orders)
    with pytest.raises(InputError, match="is closed"):
        cache.close(sequence, preempted=True)
    assert cache.host._orders == known != {}
