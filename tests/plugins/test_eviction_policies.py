"""Built-in eviction policies, on constructed traces that distinguish each from LRU."""

from __future__ import annotations

import attrs
import pytest
from helpers.caches import ask, compute, make, serve, spans

from kvcore import InputError, KVCache, Request
from kvcore_plugins.eviction import (
    ARC,
    FIFO,
    LFU,
    LRU,
    MRU,
    S3FIFO,
    SIEVE,
    SLRU,
    Cost,
    Random,
)

SECOND = 10**9


def kept(eviction, blocks, *texts):
    """Return the spans that are cached after serving `texts`, as requests 0, 1 and so on."""
    cache = make(blocks, eviction)
    for index, text in enumerate(texts):
        request = attrs.evolve(ask(text), id=index)
        cache.close(compute(cache, cache.open(request)))
    return set(spans(cache))


CONSTRUCTED = {
    "fifo": (FIFO, 2, ["a", "b", "a", "c"], {"|b", "|c"}, {"|a", "|c"}),
    "mru": (MRU, 2, ["a", "b", "c"], {"|a", "|c"}, {"|b", "|c"}),
    "lfu": (LFU, 2, ["a", "a", "b", "c"], {"|a", "|c"}, {"|b", "|c"}),
    "slru": (SLRU, 2, ["a", "a", "b", "c"], {"|a", "|c"}, {"|b", "|c"}),
    "sieve": (SIEVE, 2, ["a", "a", "b", "c"], {"|a", "|c"}, {"|b", "|c"}),
    "s3fifo": (S3FIFO, 2, ["a", "a", "a", "b", "c"], {"|a", "|c"}, {"|b", "|c"}),
    "arc": (ARC, 2, ["a", "a", "b", "c"], {"|a", "|c"}, {"|b", "|c"}),
    "cost": (Cost, 5, ["abcd", "x", "y"], {"|abcd", "|y"}, {"|abc", "|x", "|y"}),
}


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_a_policy_differs_from_lru(name):
    """On its constructed trace each policy keeps other spans than LRU."""
    policy, blocks, texts, its, lrus = CONSTRUCTED[name]
    # In `keys` accounting the last token of a prompt need not be computed again.
    cache = make(blocks, policy(), accounting="keys")
    serve(cache, *texts)
    assert set(spans(cache)) == its
    cache = make(blocks, LRU(), accounting="keys")
    serve(cache, *texts)
    assert set(spans(cache)) == lrus


def test_random_depends_only_on_the_seed_and_differs_from_lru():
    """`random` keeps the same spans with the same seed, and others with other seeds.

    Fewer than half of 40 seeds keep the spans that LRU keeps; two ninths are expected.
    """
    texts = list("abcdefghij")
    outcomes = [kept(Random(seed=seed), 3, *texts) for seed in range(40)]
    assert outcomes == [kept(Random(seed=seed), 3, *texts) for seed in range(40)]
    assert len(set(map(frozenset, outcomes))) > 10
    assert outcomes.count(kept(LRU(), 3, *texts)) < 20


def touched(policy, uses, idle=0):
    """Return the frequency of a block after `uses` requests and `idle` other accesses."""
    cache = make(64, policy, accounting="keys")
    serve(cache, *["a"] * uses)
    (span,) = [span for text, span in spans(cache).items() if text == "|a"]
    return policy.frequency(span, accesses=uses + idle)


def test_lfu_decays_by_access():
    """With decay=0.9 one to three uses score 1.0, 1.9 and 2.71.

    Idle accesses lower the score.
    """
    scores = [touched(LFU(decay=0.9), uses) for uses in (1, 2, 3)]
    assert scores == pytest.approx([1.0, 1.9, 2.71])
    assert touched(LFU(decay=0.9), 3, idle=10) == pytest.approx(2.71 * 0.9**10)
    assert touched(LFU(decay=0.9), 3, idle=10) == pytest.approx(0.94, abs=0.005)


def test_lfu_by_touch_does_not_decay_while_idle():
    """With unit=touches a score decays only at the uses of its own span."""
    assert touched(LFU(decay=0.9, unit="touches"), 3, idle=10) == pytest.approx(2.71)


def test_lfu_half_life_by_access():
    """With unit=accesses a use counts half after `half_life` accesses."""
    assert touched(LFU(half_life=4, unit="accesses"), 1, idle=4) == pytest.approx(0.5)


def test_lfu_half_life_in_seconds():
    """A use counts half after `half_life` seconds, and two uses add up."""
    policy = LFU(half_life=60)
    cache = make(8, policy, accounting="keys")
    serve(cache, "a")
    serve(cache, "a", now=60 * SECOND)
    (span,) = spans(cache).values()
    assert policy.frequency(span, now=120 * SECOND) == pytest.approx(0.75)


def test_lfu_weights_do_not_overflow_in_a_year():
    """The weights of uses do not overflow: after a year, uses a second apart are ordered.

    Two uses weigh more than one that is a second later, which LRU would keep.
    """
    year = 365 * 86_400 * SECOND
    for uses, left in (("a", {"|b", "|c"}), ("aa", {"|a", "|c"})):
        cache = make(2, LFU(half_life=60), accounting="keys")
        serve(cache, *uses, now=year)
        serve(cache, "b", now=year + SECOND)
        serve(cache, "c", now=year + 2 * SECOND)
        assert set(spans(cache)) == left


def test_options_are_checked_in_code_too():
    """A constructor refuses invalid options as the command line does."""
    with pytest.raises(InputError, match="unit='days' is not known; there are: s, accesses"):
        LFU(unit="days")


def test_an_order_is_fixed_by_the_class_itself():
    """`fixed_order` is not inherited; each subclass has to declare it."""

    class Mine(LRU):
        """A subclass that declares nothing."""

    class Same(LRU):
        """A subclass that declares the same order."""

        fixed_order = True

    found = [KVCache(4, 16, eviction=each()).tree.fixed_order for each in (LRU, Mine, Same)]
    assert found == [True, False, True]


def test_free_ahead_evicts_the_least_recent_blocks():
    """`free_ahead` evicts the least recent blocks, and residency counts them at their times."""
    cache = KVCache(4, 16, eviction=LRU(), accounting="tokens", key_tokens=16)
    for index in range(2):
        keys = [10 * index, 10 * index + 1]
        request = Request(id=index, prompt_tokens=32, output_tokens=1, keys=keys, key_tokens=16)
        seq = cache.open(request, now=index)
        cache.commit(seq, 32)
        cache.close(seq)
    residency = cache.record_residency()
    cache.free_ahead(3, "who needs them", 10, [10, 20, 30])
    assert cache.pool.free_blocks == 3
    assert [(span.path_keys[0], span.blocks) for span in cache.tree.spans()] == [(10, 1)]
    assert residency.evicted_blocks == {"capacity": 0, "expired": 0}
    assert residency.as_dict()["evicted_blocks"]["capacity"] == 3
    assert residency.age_at_eviction.total == 10 + 20 + 30 - 1
    cache.check_integrity()
