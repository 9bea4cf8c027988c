"""Hugging Face models pass the tests that every generator must pass."""

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from helpers.hugging import tiny

from kvcore.testing import GeneratorTests
from kvcore_plugins.generator import HuggingFace

FAMILIES = ["llama", "mistral-window", "qwen2-mixed", "qwen3"]


class TestHuggingFace(GeneratorTests):
    """A tiny model of each family."""

    @pytest.fixture(autouse=True, params=FAMILIES)
    def _family(self, request):
        self.family = request.param

    def make(self):
        """Build it, the same weights each time."""
        return HuggingFace(tiny(self.family))


class TestSampling(GeneratorTests):
    """Sampled, not greedy."""

    def make(self):
        """Build it."""
        return HuggingFace(tiny("llama"), temperature=0.9, top_k=20)
