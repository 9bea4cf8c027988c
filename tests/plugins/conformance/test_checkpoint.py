"""The built-in checkpoint policies pass the tests that every checkpoint policy must pass."""

from __future__ import annotations

from helpers.configurations import configured, names
from helpers.seeds import FewSeeds

from kvcore.plugins import Plugins
from kvcore.testing import CheckpointTests

POLICIES = [
    *("default", "chunk", "every:tokens=16", "marconi", "marconi:alpha=0,cap=1"),
    "marconi:alpha=tuned",
    *("seglen", "seglen:weight=0.1,cap=2", "sparse:budget=3"),
]


class TestBuiltIns(FewSeeds, configured("checkpoint", POLICIES), CheckpointTests):
    """Each built-in policy."""


def test_each_built_in_policy_is_tested():
    """The list of these tests names all built-in checkpoint policies."""
    assert names(POLICIES) == set(Plugins().names("checkpoint"))
