"""Invariants of the cache under random calls, with every eviction policy and prefix cache."""

import attrs
import pytest
from helpers.policies import POLICIES, build
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvcore import PolicyError
from kvcore.testing import cache_machine
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import NoPrefix, Radix


# Options other than the defaults are driven by the conformance tests.
@pytest.mark.parametrize("name", [name for name in POLICIES if ":" not in name])
def test_invariants_hold_under_random_calls(name):
    """The cache's invariants hold under any order of calls, with each policy.

    Sequences are opened, committed, extended, forked, rolled back and closed, and run out of
    blocks.
    """
    run_state_machine_as_test(cache_machine(lambda: build(name), Radix))


def test_invariants_hold_without_a_prefix_cache():
    """The cache's invariants hold under any order of calls without a prefix cache."""
    run_state_machine_as_test(cache_machine(lambda: build("lru"), NoPrefix))


@attrs.define(slots=False, eq=False)
class Careless(LRU):
    """A policy whose victim is the most recent span, a leaf or not."""

    def victim(self, _now):
        """Return the most recent span."""
        return next(reversed(self._order))


def test_the_state_machine_finds_a_faulty_policy():
    """The state machine raises PolicyError if a policy's victim is an inner span."""
    once = settings(phases=[Phase.generate])
    with pytest.raises(PolicyError, match="is no leaf"):
        run_state_machine_as_test(cache_machine(Careless, Radix), settings=once)
