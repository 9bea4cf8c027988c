"""The core in C: it serves plain runs many times as fast, and decides the same.

`_core` is built from the C files of this folder where a compiler is found (`build.py`). It is a
twin of the serving loop and of the tree of spans: it works on the same spans, policies and
records, and calls plugins for what they override. `serving.py` gives it a loop that has not
begun, if nothing in it is of `LACKS`:

    the loop is plain                      the core runs it
    a request needs what the core lacks    the loop in Python goes on, with the same jobs
    the loop is not plain                  the loop in Python runs it from the start

`KVCORE_PURE=1` in the environment switches the core off.
"""

from __future__ import annotations

import os
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

_loaded: tuple[Any, str] | None = None


def library() -> Any | None:
    """Return the library; None if it is not used."""
    return _load()[0]


def state() -> str:
    """Return "in C", or why the core is not used."""
    core, why = _load()
    return why if core is None else "in C"


def _load() -> tuple[Any, str]:
    """Return the library and "", or None and why it is not used."""
    global _loaded  # noqa: PLW0603 - a process loads it once
    if _loaded is None:
        _loaded = _find()
        if _loaded[0] is not None:
            from kvcore.cache.span import Span  # noqa: PLC0415 - for the core alone
            from kvcore.histogram import borders  # noqa: PLC0415
            from kvcore.request import NO_HINTS, Request  # noqa: PLC0415
            from kvcore.serving.job import Job  # noqa: PLC0415

            _loaded[0].bind(Span, Request, Job, NO_HINTS, borders())
    return _loaded


def _find() -> tuple[Any, str]:
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
