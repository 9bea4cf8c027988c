"""Whatever is done to a cache, its invariants hold: with every eviction policy and prefix."""

import pytest
from hypothesis.stateful import run_state_machine_as_test
from policies import POLICIES, build

from kvcore.testing import cache_machine
from kvcore_plugins.prefix import NoPrefix, Radix


@pytest.mark.parametrize("name", POLICIES)
def test_machine(name):
    """Open, commit, extend, fork, roll back, close, run out of blocks, in any order."""
    run_state_machine_as_test(cache_machine(lambda: build(name), Radix))


def test_machine_without_prefix_cache():
    """The same where nothing is shared."""
    run_state_machine_as_test(cache_machine(lambda: build("lru"), NoPrefix))
