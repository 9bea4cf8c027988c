"""The built-in generators pass the tests that every generator must pass."""

from functools import partial

import pytest
from helpers.configurations import configured
from helpers.seeds import FewSeeds

from kvcore.plugins import resolve
from kvcore.testing import GeneratorTests

pytest.importorskip("torch", reason="generators compute on torch")

CONFIGURATIONS = [
    "sincos:model=mistral-7b-v0.1,layers=1,kv_heads=1,head_dim=6,vocab_size=11",
    "transformer",
    "transformer:layers=1,hidden=24,heads=6,kv_heads=1,head_dim=4,mlp=40,vocab_size=97",
    "transformer:layers=2,hidden=32,heads=4,kv_heads=4,head_dim=8,window=5",
    "transformer:model=gpt-oss-20b,layers=2,hidden=32,heads=4,kv_heads=2,head_dim=8",
    "transformer:temperature=0.8,seed=3",
    "transformer:temperature=2,top_k=5,vocab_size=64",
    "induction:vocab_size=48,head_dim=34",
    "induction:heads=3,kv_heads=1,vocab_size=16,head_dim=24,temperature=30",
]

BuiltIn = configured("generator", CONFIGURATIONS, elsewhere=["huggingface"])


class TestBuiltIn(FewSeeds, BuiltIn, GeneratorTests):
    """Every configuration in the list above."""


class TestSinCos(GeneratorTests):
    """The `sincos` generator, which rounds nothing: equal logits have equal bytes."""

    generator = partial(resolve, "generator", "sincos:layers=2,kv_heads=2,head_dim=8")
    tolerance = 0
