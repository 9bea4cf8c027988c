"""The conformance kit, on the policy."""

from kvcore.testing import EvictionPolicyTests
from kvcore_depth_policy import Deepest


class TestDeepest(EvictionPolicyTests):
    """Everything kvcore expects of an eviction policy holds."""

    eviction = Deepest
