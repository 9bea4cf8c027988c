"""Tiers below cache groups: what they take, refuse and give back."""

from __future__ import annotations

import pytest
from helpers.grouped_traces import SLOT as GROUP_SLOT
from helpers.grouped_traces import TIERS, grouped_run
from helpers.serving import ask
from helpers.step_lists import POLICIES
from helpers.traces import lines, seal

import kvcore
from kvcore import InputError, Trace, TraceError
from kvcore.plugins import resolve
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup
from kvcore_plugins.eviction import LRU
from kvcore_replay.check.trace import check_trace
from kvcore_replay.misses.explain import explain
from kvcore_tiers.grouped import GroupTiers
from kvcore_tiers.tier.host import Host

SLOT = 64
FULL, WINDOW, STATE = LayerGroup("full", 4), LayerGroup("window", 4, 9), LayerGroup("state", 4)


def prefill_ns(tokens, context):
    """Return the ns to compute tokens: more than any load takes."""
    del context
    return tokens * 10**6


def below(groups, blocks=12, tier=f"host:memory={100 * SLOT}", **options):
    """Return a cache of groups and its tiers."""
    cache = GroupedCache(groups, blocks, key_tokens=4, **options)
    return cache, GroupTiers(cache, [tier], SLOT)


def serve(cache, tiers, name, keys):
    """Serve a prompt of these keys and a token, alone; return what it hit and loaded."""
    now = name * 10**6
    request = ask(name, prompt=4 * len(keys) + 1, keys=keys)
    seq = cache.open(request, 0, now)
    load = tiers.load(seq, now, prefill_ns)
    hit, loaded = seq.computed, 0
    if load is not None:
        now = load.ready
        loaded = tiers.finish(load, now) - hit
    while seq.computed < request.prompt_tokens:
        tokens = min(4, request.prompt_tokens - seq.computed)
        cache.extend(seq, tokens, now)
        cache.commit(seq, tokens, now)
    cache.close(seq, now)
    cache.check_integrity()
    tiers.check_integrity()
    return hit, loaded


def test_what_stayed_in_the_pool_is_hit_with_what_is_loaded():
    """Of a prefix that is partly in the pool, a tier gives what has left, and no more."""
    cache, tiers = below([FULL, WINDOW])
    keys = [1, 2, 3, 4]
    assert serve(cache, tiers, 0, keys) == (0, 0)
    assert serve(cache, tiers, 1, [5, 6, 7]) == (0, 0)
    (level,) = tiers.levels
    left = len(dict(level.slots))
    assert 0 < left < 4 + 2  # all of the attention, and the window of 8 tokens
    hit, loaded = serve(cache, tiers, 2, [*keys, 8])
    assert hit + loaded == 16
    assert level.stats.loaded == left
    assert level.stats.hits == loaded // 4
    assert level.stats.ratio_sum == level.stats.hits / 5  # blocks that are looked up
    assert level.stats.returned == 0


@pytest.mark.parametrize("resumed", [False, True])
def test_blocks_that_are_computed_faster_count_as_found_and_recomputed(resumed):
    """Where computing takes no time nothing is loaded; one that returns is not counted."""
    cache, tiers = below([FULL, WINDOW])
    for name, keys in enumerate(([1, 2, 3, 4], [5, 6, 7])):
        serve(cache, tiers, name, keys)
    stats = tiers.levels[0].stats
    assert not stats.found
    seq = cache.open(ask("again", prompt=17, keys=[1, 2, 3, 4]), 0, 10**9)
    assert tiers.load(seq, 10**9, lambda *_: 0, resumed=resumed) is None
    assert stats.recomputed == stats.found
    assert bool(stats.found) is not resumed


def test_a_state_is_loaded_with_the_attention_before_it():
    """A prefix that has left the pool comes back whole: all attention, and one state.

    That is a load for each group, and their time is that of all blocks on the link.
    """
    tier = f"host:memory={100 * SLOT},read_bandwidth=64GB,latency=0"
    cache, tiers = below([FULL, STATE], tier=tier)
    keys = [1, 2, 3, 4]
    serve(cache, tiers, 0, keys)
    for name in range(1, 5):
        serve(cache, tiers, name, [10 * name + index for index in range(4)])
    hit, loaded = serve(cache, tiers, 5, [*keys, 9])
    assert (hit, loaded) == (0, 16)
    stats = tiers.levels[0].stats
    assert (stats.loads, stats.loaded, stats.load_ns) == (2, 4 + 1, 4 + 1)


def test_what_computing_takes_no_longer_is_not_loaded():
    """A load counts with what is computed after it; a prefill that takes no longer is taken."""
    cache, tiers = below([FULL])
    serve(cache, tiers, 0, [1, 2, 3, 4])
    for name in range(1, 5):
        serve(cache, tiers, name, [10 * name + index for index in range(4)])
    again = ask(5, prompt=17, keys=[1, 2, 3, 4])
    seq = cache.open(again, 0, 10**8)
    assert tiers.load(seq, 10**8, lambda *_: 10**9) is None
    assert tiers.load(seq, 10**8, prefill_ns) is not None


@pytest.mark.parametrize(("token_ns", "loads"), [(15, False), (16, True)])
def test_a_load_saves_the_time_of_what_it_loads(token_ns, loads):
    """A load of a block takes 64 ns; computing its 4 tokens is compared, not what was hit."""
    tier = f"host:memory={100 * SLOT},read_bandwidth=1GB,latency=0"
    cache, tiers = below([FULL], 9, tier=tier)
    for name, keys in enumerate(([1, 2, 3, 4], [5, 6, 7], [8, 9])):
        serve(cache, tiers, name, keys)
    seq = cache.open(ask("again", prompt=17, keys=[1, 2, 3, 4]), 0, 10**9)
    assert 0 < seq.computed < 16
    load = tiers.load(seq, 10**9, lambda tokens, _: tokens * token_ns)
    assert (load is not None) == loads


def test_policies_know_how_long_a_block_of_groups_takes_to_load():
    """The layout has the seconds that a block takes to load from the nearest level."""
    cache, tiers = below([FULL], tier="host:memory=1MB,read_bandwidth=64GB,latency=0")
    assert cache.geometry.reload_seconds == pytest.approx(SLOT / 64e9)
    assert tiers.levels[0].link.load_ns(1000 * SLOT, 0) == 1000


def test_what_has_no_room_in_a_tier_goes_to_the_next():
    """A full tier writes the blocks that leave it into the one below, and no others."""
    cache = GroupedCache([FULL], 8, key_tokens=4)
    near, far = f"host:memory={6 * SLOT},keep=exclusive", f"disk:memory={100 * SLOT}"
    tiers = GroupTiers(cache, [near, far], SLOT)
    for name in range(5):
        serve(cache, tiers, name, [10 * name + index for index in range(4)])
    serve(cache, tiers, 5, [20, 21, 22, 23, 24])
    above, below_it = tiers.levels
    assert above.stats.dropped["moved"] == above.stats.loaded > 1
    assert below_it.stats.stored == above.stats.dropped["capacity"] > 0


def test_a_load_is_a_use_in_the_tier_below():
    """A tier that writes what is used twice has a block that was loaded twice from above."""
    cache = GroupedCache([FULL], 8, key_tokens=4)
    near, far = f"host:memory={100 * SLOT}", f"disk:memory={100 * SLOT},write=2"
    tiers, stored = GroupTiers(cache, [near, far], SLOT), []
    for name in range(6):
        keys = [1, 2, 3, 4] if name % 2 == 0 else [10 * name + index for index in range(7)]
        serve(cache, tiers, name, keys)
        stored.append(tiers.levels[1].stats.stored)
    assert [level.stats.loaded for level in tiers.levels] == [8, 0]
    assert stored == [0, 0, 0, 0, 4, 4]


@pytest.mark.parametrize(("write", "stored"), [("through", [0, 0, 6, 6]), (1, [0, 0, 0, 6])])
def test_blocks_of_groups_go_down_when_they_are_computed(write, stored):
    """Blocks that the plan of a step has named, and that are hit, go down after the step."""
    tier = f"host:memory={100 * SLOT},write={write}"
    cache, tiers = below([FULL, WINDOW], 40, tier)
    asked, found = ask(0, prompt=17, keys=[1, 2, 3, 4]), []

    def note():
        found.append(tiers.levels[0].stats.stored)

    first = cache.open(asked, 17, 0)
    cache.publish(first, 16, 1)
    note()
    assert cache.open(asked, 17, 2).computed == 16
    note()
    cache.commit(first, 16, 3)
    note()
    assert cache.open(asked, 17, 4).computed == 16
    note()
    assert found == stored


def test_a_trace_of_groups_cannot_store_what_is_not_computed(tmp_path):
    """An OFFLOAD at the time at which its sequence is admitted is refused."""
    path = tmp_path / "trace.jsonl"
    model = {"model": "gpt-oss-20b", "like": "vllm:lag=0", "memory": "40GiB", "limit": 2}
    kvcore.simulate("mooncake", **model, tier="host:memory=9GiB,write=through", trace=path)
    assert check_trace(path).complete
    events = lines(path)
    names = [event["event"] for event in events]
    line = events.pop(names.index("OFFLOAD"))
    commit = max(
        n
        for n, event in enumerate(events)
        if event["event"] == "COMMIT" and event["t"] < line["t"]
    )
    early = line["t"] - events[commit]["t"]
    events.insert(commit + 1, line | {"t": line["t"] - early, "done": line["done"] - early})
    with pytest.raises(TraceError, match="is not computed yet"):
        check_trace(seal(path, events))


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_policy_serves_one_tier(policy):
    """The policy of a tier is in use: a second tier with the same instance is refused."""
    eviction = resolve("eviction", policy)
    below([FULL], tier=Host(memory=100 * SLOT, eviction=eviction))
    with pytest.raises(InputError, match="is in use already"):
        below([FULL], tier=Host(memory=100 * SLOT, eviction=eviction))


@pytest.mark.parametrize(("block_bytes", "moved"), [(None, SLOT // 4), (50, 50)])
def test_a_transfer_has_the_bytes_of_its_group(block_bytes, moved):
    """Of blocks with fewer layers than the widest, or with less in them, less is moved."""
    wide = LayerGroup("full", 4, layers=4, block_bytes=block_bytes and SLOT)
    narrow = LayerGroup("window", 4, 9, layers=1, block_bytes=block_bytes)
    cache, tiers = below([wide, narrow], tier=f"host:memory={100 * SLOT},write=through")
    serve(cache, tiers, 0, [1, 2, 3, 4])
    (level,) = tiers.levels
    assert level.stats.stored == 4 + 2
    assert level.link.written_bytes == 4 * SLOT + 2 * moved


@pytest.mark.parametrize(
    ("tier", "problem"),
    [
        (f"host:memory={9 * SLOT},eviction=ttl", "lets blocks expire"),
        (f"host:memory={SLOT - 1}", "less than a block"),
    ],
)
def test_tiers_that_cannot_be_are_refused(tier, problem):
    """A policy whose blocks expire, and a tier without a slot, are refused, and stay unused."""
    built = resolve("tier", tier)
    with pytest.raises(InputError, match=problem):
        below([FULL, STATE], tier=built)
    built.check_unused()


class Hosted(LRU):
    """LRU that a host calls."""

    name = "hosted"


@pytest.mark.parametrize("seed", range(24))
def test_lru_on_a_host_decides_as_without(seed, tmp_path):
    """By LRU that a host calls, tiers write, load and drop the blocks of those by `lru`."""
    lines = []
    for eviction in (None, Hosted):
        tiers = [resolve("tier", tier) for tier in TIERS[seed % len(TIERS)]]
        for tier in tiers:
            tier.eviction = tier.eviction if eviction is None else eviction()
        grouped_run(seed, tmp_path / "trace.jsonl", tiers=tiers)
        lines.append((tmp_path / "trace.jsonl").read_text().splitlines()[1:-1])
    assert lines[0] == lines[1]
    assert seed % len(TIERS) not in (0, 2, 5) or any('"DROP"' in line for line in lines[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tier_is_evicted_by_any_policy(policy, tmp_path):
    """A policy in a tier knows the blocks in its slots, and no others; the trace is checked."""
    tiers = [f"host:memory={40 * GROUP_SLOT},load=always,keep=exclusive,eviction={policy}"]
    _, cache = grouped_run(24, tmp_path / "trace.jsonl", tiers=tiers, count=120)
    cache.tiers.check_integrity()
    (level,) = cache.tiers.levels
    assert set(level.stats.dropped) == {"capacity", "moved"}
    assert level.host._spans.keys() == level.content.keys()
    check_trace(tmp_path / "trace.jsonl")


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_tier_with_fewer_slots_than_blocks_that_leave_at_once_is_checked(policy, tmp_path):
    """Of blocks that leave the pool at once, the check asks a tier for those that fit in it."""
    tiers = [f"host:memory={4 * GROUP_SLOT},eviction={policy}"]
    _, cache = grouped_run(2, tmp_path / "trace.jsonl", tiers=tiers, count=60)
    assert cache.tiers.levels[0].stats.refused > 0
    check_trace(tmp_path / "trace.jsonl")


def test_a_policy_knows_where_a_block_is_in_its_text():
    """A policy sees each block where it begins in the text, whatever the size of its group."""
    begun = []

    class Curious(LRU):
        """LRU that records where blocks begin, and the key there."""

        name = "curious"

        def on_insert(self, span, now):
            """Record the block."""
            begun.append((span.start, span.path_keys[span.start]))
            super().on_insert(span, now)

    tier = Host(memory=100 * SLOT, write="through", eviction=Curious)
    cache, tiers = below([LayerGroup("full", 8), LayerGroup("full", 4)], tier=tier)
    serve(cache, tiers, 0, [10, 11, 12, 13])
    # Of the text the policy sees blocks of 8 tokens, which have the key of their end.
    assert sorted(begun) == 3 * [(0, 11)] + 3 * [(1, 13)]


def test_a_policy_other_than_lru_keeps_other_blocks_in_a_tier():
    """Blocks that were loaded twice stay by `lfu`, and newer ones by `lru`."""
    kept = {}
    for eviction in ("lru", "lfu"):
        tier = f"host:memory={12 * SLOT},write=through,load=always,eviction={eviction}"
        cache, tiers = below([FULL, WINDOW], blocks=9, tier=tier)
        often, once = [1, 2, 3, 4], [[10 * n, 10 * n + 1, 10 * n + 2] for n in range(1, 9)]
        prompts = [often, once[0], often, once[1], often, *once[2:5]]
        for name, keys in enumerate(prompts):
            serve(cache, tiers, name, keys)
        (level,) = tiers.levels
        kept[eviction] = sum(block.name in often for block in level.content.values())
    assert kept["lfu"] > kept["lru"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda level, _: level.content.popitem(),
        lambda level, _: level.slots.hold([next(iter(level.content))]),
        lambda level, part: level.slots.release([next(iter(part.blocks))]),
        lambda _, part: part.blocks.popitem(),
        lambda level, _: setattr(level.pool, "free_blocks", level.pool.free_blocks - 1),
    ],
    ids=["content", "held", "released", "loading", "free"],
)
def test_damage_of_a_level_is_noticed(damage):
    """While a load reads slots, each slot is free, idle or read by it, and names its block."""
    cache, tiers = below([FULL, WINDOW], tier=f"host:memory={100 * SLOT},write=through")
    for name, keys in enumerate(([1, 2, 3, 4], [5, 6, 7])):
        serve(cache, tiers, name, keys)
    seq = cache.open(ask("reads", prompt=17, keys=[1, 2, 3, 4]), 0, 10**9)
    load = tiers.load(seq, 10**9, prefill_ns)
    tiers.check_integrity()
    damage(tiers.levels[0], load.parts[0])
    with pytest.raises(AssertionError, match=r"tier host: \d+ named slots of 1[12] in use"):
        tiers.check_integrity()


def test_an_explanation_says_what_was_loaded(tmp_path):
    """The tokens that tiers have are loaded ones, and none is counted twice."""
    path = tmp_path / "trace.jsonl"
    with Trace(path) as trace:
        cache, tiers = below([FULL, WINDOW], trace=trace)
        for name, keys in enumerate(([1, 2, 3, 4], [5, 6, 7], [1, 2, 3, 4, 8])):
            serve(cache, tiers, name, keys)
    losses = [
        (loss.category, loss.tokens, loss.tier) for loss in explain(path).requests[2].losses
    ]
    assert losses[0] == ("loaded", 16, "host")
    assert sum(tokens for _, tokens, _ in losses) == 21


@pytest.mark.parametrize("tiers", [[], [f"host:memory={100 * SLOT}"]])
def test_a_prompt_whose_first_chunk_finds_no_room_hits_nothing(tiers):
    """Replayed without a clock, it counts no hit and leaves no block held, tiers or none."""
    cache = GroupedCache([FULL], 8, key_tokens=4)
    GroupTiers(cache, tiers, SLOT)
    cache.compute(ask(0, prompt=17, keys=[1, 2, 3, 4]), 64)
    again = ask(1, prompt=81, keys=[1, 2, 3, 4, *range(10, 26)])
    assert cache.compute(again, 64).tokens == cache.stats.hit_blocks == 0
    assert cache.available_blocks == 8
