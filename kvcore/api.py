"""`kvcore.simulate`, and the steps that calls of packages share with it.

Further rooms are imported by the first call that needs them: `import kvcore` stays light.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack, cast

import attrs

from kvcore.cache import KVCache
from kvcore.errors import InputError
from kvcore.files import refuse_overwrite
from kvcore.lazy import former
from kvcore.plugins import Plugins, resolve
from kvcore.plugins.manager import KINDS, imported_place
from kvcore.plugins.options import Spec
from kvcore.request import Request
from kvcore.serving import Batching, Result, Rules
from kvcore.serving.rules import CHOICES, described_rules
from kvcore.trace import Trace
from kvcore.workloads import Workload

if TYPE_CHECKING:
    from kvcore.config import RunParts, SimulateOptions

Source: TypeAlias = str | PathLike[str] | Spec | Workload | Iterable[Request]
"""Where requests come from: a plugin's name with options, a file, a workload, or requests."""

WITH_CACHE = ("scheduler", "latency", "drafter", "batching", "slo", "rate_scale")
"""Options that go with a cache of the caller's."""


def simulate(
    workload: Source = "mooncake",
    *,
    cache: KVCache | None = None,
    fragmentation: bool = False,
    residency: bool = True,
    jumps: bool = True,
    trace: str | PathLike[str] | None = None,
    plugins: Plugins | None = None,
    **options: Unpack[SimulateOptions],
) -> Result:
    """Serve a workload in the time that a latency model gives.

    `kvcore.simulate("mooncake", model="llama-3.1-8b", device="h100", scheduler="srpt")` builds
    what `kvcore simulate` builds: the pool fills the memory of the GPUs beside the weights, and
    defaults are those of the command. With a `cache` of your own, only options of the server
    are accepted, and their defaults are those of `kvcore.serving.simulate`.

    Args:
        workload: the requests: a plugin with options, a file, a workload, or an iterable of
            `Request`.
        cache: a new cache that accounts for tokens; None: one is built from the options.
        fragmentation: whether to measure the use of memory.
        residency: whether to measure how long blocks rest.
        jumps: whether decode steps between two events are run as one.
        trace: the file to write every decision to.
        plugins: the plugins by name; None: those that are installed.
        options: options of `RunConfig`, and `batching`, which gives several of them. An option
            of a mode for one server, such as `allocation`, runs that mode.

    Raises:
        InputError: an option that there is not, parts that do not fit one another, or a
            workload out of order.
        PluginError: a plugin that cannot work here.
        PolicyError: a plugin failed, or the scheduler lets nothing run.
    """
    from kvcore.config import RunConfig  # noqa: PLC0415 - `import kvcore` is light

    measured = {"fragmentation": fragmentation, "residency": residency, "jumps": jumps}
    if cache is not None:
        serve, more = _served_by(options)
        kept = resolved_options(kept_options(options, (*WITH_CACHE, *more), trace), plugins)
        return serve(opened_source(workload, plugins), cache=cache, **kept, **measured)
    config = RunConfig("simulate", plugins, workload=workload, **flat_options(options))
    parts = config.build(plugins, many=False)
    with traced(parts, trace) as written:
        return cast("Result", parts.run(written, **measured))


def opened_source(workload: Source, plugins: Plugins | None) -> Iterable[Request]:
    """Return the requests of a workload, which is opened if it is a name or a path."""
    if not isinstance(workload, str | Spec | PathLike):
        return workload
    from kvcore.workloads.selection import open_workload  # noqa: PLC0415 - as above

    named = str(workload) if isinstance(workload, Spec) else workload
    return cast("Iterable[Request]", open_workload(named, plugins or Plugins()))


def flat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the fields of `batching` among them.

    A scheduler, a latency model or a `batching` of None is left out: it is the default.
    """
    flat = {
        name: value
        for name, value in options.items()
        if not (value is None and name in ("scheduler", "latency", "batching"))
    }
    caps = _caps(flat.pop("batching", {}))
    for name in flat.keys() & caps.keys():
        msg = f"{name} is given by itself and in batching: give one of them"
        raise InputError(msg)
    return flat | caps


def _served_by(options: Mapping[str, Any]) -> tuple[Callable[..., Result], list[str]]:
    """Return what serves with the caller's cache, and the options that it has of a mode."""
    from kvcore.config.options import MODES, known_modes, mode_options  # noqa: PLC0415 - as above

    mode = MODES["simulate"]
    others = known_modes().values() if options.keys() - {*WITH_CACHE} else ()
    for other in others:
        if other.chosen_by and options.keys() & mode_options(other).keys():
            mode = other
    parts: type[RunParts] = imported_place(mode.parts)
    # A cluster has a cache for each server: what serves with one has none of its options.
    accepted = signature(parts.simulate).parameters
    return parts.simulate, [name for name in mode_options(mode) if name in accepted]


def _caps(batching: object) -> dict[str, Any]:
    """Return the options that `batching` gives: limits, and rules that are not kvcore's."""
    if isinstance(batching, Batching):
        own = described_rules(batching.rules) != described_rules(Rules())
        return batching.limits | ({"like": batching.rules} if own else {})
    if isinstance(batching, Mapping):
        return dict(batching)
    msg = f"batching={batching!r:.60}: give a Batching, or a table of its fields"
    raise InputError(msg)


def kept_options(
    options: Mapping[str, Any], known: Sequence[str], trace: object
) -> dict[str, Any]:
    """Return the options that go with a cache of the caller's.

    Raises:
        InputError: a trace, or an option of the cache that would be built without it.
    """
    from kvcore.config.options import check_names, option_named, read_option  # noqa: PLC0415

    if trace is not None:
        msg = (
            "trace= is for a cache that is built here; make yours with KVCache(..., trace=...)"
        )
        raise InputError(msg)
    for name in options:
        if name not in known:
            option_named(name)  # refused here if there is none
            msg = (
                f"{name}= is for a cache that is built here; with cache= there are: "
                f"{', '.join(known)}"
            )
            raise InputError(msg)
    kept = dict(options)
    slo = kept.get("slo")
    if isinstance(slo, str | Mapping):
        kept["slo"] = read_option("slo", slo)
    if isinstance(kept.get("batching"), Mapping):
        caps = _caps(kept["batching"])
        check_names(caps, [*attrs.fields_dict(Batching), *CHOICES])
        kept["batching"] = Batching(**caps)
    return kept


def resolved_options(options: Mapping[str, Any], plugins: Plugins | None) -> dict[str, Any]:
    """Return options with their plugins built, names by `plugins`."""
    return {
        name: resolve(name, value, plugins=plugins) if name in KINDS else value
        for name, value in options.items()
        if value is not None
    }


@contextmanager
def traced(parts: RunParts, path: str | PathLike[str] | None) -> Iterator[Trace | None]:
    """Open the trace of a run, if it is to have one."""
    if path is None:
        yield None
        return
    refuse_overwrite(path, parts.workload.options().values())
    with Trace(path, **parts.header()) as trace:
        yield trace


__getattr__ = former(__name__)
