"""The built-in latency models pass the tests that every latency model must pass."""

from pathlib import Path

from helpers.configurations import configured
from helpers.seeds import FewSeeds

from kvcore.models.catalogue import DEVICES, MODELS
from kvcore.testing.latency import LatencyModelTests
from kvcore_plugins.latency import Roofline, Table

GRID = Path(__file__).parents[2] / "data" / "step_grid.csv"

CONFIGURATIONS = [
    "linear",
    "linear:step=0,prefill=1e-9,decode=3e-12,context=1e-12",
    "roofline",
    "roofline:tensor_parallel=1,overhead=0,compute=1,bandwidth=1",
    # Windows in all layers or some, experts, latent attention, fewer K/V heads than devices;
    # engines, sparse attention.
    "roofline:model=mistral-7b-v0.1,device=a100-40g,tensor_parallel=1",
    "roofline:model=gpt-oss-20b,tensor_parallel=1",
    "roofline:model=deepseek-v3,device=h200,tensor_parallel=8,codec=fp32",
    "roofline:model=gemma-3-27b,device=gb200,tensor_parallel=32",
    "roofline:model=gpt-oss-120b,engine=vllm",
    "roofline:attended=64,selection=0.0625,missed=0.25",
    "roofline:model=gpt-oss-20b,tensor_parallel=1,attended=128,engine=trtllm",
    "token-rate",
    "token-rate:prefill=0.3,decode=1e9",
    f"table:path={GRID}",
    "table:engine=vllm",
    "table:engine=trtllm,model=llama-3.1-70b,device=h200,tensor_parallel=4",
]


class TestBuiltIn(FewSeeds, configured("latency", CONFIGURATIONS), LatencyModelTests):
    """Every configuration in the list above."""


class TestInCode(LatencyModelTests):
    """A roofline made from specifications of a model and a device instead of names."""

    latency = staticmethod(lambda: Roofline(MODELS["gpt2"], DEVICES["l4"], tensor_parallel=1))


class TestTable(LatencyModelTests):
    """A table whose path is a string."""

    latency = staticmethod(lambda: Table(str(GRID)))
