"""The conformance kit, on the policy."""

from functools import partial

from kvcore_big_values import BigValues

from kvcore.testing import RetentionPolicyTests


class TestBigValues(RetentionPolicyTests):
    """Everything kvcore expects of a retention policy holds."""

    retention = partial(BigValues, budget=64)
