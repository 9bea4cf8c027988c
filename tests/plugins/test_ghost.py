"""A `GhostTree` of runs remembers exactly the blocks that a list of blocks would."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

import attrs
import pytest
from helpers.caches import BLOCK, ask, make, serve
from hypothesis import given
from hypothesis import strategies as st

from kvcore import InputError, KVCache, Span
from kvcore.testing import Driver, Traffic, random_steps, step_lists
from kvcore_plugins.eviction import LRU
from kvcore_plugins.eviction.ghost import GhostRuns, GhostTree

KEY = 6
HINTS = Traffic(key_tokens=KEY, hints=True)


class Blocks:
    """A reference for `GhostTree` that remembers block by block."""

    def __init__(self, room):
        """Create an empty memory of at most `room` blocks."""
        self.room = room
        self.kept = OrderedDict()

    def add(self, places):
        """Add `places`, the deepest first, and drop the least recently added above `room`."""
        for place in reversed(places):
            self.kept.pop(place, None)
            self.kept[place] = None
        while len(self.kept) > self.room:
            self.kept.popitem(last=False)

    def forget(self, places):
        """Drop `places`; return how many were remembered."""
        return sum(place in self.kept and not self.kept.pop(place) for place in places)

    def match(self, places):
        """Return how many of `places` are remembered."""
        return sum(place in self.kept for place in places)


@attrs.define(slots=False, eq=False)
class Haunted(LRU):
    """LRU that remembers its evicted blocks in a `GhostTree` and in `Blocks`.

    If `forgets`, blocks that are cached again are dropped from both.
    """

    name: ClassVar[str] = "haunted"

    room: int = 1000
    forgets: bool = True

    def attach(self, blocks, block_size):
        """Create both memories with a capacity of `room` keys."""
        super().attach(blocks, block_size)
        self.ghosts = GhostTree(self.room * max(KEY, block_size))
        self.blocks_kept = Blocks(self.room * max(KEY // block_size, 1))

    def on_insert(self, span, now):
        """Drop the blocks of the inserted span from both memories."""
        super().on_insert(span, now)
        self._forget(span)

    def on_extend(self, span, blocks):
        """Drop all blocks of the extended span from both memories."""
        del blocks
        self._forget(span)

    def on_trim(self, span, blocks):
        """Add the blocks that were cut off to both memories."""
        self.ghosts.add(span, blocks)
        self.blocks_kept.add(places(span, span.end, span.end + blocks))

    def on_remove(self, span, reason):
        """Add the blocks of the removed span to both memories."""
        super().on_remove(span, reason)
        self.ghosts.add(span, span.blocks)
        self.blocks_kept.add(places(span, span.start, span.end))

    def _forget(self, span: Span):
        if self.forgets:
            forgotten = self.ghosts.forget(span)
            blocks = self.blocks_kept.forget(places(span, span.start, span.end))
            assert forgotten == blocks * self.block_size


def places(span, start, end):
    """Return the blocks `[start, end)` of a path as (position, key)."""
    ratio = span.geometry.ratio
    return [(position, span.path_keys[position // ratio]) for position in range(start, end)]


def asked(request, block_size):
    """Return the blocks of a prompt as (position, key)."""
    ratio, stride = max(1, KEY // block_size), max(1, block_size // KEY)
    keys = request.keys[stride - 1 :: stride]
    return [(position, keys[position // ratio]) for position in range(len(keys) * ratio)]


def nodes(tree):
    """Return every run of `tree`, whether it is a ghost or an inner node."""
    found, stack = [], list(tree._ring.children.values())
    while stack:
        found.append(stack.pop())
        stack.extend(found[-1].children.values())
    return found


def evicted(tree):
    """Return the runs that are ghosts, the oldest first, by the letters of their keys."""
    found, run = [], tree._ring.newer
    while run is not tree._ring:
        found.append("".join(key[-1] for key in run.keys[run.start : run.end]))
        run = run.newer
    return found


def haunted(policy, blocks, count, size):
    """Return the driver of a cache with `policy`."""
    return Driver(KVCache(blocks, size, eviction=policy, accounting=count, key_tokens=KEY))


def assert_equal_memories(policy, steps, count, size, driver=None):
    """Drive a cache through `steps`, and compare both memories after each step."""
    driver = driver or haunted(policy, 9 * KEY // size, count, size)
    for step in steps:
        driver.step(step)
        assert policy.ghosts.tokens == len(policy.blocks_kept.kept) * size
        if step.request is not None:
            found = policy.blocks_kept.match(asked(step.request, size)) * size
            assert policy.ghosts.match(step.request) == found


layouts = pytest.mark.parametrize(
    ("count", "size"), [("keys", 6), ("keys", 2), ("tokens", 6), ("tokens", 2), ("tokens", 12)]
)


@pytest.mark.slow
@layouts
@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("room", [0, 1, 4, 30])
def test_ghost_runs_match_as_a_block_by_block_memory(room, forgets, count, size):
    """A `GhostTree` stores and matches as many tokens as a block-by-block memory."""
    for seed in range(3):
        steps = random_steps(seed, 200, HINTS)
        assert_equal_memories(Haunted(room=room, forgets=forgets), steps, count, size)


@layouts
@given(steps=step_lists(HINTS), room=st.integers(0, 12), forgets=st.booleans())
def test_ghost_runs_equal_blocks_in_any_list_of_steps(count, size, steps, room, forgets):
    """A `GhostTree` equals the block-by-block memory in any list of steps.

    Hypothesis shrinks a failing list to a small counterexample.
    """
    assert_equal_memories(Haunted(room=room, forgets=forgets), steps, count, size)


@pytest.mark.parametrize("seed", range(4))
def test_the_tree_has_no_superfluous_run(seed):
    """Each run is a ghost, or has a ghost as its child, or has several children."""
    policy = Haunted(room=9)
    driver = haunted(policy, 9, "keys", KEY)
    for step in random_steps(seed, 200, HINTS):
        driver.step(step)
        for run in nodes(policy.ghosts):
            remembering = any(child.newer is not None for child in run.children.values())
            assert run.newer is not None or remembering or len(run.children) > 1


def test_resize_drops_the_oldest_ghosts():
    """A smaller capacity drops the oldest ghosts at once; a larger one restores none."""
    policy = Haunted()
    cache = make(1, policy, block_size=KEY, accounting="keys")
    serve_keys(cache, *"abcd")
    policy.ghosts.resize(2 * KEY + KEY - 1)
    assert [matched(policy, text) for text in "abc"] == [0, 1, 1]
    policy.ghosts.resize(100 * KEY)
    assert policy.ghosts.tokens == 2 * KEY


def test_adjacent_ghosts_of_a_path_become_one_run():
    """Two adjacent ghosts of a path become one run when a ghost below them is dropped.

    They became adjacent when the blocks that were evicted between them were cached again.
    """
    policy = Haunted()
    cache = make(3, policy, block_size=KEY, accounting="keys")
    serve_keys(cache, "abc", "y", "ab", "u", "w", "a", "t", "s", "r")
    assert evicted(policy.ghosts) == ["c", "y", "b", "u", "w", "a"]
    serve_keys(cache, "u", "w")
    assert evicted(policy.ghosts) == ["c", "y", "b", "a", "t", "s"]
    serve_keys(cache, "y")
    assert evicted(policy.ghosts)[:3] == ["c", "b", "a"]
    policy.ghosts.resize(policy.ghosts.tokens - KEY)
    assert evicted(policy.ghosts)[:1] == ["ab"]
    policy.ghosts.resize(policy.ghosts.tokens - KEY)
    assert evicted(policy.ghosts)[:1] == ["a"]


def test_a_negative_capacity_is_refused():
    """A capacity below 0 raises InputError."""
    with pytest.raises(InputError, match="a ghost of -1 tokens: give 0 or more"):
        GhostTree(-1)
    with pytest.raises(InputError, match="a ghost of -2 tokens"):
        GhostTree(3).resize(-2)


def serve_keys(cache, *texts):
    """Serve each text as a request with a key of `KEY` tokens for each letter."""
    for text in texts:
        seq = cache.open(ask(text, key_tokens=KEY))
        cache.commit(seq, seq.tokens - seq.computed)
        cache.close(seq)


def matched(policy, text):
    """Return how many letters of `text` are remembered."""
    return policy.ghosts.match(ask(text, key_tokens=KEY)) // KEY


class Valued(LRU):
    """LRU that stores the id of each evicted span, and what each request finds of them."""

    def __init__(self, capacity=100):
        """Store at most `capacity` blocks."""
        self.capacity = capacity

    def attach(self, blocks, block_size):
        """Store no run."""
        super().attach(blocks, block_size)
        self.runs, self.taken, self.dropped = GhostRuns(self.capacity), [], []

    def on_insert(self, span, now):
        """Store the text of the span, and its end, before its tail leaves."""
        span.data = span.keys()[-1], span.end

    def on_remove(self, span, reason):
        """Store the text of the span for its blocks."""
        super().on_remove(span, reason)
        text, end = span.data
        self.dropped += self.runs.add(span, end, text)

    def on_miss(self, request, hit_blocks, now):
        """Store the values of the runs that follow the hit."""
        self.taken.append(self.runs.take(request, hit_blocks))


RUNS = {
    "radix": [[], [], [], [("ab", 0, 2), ("abcd", 2, 3)], []],
    "hashed:spans=block": [
        [],
        [],
        [],
        [("a", 0, 1), ("ab", 1, 2), ("abc", 2, 3)],
        [("abcd", 3, 4)],
    ],
}
"""What the requests of the test below take of evicted runs, by prefix index."""


@pytest.mark.parametrize("prefix", RUNS)
def test_runs_that_follow_a_hit_are_taken_once(prefix):
    """A request takes the values of the runs that it goes into, and leaves no one theirs."""
    cache = KVCache(5, BLOCK, eviction=Valued(), accounting="keys", prefix=prefix)
    serve(cache, "ab", "abcd", "vwxyz", "abce", "abcdf")
    assert cache.eviction.taken == RUNS[prefix]


def test_the_least_recent_run_is_dropped():
    """Over capacity the oldest run leaves whole, and its value is returned."""
    cache = make(2, Valued(3), accounting="keys")
    serve(cache, "ab", "cd", "ef", "gh")
    policy = cache.eviction
    assert policy.dropped == ["ab", "cd"]
    assert list(policy.runs.values()) == ["ef"]
    assert policy.runs.blocks == 2
