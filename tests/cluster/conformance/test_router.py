"""The built-in routers pass the tests that every router must pass."""

from helpers.configurations import configured
from helpers.seeds import FewSeeds

from kvcore.testing import RouterTests

CONFIGURATIONS = [
    "round-robin",
    "random",
    "random:seed=3",
    "least-requests",
    "power-of-two",
    "session",
    "session:bound=2,points=3",
    "prefix-affinity",
    "prefix-affinity:tolerance=0",
    "prefix-affinity:bound=1",
    "dynamo",
    "dynamo:temperature=0.5,delta=1,load_weight=2",
    "llm-d",
    "llm-d:queue=0,kv=0",
    "sglang",
    "sglang:threshold=0,absolute=2,relative=1.1",
    "loadaware",
    "lmetric",
    "mooncake",
    "mooncake:reject=true",
    "preble",
    "preble:window=1,imbalance=2,warm=0",
]
DRAWS = {"random", "power-of-two", "prefix-affinity", "dynamo", "llm-d", "loadaware"}
BOUNDS = {"session": 1.25, "session:bound=2,points=3": 2.0, "prefix-affinity:bound=1": 1.0}


def _about(spec):
    return {"draws": spec.partition(":")[0] in DRAWS, "bound": BOUNDS.get(spec)}


class TestBuiltIn(FewSeeds, configured("router", CONFIGURATIONS, _about), RouterTests):
    """Every configuration in the list above."""
