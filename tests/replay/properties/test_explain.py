"""Miss reasons: without the cause that they name, the misses would be hits."""

from __future__ import annotations

from collections import Counter
from io import BytesIO
from tempfile import NamedTemporaryFile

import hypothesis.strategies as st
from helpers.policies import POLICIES, build
from helpers.retention import retentions
from helpers.serving import servers
from hypothesis import given, settings

from kvcore import KVCache, Request, Trace
from kvcore.cache.layout import BlockLayout
from kvcore.testing import COMPACTIONS, Driver, Traffic, request_lists, step_lists
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import NoPrefix, Radix
from kvcore_replay.belady import Belady, Future
from kvcore_replay.misses.explain import explain
from kvcore_replay.untimed import replay, served

TRAFFIC = Traffic(key_tokens=6, hints=True)
LAYOUTS = st.sampled_from(
    [("keys", 6), ("keys", 2), ("tokens", 6), ("tokens", 2), ("tokens", 12), ("tokens", 3)]
)
LISTS = request_lists(TRAFFIC, most=25)
POOLS = st.integers(1, 30)


def explained(data):
    """Return the explanation of the bytes of a trace."""
    with NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(data)
        file.flush()
        return explain(file.name)


def make(blocks, layout, eviction, **options):
    """Return a cache with this accounting and block size."""
    count, size = layout
    return KVCache(blocks, size, eviction=eviction, accounting=count, key_tokens=6, **options)


def recorded(requests, blocks, layout, policy, prefix=None):
    """Return the explanation of an untimed replay of `requests`."""
    out = BytesIO()
    with Trace(out) as trace:
        prefix = Radix() if prefix is None else prefix
        replay(requests, make(blocks, layout, build(policy), prefix=prefix, trace=trace))
    return explained(out.getvalue())


def check_sums(explanation, hits):
    """Check that losses are contiguous from each hit to its prompt's end, and add up."""
    for reasons in explanation.requests.values():
        at = reasons.hit
        for loss in reasons.losses:
            assert (loss.first, loss.tokens > 0) == (at, True)
            at = loss.end
        assert at == (reasons.tokens if reasons.state == "admitted" else 0)
    summary = explanation.summary()
    assert summary.hit_tokens == hits
    lost = summary.categories
    assert sum(each.tokens for each in lost.values()) == summary.missed_tokens
    assert sum(way.tokens for way in summary.ways.values()) == lost["compulsory"].tokens
    with_losses = sum(bool(reasons.losses) for reasons in explanation.requests.values())
    assert sum(each.stopped for each in lost.values()) == with_losses


@given(policy=st.sampled_from(list(POLICIES)), requests=LISTS, blocks=POOLS, layout=LAYOUTS)
@settings(max_examples=50)
def test_the_categories_add_up(policy, requests, blocks, layout):
    """Every token that missed is lost for exactly one reason."""
    out = BytesIO()
    with Trace(out) as trace:
        cache = make(blocks, layout, build(policy), trace=trace)
        stats = replay(requests, cache)
    check_sums(explained(out.getvalue()), stats.hit_tokens)


@given(requests=LISTS, blocks=POOLS, layout=LAYOUTS)
def test_blocks_without_a_prefix_cache_were_never_stored(requests, blocks, layout):
    """Without a prefix cache, repeated blocks are explained as never stored."""
    explanation = recorded(requests, blocks, layout, "lru", NoPrefix())
    check_sums(explanation, 0)
    categories = {
        loss.category for request in explanation.requests.values() for loss in request.losses
    }
    assert categories <= {"compulsory", "unstored", "granularity", "no_keys", "truncated"}


@given(
    server=servers(),
    scheduler=st.sampled_from(["fcfs", "lpm", "fair", "srpt"]),
    retention=st.just(lambda: None) | retentions,
)
@settings(max_examples=30)
def test_the_categories_add_up_under_a_clock(server, scheduler, retention):
    """Every token that missed has one reason when requests overlap, wait and are preempted.

    Some are also compacted or rejected.
    """
    run = server.run(scheduler, retention=retention())
    check_sums(explained(run.trace), run.result.cache.stats.hit_tokens)


@given(
    steps=step_lists(TRAFFIC, most=60)
    | step_lists(Traffic(key_tokens=6, mix=COMPACTIONS), most=60),
    blocks=st.integers(4, 30),
    layout=LAYOUTS,
)
def test_the_categories_add_up_under_random_calls(steps, blocks, layout):
    """Every token that missed has one reason when sequences fork, roll back and stay open."""
    out = BytesIO()
    with Trace(out) as trace:
        cache = make(blocks, layout, LRU(), trace=trace)
        Driver(cache).run(steps)
    explanation = explained(out.getvalue())
    check_sums(explanation, explanation.summary().hit_tokens)


@given(
    policy=st.sampled_from(["lru", "fifo", "lfu", "slru", "random", "ttl:ttl=2e-8"]),
    requests=LISTS,
    blocks=POOLS,
    layout=LAYOUTS,
)
@settings(max_examples=50)
def test_blocks_explained_as_evicted_would_have_hit(policy, requests, blocks, layout):
    """Blocks explained as evicted would hit if they and the blocks before them were kept.

    The run is repeated up to the end of the request that is named as their last user. Then the
    prompt's blocks up to the last evicted one are pinned, which is no access, and the pool
    grows by as many. However the policy then decides, the request hits all of them.
    """
    explanation = recorded(requests, blocks, layout, policy)
    by_id = {request.id: request for request in requests}
    for reasons in explanation.requests.values():
        for loss in reasons.losses:
            if loss.eviction is not None:
                request, end = by_id[reasons.request], loss.end // layout[1]
                cache = make(blocks, layout, build(policy))
                assert hit_with_exempt(requests, cache, loss.other, request, end) >= end


def hit_with_exempt(requests, cache, user, request, end):
    """Return the hit of `request` with its first `end` blocks exempt since `user` closed."""
    size = cache.geometry.block_size
    before = next(n for n, request in enumerate(requests) if request.id == user) + 1
    after = next(n for n, each in enumerate(requests) if each is request)
    replay(requests[:before], cache)
    keys = request.keys[: -(-end * size // request.key_tokens)]
    path = Request(
        id="path", prompt_tokens=end * size + 1, keys=keys, key_tokens=request.key_tokens
    )
    exempt = cache.open(path, 0, requests[before - 1].arrival, resumed=True)
    assert exempt.hit_blocks >= end
    room = cache.pool.blocks
    cache.pool.blocks += exempt.hit_blocks
    cache.pool.free_blocks += exempt.hit_blocks
    for other in requests[before:after]:
        short = fitting(other, room, cache)
        cache_once(cache, short, other.arrival)
    return cache.probe(request, request.arrival)


def fitting(request, room, cache):
    """Return (request, first tokens) as a replay in a pool of `room` blocks opens it."""
    by_key, size = cache.geometry.accounting == "keys", cache.geometry.block_size
    tokens = len(request.keys) * request.key_tokens if by_key else request.prompt_tokens
    if tokens <= room * size:
        return request, None
    return request, max(0, (room - cache.probe(request, request.arrival)) * size)


def cache_once(cache, opened, now):
    """Open, commit and close a request."""
    seq = cache.open(*opened, now)
    cache.commit(seq, seq.tokens - seq.computed, now)
    cache.close(seq, now)


@given(
    policy=st.sampled_from(["lru", "mru", "ttl:ttl=2e-8"]),
    requests=LISTS,
    blocks=POOLS,
    layout=LAYOUTS,
)
@settings(max_examples=40)
def test_an_unbounded_pool_hits_exactly_the_losses_to_capacity(
    policy, requests, blocks, layout
):
    """An unbounded pool hits exactly the tokens lost to capacity, policy, expiry or length.

    Request by request, it misses the others: those that are compulsory, granular or without a
    key.
    """
    explanation = recorded(requests, blocks, layout, policy)
    endless = served(requests, make(10_000, layout, LRU()))
    for request, seq in zip(requests, endless, strict=True):
        reasons = explanation.requests[request.id]
        lost = Counter()
        for loss in reasons.losses:
            lost[loss.category] += loss.tokens
        helped = sum(lost[name] for name in ("capacity", "policy", "expired", "truncated"))
        assert seq.hit_blocks * layout[1] == reasons.hit + helped
        assert lost.keys().isdisjoint({"unstored", "in_flight"})


@given(
    policy=st.sampled_from(["lru", "mru", "lfu", "random"]),
    requests=LISTS,
    blocks=POOLS,
    layout=LAYOUTS,
)
@settings(max_examples=75)
def test_losses_to_the_policy_are_hits_of_the_optimum(policy, requests, blocks, layout):
    """Losses are due to the policy exactly where Belady's rule hits, request by request."""
    explanation = recorded(requests, blocks, layout, policy)
    count, size = layout
    best = belady([shareable_blocks(request, layout) for request in requests], blocks)
    if count == "keys":
        future = Future.read(requests, BlockLayout(count, size, 6))
        assert sum(best) == Belady().replay(future, blocks, size)[0].hit_blocks
    for reasons, hit in zip(explanation.requests.values(), best, strict=True):
        lost = [loss for loss in reasons.losses if loss.eviction and not loss.eviction.expired]
        for loss in lost:
            assert (loss.category == "policy") == (loss.end <= hit * size)
            assert loss.category == "policy" or loss.first >= hit * size


def shareable_blocks(request, layout):
    """Return a request's shareable blocks, the number that can hit, and that of all blocks.

    A block is (its depth, the keys up to its end).
    """
    count, size = layout
    tokens = len(request.keys) * 6 if count == "keys" else request.prompt_tokens
    whole = min(tokens, len(request.keys) * 6) // size
    path = [
        (depth, tuple(request.keys[: -(-(depth + 1) * size // 6)])) for depth in range(whole)
    ]
    limit = whole if count == "keys" else min(whole, max(0, tokens - 1) // size)
    return path, limit, -(-tokens // size)


def belady(requests, room):
    """Return the hits of each request under Belady's rule, applied block by block.

    The evicted block is the one whose next request is furthest, the deepest among equals;
    blocks of the request that is served stay.
    """
    wanted = [set(path) for path, _, _ in requests]
    cached, hits = set(), []
    for now, (path, limit, blocks) in enumerate(requests):
        hit = next((n for n, block in enumerate(path) if block not in cached), len(path))
        hits.append(min(hit, limit))
        own = set(path[: max(room, hit)])
        unshared = max(0, min(blocks, room) - len(own))
        cached |= own
        while len(cached) + unshared > room:
            cached.remove(
                max(cached - own, key=lambda block: (after(wanted, now, block), block))
            )
    return hits


def after(wanted, now, block):
    """Return the number of the next request that contains `block`, or one past the last."""
    coming = range(now + 1, len(wanted))
    return next((n for n in coming if block in wanted[n]), len(wanted))
