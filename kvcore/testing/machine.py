"""A hypothesis state machine that does everything to a cache that can be done to it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvcore.cache import KVCache
from kvcore.policy import EvictionPolicy, PrefixCache
from kvcore.testing.driver import Decision, Driver, Witness
from kvcore.testing.strategies import steps
from kvcore.testing.traffic import Step, Traffic

_KEY = 6
_TRAFFIC = Traffic(key_tokens=_KEY, hints=True)
# (counting, block size): one and three blocks a key, and in `tokens` two keys a block.
_LAYOUTS = [("tokens", 2), ("tokens", 6), ("tokens", 12), ("keys", 2), ("keys", 6)]

_some_open = precondition(lambda self: bool(self.driver.sequences))


class CacheMachine(RuleBasedStateMachine):
    """Opens, commits, extends, forks, rolls back and closes at random, small caches included.

    After each step the cache's invariants hold. A call that is refused, and a probe, leave
    everything as it was: pool, spans, pins, statistics, the policy's state. The policy
    answers with unpinned leaves. At the end all sequences close, and no pin is left.
    """

    driver: Driver

    @abstractmethod
    def make_eviction(self) -> EvictionPolicy:
        """Return a new eviction policy."""

    def make_prefix(self) -> PrefixCache | None:
        """Return a new prefix cache; None for the `radix` plugin."""
        return None

    @initialize(blocks=st.integers(1, 40), layout=st.sampled_from(_LAYOUTS), ids=st.booleans())
    def begin(self, blocks: int, layout: tuple[str, int], ids: bool) -> None:  # noqa: FBT001
        """Make the cache."""
        witness = Witness(self.make_eviction())
        count, size = layout
        cache = KVCache(
            blocks,
            size,
            eviction=witness,
            prefix=self.make_prefix(),
            count=count,
            key_tokens=_KEY,
            ids=ids,
        )
        self.driver = Driver(cache, witness.evicted)
        self.requests = 0

    @rule(step=steps(_TRAFFIC, "open"))
    def open(self, step: Step) -> None:
        """Open a request; there may be no room."""
        self.take(step)

    @rule(step=steps(_TRAFFIC, "serve"))
    def serve(self, step: Step) -> None:
        """Open, commit and close a request; there may be no room."""
        self.take(step)

    @_some_open
    @rule(step=steps(_TRAFFIC, "commit"))
    def commit(self, step: Step) -> None:
        """Commit tokens."""
        self.take(step)

    @_some_open
    @rule(step=steps(_TRAFFIC, "extend"))
    def extend(self, step: Step) -> None:
        """Allocate more tokens; there may be no room."""
        self.take(step)

    @_some_open
    @rule(step=steps(_TRAFFIC, "extend"))
    def ask_too_much(self, step: Step) -> None:
        """Ask for a block more than exist, and be refused."""
        cache = self.driver.cache
        tokens = (cache.pool.blocks + 1) * cache.geometry.block_size
        assert self.take(attrs.evolve(step, tokens=tokens)).refused == "OutOfBlocks"

    @_some_open
    @rule(step=steps(_TRAFFIC, "fork"))
    def fork(self, step: Step) -> None:
        """Fork a sequence."""
        self.take(step)

    @_some_open
    @rule(step=steps(_TRAFFIC, "rollback"))
    def rollback(self, step: Step) -> None:
        """Drop tokens."""
        self.take(step)

    @_some_open
    @rule(step=steps(_TRAFFIC, "close"))
    def close(self, step: Step) -> None:
        """Close a sequence."""
        self.take(step)

    @invariant()
    def evictable_unless_pinned(self) -> None:
        """Every span without pins counts as evictable, and the others do not."""
        prefix = self.driver.cache.prefix
        assert prefix.unpinned == sum(s.blocks for s in prefix.spans() if not s.pins)

    def take(self, step: Step) -> Decision:
        """Take a step and check what must hold of any."""
        if step.request is not None:
            self.requests += 1
            step = attrs.evolve(step, request=attrs.evolve(step.request, id=self.requests))
        return self.driver.careful_step(step)

    def teardown(self) -> None:
        """Close every sequence: nothing is private or pinned any more."""
        if not hasattr(self, "driver"):
            return
        while self.driver.sequences:
            self.take(Step(action="close"))
        cache = self.driver.cache
        assert cache.prefix.unpinned == cache.prefix.cached
        assert cache.pool.free + cache.prefix.cached == cache.pool.blocks


def cache_machine(
    make_eviction: Callable[[], EvictionPolicy],
    make_prefix: Callable[[], PrefixCache | None] = lambda: None,
) -> type[CacheMachine]:
    """Return the machine that drives caches of these plugins.

    Its `TestCase` attribute is a unittest class that pytest collects; or pass it to
    `hypothesis.stateful.run_state_machine_as_test`.
    """

    class Machine(CacheMachine):
        def make_eviction(self) -> EvictionPolicy:
            return make_eviction()

        def make_prefix(self) -> PrefixCache | None:
            return make_prefix()

    return Machine
