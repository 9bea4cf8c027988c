"""Moves of blocks between a pool and its tiers, with times exact to the nanosecond."""

import re
from types import SimpleNamespace

import orjson
import pytest
from helpers.faults import fail, faulty
from helpers.serving import BLOCK, SLOT, Slow, Tally, ask, serve

import kvcore
from kvcore import EvictionPolicy, InputError, KVCache, PolicyError
from kvcore.cache.tiers import Tier
from kvcore.cache.tree import SpanTree
from kvcore.models.catalogue import MODELS
from kvcore.models.memory import KVLayout
from kvcore.request import Hints
from kvcore_plugins.eviction import LRU
from kvcore_tiers.hierarchy import Load, Tiers
from kvcore_tiers.level import Part, path_ids
from kvcore_tiers.link import InstantLink
from kvcore_tiers.tier import Host

FAST = "read_bandwidth=64GB,write_bandwidth=64GB,latency=0"
"""Bandwidths at which a block of 64 bytes moves in one nanosecond."""


def prompt(branch, blocks):
    """Return the keys of a prompt."""
    return [100 * branch + index for index in range(blocks)]


def shared(*rows, spaced=10**6):
    """Return requests `spaced` ns apart.

    Each row is a branch and its number of blocks; the prompt has one token more.
    """
    return [
        ask(index, index * spaced, blocks * BLOCK + 1, keys=prompt(branch, blocks))
        for index, (branch, blocks) in enumerate(rows)
    ]


def level_of(run, number=0):
    """Return a level of the tiers of a run."""
    return run.result.cache.tiers.levels[number]


def stats(run, *names, number=0):
    """Return some statistics of a level."""
    found = level_of(run, number).stats
    return tuple(getattr(found, name) for name in names)


ROTATION = ((1, 4), (2, 4), (3, 4), (1, 4), (2, 4), (3, 4))
"""Three prompts of four full blocks in turn; a pool of nine blocks does not hold all three."""


def test_evicted_blocks_are_loaded_again():
    """With write=evict, evicted blocks are loaded by every later request that needs them."""
    run = serve(shared(*ROTATION), blocks=9, latency=Slow(), tiers=(f"host:memory=1MB,{FAST}",))
    assert list(run.result.log.hit) == [0] * 6
    assert list(run.result.log.loaded) == [0, 0, 0, 16, 16, 16]
    # 16 tokens load in 4 ns, after 16 tokens of victims were stored in 4; one is computed.
    waits = [row["first_token"] - row["arrival"] for row in run.rows.values()]
    assert waits == [1700, 1700, 1700, 108, 108, 104]
    # None of them had been admitted before.
    assert stats(run, "loaded", "returned", "prefetched") == (12, 0, 0)


def test_policies_know_how_long_a_block_takes_to_load():
    """The layout has the seconds that a block takes to load from the nearest level."""
    run = serve(shared((1, 4)), blocks=9, tiers=(f"host:memory=1MB,{FAST}",))
    assert run.result.cache.geometry.reload_seconds == 1e-9


@pytest.mark.parametrize(
    ("first", "end", "ids"),
    [
        (0, 6, [10, 11, 12, 13, 20, 21]),
        (2, 5, [12, 13, 20]),
        (4, 6, [20, 21]),
        (1, 3, [11, 12]),
    ],
)
def test_the_ids_of_a_path_are_those_between_two_positions(first, end, ids):
    """The ids of blocks of a path are found over its spans, from one position to another."""
    root = SimpleNamespace(parent=None)
    upper = SimpleNamespace(parent=root, start=0, end=4, ids=[10, 11, 12, 13])
    lower = SimpleNamespace(parent=upper, start=4, end=6, ids=[20, 21])
    assert path_ids(lower, first, end) == ids


def test_an_instant_link_takes_no_time_and_counts_bytes():
    """In a replay without a clock a transfer is done when it begins, and its bytes count."""
    link = InstantLink()
    assert (link.load_ns(SLOT, 7), link.store(SLOT, 7), link.load(2 * SLOT, 7)) == (0, 7, 7)
    assert (link.written_bytes, link.read_bytes, link.wait(0)) == (SLOT, 2 * SLOT, 0)
    assert (link.busy_ns, link.free_at) == (0, 0)


def test_a_discarded_path_leaves_no_hit_on_the_rest():
    """Blocks before damaged ones stay, and have no more hits than before."""
    tiers = (f"host:memory=1MB,{FAST}",)
    run = serve(shared((1, 4), (2, 8)), blocks=9, trace=False, tiers=tiers)
    level = level_of(run)
    (span,) = level.tree.spans()
    hits, keys = span.hit_count, span.path_keys
    holder = level._holder("damaged", None, keys, 4)
    level.discard(holder, 2, 10**9, "damaged")
    assert (level.tree.cached_blocks, level.tree.match(keys, 4, 10**9).blocks) == (2, 2)
    assert [span.hit_count for span in level.tree.spans()] == [hits]


@pytest.mark.parametrize("traced", [True, False])
def test_blocks_evicted_in_a_jump_are_stored_at_the_time_of_their_step(traced):
    """A block that a growing request evicts is stored when the step begins that needs it."""
    requests = [*shared((1, 4)), ask("long", 1000, 4, output=24)]
    run = serve(requests, blocks=9, trace=traced, tiers=(f"host:memory=1MB,{FAST}",))
    # Five blocks are free: 20 slots. The prompt takes 4, and each step from 1010 ns on takes 1.
    assert [span.created for span in level_of(run).tree.spans()] == [1170]


def test_victims_of_a_tier_move_to_the_next_tier():
    """Blocks that the host evicts move to the disk and are loaded from there."""
    tiers = (f"host:memory={4 * SLOT},{FAST}", f"disk:memory=1MB,{FAST}")
    run = serve(shared(*ROTATION), blocks=9, latency=Slow(), tiers=tiers)
    assert list(run.result.log.loaded)[3:] == [16, 16, 16]
    assert stats(run, "loaded", number=1) > (0,)
    sources = {line.get("from") for line in run.lines if line["event"] == "OFFLOAD"}
    assert sources == {None, "host"}


USED_AGAIN = {
    "arc": lambda _, span: span.data,
    "lruk:history=4": lambda _, span: span.data[2] > 0,
    "s3fifo:ghost=4": lambda _, span: span.data.in_main,
    "tinylfu": lambda policy, span: policy._frequency(span) > 1,
}


@pytest.mark.parametrize("policy", USED_AGAIN)
def test_blocks_that_a_tier_stores_again_are_used_again(policy):
    """Blocks that a tier has evicted and gets again count as used again.

    The pool hands down blocks of one request at many times, and no preemption is the reason.
    """
    slots = 8 if policy == "arc" else 4
    tier = Host(memory=slots * SLOT, eviction=policy)
    requests = shared((1, 4), (2, 4), (3, 4))
    cache = serve(requests, blocks=99, tiers=(tier,)).result.cache
    (level,) = cache.tiers.levels
    first, second, third = sorted(
        (s for s in cache.tree.spans() if not s.is_generated), key=lambda s: s.last_request
    )
    now, cache.trace = 10**9, None
    level.store(first, 4, now, None)
    level.give_back(level.take(requests[0], first.path_keys, 0, 4, now), 4, now)
    for span in (second, third, second):
        level.store(span, 4, now, None)
    (stored,) = (s for s in level.tree.spans() if s.path_keys[0] == second.path_keys[0])
    assert USED_AGAIN[policy](level.eviction, stored)


def test_a_write_that_would_wait_too_long_is_skipped():
    """A write that would wait longer than `max_wait` is skipped and counted."""
    slow = "host:memory=1MB,read_bandwidth=64GB,write_bandwidth=64kB,max_wait=0"
    run = serve(shared(*ROTATION, spaced=10_000), blocks=9, latency=Slow(), tiers=(slow,))
    stored, skipped = stats(run, "stored", "skipped")
    assert stored
    assert skipped


def test_paths_longer_than_a_level_keep_their_beginning():
    """A level smaller than a path stores the first blocks of the path."""
    run = serve(
        shared((1, 8), (2, 8), (1, 8)), blocks=9, latency=Slow(),
        tiers=(f"host:memory={3 * SLOT},write=through,{FAST}",),
    )  # fmt: skip
    moves = [line for line in run.lines if line["event"] == "OFFLOAD"]
    assert [(line["first"], line["blocks"]) for line in moves] == [(0, 3)] * 3
    assert stats(run, "refused") == (3 * 5,)
    assert level_of(run).tree.cached_blocks == 3


@pytest.mark.parametrize("closes", [False, True])
def test_planned_blocks_are_written_through_once_they_are_computed(closes):
    """Blocks that are shared when a step is planned go down when it ends, not before."""
    cache = KVCache(100, BLOCK, accounting="tokens", key_tokens=BLOCK)
    (level,) = Tiers(cache, [f"host:memory=1MB,write=through,{FAST}"], SLOT).levels
    first, later = (
        cache.open(ask(n, prompt=blocks * BLOCK + 1, keys=prompt(1, blocks)), now=n)
        for n, blocks in ((0, 4), (1, 6))
    )
    cache.publish(first, 4 * BLOCK, 2)
    assert level.stats.stored == 0
    if closes:
        cache.close(first, 3)
    else:
        cache.commit(first, 2 * BLOCK, 3)
        assert level.stats.stored == 2
        cache.commit(first, 2 * BLOCK, 4)
    assert level.stats.stored == 4
    cache.commit(later, 6 * BLOCK, 5)
    assert level.stats.stored == 6
    cache.check_integrity()


def test_hits_of_planned_blocks_store_what_is_computed_of_their_path():
    """A hit of blocks that a step is still to compute writes only those before them."""
    cache = KVCache(100, BLOCK, accounting="tokens", key_tokens=BLOCK)
    (level,) = Tiers(cache, [f"host:memory=1MB,write=1,{FAST}"], SLOT).levels
    asked = ask(0, prompt=4 * BLOCK + 1, keys=prompt(1, 4))
    first = cache.open(asked, now=0)
    cache.commit(first, 2 * BLOCK, 1)
    cache.publish(first, 2 * BLOCK, 2)
    assert cache.open(asked, now=3).hit_blocks == 4
    assert level.stats.stored == 2
    cache.commit(first, 2 * BLOCK, 4)
    assert level.stats.stored == 2
    cache.open(asked, now=5)
    assert level.stats.stored == 4


@pytest.mark.parametrize(
    ("eviction", "lookups", "stored"),
    [("lru", [4, 2, 4, 4], 10), ("ttl:ttl=1", [4, 4, 3, 2, 4, 4, 4, 4], 14)],
)
def test_a_path_is_looked_up_again_only_if_it_may_have_left(
    monkeypatch, eviction, lookups, stored
):
    """A path that is stored again is not looked up, until a block of its level has left.

    Where blocks expire it is looked up each time, and what has expired is written again.
    """
    cache = KVCache(100, BLOCK, accounting="tokens", key_tokens=BLOCK)
    tier = Host(memory="1MB", eviction=eviction)
    (level,) = Tiers(cache, [tier], SLOT).levels
    path, other = (
        cache.open(ask(branch, prompt=blocks * BLOCK, keys=prompt(branch, blocks)))
        for branch, blocks in ((1, 4), (2, 2))
    )
    for seq in (path, other):
        cache.commit(seq, seq.tokens)
    match, asked = SpanTree.match, []
    monkeypatch.setattr(
        SpanTree,
        "match",
        lambda tree, keys, *more: asked.append(more[0]) or match(tree, keys, *more),
    )
    for seq, end in ((path, 4), (path, 4), (path, 3), (other, 2), (path, 4), (path, 4)):
        level.store(seq.span, end, 0, None)
    level.tree.discard(match(level.tree, path.keys, 4, 0).span, 0, "gone")
    for now in (0, 2 * 10**9):
        level.store(path.span, 4, now, None)
    assert (asked, level.stats.stored) == (lookups, stored)


@pytest.mark.parametrize("write", ["through", "evict"])
def test_stored_blocks_keep_their_retention_priority(write):
    """A stored block keeps its retention priority and the time until which it holds.

    So it does whether the spans of its path are stored one by one, or all at once.
    """
    cache = KVCache(100, BLOCK, accounting="tokens", key_tokens=BLOCK)
    (level,) = Tiers(cache, [f"host:memory=1MB,write={write}"], SLOT).levels
    hints = [
        kvcore.request.Retention(BLOCK * block, BLOCK * end, priority, duration)
        for block, end, priority, duration in ((0, 1, 80, 50), (1, 3, 70, None), (3, 4, 60, 20))
    ]
    seq = cache.open(ask("a", prompt=21, keys=prompt(1, 5), retention=hints), now=100)
    cache.commit(seq, 21)
    level.store(seq.span, 5, 100, None)
    below, above = (
        [(s.start, s.end, s.priority, s.priority_until) for s in tree.spans()]
        for tree in (level.tree, cache.tree)
    )
    expected = [(0, 1, 80, 150), (1, 3, 70, None), (3, 4, 60, 120), (4, 5, 35, None)]
    assert below == above == expected


# Preemption by swap.

TWO = [ask("a", prompt=8, output=12), ask("b", prompt=8, output=12)]
"""Two requests that need five blocks each at their end."""

ALWAYS = f"host:memory=1MB,load=always,{FAST}"


def test_a_swapped_request_computes_one_token():
    """A swapped request computes one token again when it resumes, and no more."""
    run = serve(TWO, blocks=6, latency=Tally(), tiers=(ALWAYS,))
    assert (run.result.log.swaps[-1], run.sum("recomputes")) == (1, 0)
    _, prefill = divmod(run.result.log.busy_ps, Tally.TOKEN)
    assert prefill == 8 + 8 + 1
    assert run.sum("output") == 24
    assert stats(run, "parked", "returned", "found") == (3, 3, 0)


def test_a_swap_is_recorded_in_the_trace():
    """A swap is recorded as PREEMPT, OFFLOAD, LOAD_START, LOAD and DROP.

    Afterwards no slot of the level is parked.
    """
    run = serve(TWO, blocks=6, latency=Tally(), tiers=(ALWAYS,))
    found = [
        (line["event"], line.get("how") or line.get("parked") or line.get("reason"))
        for line in run.lines
        if line["event"] in {"PREEMPT", "OFFLOAD", "LOAD_START", "LOAD", "DROP"}
    ]
    assert found == [
        ("PREEMPT", "swap"),
        ("OFFLOAD", True),
        ("LOAD_START", None),
        ("LOAD", None),
        ("DROP", "parked"),
    ]
    assert not level_of(run).parked


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("shared", [0, 2])
def test_a_sequence_is_swapped_if_that_takes_no_longer_than_computing(shared, stored):
    """The queue of the link counts once, then the write of all that is missing, and the read.

    Of the shared blocks, those that the level has are not written, and none is read.
    """
    cache = KVCache(100, BLOCK, accounting="tokens", key_tokens=BLOCK)
    tiers = Tiers(cache, [f"host:memory=1MB,{FAST}"], SLOT)
    (level,) = tiers.levels
    tokens = (shared + 2) * BLOCK + 1
    seq = cache.open(ask("a", prompt=tokens, keys=prompt(1, shared)))
    cache.commit(seq, tokens)
    if stored and shared:
        level.store(seq.span, shared, 0, None)
    level.link.store(50 * SLOT, 0)
    written = 3 if stored else shared + 3
    took, asked = level.link.wait(0) + written + 3, []
    for again, where in ((took, level), (took - 1, None)):
        answer = tiers.can_swap(
            seq, tokens, 0, lambda *work, ns=again: asked.append(work) or ns
        )
        assert answer is where
        assert asked.pop() == (tokens - shared * BLOCK, shared * BLOCK)
    for beyond, where in ((1, level), (0, None)):
        assert tiers.can_swap(seq, shared * BLOCK + beyond, 0, lambda *_: took) is where


@pytest.mark.parametrize("unit", [BLOCK, 3 * BLOCK])
def test_a_swapped_output_is_in_no_tier_afterwards(unit):
    """Generated blocks are parked and loaded, and leave; those of the prompt stay.

    No other request can hit them. The prompt ends inside a key of three blocks, or at its end.
    """
    cache = KVCache(100, BLOCK, accounting="tokens", key_tokens=unit)
    (level,) = Tiers(cache, [ALWAYS], SLOT).levels
    seq = cache.open(ask("a", prompt=7 * BLOCK, keys=prompt(1, 7), key_tokens=unit))
    cache.extend(seq, 3 * BLOCK)
    cache.commit(seq, 10 * BLOCK)
    cache.keep_generated(seq, 9 * BLOCK, 0)
    assert cache.tiers.can_swap(seq, 10 * BLOCK, 0, computed) is level
    level.park(seq, 10 * BLOCK, 0)
    cache.close(seq, preempted=True)
    assert (level.stats.stored, level.stats.parked) == (10, 3)
    cache.tree.discard(next(cache.tree.spans()), 0, "expired")
    seq = cache.open(seq.request, resumed=True, target=10 * BLOCK + 1)
    load = cache.tiers.load(seq, 0, computed, resumed=True)
    assert cache.tiers.finish(load, load.ready) == 10 * BLOCK
    cache.check_integrity()
    assert level.stats.dropped == {"parked": 3}
    assert level.pool.blocks - level.pool.free_blocks == 7
    assert not any(span.is_generated for span in level.tree.spans())


def half_hit(name, prefetch=None):
    """Return tiers with a level, and a sequence of 17 tokens whose first 8 are in the pool."""
    tiers = Tiers(KVCache(100, BLOCK), [f"host:memory=1MB,{FAST}"], SLOT)
    request = SimpleNamespace(id=name, hints=Hints(prefetch=prefetch))
    seq = SimpleNamespace(id=0, request=request, hit_blocks=2, target=17, keys=[])
    return tiers, seq


def computed(tokens, _):
    """Return the ns to compute tokens: one each."""
    return tokens


@pytest.mark.parametrize(
    ("end", "left", "waits"), [(4, 8, True), (4, 9, False), (3, 4, True), (2, 0, False)]
)
def test_a_prefetch_is_awaited_if_that_is_faster_than_computing(end, left, waits):
    """A request waits for the rest of its prefetch, if that and computing take no longer.

    Its prefetch must have more than the request hits.
    """
    tiers, seq = half_hit("a", prefetch=10)
    ahead = Load(seq, [Part(tiers.levels[0], seq, 1, end)], left, 0, resumed=False, ahead=True)
    tiers._ahead["a"] = ahead
    asked = []
    load = tiers._await(
        seq, 0, lambda *work: asked.append(work) or computed(*work), resumed=False
    )
    assert (load is not None and load.awaited is ahead) == waits
    assert asked == ([] if end == 2 else [(17 - 4 * end, 4 * end), (9, 8)])
    assert load is None or load.tokens == 4 * end


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    ("hit", "loaded", "hits"), [(1, 6, [1, 3]), (3, 6, [0, 2]), (3, 4, [0, 1])]
)
def test_an_awaited_prefetch_hits_what_the_pool_had_lost(hit, loaded, hits, resumed):
    """Blocks that a prefetch of two levels has loaded, and the request had not hit, are hits.

    It takes no more blocks than the prefetch was to load; the return of a request hits nothing.
    """
    cache = KVCache(100, BLOCK, accounting="tokens", key_tokens=BLOCK)
    tiers, keys = Tiers(cache, ["host:memory=1MB", "host:memory=1MB"], SLOT), prompt(1, 6)

    def commit(name, blocks):
        seq = cache.open(ask(name, prompt=blocks * BLOCK, keys=keys[:blocks]))
        cache.commit(seq, blocks * BLOCK - seq.computed)

    commit("before", hit)
    seq = cache.open(ask("a", prompt=7 * BLOCK, keys=keys))
    commit("prefetch", loaded)
    first, second = tiers.levels
    ahead = Load(seq, [Part(first, seq, 0, 2), Part(second, seq, 2, 5)], 0, 0, resumed=False)
    load = Load(seq, [], 0, 5 * BLOCK, resumed, awaited=ahead)
    tokens = min(loaded, 5) * BLOCK
    assert tiers.finish(load, 0) == seq.computed == tokens
    for level, blocks in zip(tiers.levels, [0, 0] if resumed else hits, strict=True):
        assert level.stats.hits == level.stats.prefetch_hits == blocks
        assert level.stats.ratio_sum == blocks / 6


def damaged_after(intact):
    """Return two tiers, which hold the first 2 and all 5 blocks of a request, and the request.

    Also returns a list that gets the ids of the blocks of the pool into which each level is
    read, and the level. The pool has the first block, and the first `intact` are not damaged.
    """
    cache = KVCache(100, BLOCK, accounting="tokens", key_tokens=BLOCK, ids=True)
    tiers = Tiers(cache, ["host:memory=1MB,load=always"] * 2, SLOT, ids=True)
    request, copied = ask("a", prompt=5 * BLOCK + 1, keys=prompt(1, 5)), []
    for held in (5, 1):
        seq = cache.open(ask(held, prompt=held * BLOCK, keys=prompt(1, held)))
        cache.commit(seq, seq.tokens)
        if held == 5:
            for level, end in zip(tiers.levels, (2, 5), strict=True):
                level.store(seq.span, end, 0, None)
        cache.close(seq)
        if held == 5:
            cache.tree.discard(next(cache.tree.spans()), 0, "expired")

    def finish(part, ids):
        copied.append((list(ids), part.level))
        return min(intact - part.first, len(ids))

    mover = dict.fromkeys(("load", "dropped"), lambda *_: None)
    mover |= {"finish": finish, "present": lambda _, slots: len(slots)}
    tiers.move_with(SimpleNamespace(lost=lambda: (), is_ready=lambda _: True, **mover))
    return tiers, request, copied


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("intact", range(1, 6))
def test_a_load_counts_up_to_its_first_damaged_block(intact, resumed):
    """Of a load from two levels, the blocks before the first damaged one are computed tokens.

    Each level counts its own as hits, except for a request that returns. The damaged block and
    those after it leave the level that it is in; a level farther away is not read.
    """
    tiers, request, copied = damaged_after(intact)
    seq = tiers.cache.open(request, resumed=resumed)
    own, (near, far) = list(seq.table()), tiers.levels
    load = tiers.load(seq, 0, computed, resumed=resumed)
    assert tiers.finish(load, load.ready) == seq.computed == intact * BLOCK
    assert copied == [(own[1:2], near), (own[2:5], far)][: 1 + (intact >= 2)]
    for level, blocks in ((near, min(intact, 2) - 1), (far, max(intact - 2, 0))):
        assert level.stats.hits == (0 if resumed else blocks)
        assert level.stats.ratio_sum == (0 if resumed else blocks / 5)
    assert near.tree.cached_blocks == min(intact, 2)
    assert far.tree.cached_blocks == (5 if intact < 2 else intact)
    tiers.cache.check_integrity()


@pytest.mark.parametrize("intact", range(1, 6))
def test_the_trace_of_a_load_has_its_intact_blocks(intact):
    """Each level of a load has a line with the blocks that are used of it."""
    tiers, request, _ = damaged_after(intact)
    load, loads = tiers.load(tiers.cache.open(request), 0, computed), []
    tiers.cache.trace = SimpleNamespace(
        load=lambda _, **fields: loads.append(fields["blocks"]),
        drop_from_tier=lambda *_, **__: None,
    )
    tiers.finish(load, load.ready)
    assert loads == [min(intact, 2) - 1, max(intact - 2, 0)]


@pytest.mark.parametrize("intact", range(1, 6))
def test_a_prefetch_leaves_what_is_before_its_first_damaged_block(intact):
    """Of a prefetch from two levels, the blocks before the first damaged one are cached."""
    tiers, request, _ = damaged_after(intact)
    load = tiers.prefetch(request, 0, 10**9, computed, 0)
    assert tiers.finish(load, load.ready) == 0
    assert load.seq.computed == intact * BLOCK
    cache = tiers.cache
    assert cache.probe(request) == cache.tree.cached_blocks == intact
    assert all(span.start < span.end for span in cache.tree.spans())
    assert not cache.sequences
    cache.check_integrity()


@pytest.mark.parametrize(("nanoseconds", "loads"), [(3, True), (2, False)])
def test_only_blocks_that_the_pool_lacks_count_as_loaded_after_a_swap(nanoseconds, loads):
    """Two of four parked blocks are loaded, if the rest takes as long to compute as that."""
    tiers, seq = half_hit("a")
    (level,) = tiers.levels
    level.unpark = lambda *_: None
    holder, asked = SimpleNamespace(blocks=4, tokens=16), []
    load = tiers._load_parked(
        seq, level, holder, 0,
        lambda *work: asked.append(work) or (1 if work[0] == 1 else nanoseconds),
    )  # fmt: skip
    assert (load is not None) == loads
    assert asked == [(1, 16), (9, 8)]


@pytest.mark.parametrize(("blocks", "loads"), [(1, False), (2, False), (3, True)])
def test_parked_blocks_that_the_pool_has_too_are_dropped(blocks, loads):
    """Parked blocks are dropped, and nothing is loaded, if the pool has all of them."""
    tiers, seq = half_hit("a")
    (level,) = tiers.levels
    unparked = []
    level.unpark = lambda *parked: unparked.append(parked)
    holder = SimpleNamespace(blocks=blocks, tokens=blocks * BLOCK)
    load = tiers._load_parked(seq, level, holder, 0, lambda tokens, _: 10**6 * tokens)
    assert (load is not None, unparked) == (loads, [] if loads else [("a", 0)])


def test_a_mover_is_told_which_slots_are_dropped():
    """When blocks leave a level, the mover gets the slots of these blocks alone."""
    cache = KVCache(100, BLOCK, accounting="tokens", key_tokens=BLOCK)
    (level,) = Tiers(cache, [f"host:memory=1MB,{FAST}"], SLOT, ids=True).levels
    dropped = []
    level.mover = SimpleNamespace(dropped=lambda _, slots: dropped.extend(slots))
    keys, slots = [1, 2, 3, 4], level.pool.allocate(4)
    level.restore(keys, slots)
    level.discard(level._holder("damaged", None, keys, 4), 1, 0, "damaged")
    assert dropped == [*slots[1:]]


def test_paths_of_an_earlier_run_are_there_at_the_beginning():
    """Paths are recovered at the time 0: a later one continues an earlier one that expires.

    It is no hit of that.
    """
    cache = KVCache(100, BLOCK, accounting="tokens", key_tokens=BLOCK)
    tier = Host(memory="1MB", eviction="ttl:ttl=1e-9")
    (level,) = Tiers(cache, [tier], SLOT, ids=True).levels
    slots = level.pool.allocate(3)
    level.restore([1, 2], slots[:2])
    level.restore([1, 2, 3], slots)
    cache.check_integrity()
    assert [(span.start, span.end, span.created) for span in level.tree.spans()] == [
        (0, 2, 0), (2, 3, 0),
    ]  # fmt: skip
    assert not level.stats.dropped
    assert not any(span.hit_count for span in level.tree.spans())


@pytest.mark.parametrize(("slots", "written"), [(2, None), (3, 3)])
def test_a_sequence_is_parked_where_all_its_blocks_fit(slots, written):
    """To park a sequence of 3 blocks takes 3 free slots, and no more."""
    cache = KVCache(100, BLOCK, accounting="tokens", key_tokens=BLOCK)
    (level,) = Tiers(cache, [f"host:memory={slots * SLOT}"], SLOT).levels
    seq = cache.open(ask("a", prompt=3 * BLOCK))
    cache.commit(seq, 3 * BLOCK)
    assert level.to_park(seq, 3 * BLOCK, 0) == written


@pytest.mark.parametrize("forks", [False, True])
def test_forks_and_sequences_under_retention_are_not_swapped(forks):
    """A forked sequence is not swapped, nor one under a retention policy."""
    retention = None if forks else kvcore.Plugins().build("retention", "window:tokens=99")
    cache = KVCache(
        100, BLOCK, accounting="tokens", key_tokens=BLOCK, retention=retention, ids=True
    )
    tiers = Tiers(cache, [ALWAYS], SLOT)
    seq = cache.open(ask("a", prompt=3 * BLOCK))
    cache.commit(seq, 3 * BLOCK)
    if forks:
        assert tiers.can_swap(seq, 3 * BLOCK, 0, lambda *_: 0) is tiers.levels[0]
        cache.fork(seq)
    assert tiers.can_swap(seq, 3 * BLOCK, 0, lambda *_: 0) is None


def test_a_request_is_preempted_if_loads_hold_all_blocks():
    """A request is preempted if it needs a block and loads in progress hold them all.

    It continues when the loads are done: swapped to a host, or recomputed above a disk.
    """
    requests, at = shared((1, 4), (2, 4)), 5 * 10**6
    requests += [ask("loads", at, 17, keys=prompt(1, 4)), ask("grows", at, 4, output=14)]
    for parks in (True, False):
        kind = "host" if parks else "disk"
        tier = f"{kind}:memory=1MB,load=always,latency=1e-5"
        run = serve(requests, blocks=7, latency=Slow(), tiers=(tier,))
        assert run.rows["loads"]["first_token"] > at + 10_000
        assert run.rows["grows"]["recomputes"] == (0 if parks else 1)
        assert sum(run.result.log.swaps) == (1 if parks else 0)


@pytest.mark.parametrize("ids", [False, True])
def test_parked_blocks_are_not_evicted(ids):
    """Parked blocks of a preempted sequence are not evicted from a full level.

    That holds whether its slots have ids or not.
    """
    cache = KVCache(100, BLOCK, accounting="tokens", key_tokens=BLOCK)
    tiers = Tiers(cache, [f"host:memory={4 * SLOT},write=through,{FAST}"], SLOT, ids=ids)
    (level,) = tiers.levels
    seq = cache.open(ask("parked", prompt=12))
    cache.commit(seq, 12)
    assert tiers.can_swap(seq, 12, 0, lambda tokens, _: 10**6 * tokens) is level
    level.park(seq, 12, 0)
    cache.close(seq)
    for index in range(3):
        other = cache.open(ask(index, prompt=9, keys=prompt(index, 2)))
        cache.commit(other, 9)
        cache.close(other)
        cache.check_integrity()
    again = cache.open(ask("parked", prompt=12), resumed=True)
    load = tiers.load(again, 0, lambda tokens, _: 10**6 * tokens, resumed=True)
    assert (load.tokens, tiers.finish(load, load.ready)) == (12, 12)
    cache.check_integrity()
    assert level.stats.returned == 3


def test_a_swapped_prefill_resumes_at_its_computed_tokens():
    """A sequence swapped during its prefill resumes at the tokens computed before."""
    cache = KVCache(100, BLOCK, accounting="tokens", key_tokens=BLOCK)
    tiers = Tiers(cache, [ALWAYS], SLOT)
    seq = cache.open(ask("a", prompt=40))
    cache.commit(seq, 10)
    tiers.levels[0].park(seq, 10, 0)
    cache.close(seq)
    again = cache.open(ask("a", prompt=40), resumed=True)
    load = tiers.load(again, 0, lambda tokens, _: tokens, resumed=True)
    assert tiers.finish(load, load.ready) == 10
    assert again.computed == 10


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda level: setattr(level.tree, "cached_blocks", 1), "spans hold 4 blocks"),
        (lambda level: setattr(level.pool, "free_blocks", 1), "1 free + 4 cached + 3 private"),
        (lambda level: level.parked.clear(), "pins 1> is on the paths of 0 open sequences"),
        (
            lambda level: level._cache.tiers._loading.clear(),
            "pins 1> is on the paths of 0 open sequences",
        ),
        (
            lambda level: level.take(ask("unknown"), prompt(2, 2), 0, 2, 0),
            "pins 2> is on the paths of 1 open sequences",
        ),
    ],
    ids=["tree", "pool", "parked", "loading", "pinned"],
)
def test_damage_of_a_level_is_noticed(damage, message):
    """While a load reads shared and parked blocks, all blocks and pins have their owners."""
    cache = KVCache(100, BLOCK, accounting="tokens", key_tokens=BLOCK)
    tiers = Tiers(cache, [f"host:memory=1MB,write=through,{FAST}"], SLOT)
    (level,) = tiers.levels
    for branch in (1, 2):
        seq = cache.open(ask(branch, prompt=5 * BLOCK, keys=prompt(branch, 2)))
        cache.commit(seq, 5 * BLOCK)
        if branch == 2:
            level.park(seq, 5 * BLOCK, 0)
        cache.close(seq)
        cache.tree.discard(next(cache.tree.spans()), 0, "expired")
    seq = cache.open(ask("b", prompt=5 * BLOCK, keys=prompt(1, 2)))
    assert tiers.load(seq, 0, lambda tokens, _: 10**6 * tokens)
    tiers.check_integrity()
    damage(level)
    with pytest.raises(AssertionError, match=re.escape(message)):
        tiers.check_integrity()


# Capacity, links, names and policies of levels.


def test_a_slot_has_the_bytes_of_a_block_in_all_layers():
    """A tier has its memory divided by the bytes of a block in all layers as slots.

    This holds for models with several groups of layers.
    """
    for model in ("gpt-oss-20b", "gemma-3-27b", "mistral-7b-v0.1"):
        result = kvcore.simulate(
            "zipf", limit=5, model=model, device="h200", tensor_parallel=4, block_size=16,
            tier="host:memory=64GiB", disable_hybrid_kv_cache_manager=True,
        )  # fmt: skip
        (level,) = result.cache.tiers.levels
        spec = MODELS[model]
        each = KVLayout(spec, "fp16", 16).bytes_per_block
        assert level.pool.blocks == 64 * 2**30 // each


def test_the_bandwidth_of_a_host_grows_with_the_number_of_gpus():
    """The bandwidth of a host is multiplied by the number of GPUs; that of a disk is not."""
    cache = KVCache(10)
    tiers = Tiers(cache, ["host:memory=1MB", "disk:memory=1MB"], SLOT, devices=4)
    host, disk = (level.link for level in tiers.levels)
    size = 10**9
    assert host.load_ns(size, 0) == host.store_ns(size, 0) == size // (4 * 50) + 10_000
    assert disk.load_ns(size, 0) == -(-size // 7) + 100_000
    assert disk.store_ns(size, 0) == size // 5 + 100_000


def test_a_failing_policy_of_a_tier_is_named_in_every_later_call():
    """A policy of a tier that raises is named by PolicyError, in every later call as well."""
    broken = faulty("Raises in `victim`.", EvictionPolicy, name="broken", victim=fail)
    cache = KVCache(8, BLOCK, accounting="tokens", key_tokens=BLOCK)
    Tiers(cache, [Host(memory=SLOT, eviction=broken, write="through")], SLOT)
    one, two = (cache.open(ask(n, prompt=5, keys=prompt(n, 1))) for n in range(2))
    cache.commit(one, 5)
    with pytest.raises(PolicyError, match="broken"):
        cache.commit(two, 5)
    with pytest.raises(PolicyError, match="broken"):
        cache.check_integrity()


@pytest.mark.parametrize(
    ("blocks", "resumed", "missed"),
    [(4, False, []), (6, False, [4]), (4, True, []), (6, True, [])],
)
def test_a_miss_is_a_first_admission_that_finds_less_than_it_could(blocks, resumed, missed):
    """A tier's policy is told how many blocks are here, unless these are all, or it returns."""
    misses = []

    class Curious(LRU):
        """An eviction policy that records the misses."""

        def on_miss(self, request, hit_blocks, now):
            """Record the blocks that hit."""
            misses.append(hit_blocks)

    cache = KVCache(30, BLOCK, accounting="tokens", key_tokens=BLOCK)
    tiers = Tiers(cache, [Host(memory="1MB", eviction=Curious)], SLOT)
    seq = cache.open(ask("a", prompt=4 * BLOCK, keys=prompt(1, 4)))
    cache.commit(seq, 4 * BLOCK)
    tiers.levels[0].store(seq.span, 4, 0, None)
    cache.close(seq)
    cache.tree.discard(next(cache.tree.spans()), 0, "expired")
    request = ask("b", prompt=blocks * BLOCK + 1, keys=prompt(1, blocks))
    tiers.load(cache.open(request, resumed=resumed), 0, computed, resumed=resumed)
    assert misses == missed


def test_the_policy_of_a_tier_is_called_for_queues_and_misses():
    """The eviction policy of a tier is called for queued requests and for misses."""
    calls = []

    class Curious(EvictionPolicy):
        """An eviction policy that records the calls of its hooks."""

        name = "curious"

        def on_miss(self, request, hit_blocks, now):
            """Record the miss."""
            calls.append(("miss", request.id, hit_blocks))

        def on_queued(self, request, now, *, front=False):
            """Record the request."""
            calls.append(("queued", request.id))

        def victim(self, now):
            """Fail, since this run needs no eviction."""
            raise AssertionError(now)

    serve(
        shared((1, 4), (2, 4)), blocks=20, trace=False,
        tiers=(faulty("No plugin.", Tier, name="own")(memory=10**6, eviction=Curious()),),
    )  # fmt: skip
    assert calls == [("queued", 0), ("miss", 0, 0), ("queued", 1), ("miss", 1, 0)]


def test_the_header_of_a_trace_describes_each_tier():
    """The header of a trace has each tier's options, number of slots and bytes of a slot."""
    run = serve(shared((1, 1)), tiers=("host:memory=1000,eviction=arc", "disk:memory=1MB"))
    header = orjson.loads(run.trace.splitlines()[0])
    assert [(t["name"], t["slots"], t["slot_bytes"]) for t in header["tiers"]] == [
        ("host", 15, 64), ("disk", 15625, 64),
    ]  # fmt: skip
    assert header["tiers"][0]["options"]["eviction"] == "arc"


def test_a_cache_with_an_empty_list_of_tiers_works():
    """A cache with an empty list of tiers works, and stores nothing below."""
    cache = KVCache(8, BLOCK)
    tiers = Tiers(cache, [], SLOT)
    (request,) = shared((1, 2))
    seq = cache.open(request)
    cache.commit(seq, seq.tokens)
    cache.close(seq)
    assert (cache.probe(request), tiers.as_dict()) == (2, [])


def test_a_tier_smaller_than_a_block_is_refused():
    """A tier smaller than a block raises InputError with the bytes of a block."""
    with pytest.raises(InputError, match="takes 64 bytes in all layers"):
        serve([], tiers=("host:memory=63",))


def test_fragmentation_counts_loaded_tokens():
    """Slots of a prompt are idle until its tokens are computed or loaded from a tier."""
    cache = KVCache(9, BLOCK, accounting="tokens", key_tokens=BLOCK)
    Tiers(cache, [f"host:memory=1MB,{FAST}"], SLOT)
    result = kvcore.serving.simulate(
        shared(*ROTATION), cache=cache, latency=Slow(), fragmentation=True,
        batching=kvcore.serving.Batching(watermark=0),
    )  # fmt: skip
    assert list(result.log.loaded) == [0, 0, 0, 16, 16, 16]
    # In slots and ns: three prompts of 17 tokens in 20 slots are computed in 1700 ns each; of
    # three more, 16 tokens are loaded in 8, 8 and 4 ns, and one is computed in 100 ns.
    whole = 9 * BLOCK * (5 * 10**6 + 104)
    shares = result.fragmentation
    assert shares.uncomputed == pytest.approx((3 * 1700 * 17 + 20 * 17 + 300) / whole)
    assert shares.internal == pytest.approx((3 * 1700 * 20 + 20 * 20 + 300 * 4) / whole)
    assert shares.used == pytest.approx(300 * 16 / whole)
    assert shares.internal_peak == 20 / 36
