"""Policies against the published algorithms on one-key requests, and queues on prefixes.

The algorithms are implemented a second time in `reference/queues.py` and `reference/flat.py`,
in these variants:

* SIEVE has no variants.
* S3-FIFO is algorithm 1 of its paper as in its authors' simulator: counts start at zero in the
  main queue, and ghosts are looked up after blocks have been evicted.
* ARC is figure 4 of its paper with real-valued steps.
"""

from __future__ import annotations

from itertools import islice
from random import Random

import attrs
import pytest
from helpers.policies import build
from helpers.reference import flat, queues
from helpers.requests import keyed
from hypothesis import given
from hypothesis import strategies as st

from kvcore import KVCache
from kvcore.request import Retention
from kvcore.testing import RecordingPolicy, Traffic, random_requests, replay, request_lists
from kvcore_plugins.workload import Mooncake
from kvcore_replay.untimed import served

KEY = 6
ALGORITHMS = {
    "sieve": queues.SIEVE,
    "s3fifo": queues.S3FIFO,
    "arc": queues.ARC,
    "lruk": flat.LRUK,
    "tinylfu": flat.TinyLFU,
}
QUEUES = [
    "sieve",
    "s3fifo",
    "s3fifo:small=0.4,ghost=2,promote=1",
    "s3fifo:ghost=0,promote=3",
    "arc",
]
PLAIN = [
    *QUEUES,
    "lruk",
    "lruk:k=1,history=0",
    "lruk:k=3,correlated=2,history=0.5",
    "lruk:k=3,correlated=50,history=4",
    "tinylfu",
    "tinylfu:window=0.2,period=1",
    "tinylfu:window=0.5,protected=0.2,period=3",
    "tinylfu:window=0,protected=1",
    "tinylfu:window=1,protected=0",
]

every_policy = pytest.mark.parametrize("name", PLAIN)
every_queue = pytest.mark.parametrize("name", QUEUES)


def hits(name, keys, blocks):
    """Return which of `keys`, each a separate request, hit, and hit in the plain algorithm."""
    policy = build(name)
    plain = ALGORITHMS[policy.name](blocks, **policy.options())
    if policy.name == "tinylfu":
        policy._sketch = flat.Counts(policy.period * blocks)  # which never confuses two keys
    cache = KVCache(blocks, 1, eviction=policy, accounting="keys")
    requests = (keyed(index, [key], 1) for index, key in enumerate(keys))
    return [bool(seq.hit_blocks) for seq in served(requests, cache)], list(
        map(plain.hits, keys)
    )


@every_policy
@given(keys=st.lists(st.integers(0, 12), min_size=40, max_size=120), blocks=st.integers(1, 9))
def test_any_keys_hit_as_in_the_plain_algorithm(name, keys, blocks):
    """The policy hits like the plain algorithm on any sequence of keys."""
    found, plain = hits(name, keys, blocks)
    assert found == plain


@every_policy
def test_long_streams_hit_as_in_the_plain_algorithm(name):
    """The policy hits like the plain algorithm when its hand goes round many times."""
    for seed in range(40):
        draw = Random(seed)
        blocks = draw.randint(1, 9)
        keys = [draw.randint(0, blocks + 4) for _ in range(200)]
        found, plain = hits(name, keys, blocks)
        assert found == plain


@every_policy
@pytest.mark.parametrize("blocks", [100, 1000])
def test_the_bundled_trace_hits_as_in_the_plain_algorithm(name, blocks):
    """The policy hits like the plain algorithm on the blocks of the bundled trace."""
    keys = list(islice((key for request in Mooncake() for key in request.keys), 10_000))
    found, plain = hits(name, keys, blocks)
    assert any(plain)
    assert found == plain


@every_queue
@given(requests=request_lists(Traffic(key_tokens=KEY)), blocks=st.integers(1, 20))
def test_block_size_does_not_matter(name, requests, blocks):
    """`ratio` blocks per key give `ratio` times the hits, and the same victims."""
    coarse = decisions(name, requests, blocks, 1)
    for ratio in (2, 3, 6):
        fine = decisions(name, requests, blocks, ratio)
        assert [decision.hit for decision in fine] == [ratio * (d.hit or 0) for d in coarse]
        keys = [key for decision in fine for _, key, _ in decision.evicted]
        assert keys[::ratio] == [key for d in coarse for _, key, _ in d.evicted]


@every_queue
@pytest.mark.parametrize("seed", range(4))
def test_splitting_a_span_changes_no_decision(name, seed):
    """A split of a span into parts with the same history changes no decision.

    A retention hint splits a hit span at its border; these policies do not read hints.
    """
    requests = random_requests(seed, 150, Traffic(key_tokens=KEY, most_keys=12))
    whole, cut = cached(name, 30), cached(name, 30)
    more = 0
    for request in requests:
        hit = cut[0].probe(request)
        hinted = request
        if hit > 1:
            hinted = attrs.evolve(request, retention=(Retention(0, hit // 2 * KEY, 60),))
        expected, found = (
            replay(cache, [variant], evicted)
            for (cache, evicted), variant in ((whole, request), (cut, hinted))
        )
        assert found == expected
        more += len(list(cut[0].tree.spans())) - len(list(whole[0].tree.spans()))
    assert more, "nothing was cut"


def cached(name, blocks, ratio=1):
    """Return a cache in `keys` accounting, and the list of its evictions."""
    recording = RecordingPolicy(build(name))
    size = KEY // ratio
    cache = KVCache(blocks * ratio, size, eviction=recording, accounting="keys", key_tokens=KEY)
    return cache, recording.evicted


def decisions(name, requests, blocks, ratio):
    """Return the decisions of a replay of `requests` with `ratio` blocks per key."""
    cache, evicted = cached(name, blocks, ratio)
    return replay(cache, requests, evicted)
