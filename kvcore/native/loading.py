"""The library of the core in C: whether it is there and used, and what it lacks."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any, Final

from kvcore.native.build import source_digest

PURE: Final = "KVCORE_PURE"
"""The variable of the environment that switches the core off."""

LACKS: Final = (
    "traces, tiers, retention, drafts, cache groups, attention windows",
    "rules of engines, schedulers that pause jobs or plan",
    "policies by which spans expire or that hear of the queue, leaves evicted whole",
    "of requests: hints, retention priorities, output keys",
)
"""What the loop in Python serves alone."""


def library() -> Any | None:
    """Return the library, for which `kvcore.cache.native` finds its classes; None: not used."""
    return _load()[0]


def state() -> str:
    """Return "in C", or "in Python" and why the core is not used."""
    core, why = _load()
    return why if core is None else "in C"


@cache
def _load() -> tuple[Any, str]:
    """Return the library and "", or None and why it is not used."""
    if os.environ.get(PURE, "0") not in {"", "0"}:
        return None, f"in Python: {PURE} is set"
    try:
        core = import_module("kvcore.native._core")
    except ImportError:
        return (
            None,
            "in Python: the core in C was not built, as it is where a compiler is found",
        )
    if source_digest() not in (None, core.SOURCE):
        return None, "in Python: the core in C is older than its sources; install kvcore again"
    return core, ""
