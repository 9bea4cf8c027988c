"""The command that starts an engine as a replica of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from kvcore.config.options import read_option
from kvcore.models.catalogue import SOURCES
from kvcore.units import BINARY


def start_command(setup: Mapping[str, Any], fleet: Mapping[str, Any]) -> str:
    """Return the command for a replica: of SGLang under its rules, else of vLLM.

    What is not in it `not_in_start` says.

    Args:
        setup: the options that all fleets share, as a plan has them.
        fleet: a fleet of the plan.
    """
    served = SOURCES.get(setup["model"])
    model = setup["model"] if served is None else served.config
    sglang = _is_sglang(setup)
    flags = _sglang(setup, fleet) if sglang else _vllm(setup, fleet)
    begin = "python -m sglang.launch_server --model-path" if sglang else "vllm serve"
    words = (f"--{flag}" if value is None else f"--{flag} {value}" for flag, value in flags)
    return " ".join([begin, str(model), *words])


def not_in_start(setup: Mapping[str, Any]) -> list[str]:
    """Return the options of a plan, in words, that no flag of its engine sets."""
    absent = []
    if _is_sglang(setup):
        schedulers, page = SGLANG_SCHEDULERS, ""
        known = "SGLang has fcfs and lpm by these names"
    else:
        schedulers, page = ("fcfs",), " (docs/how-to/deploy-in-vllm.md)"
        known = "vLLM has fcfs, and priority with lower values first"
    if setup["scheduler"] not in schedulers:
        absent.append(f"scheduler {setup['scheduler']} ({known})")
    if str(setup["eviction"]).partition(":")[0] != "lru":  # SGLang's own has options
        absent.append(f"eviction {setup['eviction']}{page}")
    tiers = read_option("tier", setup["tier"])
    absent += [f"tier {tier}" for tier in tiers if tier.name != "host"]
    flags = {"codec": ("fp16", "bf16", "fp8"), "weights_dtype": ("fp8",)}
    for name in ("codec", "weights_dtype", "retention", "drafter"):
        if setup[name] not in (None, *flags.get(name, ())):
            absent.append(f"{name} {setup[name]}")
    return absent


SGLANG_SCHEDULERS: tuple[str, ...] = ("fcfs", "lpm")
"""The schedulers that SGLang has by the same name."""


def _is_sglang(setup: Mapping[str, Any]) -> bool:
    return str(setup.get("like") or "").partition(":")[0] == "sglang"


def _vllm(setup: Mapping[str, Any], fleet: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield flags of `vllm serve`, and their values.

    Source: https://docs.vllm.ai/en/stable/cli/serve/. Bytes of the pool are those of a GPU, and
    of host memory those of all GPUs of a replica, in GiB (`vllm.config.cache`).
    """
    yield "tensor-parallel-size", fleet["tensor_parallel"]
    yield "kv-cache-memory-bytes", fleet["pool_bytes"] // fleet["tensor_parallel"]
    yield "block-size", setup["block_size"]
    yield "max-num-batched-tokens", setup["max_tokens"]
    yield "max-num-seqs", setup["max_seqs"]
    yield "max-model-len", fleet["max_model_len"]
    if setup["codec"] == "fp8":
        yield "kv-cache-dtype", "fp8"
    if setup.get("weights_dtype") == "fp8":
        yield "quantization", "fp8"
    if not setup["chunked"]:
        yield "no-enable-chunked-prefill", None
    if setup["prefix"] == "none":
        yield "no-enable-prefix-caching", None
    if fleet["host_bytes"]:
        yield "kv-offloading-backend", "native"
        yield "kv-offloading-size", ceil(fleet["host_bytes"] / BINARY["GiB"])


def _sglang(setup: Mapping[str, Any], fleet: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield flags of SGLang's server, and their values.

    Source: https://docs.sglang.ai/advanced_features/server_arguments.html: host memory is that
    of a rank, in GB.
    """
    degree = fleet["tensor_parallel"]
    yield "tp-size", degree
    yield "max-total-tokens", fleet["blocks"] * setup["block_size"]
    yield "page-size", setup["block_size"]
    yield "chunked-prefill-size", setup["max_tokens"] if setup["chunked"] else -1
    yield "max-running-requests", setup["max_seqs"]
    if setup["scheduler"] in SGLANG_SCHEDULERS:
        yield "schedule-policy", setup["scheduler"]
    yield "context-length", fleet["max_model_len"]
    if setup["codec"] == "fp8":
        yield "kv-cache-dtype", "fp8_e4m3"
    if setup.get("weights_dtype") == "fp8":
        yield "quantization", "fp8"
    if setup["prefix"] == "none":
        yield "disable-radix-cache", None
    if fleet["host_bytes"]:
        yield "enable-hierarchical-cache", None
        yield "hicache-size", ceil(fleet["host_bytes"] / degree / 10**9)
