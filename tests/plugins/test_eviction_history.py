"""Policies that remember: what distinguishes their decisions, and how much they remember."""

from __future__ import annotations

from random import Random
from weakref import WeakSet

import pytest
from helpers.caches import ask, compute, make, serve, spans
from helpers.requests import keyed

from kvcore import InputError, KVCache
from kvcore_plugins.eviction import (
    ARC,
    LRU,
    LRUK,
    S3FIFO,
    TailLRU,
    TinyLFU,
    first_use,
    survival,
    tool_ttl,
)
from kvcore_plugins.eviction import workload_aware as workload
from kvcore_replay.untimed import replay

SCAN = ["a", "a", "b", "c"]
TALKS = ["wx", "abcd", "y", "z"]

CONSTRUCTED = {
    "lruk": (LRUK, 2, SCAN, {"|a", "|c"}, {"|b", "|c"}),
    "tinylfu": (TinyLFU, 2, SCAN, {"|a", "|c"}, {"|b", "|c"}),
    "tail-lru": (
        lambda: TailLRU(threshold=4, unit="tokens", turn=0),
        6,
        TALKS,
        {"|w", "|abc", "|y", "|z"},
        {"|abcd", "|y", "|z"},
    ),
}


def served(policy, blocks, texts, **options):
    """Return the cache, in `keys` accounting, after serving `texts`."""
    cache = make(blocks, policy, accounting="keys", **options)
    serve(cache, *texts)
    return cache


def kept(policy, blocks, texts, **options):
    """Return the spans that are cached after serving `texts`."""
    return set(spans(served(policy, blocks, texts, **options)))


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_a_policy_differs_from_lru(name):
    """On its constructed trace a policy keeps other spans than LRU."""
    policy, blocks, texts, its, lrus = CONSTRUCTED[name]
    assert kept(policy(), blocks, texts) == its
    assert kept(LRU(), blocks, texts) == lrus


def test_lruk_counts_uses_before_an_eviction():
    """LRU-K counts uses before an eviction, unless it has no history."""
    texts = ["a", "b", "c", "a", "d", "e"]
    assert "|a" in kept(LRUK(), 2, texts)
    assert "|a" not in kept(LRUK(history=0), 2, texts)


USED_AGAIN = {
    LRUK: lambda _, span: span.data[2] > 0,
    S3FIFO: lambda _, span: span.data.in_main,
    ARC: lambda _, span: span.data,
    TinyLFU: lambda policy, span: policy._frequency(span) > 1,
}


@pytest.mark.parametrize("policy", USED_AGAIN)
@pytest.mark.parametrize("returns", [True, False])
def test_a_return_after_an_eviction_is_no_other_use(policy, returns):
    """A preempted request whose blocks were evicted stores them again: no use but the first.

    If another request stores them, it is one.
    """
    cache = make(3, policy(), accounting="keys")
    serve(cache, "t", "t", "t")
    request = ask("a")
    cache.close(compute(cache, cache.open(request)), preempted=returns)
    serve(cache, "b", "c")
    assert "|a" not in spans(cache)
    again = request if returns else ask("a")
    compute(cache, cache.open(again, resumed=returns))
    span = spans(cache)["|a"]
    assert USED_AGAIN[policy](cache.eviction, span) is not returns


def test_what_a_returned_request_has_not_used_before_counts():
    """Only the blocks of before its preemption are no use, and only until it ends."""
    cache = make(4, TinyLFU(), accounting="keys")
    request = ask("abcd")
    first = cache.open(request, 2 * 4)
    cache.close(compute(cache, first), preempted=True)
    serve(cache, "wxyz")
    seq = compute(cache, cache.open(request, resumed=True))
    frequency = cache.eviction._sketch.estimate
    assert [frequency(key) for key in request.keys] == [1, 1, 1, 1]
    cache.close(seq)
    assert not cache.eviction._uses._reached


def test_a_request_hits_blocks_that_it_then_stores_again():
    """Blocks that a request has hit and stores again after a preemption have one use of it."""
    cache = make(4, TinyLFU(), accounting="keys")
    serve(cache, "ab")
    request = ask("ab")
    cache.close(compute(cache, cache.open(request)), preempted=True)
    serve(cache, "wxyz")
    cache.open(request, resumed=True)
    compute(cache, next(iter(cache.sequences.values())))
    assert [cache.eviction._sketch.estimate(key) for key in request.keys] == [2, 2]


def test_as_many_running_requests_are_followed_as_may_run(monkeypatch):
    """Where no end of a request is told, those that came last are followed."""
    monkeypatch.setattr(first_use, "_RUNNING", 2)
    cache = make(8, ARC(), accounting="keys")
    for text in "abcd":
        compute(cache, cache.open(ask(text)))
    assert len(cache.eviction._uses._reached) == 2


def test_tail_lru_measures_a_common_prefix_by_its_longest_user():
    """Tail-LRU measures a common prefix by its longest conversation."""
    policy = TailLRU(threshold=4, unit="tokens", turn=0)
    cache = served(policy, 6, ["ax", "abcd", "y"])
    assert {text: span.data for text, span in spans(cache).items()} == {
        "|a": 4,
        "a|x": 2,
        "a|bcd": 4,
        "|y": 1,
    }


def test_tinylfu_evicts_a_new_span_that_is_used_less():
    """TinyLFU evicts a new span rather than a less recent one that is used more often."""
    policy = TinyLFU(window=0, protected=0)
    assert kept(policy, 2, SCAN) == {"|a", "|c"}


def test_tinylfu_keeps_a_new_span_that_is_used_more():
    """TinyLFU keeps a new span that was used more often than the older one."""
    policy = TinyLFU(window=0, protected=0)
    assert kept(policy, 2, ["b", "b", "b", "x", "y", "z", "b", "w"]) == {"|b", "|w"}


def test_options_are_checked_in_code_too():
    """A constructor refuses invalid options as the command line does."""
    with pytest.raises(InputError, match="unit='ms' is not known; there are: s, tokens"):
        TailLRU(unit="ms")


@pytest.mark.parametrize("policy", ["arc", "hazard", "lruk", "s3fifo", "workload-aware"])
def test_what_has_left_is_known_in_blocks_of_several_keys(policy):
    """With four keys a block a policy hits what it does with one, after evictions too."""
    stats = []
    for keys in (1, 4):
        rng = Random(5)
        cache = KVCache(120, 64, key_tokens=64 // keys, eviction=policy)
        requests = []
        for index in range(600):
            text, tokens = rng.randrange(rng.choice((40, 400))), rng.randrange(256, 704, 64)
            names = tuple((text, key) for key in range(tokens * keys // 64))
            requests.append(keyed(index, names, 64 // keys, arrival=index, tenant=text % 2))
        replay(requests, cache)
        stats.append(cache.stats.hit_blocks)
    assert stats[0] == stats[1] > 0


class Name(str):
    """A name that can be told to be alive."""

    __slots__ = ("__weakref__",)


@pytest.mark.parametrize(
    ("policy", "bounds"),
    [
        ("hazard:by=turns+tool+tenant", {(survival, "_CLASSES"): 20, (survival, "_FADE"): 80}),
        ("tool-ttl", {(tool_ttl, "_MOST_TOOLS"): 20}),
        ("workload-aware:type=tenant", {(workload, "_MOST_CLASSES"): 20}),
        ("workload-aware:type=tool", {(workload, "_MOST_CLASSES"): 20}),
    ],
)
def test_names_of_clients_take_bounded_memory(policy, bounds, monkeypatch):
    """Of 1,000 names of tools and tenants, a policy keeps no more than it tells apart."""
    for constant, value in bounds.items():
        monkeypatch.setattr(*constant, value)
    cache, names = make(2, policy), WeakSet()

    def requests():
        for index in range(1000):
            tool, tenant = Name(f"tool {index}"), Name(f"tenant {index}")
            names.update((tool, tenant))
            text = chr(2000 + index)
            yield ask(text, arrival=index, session="s", tool=tool, tenant=tenant)

    replay(requests(), cache)
    assert 0 < len(names) < 200


@pytest.mark.parametrize("value", ["2", None, 0])
def test_an_option_beyond_its_bounds_is_refused_whatever_its_type(value):
    """A value out of bounds, or no number at all, is an error that says what must be."""
    with pytest.raises(InputError, match=f"lruk: k={value!r} must be from 1 to 1,000"):
        LRUK(k=value)
