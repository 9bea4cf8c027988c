"""The built-in checkpoint policies pass the tests that every checkpoint policy must pass."""

from __future__ import annotations

import pytest
from helpers.seeds import FewSeeds

from kvcore.plugins import Plugins
from kvcore.testing import CheckpointTests

POLICIES = [
    *("default", "chunk", "every:tokens=16", "marconi", "marconi:alpha=0,cap=1"),
    "marconi:alpha=tuned",
    *("seglen", "seglen:weight=0.1,cap=2", "sparse:budget=3"),
]


@pytest.mark.parametrize("spec", POLICIES)
class TestBuiltIns(FewSeeds, CheckpointTests):
    """Each built-in policy."""

    @pytest.fixture(autouse=True)
    def _spec(self, spec):
        self.spec = spec

    def make(self):
        """Return a new policy."""
        return Plugins().build("checkpoint", self.spec)


def test_each_built_in_policy_is_tested():
    """The list of these tests names all built-in checkpoint policies."""
    assert {spec.partition(":")[0] for spec in POLICIES} == set(Plugins().names("checkpoint"))
