"""The built-in drafters pass the tests that every drafter must pass."""

from helpers.configurations import configured

from kvcore.testing import DrafterTests

SIZE = "hidden=32,heads=4,kv_heads=2,head_dim=8,vocab_size=31"
DRAFTERS = [
    "acceptance",
    "acceptance:tokens=1,probability=1,draft=llama-3.1-8b",
    "acceptance:tokens=7,probability=0.9/0.1,parameters=1e9,seed=3",
    f"draft-model:layers=1,{SIZE}",
    f"draft-model:layers=2,tokens=1,{SIZE}",
    "medusa:texts=9,length=16",
    "medusa:tokens=1,texts=2,length=2,ridge=0.1",
    "prompt-lookup",
    "prompt-lookup:tokens=9,longest=2,shortest=2",
]


class TestBuiltIn(configured("drafter", DRAFTERS), DrafterTests):
    """Every configuration in the list above."""
