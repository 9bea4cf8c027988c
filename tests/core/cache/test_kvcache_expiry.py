"""Expiry: where matches stop, which spans are dropped, and the expiry of ancestors."""

import pytest
from helpers.caches import (
    BLOCK,
    Lines,
    Mortal,
    Recorded,
    ask,
    compute,
    make,
    pins,
    serve,
    spans,
    start,
    table,
)

from kvcore import KVCache, OutOfBlocks, PolicyError
from kvcore.testing.harness import EVEN, FORKS, Driver, Traffic, random_steps, snapshot
from kvcore_plugins.eviction import TTL


@pytest.fixture
def cache():
    """Return a cache whose spans live for 10 ns."""
    return make(12, Mortal())


def expiries(cache):
    """Return the expiry time of each span."""
    return {text: span.expires for text, span in spans(cache).items()}


def test_open_drops_expired_spans(cache):
    """`open` drops an expired span with its subtree, and counts it as expired, not evicted."""
    serve(cache, "abc", "abcde", "abcxy", now=0)
    cache.open(ask("abc"), now=50)
    cache.check_integrity()
    assert spans(cache) == {}
    assert (cache.tree.evicted_blocks, cache.tree.expired_blocks) == (0, 7)


def test_a_refused_open_drops_nothing(cache):
    """A refused `open` drops no expired span, though expired blocks count as evictable."""
    start(cache, "mn", now=0)
    serve(cache, "abc", now=0)
    before = snapshot(cache)
    with pytest.raises(OutOfBlocks, match=r"needs 11 more .* 7 of 12 are free and 3 can be"):
        cache.open(ask("abcdefghijk"), now=50)
    assert snapshot(cache) == before
    cache.open(ask("abcdefghij"), now=50)
    assert pins(cache) == {"|mn": 1}


def test_the_trace_of_an_expiry():
    """EVICT lines of expired spans, leaves first, precede HIT; MISS has reason `expired`."""
    trace = Lines()
    cache = make(12, Mortal(), trace=trace)
    serve(cache, "abcd", now=0)
    serve(cache, "abcdef", now=1)
    serve(cache, "ax", now=8)
    trace.lines.clear()
    seq = cache.open(ask("abcde"), now=12)
    assert trace.events() == ["EVICT", "EVICT", "HIT", "MISS", "ALLOC"]
    first, second = trace.of("EVICT")
    assert (first["reason"], list(first["runs"])) == ("expired", [5, 4])
    assert (second["reason"], list(second["runs"])) == ("expired", [3, 2, 1])
    assert (first["for"], first["age"], first["hits"]) == (seq.request.id, 11, 0)
    assert trace.of("MISS")[0]["why"] == "expired"
    assert table(cache, seq) == [0, 1, 2, 3, 4]


def test_expired_leaves_are_removed_first():
    """`on_remove` is called for expired children before their parents."""
    cache = make(12, Recorded())
    cache.tree._expires = True
    serve(cache, "abc", "abcde", now=0)
    for span in cache.tree.spans():
        span.expires = 10
    cache.eviction.callbacks.clear()
    cache.open(ask("x"), now=20)
    cache.open(ask("abc"), now=20)
    assert [text for what, text in cache.eviction.callbacks if what == "on_remove"] == [
        "abc|de",
        "|abc",
    ]


def test_commit_drops_expired_copies_of_its_blocks(cache):
    """A commit drops an expired copy of its blocks, and stores the new ones."""
    seq = cache.open(ask("abcd"), now=0)
    serve(cache, "abcd", now=0)
    compute(cache, seq, now=50)
    assert pins(cache) == {"|abcd": 1}
    assert expiries(cache) == {"|abcd": 60}
    assert table(cache, seq) == [0, 1, 2, 3]


def test_an_insertion_raises_its_ancestors(cache):
    """An insertion raises its ancestors' expiry, which stays raised after its eviction."""
    serve(cache, "ab", now=0)
    seq = cache.open(ask("abc"), now=4)
    assert expiries(cache) == {"|ab": 14}
    compute(cache, seq, now=9)
    cache.close(seq, 9)
    assert expiries(cache) == {"|ab": 19, "ab|c": 19}
    serve(cache, "mnopqrstuv", now=9)
    assert expiries(cache) == {"|ab": 19, "|mnopqrstuv": 19}


def test_a_hit_raises_its_ancestors():
    """A hit raises ancestors to the expiry of their children, if the policy does not."""

    class Deepest(Mortal):
        """A policy that renews only the deepest span of a hit."""

        name = "deepest"

        def on_access(self, span, now):
            if not any(child.ref_count for child in (span.children or {}).values()):
                span.expires = now + 10

    cache = make(12, Deepest())
    serve(cache, "ab", "abcd", now=0)
    cache.open(ask("abcdx"), now=7)
    cache.check_integrity()
    assert expiries(cache) == {"|ab": 17, "ab|cd": 17}


def test_a_child_that_never_expires_keeps_its_ancestors():
    """The ancestors of a span that never expires do not expire either."""

    class Eternal(Mortal):
        """A policy under which spans of the request "forever" never expire."""

        name = "eternal"

        def on_insert(self, span, now):
            span.expires = None if span.last_request == "forever" else now + 10

    cache = make(12, Eternal())
    serve(cache, "ab", now=0)
    request = ask("abcd")
    request.id = "forever"
    cache.close(compute(cache, cache.open(request, now=1), now=1), 1)
    cache.check_integrity()
    assert expiries(cache) == {"|ab": None, "ab|cd": None}
    assert cache.probe(ask("abcde"), now=1000) == 4


def test_growth_raises_its_ancestors():
    """An extension that renews a span renews its ancestors."""

    class Renewing(Mortal):
        """A policy that adds 5 ns per block to the expiry of an extended span."""

        name = "renewing"

        def on_extend(self, span, blocks):
            span.expires += 5 * blocks

    cache = make(12, Renewing())
    serve(cache, "ab", now=0)
    seq = cache.open(ask("abcd"), now=1)
    compute(cache, seq, BLOCK, now=2)
    compute(cache, seq, BLOCK, now=3)
    assert expiries(cache) == {"|ab": 17, "ab|cd": 17}


def test_the_end_of_a_use_raises_its_ancestors():
    """A release that renews a span renews its ancestors, even if they are still pinned."""
    cache = make(12, TTL(ttl=10e-9))
    serve(cache, "ab", now=0)
    one = start(cache, "abc", now=1)
    two = cache.open(ask("abx"), now=2)
    cache.close(one, 50)
    cache.check_integrity()
    assert expiries(cache) == {"|ab": 60, "ab|c": 60}
    cache.close(two, 51)
    assert expiries(cache) == {"|ab": 61, "ab|c": 60}


@pytest.mark.parametrize("time", [float("nan"), float("inf"), 0.5, -5, "soon"])
@pytest.mark.parametrize("method", ["on_insert", "on_access", "on_release"])
def test_a_time_of_expiry_that_is_no_whole_number_is_refused(method, time):
    """A policy that stores in `expires` what is no time is named, once the span is released."""

    def sets(_, span, __):
        span.expires = time

    policy = type("Wrong", (Mortal,), {"name": "wrong", method: sets})()
    cache = make(12, policy)
    with pytest.raises(PolicyError, match=rf"'wrong' .* expires of .* is {time!r}: give whole"):
        serve(cache, "ab", "ab")


def test_a_span_may_expire_at_time_0():
    """A policy that ends the spans of each use keeps none of those that end as time begins."""

    class Brief(Mortal):
        """A policy whose spans expire when they are hit or released."""

        name = "brief"

        def on_access(self, span, now):
            span.expires = now

        on_release = on_access

    cache = make(12, Brief())
    serve(cache, "ab", now=0)
    assert expiries(cache) == {"|ab": 0}


def test_a_split_copies_the_expiry(cache):
    """Both halves of a split have the expiry of the whole; a hit renews only the upper."""
    serve(cache, "abcd", now=0)
    cache.close(cache.open(ask("abx"), 0, now=3), 3)
    assert expiries(cache) == {"|ab": 13, "ab|cd": 10}


class PerTenant(Mortal):
    """A policy whose spans live 1000 ns for tenant a, 10 ns for others, after each use."""

    name = "per-tenant"

    def on_insert(self, span, now):
        """Set the expiry by the tenant."""
        super().on_insert(span, now)
        span.expires = now + (1000 if span.tenant == "a" else 10)

    on_access = on_insert

    def on_release(self, span, now):
        """Set the expiry by the tenant."""
        super().on_release(span, now)
        span.expires = now + (1000 if span.tenant == "a" else 10)


def test_a_span_lives_as_long_as_each_of_its_children():
    """A hit that would shorten a span's life does not let it expire before its children."""
    cache = make(12, PerTenant())
    serve(cache, "ab", now=0)
    serve(cache, "abcd", now=1, tenant="a")
    serve(cache, "abx", now=5)
    assert expiries(cache) == {"|ab": 1001, "ab|cd": 1001, "ab|x": 15}
    assert cache.probe(ask("abcde"), now=100) == 4


@pytest.mark.parametrize("mix", [EVEN, FORKS])
@pytest.mark.parametrize("seed", range(3))
def test_lifetimes_that_differ_by_tenant(seed, mix):
    """No span expires before its children in random runs; the driver checks each step."""
    cache = KVCache(30, 6, eviction=PerTenant(), key_tokens=6, ids=True)
    Driver(cache).run(random_steps(seed, 150, Traffic(mix=mix)))
    assert cache.tree.expired_blocks, "nothing expired"
