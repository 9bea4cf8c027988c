"""The built-in rules of engines pass the tests that all rules must pass."""

from helpers.configurations import configured
from helpers.seeds import FewSeeds

from kvcore.testing import RulesTests

RULES = ("kvcore", "kvcore:reserve=first-chunk,max_chunk=8", "sglang", "vllm", "vllm:lag=0")
"""Every configuration under test."""


class TestBuiltIn(FewSeeds, configured("rules", RULES, defaults=True), RulesTests):
    """Every configuration in the list above."""
