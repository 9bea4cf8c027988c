"""Registers runs on tensors: their mode, their verbs, and the plugins that compute."""

from __future__ import annotations

from kvcore import hookimpl
from kvcore.hookspecs import REAL, Mode, Verb


@hookimpl
def kvcore_modes() -> dict[str, Mode]:
    """Return the mode of runs on tensors."""
    return {
        "run": Mode(
            parts="kvcore_engine.config:EngineParts",
            options="kvcore_engine.options:EngineOptions",
            defaults={"model": None, "tensor_parallel": 1, "codec": None},
        )
    }


@hookimpl
def kvcore_commands() -> dict[str, Verb]:
    """Return the verbs."""
    about = {
        "bench": (
            "Measure the speed of kvcore on this machine: SUITE is cpu, gpu, cache or sim."
        ),
        "run": "Serve WORKLOAD, or prompts, by computing them: real K/V in real blocks.",
    }
    return {
        name: Verb(f"kvcore_engine.cli.{name}:{name}", text, REAL)
        for name, text in about.items()
    }


@hookimpl
def kvcore_backends() -> dict[str, str]:
    """Return the backends."""
    return {
        "torch-cpu": "kvcore_engine.backend.torch_cpu:TorchCPU",
        "torch-cuda": "kvcore_engine.backend.torch_cuda:TorchCUDA",
    }


@hookimpl
def kvcore_generators() -> dict[str, str]:
    """Return the generators."""
    return {
        "huggingface": "kvcore_engine.generator.huggingface:HuggingFace",
        "induction": "kvcore_engine.generator.induction:Induction",
        "sincos": "kvcore_engine.generator.sincos:SinCos",
        "transformer": "kvcore_engine.generator.transformer:Transformer",
    }


@hookimpl
def kvcore_drafters() -> dict[str, str]:
    """Return the drafters that see tokens."""
    return {
        "draft-model": "kvcore_engine.drafter.draft_model:DraftModel",
        "medusa": "kvcore_engine.drafter.medusa:Medusa",
        "prompt-lookup": "kvcore_engine.drafter.prompt_lookup:PromptLookup",
    }


@hookimpl
def kvcore_retention_policies() -> dict[str, str]:
    """Return the retention policies that see tokens."""
    return {
        "expected": "kvcore_engine.retention.expected:Expected",
        "h2o": "kvcore_engine.retention.h2o:H2O",
        "knorm": "kvcore_engine.retention.knorm:KNorm",
        "kvmerger": "kvcore_engine.retention.kvmerger:KVMerger",
        "quest": "kvcore_engine.retention.quest:Quest",
        "random": "kvcore_engine.retention.random:Random",
        "snapkv": "kvcore_engine.retention.snapkv:SnapKV",
        "tova": "kvcore_engine.retention.tova:TOVA",
        "window": "kvcore_engine.retention.window:Window",
    }
