"""The built-in rules of engines pass the tests that all rules must pass."""

import pytest
from helpers.seeds import FewSeeds

from kvcore import Plugins
from kvcore.plugins import resolve
from kvcore.testing import RulesTests

RULES = ("kvcore", "kvcore:reserve=first-chunk,max_chunk=8", "sglang", "vllm", "vllm:lag=0")
"""Every configuration under test."""


class TestBuiltIn(FewSeeds, RulesTests):
    """Every configuration in the list above."""

    @pytest.fixture(autouse=True, params=RULES)
    def _configured(self, request):
        self.spec = request.param

    def make(self):
        """Build the configured rules."""
        return resolve("rules", self.spec)


def test_all_rules_are_in_the_list():
    """All registered rules are tested, with their default options among others."""
    assert set(Plugins().names("rules")) <= set(RULES)
