"""`kvcore.run`: a workload, or texts, computed on tensors, from names."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from kvcore.api import (
    WITH_CACHE,
    Source,
    flat_options,
    kept_options,
    opened_source,
    resolved_options,
    traced,
)
from kvcore.cache import ServedCache
from kvcore.config import RunConfig
from kvcore.errors import InputError
from kvcore.plugins import Plugins
from kvcore_engine.config import OF_WORKLOADS, EngineParts
from kvcore_engine.engine import RunResult
from kvcore_engine.engine import run as run_engine
from kvcore_engine.executor import Computing

if TYPE_CHECKING:
    from kvcore_engine.options import EngineOptions


COMPUTING = ("generator", "backend", *Computing.__annotations__)
"""Options that go with a cache of the caller's, besides those of the server."""


def run(
    workload: Source = "mooncake",
    *,
    cache: ServedCache | None = None,
    prompts: str | Sequence[str] | None = None,
    max_output: int | None = None,
    fragmentation: bool = False,
    residency: bool = True,
    trace: str | PathLike[str] | None = None,
    plugins: Plugins | None = None,
    **options: Unpack[EngineOptions],
) -> RunResult:
    """Serve a workload, or texts, by computing it on tensors.

    `kvcore.run("mooncake", limit=5)` builds what `kvcore run` builds: a tiny transformer on
    the CPU serves the first requests, with lengths divided so that a key is a block. With a
    `cache` of your own (made with `ids=True` or a trace), only options of the server and of
    the computation are accepted.

    Args:
        workload: the requests: a plugin with options, a file, a workload, or an iterable of
            `Request`.
        cache: a new cache that accounts for tokens; None: one is built from the options.
        prompts: texts to continue, or a single one, in place of a workload; None: none.
        max_output: tokens to generate for each text; None: 16.
        fragmentation: whether to measure the use of memory.
        residency: whether to measure how long blocks rest.
        trace: the file to write every decision to.
        plugins: the plugins by name; None: those that are installed.
        options: options of `RunConfig`, and `batching`, which gives several of them.

    Raises:
        InputError: as for `simulate`, or a dtype or shape that backend or generator lack; or
            options of a workload beside prompts, or of prompts without them.
        PluginError: a plugin that cannot work here.
        PolicyError: a plugin failed, or the scheduler lets nothing run.
        StorageError: the pool does not fit into the memory of the device.
    """
    unused: dict[str, object] = {"max_output": max_output}
    why = "is for prompts alone"
    if cache is not None:
        unused, why = unused | {"prompts": prompts}, "is for a cache that is built here"
    elif prompts is not None:
        unused = {name: options.get(name) for name in OF_WORKLOADS}
        unused["workload"] = None if workload == "mooncake" else workload
        why = "is not for prompts"
    for name, value in unused.items():
        if value is not None:
            msg = f"{name}= {why}: leave it out"
            raise InputError(msg)
    if cache is not None:
        kept: dict[str, Any] = {"generator": "transformer", "backend": "torch-cpu"}
        kept |= kept_options(options, (*WITH_CACHE, *COMPUTING), trace)
        return run_engine(
            opened_source(workload, plugins),
            cache=cache,
            fragmentation=fragmentation,
            residency=residency,
            **resolved_options(kept, plugins),
        )
    config = RunConfig("run", plugins, workload=workload, **flat_options(options))
    texts = [prompts] if isinstance(prompts, str) else list(prompts or ())
    if prompts is not None and not texts:
        msg = "prompts: there is none: give a text, or leave prompts out to serve a workload"
        raise InputError(msg)
    parts = EngineParts(config, plugins, prompts=texts, max_output=max_output)
    with traced(parts, trace) as written:
        return run_engine(
            parts.workload,
            **parts.arguments(written),
            fragmentation=fragmentation,
            residency=residency,
        )
