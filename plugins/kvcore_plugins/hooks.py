"""Registers the built-in plugins, by the same hooks as plugins of other distributions.

Each hook returns the places of the classes of its kind, so a command imports those it uses.
"""

from __future__ import annotations

from kvcore import hookimpl


def _places(folder: str, classes: dict[str, str]) -> dict[str, str]:
    """Return the places of classes in modules of the package `folder`, by plugin names."""
    return {name: f"kvcore_plugins.{folder}.{place}" for name, place in classes.items()}


@hookimpl
def kvcore_eviction_policies() -> dict[str, str]:
    """Return the built-in eviction policies."""
    classes = {
        "arc": "arc:ARC",
        "cost": "cost:Cost",
        "fifo": "fifo:FIFO",
        "hazard": "hazard:Hazard",
        "lfu": "lfu:LFU",
        "lookahead": "lookahead:Lookahead",
        "lru": "lru:LRU",
        "lruk": "lruk:LRUK",
        "mru": "mru:MRU",
        "priority": "priority:Priority",
        "random": "random:Random",
        "s3fifo": "s3fifo:S3FIFO",
        "sieve": "sieve:SIEVE",
        "slru": "slru:SLRU",
        "tail-lru": "tail_lru:TailLRU",
        "tinylfu": "tinylfu:TinyLFU",
        "tool-ttl": "tool_ttl:ToolTTL",
        "ttl": "ttl:TTL",
        "workload-aware": "workload_aware:WorkloadAware",
    }
    return _places("eviction", classes)


@hookimpl
def kvcore_prefix_indexes() -> dict[str, str]:
    """Return the built-in prefix indexes."""
    classes = {
        "hashed": "hashed:Hashed",
        "none": "none:NoPrefix",
        "radix": "radix:Radix",
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
        "fair": "fair:Fair",
        "fcfs": "fcfs:FCFS",
        "lpm": "lpm:LPM",
        "priority": "priority:Priority",
        "sjf": "sjf:SJF",
        "slo": "slo:LeastSlack",
        "srpt": "srpt:SRPT",
    }
    return _places("scheduler", classes)


@hookimpl
def kvcore_rules() -> dict[str, str]:
    """Return the built-in rules of engines, those of kvcore itself among them."""
    engines = {"sglang": "sglang:SGLang", "vllm": "vllm:VLLM"}
    return {"kvcore": "kvcore.serving.rules:Rules"} | _places("rules", engines)


@hookimpl
def kvcore_latency_models() -> dict[str, str]:
    """Return the built-in latency models."""
    classes = {
        "linear": "linear:Linear",
        "roofline": "roofline:Roofline",
        "table": "table:Table",
        "token-rate": "token_rate:TokenRate",
    }
    return _places("latency", classes)


@hookimpl
def kvcore_codecs() -> dict[str, str]:
    """Return the built-in codecs."""
    classes = {
        "bf16": "plain:BF16",
        "fp16": "plain:FP16",
        "fp32": "plain:FP32",
        "fp64": "plain:FP64",
        "fp8-e4m3": "fp8:E4M3",
        "fp8-e5m2": "fp8:E5M2",
        "int4": "integer:INT4",
        "int8": "integer:INT8",
        "kivi": "integer:KIVI",
    }
    return _places("codec", classes)


@hookimpl
def kvcore_workloads() -> dict[str, str]:
    """Return the built-in workloads."""
    classes = {
        "azure": "azure:Azure",
        "bench": "bench:Bench",
        "chat": "chat:Chat",
        "jsonl": "jsonl:Jsonl",
        "lengths": "lengths:Lengths",
        "lmcache": "lmcache:LMCache",
        "mooncake": "mooncake:Mooncake",
        "trace": "trace:Recording",
        "weka": "weka:Weka",
        "zipf": "zipf:Zipf",
    }
    return _places("workload", classes)


@hookimpl
def kvcore_formats() -> dict[str, list[set[str]]]:
    """Return the fields of published traces."""
    return {name: list[set[str]]() for name in kvcore_workloads()} | {
        "azure": [{"TIMESTAMP", "ContextTokens", "GeneratedTokens"}],
        "mooncake": [{"timestamp", "input_length", "output_length", "hash_ids"}],
    }


@hookimpl
def kvcore_drafters() -> dict[str, str]:
    """Return the built-in drafters."""
    return {"acceptance": "kvcore_plugins.drafter:Acceptance"}


@hookimpl
def kvcore_checkpoint_policies() -> dict[str, str]:
    """Return the built-in checkpoint policies, the default among them."""
    classes = {
        "chunk": "intervals:Chunk",
        "every": "intervals:Every",
        "marconi": "marconi:Marconi",
        "seglen": "marconi:SegLen",
        "sparse": "sparse:Sparse",
    }
    default = {"default": "kvcore.cache.checkpoint:CheckpointPolicy"}
    return default | _places("checkpoint", classes)
