"""Whatever is done to a cache, its invariants hold: with every eviction policy and prefix."""

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
def test_machine(name):
    """Open, commit, extend, fork, roll back, close, run out of blocks, in any order."""
    run_state_machine_as_test(cache_machine(lambda: build(name), Radix))


def test_machine_without_prefix_cache():
    """The same where nothing is shared."""
    run_state_machine_as_test(cache_machine(lambda: build("lru"), NoPrefix))


@attrs.define(slots=False, eq=False)
class Careless(LRU):
    """Offers what was used last, a leaf or not."""

    def victim(self, _now):
        """Return the most recent span."""
        return next(reversed(self._order))


def test_machine_finds_faults():
    """A policy that answers with inner spans is found out."""
    once = settings(phases=[Phase.generate])
    with pytest.raises(PolicyError, match="is no leaf"):
        run_state_machine_as_test(cache_machine(Careless, Radix), settings=once)
