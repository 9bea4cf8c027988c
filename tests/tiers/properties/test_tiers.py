"""Tiers below a server: no block is lost, and no transfer takes less than its link allows."""

from fractions import Fraction
from random import Random
from types import SimpleNamespace

import attrs
import pytest
from helpers.policies import POLICIES, build
from helpers.serving import (
    BLOCK,
    SLOT,
    Bent,
    ask,
    early,
    random_tiered_server,
    random_tiers,
    serve,
    tiered_servers,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcore import KVCache
from kvcore.serving.latency import ServiceEstimates
from kvcore.serving.loop import ServingLoop
from kvcore.testing import (
    COMPACTIONS,
    EVEN,
    FORKS,
    Driver,
    Traffic,
    random_requests,
    random_steps,
)
from kvcore_plugins.latency import Linear, Roofline, TokenRate
from kvcore_tiers.hierarchy import Tiers
from kvcore_tiers.level import Level
from kvcore_tiers.link import Link
from kvcore_tiers.tier import Host

few = settings(max_examples=max(settings.default.max_examples // 2, 1))
SOME = ("fcfs", "urgent", "planning")
some_schedulers = pytest.mark.parametrize("scheduler", SOME)


@some_schedulers
@given(server=tiered_servers())
def test_every_block_is_in_one_place(scheduler, server):
    """Pool and levels account for all their blocks after every plan, and leave none pinned."""
    planned = ServingLoop._planned

    def checked(loop, now):
        loop._cache.check_integrity()
        planned(loop, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServingLoop, "_planned", checked)
        run = server.run(scheduler)
    for level in run.result.cache.tiers.levels:
        assert not level.parked
        assert not any(span.ref_count for span in level.tree.spans())


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_may_evict_in_a_tier(policy):
    """A tier evicts and loads under every policy, and its contents stay consistent."""
    cache = KVCache(12, 3, accounting="tokens", key_tokens=6)
    rules = {"keep": "exclusive", "load": "always", "latency": 0}
    tier = Host(memory=14 * SLOT, eviction=build(policy), **rules)
    tiers = Tiers(cache, [tier], SLOT)
    now = 0
    for request in random_requests(1, 90, Traffic(key_tokens=6, most_keys=4, hints=True)):
        now = max(now, request.arrival)
        seq = cache.open(request, now=now)
        load = tiers.load(seq, now, lambda tokens, _: tokens)
        if load is not None:
            now = load.ready
            tiers.finish(load, now)
        cache.commit(seq, seq.tokens - seq.computed, now)
        cache.close(seq, now)
        cache.check_integrity()
    (level,) = tiers.levels
    assert level.stats.dropped.get("capacity")
    assert level.stats.loaded


@pytest.mark.parametrize(
    "mix", [FORKS, EVEN, COMPACTIONS], ids=["forks", "even", "compactions"]
)
@pytest.mark.parametrize(
    ("size", "accounting"), [(6, "tokens"), (2, "tokens"), (12, "tokens"), (2, "keys")]
)
def test_tiers_stay_consistent_under_all_calls_of_a_cache(size, accounting, mix):
    """Caches and tiers stay consistent under forks, rollbacks and compactions.

    Blocks are smaller and larger than keys.
    """
    steps = random_steps(size, 100, Traffic(key_tokens=6, hints=True, mix=mix))
    for seed in range(4):
        blocks = 15 * max(1, 6 // size)
        cache = KVCache(blocks, size, accounting=accounting, key_tokens=6, ids=seed % 2 == 0)
        Tiers(cache, random_tiers(Random(seed).randint), SLOT)
        Driver(cache).run(steps)  # checks integrity after every step


@some_schedulers
@few
@given(server=tiered_servers())
def test_links_carry_the_bytes_of_the_trace(scheduler, server):
    """A link moves the bytes of the trace, one move at a time, within its bandwidth."""
    run = server.run(scheduler)
    for level in run.result.cache.tiers.levels:
        link, tier, free = level.link, level.tier, 0
        moved = {"OFFLOAD": 0, "LOAD_START": 0}
        for line in run.lines:
            if line["event"] not in moved or line["tier"] != level.name:
                continue
            moved[line["event"]] += line["blocks"]
            reads = line["event"] == "LOAD_START"
            rate = tier.read_bandwidth if reads else tier.write_bandwidth
            end = line["done"] - round(tier.latency * 10**9)
            start = max(free, line["t"])
            assert end - start >= Fraction(line["blocks"] * SLOT * 10**9, rate)
            free = end
        assert moved["OFFLOAD"] * SLOT == link.written_bytes
        assert moved["LOAD_START"] * SLOT == link.read_bytes
        lost = sum(level.stats.dropped.values())
        assert level.stats.stored - lost == level.pool.blocks - level.pool.free_blocks


@some_schedulers
@few
@given(server=tiered_servers())
def test_a_request_waits_for_its_load(scheduler, server):
    """No request has a token before its load is done, and loaded tokens are counted once."""
    run = server.run(scheduler)
    due = {}
    for line in run.lines:
        if line["event"] == "LOAD_START":
            due[line["seq"]] = max(line["done"], due.get(line["seq"], 0))
        elif line["event"] in {"LOAD", "FIRST_TOKEN", "FINISH"}:
            assert line["t"] >= due.get(line["seq"], 0)
    # What is loaded ahead of a request counts only if the request waits for it.
    cache, log = run.result.cache, run.result.log
    size, stats = cache.geometry.block_size, [level.stats for level in cache.tiers.levels]
    assert sum(log.loaded) == size * sum(each.hits for each in stats)
    looked_up = {r.id: cache.geometry.prompt(r).lookup for r in server.requests}
    ratios = (
        loaded / size / looked_up[name]
        for name, loaded in zip(log.ids, log.loaded, strict=True)
        if loaded
    )
    assert sum(each.ratio_sum for each in stats) == pytest.approx(sum(ratios))


@few
@given(server=tiered_servers())
def test_a_tier_too_slow_to_use_changes_no_time(server):
    """A tier of a byte a second changes no time, since no block is loaded or swapped."""
    slow = ("host:memory=10MB,read_bandwidth=1,write_bandwidth=1,max_wait=1e6",)
    tiered = attrs.evolve(server, tiers=slow).run("urgent", trace=False)
    plain = attrs.evolve(server, tiers=()).run("urgent", trace=False)
    assert tiered.rows == plain.rows
    assert tiered.result.log.busy_ps == plain.result.log.busy_ps


@few
@given(server=tiered_servers(), write=st.sampled_from(("evict", "through")))
def test_every_admission_looks_up_every_level(server, write):
    """Each admission looks up each level, the nearest first, until all blocks are found.

    These are the blocks of the prompt that may hit. There is no lookup if all hit in the pool.
    """
    server = attrs.evolve(
        server, requests=[early(request, None) for request in server.requests]
    )
    tiers = tuple(f"disk:memory={slots * SLOT},write={write}" for slots in (3, 1000))
    opened, admissions = [], []
    find_all, find_in = Tiers._find, Level.find

    class Noting(KVCache):
        def open(self, request, *arguments, **options):
            seq = super().open(request, *arguments, **options)
            opened.append(request.id)
            return seq

    def finding(tiers, seq, now, *, counts):
        geometry, lookups = tiers.cache.geometry, []
        limit = min(seq.cacheable, seq.blocks)
        if geometry.accounting == "tokens":
            limit = min(limit, (seq.target - 1) // geometry.block_size)
        admissions.append((seq.hit_blocks, limit, lookups))
        return find_all(tiers, seq, now, counts=counts)

    def found(level, keys, limit, now):
        upto = find_in(level, keys, limit, now)
        admissions[-1][2].append((level.name, upto, limit))
        return upto

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("helpers.serving.KVCache", Noting)
        patch.setattr(Tiers, "_find", finding)
        patch.setattr(Level, "find", found)
        attrs.evolve(server, tiers=tiers).run("urgent", trace=False)
    assert len(admissions) == len(opened)
    for hit, limit, lookups in admissions:
        assert {wanted for _, _, wanted in lookups} <= {limit}
        ends = {name: upto for name, upto, _ in lookups}
        expected, end = [], hit
        for name in ("disk-1", "disk-2"):
            if end < limit:
                expected.append(name)
            end = max(end, ends.get(name, 0))
        assert [name for name, _, _ in lookups] == expected


LATENCIES = {
    "linear": Linear,
    "flat": lambda: Linear(step=1e-3, prefill=1e-6, context=0),
    "token-rate": TokenRate,
    "roofline": Roofline,
    "experts": lambda: Roofline("deepseek-v3", "h200", tensor_parallel=8),
    "windows": lambda: Roofline("gemma-3-27b", tensor_parallel=4),
}


@pytest.mark.parametrize("name", LATENCIES)
@given(
    held=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    rates=st.lists(st.integers(6, 12), min_size=3, max_size=3),
    queued=st.lists(st.integers(0, 2000), min_size=3, max_size=3),
    more=st.integers(1, 3000),
    lead=st.sampled_from((None, 10**4, 10**6, 10**7, 10**8)),
)
def test_the_fastest_prefix_is_loaded(name, held, rates, queued, more, lead):
    """The prefix that is loaded takes the least time, with the computation of the rest.

    The time until the arrival of a request, `lead` ns, costs it nothing.
    """
    size, latency = 16, LATENCIES[name]()
    cache = KVCache(1000, size, accounting="tokens", key_tokens=size)
    tiers = Tiers(
        cache,
        [
            f"host:memory=10GB,read_bandwidth={10**rate},latency={10.0 ** (rate - 14)},"
            "max_wait=1e6"
            for rate in rates[: len(held)]
        ],
        10_000,
    )
    keys = list(range(max(held)))
    request = ask("a", prompt=len(keys) * size, keys=keys, key_tokens=size)
    seq = cache.open(request)
    cache.commit(seq, request.prompt_tokens)
    for level, blocks, wait in zip(tiers.levels, held, queued, strict=False):
        level.store(seq.span, blocks, 0, None)
        level.link.load(wait * 10_000, 0)
    cache.close(seq)
    cache.tree.discard(cache.tree.root.children[0], 0, "expired")
    prefill_ns = ServiceEstimates(cache, latency, 8).prefill_ns
    borders, end = [], 0
    for level, blocks in zip(tiers.levels, held, strict=True):
        borders.append((level, end, max(end, blocks)))
        end = max(end, blocks)
    target = request.prompt_tokens + more

    def took(upto):
        loads = [
            level.link.load_ns((min(upto, last) - first) * 10_000, 0)
            for level, first, last in borders
            if first < min(upto, last)
        ]
        waited = max(max(loads, default=0) - (lead or 0), 0)
        return waited + prefill_ns(target - upto * size, upto * size)

    times = [took(upto) for upto in range(end + 1)]
    request = attrs.evolve(request, id="b", prompt_tokens=target)
    if lead is None:
        load = tiers.load(cache.open(request), 0, prefill_ns)
    else:
        load = tiers.prefetch(request, 0, lead, prefill_ns, 0)
    ready, upto = (0, 0) if load is None else (load.ready, load.parts[-1].end)
    computing = prefill_ns(target - upto * size, upto * size)
    assert times[upto] == max(ready - (lead or 0), 0) + computing == min(times)


@settings(max_examples=100)
@given(
    hit=st.integers(0, 2),
    levels=st.lists(
        st.tuples(
            *(st.integers(1, 9), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9)),
            st.sampled_from(("cost", "cost", "always")),
        ),
        min_size=1,
        max_size=3,
    ),
    block_ns=st.integers(0, 4),
    context_ns=st.integers(0, 2),
    more=st.integers(0, 4),
    lead=st.integers(0, 20),
)
@example(hit=0, levels=[(1, 1, 0, 0, "cost")], block_ns=0, context_ns=0, more=0, lead=20)
def test_the_end_of_a_load_is_the_best_of_all(hit, levels, block_ns, context_ns, more, lead):
    """No other end of a load takes less time; if it takes as long, all of a level is loaded.

    What a level has to load in any case is loaded.
    """
    cache, now = KVCache(100, BLOCK, accounting="tokens", key_tokens=BLOCK), 7
    tiers, runs, end = Tiers(cache, [], SLOT), [], hit
    for blocks, ns, latency, wait, load in levels:
        link = Link(SLOT * 10**9 // ns, 1, latency / 10**9)
        link.free_at = now + wait
        level = SimpleNamespace(link=link, slot_bytes=SLOT, tier=SimpleNamespace(load=load))
        runs.append((level, end, end + blocks))
        end += blocks

    seq = SimpleNamespace(hit_blocks=hit, target=(end + more) * BLOCK + 1)

    def prefill_ns(tokens, context):
        assert context + tokens == seq.target
        blocks = range(context // BLOCK, seq.target // BLOCK)
        return sum(block_ns + context_ns * block for block in blocks)

    floor = max((upto for level, _, upto in runs if level.tier.load == "always"), default=hit)

    def took(upto):
        loads = (
            level.link.load_ns((min(upto, last) - first) * SLOT, now) - lead
            for level, first, last in runs
            if first < upto
        )
        return max(0, *loads, 0) + prefill_ns(seq.target - upto * BLOCK, upto * BLOCK)

    best = tiers._cheapest(seq, runs, now, prefill_ns, lead)
    times = {upto: took(upto) for upto in range(floor, end + 1)}
    assert times[best] == min(times.values())
    ends = [upto for _, _, upto in runs if upto > floor]
    assert best > floor or all(times[upto] > times[floor] for upto in ends)


ROWS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 2), st.integers(1, 3)), max_size=20
)


@few
@given(rows=ROWS, write=st.sampled_from(("evict", "through")), exclusive=st.booleans())
def test_a_tier_without_limits_is_an_endless_pool(rows, write, exclusive):
    """Every computed block hits if a tier of unlimited size and speed is below the pool."""
    requests = [
        ask(
            index,
            index * 10**6,
            prompt,
            output,
            keys=[100 * branch + index for index in range(prompt // BLOCK)],
        )
        for index, (prompt, branch, output) in enumerate(rows)
    ]
    keep = "exclusive" if exclusive and write == "evict" else "inclusive"
    tier = (
        f"host:memory=1GB,write={write},keep={keep},load=always,latency=0,"
        f"read_bandwidth={10**18},write_bandwidth={10**18}"
    )
    tiered = serve(requests, blocks=11, latency=Bent(), tiers=(tier,), trace=False)
    endless = serve(requests, latency=Bent(), trace=False)
    transfer_ns = tiered.result.cache.tiers.levels[0].link.busy_ns
    for name, row in endless.rows.items():
        found = tiered.rows[name]
        at = tiered.result.log.ids.index(name)
        assert found["hit"] + tiered.result.log.loaded[at] == row["hit"]
        # Each transfer takes a nanosecond. A load waits for the writes of what it displaces,
        # and may delay other requests as well.
        assert 0 <= found["first_token"] - row["first_token"] <= transfer_ns


@pytest.mark.parametrize("what", ["loaded", "swaps"])
def test_random_servers_use_their_tiers(what):
    """Random servers are tight enough for loads and for swaps."""
    servers = (random_tiered_server(Random(seed).randint) for seed in range(100))
    runs = (server.run("fcfs", trace=False) for server in servers)
    assert any(sum(getattr(run.result.log, what)) for run in runs)
