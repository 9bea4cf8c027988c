"""Registers the recorder of KV events, and their recordings as workloads."""

from __future__ import annotations

from kvcore import hookimpl
from kvcore.hookspecs import REAL, Verb


@hookimpl
def kvcore_commands() -> dict[str, Verb]:
    """Return the verbs."""
    about = "Record the KV events that a server publishes over ZMQ: vLLM, SGLang, TensorRT-LLM."
    return {"record": Verb("kvcore_events.cli:record", about, REAL)}


@hookimpl
def kvcore_workloads() -> dict[str, str]:
    """Return recordings of KV events as workloads."""
    return {"kv-events": "kvcore_events.workload:KvEvents"}


@hookimpl
def kvcore_formats() -> dict[str, list[set[str]]]:
    """Return that recordings of KV events have no fields of published traces."""
    return {"kv-events": []}
