"""The built-in eviction policies pass the tests that every eviction policy must pass."""

from helpers.configurations import configured
from helpers.policies import POLICIES
from helpers.seeds import FewSeeds
from hypothesis import settings

from kvcore.testing import EvictionPolicyTests


class TestBuiltIn(
    FewSeeds, configured("eviction", POLICIES, defaults=True), EvictionPolicyTests
):
    """Every configuration in the list of policies."""

    machine_examples = max(settings.default.max_examples // 3, 1)
