"""The order of block ids, and decisions of the cache with and without ids."""

import attrs
import pytest
from helpers.policies import POLICIES, build
from hypothesis import given
from hypothesis import strategies as st

from kvcore import KVCache, Request
from kvcore.cache import BlockPool, CountingPool
from kvcore.testing import (
    FORKS,
    Driver,
    RecordingPolicy,
    Traffic,
    random_requests,
    replay,
    step_lists,
)

KEY = 6
TRAFFIC = Traffic(key_tokens=KEY, hints=True)

# The history of a pool: numbers of allocated blocks, and whether they were freed.
histories = st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=12)


def used_pool(history):
    """Return a pool of 40 blocks after the allocations and releases of `history`."""
    pool = BlockPool(40)
    for count, back in history:
        ids = pool.allocate(min(count, pool.free_blocks))
        if back:
            pool.free(ids, len(ids))
    return pool


@given(histories, st.integers(0, 20), st.integers(0, 20))
def test_allocating_in_two_parts_gives_the_same_ids(history, first, second):
    """allocate(a + b) gives the ids of allocate(a), then those of allocate(b)."""
    whole, parts = used_pool(history), used_pool(history)
    first = min(first, whole.free_blocks)
    second = min(second, whole.free_blocks - first)
    assert whole.allocate(first + second) == parts.allocate(first) + parts.allocate(second)


@given(histories, st.integers(0, 40))
def test_a_pool_without_ids_has_as_many_free_blocks(history, count):
    """A pool without ids has as many free blocks as one with ids."""
    ids, counted = used_pool(history), CountingPool(40)
    counted.allocate(40 - ids.free_blocks)
    for pool in (ids, counted):
        pool.allocate(min(count, pool.free_blocks))
    assert ids.free_blocks == counted.free_blocks


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_extending_in_two_parts_gives_the_same_blocks(name, seed):
    """extend(a + b) gives the blocks of extend(a), then of extend(b), even from victims."""
    whole = extended(name, seed, lambda room: [room])
    assert whole == extended(name, seed, lambda room: [room // 3, room - room // 3])
    assert whole == extended(name, seed, lambda room: [1] * room)


def extended(name, seed, parts_of):
    """Return the block table of a sequence that takes all available blocks of a used cache."""
    cache = KVCache(30, 2, eviction=build(name), key_tokens=KEY, ids=True)
    replay(cache, random_requests(seed, 60, TRAFFIC))
    now = 60 * TRAFFIC.longest_wait
    seq = cache.open(Request(id="last", prompt_tokens=2, key_tokens=KEY), now=now)
    room = cache.pool.free_blocks + cache.tree.unpinned_blocks
    assert cache.tree.unpinned_blocks > room // 2
    for blocks in parts_of(room):
        cache.extend(seq, 2 * blocks, now)
    assert len(cache.block_table(seq)) == room + 1
    return cache.block_table(seq)


@pytest.mark.parametrize("count", ["keys", "tokens"])
@given(steps=step_lists(attrs.evolve(TRAFFIC, mix=FORKS)))
def test_a_cache_without_ids_decides_as_one_with_ids(count, steps):
    """A cache decides the same with ids as without, forks included.

    A cache without ids gets them at the first fork.
    """
    counted, with_ids = (decisions(steps, count, ids=ids) for ids in (False, True))
    assert counted == with_ids


@pytest.mark.parametrize("name", POLICIES)
def test_a_replay_without_ids_decides_as_one_with_ids(name):
    """A serial replay decides the same with ids as without, and needs none."""
    requests = random_requests(3, 100, TRAFFIC)
    counted, with_ids = (cache(name, "tokens", ids=ids) for ids in (False, True))
    assert replay(counted, requests) == replay(with_ids, requests)
    assert type(counted.pool) is CountingPool


def cache(name, count, *, ids):
    """Return a cache of 24 blocks, three per key."""
    return KVCache(
        24, 2, eviction=RecordingPolicy(build(name)), accounting=count, key_tokens=KEY, ids=ids
    )


def decisions(steps, count, *, ids):
    """Return the decisions of a cache with LRU."""
    lru = cache("lru", count, ids=ids)
    return Driver(lru, lru.eviction.evicted).run(steps)
