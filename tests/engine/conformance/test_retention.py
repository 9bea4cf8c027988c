"""The built-in retention policies pass the tests that every retention policy must pass."""

from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from helpers.configurations import configured

from kvcore.testing import RetentionPolicyTests

POLICIES = [
    "expected:budget=64",
    "expected:budget=0.5,queries=5,ahead=3,sinks=0",
    "full",
    "h2o:budget=0.25,recent=9,sinks=2",
    "knorm:budget=9",
    "kvmerger:budget=64",
    "kvmerger:budget=0.25,threshold=-1,recent=3,sinks=2",
    "quest:budget=64,page=4",
    "quest:budget=0.1,page=8,dense_layers=0",
    "random:budget=30,recent=0.5,seed=7",
    "snapkv:budget=64",
    "snapkv:budget=0.2,window=3,pool=1,when=always",
    "tova:budget=1",
    "window:tokens=64",
    "window:tokens=1",
    "window:tokens=9,sinks=6",
    "window:tokens=9,sinks=6,positions=cache",
]
EXAMPLE = Path(__file__).parents[3] / "examples/third_party_retention/kvcore_big_values.py"


def _about(spec):
    forgets, per_head = not spec.startswith(("full", "quest")), not spec.startswith("tova")
    return {"forgets": forgets, "per_head": per_head}


class TestBuiltIn(configured("retention", POLICIES, _about), RetentionPolicyTests):
    """Every configuration in the list above."""


def example():
    """Return the module of the example, which is not installed here."""
    spec = spec_from_file_location("kvcore_big_values", EXAMPLE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestExample(RetentionPolicyTests):
    """The example of a third party's policy, of ten lines."""

    retention = partial(example().BigValues, budget=64)
