"""The conformance kit, on the policy."""

from kvcore_depth_policy import Deepest

from kvcore.testing import EvictionPolicyTests


class TestDeepest(EvictionPolicyTests):
    """Everything kvcore expects of an eviction policy holds."""

    def make(self):
        """Build the policy under test."""
        return Deepest()
