"""Registers runs on tensors: their mode, their verbs, and the plugins that compute."""

from __future__ import annotations

from kvcore import hookimpl
from kvcore.hookspecs import Mode, Verb


@hookimpl
def kvcore_modes() -> dict[str, Mode]:
    """Return the mode of runs on tensors."""
    return {
        "run": Mode(
            parts="kvcore.config.engine:EngineParts",
            options="kvcore.config.engine_options:EngineOptions",
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
    return {name: Verb(f"kvcore.cli.{name}:{name}", text) for name, text in about.items()}


@hookimpl
def kvcore_backends() -> dict[str, str]:
    """Return the backends."""
    return {
        "torch-cpu": "kvcore_plugins.backend.torch_cpu:TorchCPU",
        "torch-cuda": "kvcore_plugins.backend.torch_cuda:TorchCUDA",
    }


@hookimpl
def kvcore_generators() -> dict[str, str]:
    """Return the generators."""
    return {
        "huggingface": "kvcore_plugins.generator.huggingface:HuggingFace",
        "induction": "kvcore_plugins.generator.induction:Induction",
        "sincos": "kvcore_plugins.generator.sincos:SinCos",
        "transformer": "kvcore_plugins.generator.transformer:Transformer",
    }


@hookimpl
def kvcore_drafters() -> dict[str, str]:
    """Return the drafters that see tokens."""
    return {
        "draft-model": "kvcore_plugins.drafter.draft_model:DraftModel",
        "medusa": "kvcore_plugins.drafter.medusa:Medusa",
        "prompt-lookup": "kvcore_plugins.drafter.prompt_lookup:PromptLookup",
    }


@hookimpl
def kvcore_retention_policies() -> dict[str, str]:
    """Return the retention policies that see tokens."""
    return {
        "expected": "kvcore_plugins.retention.expected:Expected",
        "h2o": "kvcore_plugins.retention.h2o:H2O",
        "knorm": "kvcore_plugins.retention.knorm:KNorm",
        "random": "kvcore_plugins.retention.random:Random",
        "snapkv": "kvcore_plugins.retention.snapkv:SnapKV",
        "tova": "kvcore_plugins.retention.tova:TOVA",
        "window": "kvcore_plugins.retention.window:Window",
    }
