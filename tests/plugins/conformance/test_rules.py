"""The built-in rules of engines pass the tests that all rules must pass."""

from helpers.configurations import configured
from helpers.seeds import FewSeeds

from kvcore import Plugins
from kvcore.testing import RulesTests

RULES = ("kvcore", "kvcore:reserve=first-chunk,max_chunk=8", "sglang", "vllm", "vllm:lag=0")
"""Every configuration under test."""


class TestBuiltIn(FewSeeds, configured("rules", RULES), RulesTests):
    """Every configuration in the list above."""


def test_all_rules_are_in_the_list():
    """All registered rules are tested, with their default options among others."""
    assert set(Plugins().names("rules")) <= set(RULES)
