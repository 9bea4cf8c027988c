"""The built-in eviction policies pass the tests that every eviction policy must pass."""

import pytest
from helpers.policies import POLICIES, build
from helpers.seeds import FewSeeds

from kvcore import Plugins
from kvcore.plugins.options import parse
from kvcore.testing import EvictionPolicyTests

PLUGINS = Plugins()


class TestBuiltIn(FewSeeds, EvictionPolicyTests):
    """Every configuration in the list of policies."""

    machine_examples = 2

    @pytest.fixture(autouse=True, params=POLICIES)
    def _configured(self, request):
        self.spec = request.param

    def make(self):
        """Build the configured policy."""
        return build(self.spec)


def test_every_policy_is_in_the_list():
    """Each registered policy is tested, with its default options among others."""
    assert set(Plugins().names("eviction")) <= set(POLICIES)
    assert {parse(name)[0].name for name in POLICIES} == set(Plugins().names("eviction"))
