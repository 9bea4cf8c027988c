"""The library of the core in C: built beside its sources, found, and what it lacks.

The installation of kvcore does it where a compiler is found. The library knows of which sources
it was made, so that an editable install does not use one that is older than they are.
"""

from __future__ import annotations

import os
import sys
from _blake2 import blake2b  # that of hashlib, which loads OpenSSL too
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

FOLDER = Path(__file__).parent
SOURCES = (
    *("residency.c", "tree.c", "decode_batch.c", "untimed.c", "named_blocks.c", "rows.c"),
    *("stats.c", "batcher.c", "arrivals.c", "loop.c", "runs.c", "module.c"),
)

PURE: Final = "KVCORE_PURE"
"""The variable of the environment that switches the core off."""

LACKS: Final = (
    "clusters, servers and runs on tensors, whose turns are driven from outside",
    "traces, tiers, retention, drafts, cache groups, attention windows, fragmentation",
    "rules that decide by methods or by future tokens, schedulers that pause jobs or plan",
    "policies by which spans expire or that hear of the queue, leaves evicted whole",
    "of requests: hints, retention priorities, output keys",
)
"""What the loop in Python serves alone."""


def source_digest() -> str | None:
    """Return the digest of the C sources; None where there are none, as in a wheel."""
    digest = blake2b(digest_size=16)
    try:
        for name in ("core.h", *SOURCES):
            digest.update((FOLDER / name).read_bytes())
    except FileNotFoundError:
        return None
    return digest.hexdigest()


def library_name() -> str:
    """Return the name of the library for this Python."""
    import sysconfig  # noqa: PLC0415 - for a build alone, as below

    return f"_core{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"


def command(target: Path) -> list[str]:
    """Return the command that builds the library `target`."""
    import shlex  # noqa: PLC0415
    import sysconfig  # noqa: PLC0415

    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    shared = ["-bundle", "-undefined", "dynamic_lookup"]
    return [
        *compiler,
        *("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden"),
        *(shared if sys.platform == "darwin" else ["-shared"]),
        f'-DKVCORE_SOURCE="{source_digest()}"',
        f"-I{sysconfig.get_paths()['include']}",
        *(str(FOLDER / name) for name in SOURCES),
        *("-o", str(target), "-lm"),
    ]


def build(folder: Path = FOLDER) -> str:
    """Build the library in `folder`; return "", or why that cannot be done."""
    import subprocess  # noqa: PLC0415
    import sysconfig  # noqa: PLC0415

    threads = "Py_GIL_DISABLED" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    if sys.platform == "win32" or sys.implementation.name != "cpython" or threads:
        return f"no core for {sys.implementation.name} on {sys.platform} {threads}".rstrip()
    target = folder / library_name()
    partial = target.with_suffix(".partial")
    try:
        done = subprocess.run(  # noqa: S603 - the compiler of this Python
            command(partial), capture_output=True, text=True, check=False
        )
    except OSError as error:
        return str(error)
    if done.returncode:
        return done.stderr.strip() or f"the compiler ended with {done.returncode}"
    partial.replace(target)
    return ""


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
            "in Python: without the core in C, which a C compiler makes at installation",
        )
    if source_digest() not in (None, core.SOURCE):
        return None, "in Python: the core in C is older than its sources; install kvcore again"
    return core, ""
