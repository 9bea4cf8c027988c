"""The core in C names, holds and evicts blocks of cache groups as Python does."""

import gc
import sys

import pytest
from helpers.native import needs_core
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.native import library
from kvcore_plugins.cache_groups.named_blocks import NO_BLOCK, NamedBlocks

pytestmark = needs_core

BLOCKS, GROUPS = 12, 2

steps = st.lists(
    st.tuples(
        st.sampled_from(["name", "hold", "release", "pop", "remove"]),
        st.lists(st.integers(0, BLOCKS - 1), max_size=4, unique=True),
        st.integers(0, GROUPS - 1),
        st.integers(0, 3),
    ),
    max_size=60,
)


class Side:
    """One of the twins, and the calls of a sequence of steps that it can take.

    Attributes:
        blocks: the names.
        held: by block with a name, the number of its holders.
    """

    def __init__(self, kind):
        self.blocks, self.held = kind(GROUPS), {}
        self.blocks.grow(BLOCKS)

    def take(self, call, chosen, group, name):
        """Take a step with the `chosen` blocks that it can be for; return its answer."""
        bare = [block for block in chosen if block not in self.held]
        named = [block for block in chosen if block in self.held]
        if call == "name":
            names = [name if n % 2 else (name, n) for n, _ in enumerate(bare)]
            self.held.update(dict.fromkeys(bare, 1))
            return self.blocks.name(bare, names, group)
        if call == "hold":
            self.held.update((block, self.held[block] + 1) for block in named)
            return self.blocks.hold(named)
        if call == "release":
            held = [block for block in named if self.held[block]]
            self.held.update((block, self.held[block] - 1) for block in held)
            return self.blocks.release([*bare, *held, NO_BLOCK])
        return self.evict(call, named, name)

    def evict(self, call, named, count):
        """Evict `count` blocks, or those of the `named` ones that are idle; return them."""
        if call == "remove":
            victims = [block for block in named if not self.held[block]]
            for block in victims:
                self.blocks.remove(block)
        else:
            victims = self.blocks.pop(min(count, self.blocks.idle))
        for block in victims:
            del self.held[block]
        self.blocks.forget(victims)
        return victims

    def state(self):
        """Return all that can be read."""
        blocks = self.blocks
        return (
            blocks.cached,
            blocks.idle,
            list(blocks),
            [blocks.place(block)[1] for block in range(BLOCKS)],
            [blocks.holders(block) for block in self.held],
            blocks.count_idle(list(self.held)),
        )


@given(steps)
@settings(max_examples=300)
def test_both_name_hold_and_evict_alike(script):
    """After each step of any script, the twins have given one answer and are in one state."""
    python, native = Side(NamedBlocks), Side(library().NamedBlocks)
    for step in script:
        assert python.take(*step) == native.take(*step)
        assert python.state() == native.state()


@pytest.mark.parametrize("count", [-1, 0])
def test_none_are_popped_where_none_are_missing(count):
    """So many blocks are a list of none, where more are free than were asked for."""
    for kind in (NamedBlocks, library().NamedBlocks):
        assert kind(GROUPS).pop(count) == []


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("name", ([0], [], 0)),
        ("name", ([9], ["a"], 0)),
        ("name", ([0], ["a"], 2)),
        ("name", ([0], [[]], 0)),
        ("hold", ([0],)),
        ("hold", ((0,),)),
        ("release", ([4],)),
        ("release", (["a"],)),
        ("count_idle", (5,)),
        ("pop", (1,)),
        ("remove", (0,)),
        ("remove", (2**80,)),
        ("forget", ([0],)),
        ("place", (-5,)),
        ("grow", ("a",)),
    ],
)
def test_a_wrong_call_is_an_exception(call, arguments):
    """A block that is not known, or has no name, is an exception, and changes nothing."""
    blocks = library().NamedBlocks(GROUPS)
    blocks.grow(4)
    with pytest.raises((KeyError, IndexError, TypeError, ValueError, OverflowError)):
        getattr(blocks, call)(*arguments)
    assert (blocks.idle, blocks.cached, list(blocks)) == (0, [{}, {}], [])


def test_names_are_given_back():
    """A name is referred to by the cache as long as a block has it, and no longer."""
    name = "a name of its own"
    blocks = library().NamedBlocks(1)
    blocks.grow(2)
    before = sys.getrefcount(name)
    blocks.name([0, 1], [name, name], 0)
    assert sys.getrefcount(name) > before
    blocks.release([0, 1])
    blocks.forget(blocks.pop(2))
    assert sys.getrefcount(name) == before
    blocks.name([1], [name], 0)
    del blocks
    gc.collect()
    assert sys.getrefcount(name) == before
