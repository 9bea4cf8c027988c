"""The built-in checkpoint policies pass the tests that every checkpoint policy must pass."""

from __future__ import annotations

from helpers.configurations import configured
from helpers.seeds import FewSeeds

from kvcore.testing import CheckpointTests

POLICIES = [
    *("default", "chunk", "every:tokens=16", "marconi", "marconi:alpha=0,cap=1"),
    "marconi:alpha=tuned",
    *("seglen", "seglen:weight=0.1,cap=2", "sparse:budget=3"),
]


class TestBuiltIns(FewSeeds, configured("checkpoint", POLICIES), CheckpointTests):
    """Each built-in policy."""
