"""The built-in eviction policies pass the tests that every eviction policy must pass."""

from helpers.configurations import configured
from helpers.policies import POLICIES
from helpers.seeds import FewSeeds

from kvcore import Plugins
from kvcore.plugins.options import parse
from kvcore.testing import EvictionPolicyTests

PLUGINS = Plugins()


class TestBuiltIn(FewSeeds, configured("eviction", POLICIES), EvictionPolicyTests):
    """Every configuration in the list of policies."""

    machine_examples = 2


def test_every_policy_is_in_the_list():
    """Each registered policy is tested, with its default options among others."""
    assert set(Plugins().names("eviction")) <= set(POLICIES)
    assert {parse(name)[0].name for name in POLICIES} == set(Plugins().names("eviction"))
