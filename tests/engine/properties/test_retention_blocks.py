"""Blocks of sequences that drop tokens: a cached block always holds the tokens of its keys."""

import pytest
from helpers.retention import Eager
from hypothesis import given
from hypothesis import strategies as st

from kvcore import KVCache
from kvcore.testing import COMPACTIONS, FORKS, Driver, Traffic, random_steps, step_lists
from kvcore_engine.retention.window import Window
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix

KEY = 6
TRAFFIC = Traffic(key_tokens=KEY, mix=COMPACTIONS)
TAINTED = "computed without some of the tokens before it"


class Slots(Driver):
    """A driver that records the contents that a backend would have in every slot.

    A slot holds the key and position of the token that was computed into it, or `TAINTED` if
    the sequence had dropped tokens by then.
    """

    def __init__(self, cache):
        super().__init__(cache)
        self.size = cache.geometry.block_size
        self.slots = {}
        cache.on_copy, cache.on_compact = self.copied, self.compacted

    def copied(self, source, target):
        """Copy a block."""
        for slot in range(self.size):
            self.slots[target, slot] = self.slots.get((source, slot))

    def compacted(self, seq, before, held):
        """Copy the newest tokens in reverse, the worst order for a late reader."""
        kept = [self.slots[self.place(before, at)] for at in reversed(range(held))]
        table = seq.table()
        for index in range(seq.computed):
            self.slots[self.place(table, index)] = kept[index]

    def place(self, table, at):
        """Return the slot of a token in a table."""
        return table[at // self.size], at % self.size

    def _act(self, action, seq, tokens):
        if action == "commit":
            left = seq.tokens - seq.computed
            self._compute(seq, left if tokens is None else min(tokens, left))
        super()._act(action, seq, tokens)

    def _compute(self, seq, tokens):
        table, hidden = seq.table(), seq.dropped * self.size
        for index in range(seq.computed, seq.computed + tokens):
            value = TAINTED if seq.holes or seq.compacted else self.value(seq.keys, index)
            self.slots[self.place(table, index - hidden)] = value

    def value(self, keys, at):
        """Return the content of a token at a position, by the keys of its prompt."""
        key = at // self.size // self.cache.geometry.ratio
        return (keys[key] if key < len(keys) else None), at

    def step(self, step):
        """Perform `step`; check every cached block, and tables of sequences with all tokens."""
        decision = super().step(step)
        for span in self.cache.tree.spans():
            for at in range(span.start * self.size, span.end * self.size):
                place = self.place(span.ids, at - span.start * self.size)
                assert self.slots[place] == self.value(span.path_keys, at), (span, at)
        for seq in self.sequences:
            if not (seq.holes or seq.compacted):
                table = seq.table()
                for at in range(seq.computed):
                    assert self.slots[self.place(table, at)] == self.value(seq.keys, at), seq
        return decision


def make(blocks, size, policy):
    """Return a driver of a cache whose sequences drop tokens by `policy`."""
    return Slots(
        KVCache(
            blocks,
            size,
            eviction=LRU(),
            prefix=Radix(),
            key_tokens=KEY,
            retention=policy,
            ids=True,
        )
    )


policies = st.sampled_from((
    *(lambda: None, lambda: Eager(1), lambda: Eager(5), lambda: Eager(11)),
    *(lambda: Window(tokens=5), lambda: Window(tokens=7, sinks=3)),
))  # fmt: skip
sizes = st.sampled_from((1, 2, 3, 6, 12))


@given(
    steps=step_lists(TRAFFIC),
    blocks=st.sampled_from((6, 20, 60)),
    size=sizes,
    make_policy=policies,
)
def test_a_sequence_that_drops_tokens_never_poisons_the_cache(steps, blocks, size, make_policy):
    """No cached block was computed by a sequence that had dropped tokens.

    Prefixes are shared, sequences fork, and blocks are evicted and used again.
    """
    make(blocks, size, make_policy()).run(steps)


@given(steps=step_lists(TRAFFIC, most=40), size=sizes)
def test_compactions_change_the_hits_of_no_request(steps, size):
    """Compactions and other calls change the hits of no request in an ample pool."""
    driver = make(4000, size, None)
    opened = [step.request for step in steps if step.request is not None]
    for step in steps:
        before = [driver.cache.probe(request, driver.now) for request in opened]
        decision = driver.step(step)
        if decision.action in ("compact", "extend", "fork", "close", "rollback"):
            assert [driver.cache.probe(request, driver.now) for request in opened] == before


def test_slots_find_a_poisoned_cache(monkeypatch):
    """`Slots` finds a shared block that was computed after its sequence dropped tokens."""
    monkeypatch.setattr("kvcore.cache.kvcache.is_past_shared", lambda _: True)
    forks = Traffic(key_tokens=KEY, mix=FORKS)
    drivers = [(make(60, 2, Window(tokens=1)), random_steps(i, 60, forks)) for i in range(50)]
    with pytest.raises(AssertionError, match="computed without"):
        [driver.run(steps) for driver, steps in drivers]
