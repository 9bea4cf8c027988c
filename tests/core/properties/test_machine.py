"""Invariants of the cache under random calls, with every eviction policy and prefix cache."""

import pytest
from helpers.policies import POLICIES, build
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvcore.testing import cache_machine
from kvcore_plugins.prefix import NoPrefix, Radix

few = settings(max_examples=max(settings.default.max_examples // 3, 1))


# Options other than the defaults are driven by the conformance tests.
@pytest.mark.parametrize("name", [name for name in POLICIES if ":" not in name])
def test_invariants_hold_under_random_calls(name):
    """The cache's invariants hold under any order of calls, with each policy.

    Sequences are opened, committed, extended, forked, rolled back and closed, and run out of
    blocks.
    """
    run_state_machine_as_test(cache_machine(lambda: build(name), Radix), settings=few)


def test_invariants_hold_without_a_prefix_cache():
    """The cache's invariants hold under any order of calls without a prefix cache."""
    run_state_machine_as_test(cache_machine(lambda: build("lru"), NoPrefix))
