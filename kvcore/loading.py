"""Load plugins: entry points and objects with hooks, imported and registered with pluggy."""

from __future__ import annotations

import os
from inspect import signature
from typing import TYPE_CHECKING

import attrs
from pluggy import PluginManager, PluginValidationError

from kvcore import hookspecs
from kvcore.errors import PluginError
from kvcore.hookspecs import PROJECT
from kvcore.specs import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.metadata import EntryPoint

DISABLE = "KVCORE_DISABLE_PLUGINS"
"""Environment variable: the entry points to skip, by name, separated by commas."""


@attrs.frozen
class Origin:
    """Where a plugin was found: an entry point of a distribution, or (None) code."""

    name: str
    distribution: str | None = None
    version: str | None = None

    @classmethod
    def of(cls, point: EntryPoint) -> Origin:
        """Return the origin that `point` is."""
        if point.dist is None:
            return cls(point.name)
        metadata = point.dist.metadata
        return cls(point.name, metadata["Name"], metadata["Version"])

    @property
    def way_out(self) -> str:
        """What to do when this plugin is in the way, as the end of a sentence."""
        if self.distribution is None:
            return ""
        return f"; to go on without it, set {DISABLE}={self.name}"

    def __str__(self) -> str:
        """Name it as error messages do."""
        if self.distribution is None:
            return f"{self.name} (registered in code)"
        return f"entry point {self.name!r} of {self.distribution} {self.version}"


@attrs.define
class Loaded:
    """What has been registered: hooks in pluggy's keeping, and where each came from."""

    manager: PluginManager = attrs.field(factory=lambda: PluginManager(PROJECT))
    origins: dict[str, Origin] = attrs.field(factory=dict)
    skipped: list[str] = attrs.field(factory=list)

    def results(self, hook: str) -> Iterator[tuple[Origin, object]]:
        """Call every implementation of `hook`, in order of registration.

        Raises:
            PluginError: one of them raised.
        """
        for implementation in getattr(self.manager.hook, hook).get_hookimpls():
            origin = self.origins[implementation.plugin_name]
            try:
                result = implementation.function()
            except (Exception, SystemExit) as error:
                msg = f"{hook} of {origin} raised {error!r}{origin.way_out}"
                raise PluginError(msg) from error
            yield origin, result


def load(points: Iterable[EntryPoint], extra: Iterable[object]) -> Loaded:
    """Import and register `points` by (distribution, name), then register `extra`.

    Raises:
        PluginError: what is wrong with `points`, all of it, a line each; or with the first
            of `extra` that does not fit.
    """
    loaded = Loaded()
    loaded.manager.add_hookspecs(hookspecs)
    faults: list[PluginError] = []
    for origin, point in _enabled(points, loaded.skipped):
        try:
            _register(loaded, origin, _imported(origin, point))
        except PluginError as fault:
            faults.append(fault)
    if faults:
        raise PluginError("\n".join(map(str, faults))) from faults[0].__cause__
    for number, plugin in enumerate(extra):
        _register(loaded, Origin(f"extra[{number}]"), plugin)
    return loaded


def _enabled(
    points: Iterable[EntryPoint], skipped: list[str]
) -> Iterator[tuple[Origin, EntryPoint]]:
    disabled = {name.strip() for name in os.environ.get(DISABLE, "").split(",")}
    found = [(Origin.of(point), point) for point in points]
    for origin, point in sorted(found, key=_order):
        if disabled & {origin.name, f"{origin.distribution}:{origin.name}"}:
            skipped.append(origin.name)
        else:
            yield origin, point


def _order(found: tuple[Origin, EntryPoint]) -> tuple[str, str]:
    return found[0].distribution or "", found[0].name


def _imported(origin: Origin, point: EntryPoint) -> object:
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        msg = f"{origin} ({point.value}) cannot be imported: {reason}{origin.way_out}"
        raise PluginError(msg) from error


def _register(loaded: Loaded, origin: Origin, plugin: object) -> None:
    manager, twin = loaded.manager, loaded.origins.get(origin.name)
    if twin:
        msg = (
            f"{twin} and {origin} have the same name: rename one, or skip one with "
            f"{DISABLE}={origin.distribution}:{origin.name}"
        )
        raise PluginError(msg)
    loaded.origins[origin.name] = origin
    if manager.is_registered(plugin):
        return
    try:
        manager.register(plugin, origin.name)
        manager.check_pending()
    except PluginValidationError as error:
        reason = (
            _unknown_hook(manager, plugin)
            or _surplus_argument(plugin)
            or f"has a hook that does not fit: {error}"
        )
        manager.unregister(name=origin.name)
        msg = f"{origin} {reason}{origin.way_out}"
        raise PluginError(msg) from error
    if not manager.get_hookcallers(plugin):
        msg = (
            f"{origin} has no hooks: it is {plugin!r}, where no function is marked with "
            f"kvcore.hookspecs.hookimpl{origin.way_out}"
        )
        raise PluginError(msg)


def _unknown_hook(manager: PluginManager, plugin: object) -> str | None:
    known = _hooks()
    for caller in manager.get_hookcallers(plugin) or ():
        if not caller.has_spec():
            return (
                f"implements {caller.name!r}, which is no hook of kvcore"
                f"{nearest(caller.name, known)}. The hooks are {', '.join(known)}"
            )
    return None


def _surplus_argument(plugin: object) -> str | None:
    """Name the argument that a hook of `plugin` wants and kvcore does not give it."""
    for hook in _hooks():
        given = signature(getattr(hookspecs, hook)).parameters
        implementation = getattr(plugin, hook, None)
        wanted = signature(implementation).parameters if callable(implementation) else ()
        surplus = [name for name in wanted if name not in given]
        if surplus:
            return (
                f"implements {hook!r} with an argument {surplus[0]!r}, which kvcore does not "
                f"pass: write {hook}({', '.join(given)})"
            )
    return None


def _hooks() -> list[str]:
    return [hook for hook in vars(hookspecs) if hook.startswith(f"{PROJECT}_")]
