"""The core in C replays requests as Python does."""

import random

import pytest
from helpers.native import KEY_TOKENS, POLICIES, examples, needs_core, random_requests
from hypothesis import given
from hypothesis import strategies as st

from kvcore import KVCache, Request
from kvcore.cache import Residency, native
from kvcore.cache.integrity import check_tree
from kvcore.errors import KvcoreError
from kvcore.request import Hints
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix
from kvcore_replay import untimed
from kvcore_replay.untimed import hits_of, replayed_in_c

pytestmark = needs_core


class Listening:
    """A watcher of a tree that keeps what it hears."""

    def __init__(self):
        self.heard = []

    def stored(self, span, blocks, now):
        """Keep the event."""
        self.heard.append(("stored", span.id, blocks, now))

    def hit(self, span, now):
        """Keep the event."""
        self.heard.append(("hit", span.id, now))

    def leaving(self, span, blocks, now, reason):
        """Keep the event."""
        self.heard.append(("leaving", span.id, blocks, now, reason))


def replayed(seed, *, hinted, pure):
    """Return all that a replay of random requests in a random cache leaves."""
    chance = random.Random(seed)
    requests = random_requests(chance, chance.randrange(5, 200))
    if hinted:
        chance.choice(requests).hints = Hints(share=600)
    accounting = chance.choice(("keys", "tokens"))
    size = chance.choice((64, 512) if accounting == "keys" else (64, 512, 1024))
    prefix = chance.choice(("radix", "hashed", "hashed:spans=block", "none"))
    cache = KVCache(
        chance.randrange(1, 400),
        size,
        eviction=chance.choice(POLICIES),
        prefix=prefix,
        accounting=accounting,
    )
    watcher = cache.tree.watcher = Listening()
    if chance.random() < 0.5:
        cache.record_residency()
    with pytest.MonkeyPatch.context() as patch:
        if pure:
            patch.setattr(untimed, "core", lambda: None)
        try:
            hits = list(hits_of(requests, cache))
        except KvcoreError as error:
            return str(error)
    check_tree(cache.tree)
    return hits, watcher.heard, repr(cache.stats), cache.residency_by_tier(), cache.now


@examples
@given(st.integers(0, 2**32), st.booleans())
def test_both_cores_replay_alike(seed, hinted):
    """Hits, changes of the tree in order, counts and residency are those of Python."""
    assert replayed(seed, hinted=hinted, pure=False) == replayed(seed, hinted=hinted, pure=True)


class Own(Residency):
    """Statistics that are not those of the cache."""


class OtherMatch(Radix):
    """An index with another lookup."""

    def match(self, keys, limit, after):
        """Return what the index of the tree returns."""
        return super().match(keys, limit, after)


class OtherWalk(OtherMatch):
    """An index with another lookup, which says that it only walks down the tree."""

    walks_tree = True

    match = Radix.match


def used(cache):
    """Return a cache that has served a request."""
    cache.close(cache.open(Request(id="a", prompt_tokens=1, key_tokens=16)))
    return cache


def with_residency(cache, kind=Residency):
    """Return a cache with statistics of residency."""
    cache.tree.residency = kind(cache.pool.blocks)
    return cache


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: KVCache(99), ""),
        (lambda: with_residency(KVCache(99)), ""),
        (lambda: with_residency(KVCache(99), Own), "statistics of its own"),
        (lambda: KVCache(99, ids=True), "a KVCache with a BlockPool"),
        (lambda: KVCache(99, retention="window:tokens=64"), "a retention policy"),
        (lambda: KVCache(99, eviction="ttl:ttl=5"), "spans that expire"),
        (lambda: KVCache(99, eviction="lookahead"), "a policy that hears of the queue"),
        (lambda: used(KVCache(99)), "a cache in use"),
    ],
)
def test_what_the_core_lacks_is_replayed_in_python(make, reason):
    """A cache whose requests the core does not replay says why, and all requests are left."""
    cache, request = make(), Request(id=0, prompt_tokens=100, key_tokens=16)
    assert native.why_not(cache) == reason
    hits, rest = replayed_in_c([request], cache, keeps=True)
    assert (list(hits), list(rest)) == (([], [request]) if reason else ([0], []))


@pytest.mark.parametrize(
    ("index", "walks"), [(Radix, True), (OtherMatch, False), (OtherWalk, True)]
)
def test_an_index_walks_the_tree_if_the_class_of_its_lookup_says_so(index, walks):
    """A lookup that a subclass overrides is called, unless that says that it only walks."""
    known = native.known_plugins(KVCache(9, prefix=index(), eviction="fifo"))
    assert known == (1 if walks else 0)


class OwnLRU(LRU):
    """A policy that hears of releases, and does not say in what order it evicts."""


@pytest.mark.parametrize(
    ("policy", "known"),
    [(LRU(), 3), (LRU(renew_split=True), 1), (OwnLRU(), 1)],
)
def test_the_core_orders_the_spans_of_a_policy_whose_class_itself_says_how(policy, known):
    """An LRU that renews splits, or a subclass, is asked for its victims."""
    assert native.known_plugins(KVCache(9, eviction=policy)) == known


def test_a_policy_is_told_the_order_of_releases_when_the_core_has_ended():
    """After a replay in a full pool the policy names the victim that Python alone names."""
    requests = random_requests(random.Random(7), 300)
    victims = []
    for policy in (LRU(), OwnLRU()):
        cache = KVCache(40, eviction=policy)
        list(replayed_in_c(requests, cache, keeps=False)[1])
        victims.append([(span.id, span.released_order) for span in policy._order])
    assert victims[0] == victims[1] != []


def test_time_that_runs_backwards_is_refused_in_the_same_words():
    """A request before its predecessor is refused by the core as by Python."""
    requests = random_requests(random.Random(1), 20)
    requests[9].arrival = 10**12
    for pure in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if pure:
                patch.setattr(untimed, "core", lambda: None)
            with pytest.raises(KvcoreError, match="never decreases"):
                hits_of(requests, KVCache(99, KEY_TOKENS))
