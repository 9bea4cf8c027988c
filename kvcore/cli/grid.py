"""`sweep.toml`: the axes of a sweep, each with the values it is to take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import click

from kvcore.analysis import Optimum
from kvcore.analysis.sweep import AXES, MODES, Grid, Plan
from kvcore.cli.compare import compare
from kvcore.cli.model import find_or_read
from kvcore.cli.options import ConfigFile, read_plugin
from kvcore.cli.simulate import simulate
from kvcore.cli.workload import find_workload
from kvcore.errors import InputError, PluginError
from kvcore.plugins.base import options_of
from kvcore.plugins.manager import Plugins
from kvcore.plugins.options import Spec, as_text
from kvcore.workloads import Workload

OWN = ("out", "jobs", "executor")
"""Options of `kvcore sweep` itself, which the file may set too."""


def axis_options() -> dict[str, click.Parameter]:
    """Return what reads a value of each axis: the option of `simulate`, or of `compare`."""
    options = {str(each.name): each for verb in (compare, simulate) for each in verb.params}
    mode = click.Option(["--mode"], type=click.Choice(MODES))
    return {"mode": mode, **{name: options[name] for name in AXES}}


@attrs.frozen
class GridFile(ConfigFile):
    """A configuration file whose options may be lists: one run for each value."""

    def values(self, ctx: click.Context) -> dict[str, tuple[Any, ...]]:
        """Return the values of all keys, read as their options read them.

        Raises:
            InputError: as `defaults` does; names the file and the key.
        """
        found: Mapping[str, Any] = self.defaults(ctx)
        return dict(found)

    def plan(self, values: Mapping[str, tuple[Any, ...]]) -> Plan:
        """Return the cells of the file, each of which can be run.

        Raises:
            InputError, PluginError: one that cannot be; names the file and the field.
        """
        with _naming(str(self.path)):
            mode = _single("mode", values.get("mode", MODES[:1]))
            axes = {name: list(each) for name, each in values.items() if name in AXES}
            for name, read in (("workload", _workload), ("model", find_or_read)):
                if name in axes:
                    with _naming(name):
                        axes[name] = [read(each) for each in axes[name]]
            return Plan.of(Grid(mode, **axes))

    def own(self, values: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Return what the file sets of the options of `kvcore sweep`.

        Raises:
            InputError: several values of one.
        """
        with _naming(str(self.path)):
            return {name: _single(name, values[name]) for name in OWN if name in values}

    def _tried(self, ctx: click.Context, key: str, option: click.Parameter, value: Any) -> Any:
        """Return the values of a key, as its option reads each of them."""
        given = value if isinstance(value, list) else [value]
        tried = (super(GridFile, self)._tried(ctx, key, option, each) for each in given)
        return tuple(option.process_value(ctx, each) for each in tried)

    def _plugin(self, kind: str, value: Any) -> str | Spec:
        """Return a plugin, or the optimum, which is none."""
        if kind == "eviction":
            name = value.get("name") if isinstance(value, dict) else value
            if str(name).partition(":")[0].strip() == Optimum.name:
                if not isinstance(value, dict):
                    return read_plugin(value)
                options = {key: as_text(each) for key, each in value.items() if key != "name"}
                return Spec(Optimum.name, options)
        return super()._plugin(kind, value)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Let an error begin with what it is about."""
    try:
        yield
    except (InputError, PluginError) as error:
        msg = f"{what}: {error}"
        raise type(error)(msg) from error


def _single(key: str, values: tuple[Any, ...]) -> Any:
    if len(values) != 1:
        msg = f"{key}: {len(values)} values were given where one is needed"
        raise InputError(msg)
    return values[0]


def _workload(given: str | Spec) -> Spec:
    """Return a workload as a plugin; of a file, the one that reads it."""
    if isinstance(given, Spec):
        return given
    workload: Workload = find_workload(given, Plugins())
    defaults = {field.name: field.default for field in options_of(type(workload))}
    options = {
        name: as_text(value)
        for name, value in workload.options().items()
        if value != defaults[name]
    }
    return Spec(workload.name, options)
