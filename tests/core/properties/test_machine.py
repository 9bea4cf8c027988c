"""Invariants of the cache under random calls, without a prefix cache.

With one they are driven by the conformance tests of each eviction policy.
"""

from helpers.policies import build
from hypothesis.stateful import run_state_machine_as_test

from kvcore.testing import cache_machine
from kvcore_plugins.prefix import NoPrefix


def test_invariants_hold_without_a_prefix_cache():
    """The cache's invariants hold under any order of calls without a prefix cache.

    Sequences are opened, committed, extended, forked, rolled back and closed, and run out of
    blocks.
    """
    run_state_machine_as_test(cache_machine(lambda: build("lru"), NoPrefix))
