"""The built-in retention policies pass the tests that every retention policy must pass."""

import pytest

from kvcore import Plugins
from kvcore.testing import RetentionPolicyTests

POLICIES = ["window:tokens=64", "window:tokens=1", "window:tokens=9,sinks=6"]


class TestBuiltIn(RetentionPolicyTests):
    """Every configuration in the list."""

    @pytest.fixture(autouse=True, params=POLICIES)
    def _configured(self, request):
        self.spec = request.param

    def make(self):
        """Build it."""
        return Plugins().build("retention", self.spec)


def test_every_policy_is_in_the_list():
    """Each registered policy is tested in at least one configuration."""
    assert {name.partition(":")[0] for name in POLICIES} == set(Plugins().names("retention"))
