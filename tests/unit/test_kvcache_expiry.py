"""Expiry: where a match stops, who drops what has expired, how ancestors live on."""

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

from kvcore import KVCache, OutOfBlocks
from kvcore.testing.harness import EVEN, FORKS, Driver, Traffic, random_steps, snapshot
from kvcore_plugins.eviction import TTL


@pytest.fixture
def cache():
    """Return a cache whose spans live for 10 ns."""
    return make(12, Mortal())


def expiries(cache):
    """Return when each span expires."""
    return {text: span.expires for text, span in spans(cache).items()}


def test_a_span_matches_until_it_expires(cache):
    """At `expires` itself it is gone."""
    serve(cache, "abc", now=0)
    assert cache.probe(ask("abcd"), now=9) == 3
    assert cache.probe(ask("abcd"), now=10) == 0


def test_a_match_stops_at_the_first_expired_span(cache):
    """What came before it still hits."""
    serve(cache, "abcd", now=0)
    serve(cache, "abx", now=5)
    assert cache.probe(ask("abcde"), now=12) == 2


def test_a_pinned_span_does_not_expire(cache):
    """While a sequence uses it, it matches."""
    start(cache, "abc", now=0)
    assert cache.probe(ask("abcd"), now=99) == 3


def test_probe_drops_nothing(cache):
    """Finding an expired span changes nothing."""
    serve(cache, "abc", now=0)
    before = snapshot(cache)
    cache.probe(ask("abcd"), now=50)
    assert snapshot(cache) == before


def test_open_drops_what_has_expired(cache):
    """The whole subtree goes, and is not counted as evicted for room."""
    serve(cache, "abc", "abcde", "abcxy", now=0)
    cache.open(ask("abc"), now=50)
    cache.check_integrity()
    assert spans(cache) == {}
    assert (cache.tree.evicted_blocks, cache.tree.expired_blocks) == (0, 7)


def test_open_drops_before_it_allocates(cache):
    """Blocks of what expired are free for the same admission: no victim is asked for."""
    serve(cache, "abcdefgh", now=0)
    serve(cache, "mnop", now=45)
    cache.open(ask("abcxyzuv"), now=50)
    assert pins(cache) == {"|mnop": 0}
    assert cache.tree.evicted_blocks == 0


def test_open_leaves_other_expired_spans_alone(cache):
    """Only what the match ran into is dropped."""
    serve(cache, "abc", "xyz", now=0)
    cache.open(ask("abc"), now=50)
    assert pins(cache) == {"|xyz": 0}


def test_an_expired_span_beyond_the_hit_limit_stays(cache):
    """The match did not come to it."""
    serve(cache, "abcd", now=0)
    serve(cache, "abx", now=5)
    cache.open(ask("ab", 2 * BLOCK + 1), now=12)
    assert "ab|cd" in spans(cache)


def test_a_refused_open_drops_nothing(cache):
    """Expired blocks count as evictable; when even that is too little, nothing changes."""
    start(cache, "mn", now=0)
    serve(cache, "abc", now=0)
    before = snapshot(cache)
    with pytest.raises(OutOfBlocks, match=r"needs 11 more .* 7 of 12 are free and 3 can be"):
        cache.open(ask("abcdefghijk"), now=50)
    assert snapshot(cache) == before
    cache.open(ask("abcdefghij"), now=50)
    assert pins(cache) == {"|mn": 1}


def test_the_trace_says_expired():
    """EVICT leaves first, reason `expired`, before SPLIT, HIT and MISS; the MISS says why."""
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


def test_the_policy_is_told_leaves_first():
    """Children are removed before their parents, with the reason."""
    cache = make(12, Recorded())
    cache.tree._expires = True
    serve(cache, "abc", "abcde", now=0)
    for span in cache.tree.spans():
        span.expires = 10
    cache.eviction.told.clear()
    cache.open(ask("x"), now=20)
    cache.open(ask("abc"), now=20)
    assert [text for what, text in cache.eviction.told if what == "on_remove"] == [
        "abc|de",
        "|abc",
    ]


def test_commit_drops_what_expired_in_its_way(cache):
    """A block cannot be cached twice: the expired copy makes room for the new one."""
    seq = cache.open(ask("abcd"), now=0)
    serve(cache, "abcd", now=0)
    compute(cache, seq, now=50)
    assert pins(cache) == {"|abcd": 1}
    assert expiries(cache) == {"|abcd": 60}
    assert table(cache, seq) == [0, 1, 2, 3]


def test_an_insertion_raises_its_ancestors(cache):
    """A parent never expires before its child, and the raise stays when the child goes."""
    serve(cache, "ab", now=0)
    seq = cache.open(ask("abc"), now=4)
    assert expiries(cache) == {"|ab": 14}
    compute(cache, seq, now=9)
    cache.close(seq, 9)
    assert expiries(cache) == {"|ab": 19, "ab|c": 19}
    serve(cache, "mnopqrstuv", now=9)
    assert expiries(cache) == {"|ab": 19, "|mnopqrstuv": 19}


def test_a_hit_raises_its_ancestors():
    """Also those that the policy itself did not refresh."""

    class Deepest(Mortal):
        """Refreshes only the deepest span of a hit."""

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
    """An ancestor of something without an end has none either."""

    class Eternal(Mortal):
        """Lets what request "forever" stores live for good."""

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
    """A policy that renews a span as it grows renews the path to it."""

    class Renewing(Mortal):
        """Starts the time again with every growth."""

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
    """A policy that counts from release does so for the path, though it is still pinned."""
    cache = make(12, TTL(ttl=10e-9))
    serve(cache, "ab", now=0)
    one = start(cache, "abc", now=1)
    two = cache.open(ask("abx"), now=2)
    cache.close(one, 50)
    cache.check_integrity()
    assert expiries(cache) == {"|ab": 60, "ab|c": 60}
    cache.close(two, 51)
    assert expiries(cache) == {"|ab": 61, "ab|c": 60}


def test_a_split_copies_the_expiry(cache):
    """Both halves end when the whole would have; a hit renews the upper alone."""
    serve(cache, "abcd", now=0)
    cache.close(cache.open(ask("abx"), 0, now=3), 3)
    assert expiries(cache) == {"|ab": 13, "ab|cd": 10}


def test_without_an_expiring_policy_nothing_expires():
    """The tree does not look at expiry unless the policy says that it sets it."""
    cache = make(12)
    serve(cache, "ab", now=0)
    assert cache.probe(ask("abc"), now=10**18) == 2


class PerTenant(Mortal):
    """Spans of tenant a live for 1000 ns, all others for 10, from a hit and from a release."""

    name = "per-tenant"

    def on_insert(self, span, now):
        """Start its time."""
        super().on_insert(span, now)
        span.expires = now + (1000 if span.tenant == "a" else 10)

    on_access = on_insert

    def on_release(self, span, now):
        """Start its time again."""
        super().on_release(span, now)
        span.expires = now + (1000 if span.tenant == "a" else 10)


def test_a_span_lives_as_long_as_each_of_its_children():
    """Also where a hit on the span alone would let it end sooner."""
    cache = make(12, PerTenant())
    serve(cache, "ab", now=0)
    serve(cache, "abcd", now=1, tenant="a")
    serve(cache, "abx", now=5)
    assert expiries(cache) == {"|ab": 1001, "ab|cd": 1001, "ab|x": 15}
    assert cache.probe(ask("abcde"), now=100) == 4


@pytest.mark.parametrize("mix", [EVEN, FORKS])
@pytest.mark.parametrize("seed", range(3))
def test_lifetimes_that_differ_by_tenant(seed, mix):
    """No span ends before its children, whatever happens: the driver checks after each step."""
    cache = KVCache(30, 6, eviction=PerTenant(), key_tokens=6, ids=True)
    Driver(cache).run(random_steps(seed, 150, Traffic(mix=mix)))
    assert cache.tree.expired_blocks, "nothing expired"
