"""Eviction policies written for kvcore inside vLLM."""

from importlib import import_module
from typing import Any

_HOMES = {
    "KvcorePolicy": "cpu_tier",
    "Scheduler": "block_pool",
    "SyncScheduler": "block_pool",
}


def __getattr__(name: str) -> Any:
    """Import a class when it is used: the package can be imported without vLLM."""
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
