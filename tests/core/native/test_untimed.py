"""The core in C replays requests as Python does."""

import random

import pytest
from helpers.native import KEY_TOKENS, POLICIES, examples, needs_core, random_requests
from hypothesis import given
from hypothesis import strategies as st

from kvcore import KVCache
from kvcore.cache import native
from kvcore.cache.integrity import check_tree
from kvcore.errors import KvcoreError
from kvcore.request import Hints
from kvcore_replay.untimed import hits_of

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
            patch.setattr(native, "core", lambda: None)
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


def test_time_that_runs_backwards_is_refused_in_the_same_words():
    """A request before its predecessor is refused by the core as by Python."""
    requests = random_requests(random.Random(1), 20)
    requests[9].arrival = 10**12
    for pure in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if pure:
                patch.setattr(native, "core", lambda: None)
            with pytest.raises(KvcoreError, match="never decreases"):
                hits_of(requests, KVCache(99, KEY_TOKENS))
