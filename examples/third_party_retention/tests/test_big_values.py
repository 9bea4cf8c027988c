"""The conformance kit, on the policy."""

from functools import partial

from kvcore.testing import RetentionPolicyTests
from kvcore_big_values import BigValues


class TestBigValues(RetentionPolicyTests):
    """Everything kvcore expects of a retention policy holds."""

    retention = partial(BigValues, budget=64)
