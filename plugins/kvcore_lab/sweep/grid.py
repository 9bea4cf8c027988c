"""The grid of a sweep: every combination of the values of its axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kvcore.config import RunConfig, find_workload, read_plugin, read_toml
from kvcore.config.options import option_named, read_option, renamed
from kvcore.errors import InputError, PluginError
from kvcore.models.catalogue import find_device, load_model
from kvcore.plugins import Plugins, nearest
from kvcore.plugins.options import Spec, spec_of
from kvcore.serving.rules import CHOICES
from kvcore.workloads import Workload

Mode: TypeAlias = Literal["simulate", "compare"]
"""The mode of the cells of a sweep: serve under a clock, or replay without one."""

MODES: tuple[Mode, ...] = ("simulate", "compare")
"""The modes of a sweep."""

UNTIMED = (
    *("workload", "limit", "window", "model", "device", "codec", "accounting"),
    *("block_size", "blocks", "memory", "tier", "prefix", "seed", "eviction"),
)
"""The axes of a sweep without a clock: options that do not depend on time."""

TIMED = (
    *("workload", "limit", "window", "model", "device", "tensor_parallel", "codec"),
    *("weights_dtype", "block_size", "blocks", "memory", "tier", "prefix", "retention"),
    *("latency", "checkpoint", "drafter", "max_tokens", "max_seqs", "steps", "chunked"),
    *("watermark", "max_model_len", "rate_scale", "like", "slo", "seed"),
    *("replicas", "view", "fail", "autoscale", "router", "scheduler", "eviction"),
)
"""The axes of a sweep under a clock, which accounts for tokens."""

AXES = tuple(dict.fromkeys((*UNTIMED, *TIMED)))
"""The options of a run that may have several values in a sweep."""


CLUSTER_AXES = ("replicas", "view", "fail", "autoscale", "router")
"""The axes of clusters: several servers that share the requests."""

PART = ("limit", "window", "tier", "checkpoint", "drafter", *CLUSTER_AXES)
"""The axes that are columns of a table only if they are given."""


class Grid:
    """Every combination of the values of a sweep's axes.

    Args:
        mode: the mode of all cells: `simulate`, under a clock, or `compare`, serial and
        untimed.
        axes: options of `RunConfig`, each with a value or a list of values. Equal values in a
            list count once.

    Attributes:
        mode: the mode of all cells.
        axes: the values of each axis that was given, in the order of `axes_of`.

    Raises:
        InputError: an unknown mode, an axis that does not exist in this mode or has no value,
            or a value that is not valid; names the axis.
    """

    def __init__(self, mode: Mode = "simulate", **axes: Any) -> None:
        if mode not in MODES:
            msg = f"mode: {mode!r} is not known; there are: {', '.join(MODES)}"
            raise InputError(msg)
        known, axes = axes_of(mode), renamed(_with_rules(axes))
        for name in known:
            option_named(name)  # refused here if its package is switched off
        for name in axes:
            if name not in known:
                raise InputError(_unknown(name, mode, known))
        self.mode = mode
        self.axes = {name: _values(name, axes[name]) for name in known if name in axes}
        if axes.keys() >= {"blocks", "memory"}:
            msg = "blocks and memory both say how large the pool is: give one of them"
            raise InputError(msg)
        if mode == "compare" and not axes.keys() & {"blocks", "memory"}:
            msg = "blocks: a sweep in mode 'compare' needs pools: give blocks, or memory"
            raise InputError(msg)

    def __iter__(self) -> Iterator[RunConfig]:
        """Yield the cells, the last axis changing fastest."""
        for values in product(*self.axes.values()):
            yield RunConfig(self.mode, **dict(zip(self.axes, values, strict=True)))

    @property
    def varied(self) -> list[str]:
        """The axes with more than one value, in order."""
        return [name for name, values in self.axes.items() if len(values) > 1]


OWN: Mapping[str, Any] = {"out": Path, "jobs": int, "executor": str}
"""The keys of the file of a sweep that are no axes, and their types."""


def read_sweep(path: Path) -> tuple[Grid, dict[str, Any]]:
    """Return the grid of a sweep in TOML, and the values of the `OWN` keys that the file has.

    The others are `mode` and the axes, each with a value or a list.

    Raises:
        InputError: as for `read_toml` and `Grid`, or several values of a key that takes one;
            names the file and the key.
    """
    # With keys of the release before, which the grid makes options of `like`.
    types = sweep_keys() | dict.fromkeys(CHOICES, Any)
    values = read_toml(path, types, lists=True)
    try:
        own = {n: _single(n, values[n]) for n in ("mode", *OWN) if n in values}
        axes = {name: value for name, value in values.items() if name in (*AXES, *CHOICES)}
        return Grid(own.pop("mode", "simulate"), **axes), own
    except (InputError, PluginError) as error:
        msg = f"{path}: {error}"
        raise type(error)(msg) from error


def sweep_keys() -> dict[str, Any]:
    """Return the keys that the file of a sweep may have, and their types."""
    return {"mode": Mode, **{name: option_named(name).type for name in AXES}, **OWN}


def _single(key: str, values: tuple[Any, ...]) -> Any:
    if len(values) != 1:
        msg = f"{key}: {len(values)} values were given where one is needed"
        raise InputError(msg)
    return values[0]


def axes_of(mode: str) -> list[str]:
    """Return the names of the axes of a mode, in order."""
    return list(TIMED if mode == "simulate" else UNTIMED)


def _with_rules(axes: Mapping[str, Any]) -> dict[str, Any]:
    """Return axes with choices of rules, which were axes in the release before, in `like`."""
    former = [name for name in CHOICES if name in axes]
    if not former:
        return dict(axes)
    lists = [axes[name] for name in former]
    lists = [value if isinstance(value, list | tuple) else [value] for value in lists]
    rules = [
        renamed({"like": like} | dict(zip(former, values, strict=True)))["like"]
        for like, *values in product(_values("like", axes.get("like")), *lists)
    ]
    return {name: axes[name] for name in axes.keys() - former} | {"like": rules}


def _values(name: str, axis_values: Any) -> tuple[Any, ...]:
    """Return the values of an axis in the form of a cell, without repetitions."""
    values: list[Any] = []
    if hasattr(axis_values, "tolist"):
        axis_values = axis_values.tolist()  # of NumPy
    several = isinstance(axis_values, (list, tuple, range)) and not _is_window(
        name, axis_values
    )
    for value in axis_values if several else [axis_values]:
        read = _resolved(name, read_option(name, value))
        if read not in values:
            values.append(read)
    if not values:
        msg = f"{name}: the list is empty; give a value, or leave it out"
        raise InputError(msg)
    return tuple(values)


def _is_window(name: str, value: Any) -> bool:
    """Return True if `value` is one window in ns: start and end, not two windows."""
    return (
        name == "window" and isinstance(value, tuple) and type(next(iter(value), None)) is int
    )


def _resolved(name: str, value: Any) -> Any:
    """Return the canonical form of a value, so that equal values are one cell."""
    try:
        if name == "workload":
            return value if isinstance(value, Spec) else _workload(value)
        if name == "model" and isinstance(value, str):
            return load_model(value)
        if name == "device" and isinstance(value, str):
            return find_device(value).name
    except InputError as error:
        msg = f"{name}: {error}"
        raise InputError(msg) from error
    return float(value) if option_named(name).type is float else value


def _workload(workload: str | Path | Workload) -> Spec | Workload:
    """Return a workload as a plugin with options, or an instance that no name would build."""
    plugins = Plugins()
    known = plugins.names("workload")
    if isinstance(workload, Workload):
        registered = workload.name in known and plugins.get("workload", workload.name) is type(
            workload
        )
        return spec_of(workload) if registered else workload
    if isinstance(workload, str) and workload.partition(":")[0].strip() in known:
        with suppress(InputError):  # `trace:FILE` is short for a path
            return read_plugin(workload)
    return spec_of(find_workload(str(workload), plugins))


def _unknown(name: str, mode: Mode, known: list[str]) -> str:
    if name in AXES:
        return f"{name}: there is no such thing in mode {mode!r}. There are: {', '.join(known)}"
    return f"there is no axis {name!r}{nearest(name, known)}. There are: {', '.join(known)}"
