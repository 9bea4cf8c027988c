"""Registers the built-in plugins, by the same hooks as plugins of other distributions.

Each hook returns the places of the classes of its kind, so a command imports those it uses.
"""

from __future__ import annotations

from kvcore import hookimpl


def _places(folder: str, classes: dict[str, str]) -> dict[str, str]:
    """Return the places of classes that the package `folder` exports, by plugin names."""
    return {name: f"kvcore_plugins.{folder}:{found}" for name, found in classes.items()}


@hookimpl
def kvcore_eviction_policies() -> dict[str, str]:
    """Return the built-in eviction policies."""
    classes = {
        "adaptive": "Adaptive",
        "arc": "ARC",
        "cost": "Cost",
        "fifo": "FIFO",
        "lfu": "LFU",
        "lookahead": "Lookahead",
        "lru": "LRU",
        "lruk": "LRUK",
        "mru": "MRU",
        "priority": "Priority",
        "random": "Random",
        "s3fifo": "S3FIFO",
        "sieve": "SIEVE",
        "slru": "SLRU",
        "tail-lru": "TailLRU",
        "tinylfu": "TinyLFU",
        "tool-ttl": "ToolTTL",
        "ttl": "TTL",
    }
    return _places("eviction", classes)


@hookimpl
def kvcore_prefix_indexes() -> dict[str, str]:
    """Return the built-in prefix indexes."""
    classes = {
        "hashed": "Hashed",
        "none": "NoPrefix",
        "radix": "Radix",
    }
    return _places("prefix", classes)


@hookimpl
def kvcore_retention_policies() -> dict[str, str]:
    """Return the built-in retention policies."""
    return {"full": "kvcore_plugins.retention:Full"}


@hookimpl
def kvcore_schedulers() -> dict[str, str]:
    """Return the built-in schedulers."""
    classes = {
        "fair": "Fair",
        "fcfs": "FCFS",
        "lpm": "LPM",
        "priority": "Priority",
        "sjf": "SJF",
        "slo": "LeastSlack",
        "srpt": "SRPT",
    }
    return _places("scheduler", classes)


@hookimpl
def kvcore_latency_models() -> dict[str, str]:
    """Return the built-in latency models."""
    classes = {
        "linear": "Linear",
        "roofline": "Roofline",
        "table": "Table",
        "token-rate": "TokenRate",
    }
    return _places("latency", classes)


@hookimpl
def kvcore_codecs() -> dict[str, str]:
    """Return the built-in codecs."""
    classes = {
        "bf16": "BF16",
        "fp16": "FP16",
        "fp32": "FP32",
        "fp64": "FP64",
        "fp8-e4m3": "E4M3",
        "fp8-e5m2": "E5M2",
        "int4": "INT4",
        "int8": "INT8",
        "kivi": "KIVI",
    }
    return _places("codec", classes)


@hookimpl
def kvcore_workloads() -> dict[str, str]:
    """Return the built-in workloads."""
    classes = {
        "azure": "Azure",
        "bench": "Bench",
        "chat": "Chat",
        "jsonl": "Jsonl",
        "lengths": "Lengths",
        "lmcache": "LMCache",
        "mooncake": "Mooncake",
        "trace": "Recording",
        "weka": "Weka",
        "zipf": "Zipf",
    }
    return _places("workload", classes)


@hookimpl
def kvcore_drafters() -> dict[str, str]:
    """Return the built-in drafters."""
    return {"acceptance": "kvcore_plugins.drafter:Acceptance"}
