"""The span cache against a block-by-block reference, for every policy with a score."""

import attrs
import pytest
from helpers.policies import POLICIES, SCORED, build
from helpers.reference.block_cache import BlockCache
from helpers.requests import keyed
from hypothesis import given

from kvcore import KVCache
from kvcore.request import Retention
from kvcore.testing import (
    COMPACTIONS,
    EVEN,
    FORKS,
    Driver,
    RecordingPolicy,
    Step,
    Traffic,
    random_requests,
    random_steps,
    replay,
    request_lists,
    step_lists,
)

KEY = 6
# (accounting, block size): one and three blocks per key; in `tokens` also two keys per block.
LAYOUTS = [("keys", 6), ("keys", 2), ("tokens", 6), ("tokens", 2), ("tokens", 12)]

seeded_layouts = pytest.mark.parametrize(
    ("seed", "count", "size"), [(seed, *layout) for seed, layout in enumerate(LAYOUTS)]
)

ROTATED = [
    (name, layout, *LAYOUTS[layout])
    for n, name in enumerate(SCORED)
    for layout in (n % 5, (n + 2) % 5)
]
"""Policies with two layouts: layouts rotate, because the tree that forks knows no policy."""

rotated_layouts = pytest.mark.parametrize(("name", "seed", "count", "size"), ROTATED)


def seconds(context, tokens):
    """Return a cost that grows with depth, without rounding."""
    return tokens * (16 + context) / 1024


def caches(name, blocks, count, size):
    """Return the cache and its reference, each with the list of its evictions."""
    recording = RecordingPolicy(build(name))
    options = {"accounting": count, "key_tokens": KEY, "recompute": seconds}
    cache = KVCache(blocks, size, eviction=recording, **options)
    reference = BlockCache(blocks, size, POLICIES[name](), **options)
    return (cache, recording.evicted), (reference, reference.evicted)


def assert_same_decisions(name, blocks, count, size, steps):
    """Check that hits, refusals, free blocks and evictions of both are equal at each step."""
    cache, reference = caches(name, blocks, count, size)
    one, other = Driver(*cache), Driver(*reference)
    for index, step in enumerate(steps):
        assert one.step(step) == other.step(step), f"step {index} of {len(steps)}: {step}"


def traffic(name, **changes):
    """Return traffic, with hints for retention and pins except for SLRU.

    There these cut a span where nothing else distinguishes the halves, and SLRU demotes whole
    spans.
    """
    cuts = not name.startswith("slru")
    return Traffic(key_tokens=KEY, hints=cuts, pins=cuts, **changes)


@seeded_layouts
@pytest.mark.parametrize("name", SCORED)
def test_decisions_under_random_concurrency(name, seed, count, size):
    """Decisions are those of the reference when many sequences run concurrently.

    They compute in pieces, diverge, grow in place and are refused.
    """
    blocks = (6, 12, 24)[seed % 3] * KEY // size + seed
    steps = random_steps(seed, 150, traffic(name, mix=EVEN))
    assert_same_decisions(name, blocks, count, size, steps)


@rotated_layouts
def test_decisions_with_forks(name, seed, count, size):
    """Decisions are those of the reference when forks share and commit private blocks."""
    steps = random_steps(seed, 150, traffic(name, mix=FORKS))
    assert_same_decisions(name, 16 * KEY // size, count, size, steps)


@rotated_layouts
def test_decisions_with_compactions(name, seed, count, size):
    """Decisions are those of the reference when sequences and forks are compacted."""
    steps = random_steps(seed, 150, traffic(name, mix=COMPACTIONS))
    assert_same_decisions(name, 16 * KEY // size, count, size, steps)


@rotated_layouts
def test_decisions_for_requests_longer_than_the_pool(name, seed, count, size):
    """Decisions are those of the reference for requests longer than the pool.

    In a serial replay such a request is opened with as many leading blocks as the pool has.
    """
    blocks = (1, 20)[seed % 2]
    requests = random_requests(blocks, 40, traffic(name, most_keys=3 + blocks * size // KEY))
    (cache, evicted), (reference, expected) = caches(name, blocks, count, size)
    assert replay(cache, requests, evicted) == replay(reference, requests, expected)


@pytest.mark.parametrize("name", ["fifo", "lfu:half_life=inf", "priority", "ttl:ttl=2e-8"])
@given(
    steps=step_lists(Traffic(key_tokens=KEY, hints=True, pins=True))
    | step_lists(Traffic(key_tokens=KEY, hints=True, pins=True, mix=COMPACTIONS))
)
def test_decisions_for_any_steps(name, steps):
    """Decisions are those of the reference for any steps that hypothesis draws."""
    for count, size in LAYOUTS:
        assert_same_decisions(name, 10 * KEY // size, count, size, steps)


@pytest.mark.parametrize("name", ["lru", "slru"])
@given(requests=request_lists(Traffic(key_tokens=KEY)))
def test_decisions_for_any_requests(name, requests):
    """Decisions are those of the reference for any requests in a serial replay."""
    for count, size in LAYOUTS:
        (cache, evicted), (reference, expected) = caches(name, 4, count, size)
        assert replay(cache, requests, evicted) == replay(reference, requests, expected)


def request(number, keys, *hints):
    """Return a request of whole keys, with a retention hint (priority, duration) per key."""
    retention = tuple(
        Retention(index * KEY, (index + 1) * KEY, *hint)
        for index, hint in enumerate(hints)
        if hint is not None
    )
    return keyed(number, keys, KEY, retention=retention)


def serve(number, keys, *hints, wait=0):
    """Return the step that serves a request of these keys and hints."""
    return Step(action="serve", request=request(number, keys, *hints), wait=wait)


def test_a_commit_is_shared_with_forks_of_several_lengths():
    """A commit is shared with each fork as far as the fork has the blocks, in any order."""
    for shorter in ((1, 3), (3, 1), (2, 2), (0, 4)):
        steps = [Step(action="open", request=request(0, [1, 2, 3, 4, 5]))]
        for sibling, keys in enumerate(shorter, 1):
            fork = Step(action="fork")
            steps += [fork, Step(action="rollback", which=sibling, tokens=keys * KEY)]
        steps += [Step(action="commit"), *[Step(action="close")] * 3]
        steps += [serve(index, [10 * index] * 3) for index in range(1, 4)]
        assert_same_decisions("fifo", 9, "keys", KEY, steps)


# Whether a hint of priority 60 holds shows against a span of priority 50, which was pinned
# while all spans below the hint's span were evicted.
AGAINST_50 = [
    Step(action="open", request=request(8, [50], (50, None))),
    Step(action="commit"),
    serve(9, [91, 92]),
    Step(action="close"),
    serve(10, [93, 94, 95]),
    serve(11, [96, 97]),
]


@pytest.mark.parametrize(
    "steps",
    [
        [serve(0, [1], (60, 5)), serve(1, [1, 2], None, (60, None))],
        [serve(0, [1], (90, 5)), serve(1, [1], (60, None), wait=9)],
        [serve(0, [1], (60, None)), serve(1, [1, 2], None, (90, 5)), serve(2, [1], wait=9)],
        [serve(0, [1, 2], (60, None), (60, 5)), serve(1, [3])],
        [serve(0, [1, 2], (60, 90), (60, 5)), serve(1, [3])],
        [
            Step(action="open", request=request(0, [1, 2], (90, 5), (60, None))),
            Step(action="commit", tokens=KEY),
            Step(action="commit", wait=9),
            Step(action="close"),
        ],
    ],
)
def test_the_stronger_of_two_hints_holds(steps):
    """Of two hints the stronger and longer one holds, and an expired one has no effect."""
    for wait in (0, 9):
        later = attrs.evolve(AGAINST_50[0], wait=wait)
        assert_same_decisions("priority", 3, "keys", KEY, [*steps, later, *AGAINST_50[1:]])
        assert_same_decisions("priority", 4, "keys", KEY, [*steps, later, *AGAINST_50[1:]])
