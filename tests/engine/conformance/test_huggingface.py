"""Hugging Face models pass the tests that every generator must pass."""

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from helpers.hugging import tiny
from helpers.seeds import FewSeeds

from kvcore.testing import GeneratorTests
from kvcore_engine.generator import HuggingFace

FAMILIES = ["llama", "mistral-window", "qwen2-mixed", "qwen3"]


class TestHuggingFace(FewSeeds, GeneratorTests):
    """A tiny model of each family, decoded greedily."""

    @pytest.fixture(autouse=True, params=FAMILIES)
    def _family(self, request):
        self.family = request.param

    def make(self):
        """Build the model, with the same weights each time."""
        return HuggingFace(tiny(self.family))


class TestSampling(GeneratorTests):
    """A tiny model that samples its tokens."""

    def make(self):
        """Build the model, with a temperature and a limit of candidates."""
        return HuggingFace(tiny("llama"), temperature=0.9, top_k=20)
