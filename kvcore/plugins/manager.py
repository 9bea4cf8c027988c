"""The manager of plugins: finds classes by kind and name, and builds instances of them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
from pluggy import PluginManager, PluginValidationError

from kvcore import hookspecs
from kvcore.errors import InputError, KvcoreError, PluginError
from kvcore.hookspecs import PROJECT
from kvcore.plugins.base import Plugin, qualified, undecorated
from kvcore.plugins.options import Spec, instantiate, nearest, parse

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

KINDS = {
    "eviction": "kvcore_eviction_policies",
    "prefix": "kvcore_prefix_indexes",
    "retention": "kvcore_retention_policies",
    "scheduler": "kvcore_schedulers",
    "latency": "kvcore_latency_models",
    "backend": "kvcore_backends",
    "generator": "kvcore_generators",
    "workload": "kvcore_workloads",
}
"""The kinds of plugins, and the hook that returns the classes of each. The entry points of
kvcore itself are called as the kind whose hook they have."""

NO_PLUGINS = {
    ("eviction", "belady"): "it is no policy but a bound, and comparisons alone know it",
    ("eviction", "optimum"): "it is no policy but a bound, and comparisons alone know it",
}
"""Names that are not to be found here, by kind and name, and why."""

DISABLE = "KVCORE_DISABLE_PLUGINS"
"""Environment variable: the entry points to skip, by name, separated by commas."""


@attrs.frozen
class Origin:
    """The place a plugin comes from: an entry point of a distribution, or (None) code."""

    name: str
    distribution: str | None = None
    version: str | None = None

    @classmethod
    def of(cls, point: EntryPoint) -> Origin:
        """Return the origin of what `point` names."""
        if point.dist is None:
            return cls(point.name)
        metadata = point.dist.metadata
        return cls(point.name, metadata["Name"], metadata["Version"])

    @property
    def way_out(self) -> str:
        """The end of a sentence: what to set when this plugin is in the way."""
        if self.distribution is None:
            return ""
        return f"; to go on without it, set {DISABLE}={self.name}"

    def __str__(self) -> str:
        """Return the origin as error messages name it."""
        if self.distribution is None:
            return f"{self.name} (registered in code)"
        return f"entry point {self.name!r} of {self.distribution} {self.version}"


Found: TypeAlias = tuple[type[Plugin], Origin]


@attrs.frozen
class PluginInfo:
    """A plugin as a listing shows it, without building it.

    `distribution` and `version` are None for a plugin registered in code; `reason` is why
    the plugin cannot work here, and None if it can.
    """

    kind: str
    name: str
    distribution: str | None
    version: str | None
    module: str
    usable: bool
    reason: str | None


class Plugins:
    """The plugins of one program: an object you make, not a global.

    Making it imports what the entry points of the group `kvcore` name, in order of
    (distribution, name), and registers `extra` after them: more modules or objects with
    hooks. The hook of a kind is called at the first look-up of that kind, once. Entry points
    named in the environment variable KVCORE_DISABLE_PLUGINS, as `name` or
    `distribution:name`, are skipped.
    `entry_points` replaces those that are installed.

    Raises:
        PluginError: kvcore is not installed, or plugins cannot be loaded: which ones,
            from which distribution, why, and how to go on without them.
    """

    def __init__(
        self,
        extra: Iterable[object] = (),
        entry_points: Iterable[EntryPoint] | None = None,
    ) -> None:
        """Load the entry points, then `extra`."""
        self._points = None if entry_points is None else list(entry_points)
        self._manager = PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._origins: dict[str, Origin] = {}
        self._skipped: list[str] = []
        self._classes: dict[str, dict[str, Found]] = {}
        self._load(self._enabled())
        for number, plugin in enumerate(extra):
            self._register(Origin(f"extra[{number}]"), plugin)

    def names(self, kind: str) -> list[str]:
        """Return the names of the plugins of `kind`, sorted."""
        return sorted(self._find(kind))

    def get(self, kind: str, name: str) -> Any:
        """Return the class named `name`, derived from the kind's base class.

        Raises:
            InputError: there is no such kind, or no such plugin.
            PluginError: a plugin of this kind is broken, or an editable install is older
                than its checkout's entry points.
        """
        found = self._find(kind)
        if name in found:
            return found[name][0]
        names = sorted(found)
        msg = f"no {kind} plugin is named {name!r}"
        if (kind, name) in NO_PLUGINS:
            msg += f": {NO_PLUGINS[kind, name]}"
        else:
            msg += nearest(name, names)
        msg += f". There are: {', '.join(names)}" if names else ". There are none"
        if self._skipped:
            msg += f" ({DISABLE} skips {', '.join(self._skipped)})"
        raise self._or_outdated(InputError(msg))

    def build(
        self, kind: str, spec: str | Spec, defaults: Mapping[str, Any] | None = None
    ) -> Any:
        """Build the plugin that a text such as `lfu:half_life=300,unit=s` describes.

        `defaults` are values of options that the text leaves out, used where the plugin
        has them.

        Raises:
            InputError: not one plugin, or an unknown name, option or value.
            PluginError: the plugin is broken or cannot work here.
        """
        wanted = [spec] if isinstance(spec, Spec) else parse(spec)
        if len(wanted) != 1:
            msg = f"{spec!r} names {len(wanted)} {kind} plugins where one is needed"
            raise InputError(msg)
        cls = self.get(kind, wanted[0].name)
        reason = _unavailable(cls)
        if reason is not None:
            msg = f"{kind} plugin {cls.name!r} cannot work here: {reason}"
            raise PluginError(msg)
        return instantiate(cls, wanted[0].options, defaults)

    def build_many(self, kind: str, text: str) -> list[Any]:
        """Build each plugin of a list such as `lru,lfu:half_life=300,unit=s,cost`.

        Raises:
            InputError, PluginError: as `build` does.
        """
        return [self.build(kind, spec) for spec in parse(text)]

    def listing(self) -> list[PluginInfo]:
        """Return all plugins by kind and name, those that cannot work here included."""
        infos = []
        for kind in KINDS:
            for name, (cls, origin) in sorted(self._find(kind).items()):
                reason = _unavailable(cls)
                place = origin.distribution, origin.version, cls.__module__
                infos.append(PluginInfo(kind, name, *place, reason is None, reason))
        return infos

    def _enabled(self) -> Iterator[tuple[Origin, EntryPoint]]:
        """Yield the entry points that are not skipped, in the order they are loaded in."""
        disabled = {name.strip() for name in os.environ.get(DISABLE, "").split(",")}
        points = _installed_points() if self._points is None else self._points
        found = [(Origin.of(point), point) for point in points]
        for origin, point in sorted(found, key=lambda o: (o[0].distribution or "", o[0].name)):
            if disabled & {origin.name, f"{origin.distribution}:{origin.name}"}:
                self._skipped.append(origin.name)
            else:
                yield origin, point

    def _load(self, points: Iterable[tuple[Origin, EntryPoint]]) -> None:
        """Import and register `points`.

        Raises:
            PluginError: one or more cannot be; with a line for each.
        """
        faults: list[PluginError] = []
        for origin, point in points:
            try:
                self._register(origin, _imported(origin, point))
            except PluginError as fault:
                faults.append(fault)
        if faults:
            error = PluginError("\n".join(map(str, faults)))
            raise self._or_outdated(error) from faults[0].__cause__

    def _register(self, origin: Origin, plugin: object) -> None:
        twin = self._origins.setdefault(origin.name, origin)
        if twin is not origin:
            msg = (
                f"{twin} and {origin} have the same name: rename one, or skip one with "
                f"{DISABLE}={origin.distribution}:{origin.name}"
            )
            raise PluginError(msg)
        manager = self._manager
        if manager.is_registered(plugin):
            return
        try:
            manager.register(plugin, origin.name)
            manager.check_pending()
        except PluginValidationError as error:
            manager.unregister(name=origin.name)
            msg = f"{origin} {_misfit(plugin, error)}{origin.way_out}"
            raise PluginError(msg) from error
        if not manager.get_hookcallers(plugin):
            msg = (
                f"{origin} has no hooks: it is {plugin!r}, where no function is marked with "
                f"kvcore.hookimpl{origin.way_out}"
            )
            raise PluginError(msg)

    def _find(self, kind: str) -> dict[str, Found]:
        """Return the classes of `kind` by name, each with its origin."""
        if kind not in KINDS:
            msg = f"{kind!r} is no kind of plugin{nearest(kind, KINDS)}. The kinds are: "
            raise InputError(msg + ", ".join(KINDS))
        if kind not in self._classes:
            self._classes[kind] = self._collect(kind)
        return self._classes[kind]

    def _collect(self, kind: str) -> dict[str, Found]:
        found: dict[str, Found] = {}
        for origin, classes in self._results(KINDS[kind]):
            if not isinstance(classes, list):
                msg = f"{KINDS[kind]} of {origin} returned {classes!r}, not a list of classes"
                raise PluginError(msg + origin.way_out)
            for cls in classes:
                fault = _fault(cls, kind)
                if fault:
                    msg = f"{KINDS[kind]} of {origin} returned {fault}{origin.way_out}"
                    raise PluginError(msg)
                if cls.name in found:
                    first, second = (
                        f"{qualified(each)} of {place}"
                        for each, place in (found[cls.name], (cls, origin))
                    )
                    msg = (
                        f"two {kind} plugins are named {cls.name!r}: {first}, and {second}; "
                        f"rename one, or skip the entry point of one with {DISABLE}"
                    )
                    raise PluginError(msg)
                found[cls.name] = (cls, origin)
        return found

    def _results(self, hook: str) -> Iterator[tuple[Origin, object]]:
        """Call every implementation of `hook`, in order of registration.

        Raises:
            PluginError: one of them raised.
        """
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            origin = self._origins[implementation.plugin_name]
            try:
                result = implementation.function()
            except (Exception, SystemExit) as error:
                msg = f"{hook} of {origin} raised {error!r}{origin.way_out}"
                raise PluginError(msg) from error
            yield origin, result

    def _or_outdated(self, error: KvcoreError) -> KvcoreError:
        """Return `error`, or one that adds an outdated installation as its likely cause."""
        from kvcore.plugins._installation import outdated  # noqa: PLC0415

        cause = outdated(self._points)
        return PluginError(f"{error}\n{cause}") if cause else error


def resolve(
    kind: str, given: object, default_name: str | None = None, plugins: Plugins | None = None
) -> Any:
    """Return the plugin of `kind` that `given` stands for.

    `given` may be an instance, which is returned; a class, which is built without options; a
    text such as `lfu:half_life=300` or a `Spec`, which is looked up in `plugins` (None: in
    all that are installed); or None: the built-in called `default_name`, or None without one.

    Raises:
        InputError: `given` is none of these, of another kind, or an unknown name or option.
        PluginError: the plugin is broken, has no name, or cannot work here.
    """
    if given is None:
        return default_name and default(kind, default_name)()
    if isinstance(given, (str, Spec)):
        known = plugins or _installed(tuple(sys.path), os.environ.get(DISABLE))
        return known.build(kind, given)
    cls = given if isinstance(given, type) else type(given)
    if not (issubclass(cls, Plugin) and getattr(cls, "kind", None) == kind):
        what = given.__name__ if isinstance(given, type) else repr(given)
        example = f" such as {default_name!r}" if default_name else ""
        msg = (
            f"{kind}={what} is no {kind} plugin: give a name{example}, or a class derived from "
            f"{base_of(kind).__name__} or an instance of one"
        )
        raise InputError(msg)
    check_name(cls)
    if cls is not given:
        return given
    fault = _fault(cls, kind)
    if fault:
        msg = f"{kind} plugin {fault}"
        raise PluginError(msg)
    return instantiate(cls, {})


@cache
def default(kind: str, name: str) -> Any:
    """Return the built-in class of `kind` named `name`, through its entry point.

    Looks at kvcore's own entry points alone; remembered, so a later call costs nothing.

    Raises:
        InputError, PluginError: as `Plugins.get` does.
    """
    from importlib import metadata  # noqa: PLC0415

    try:
        points = list(metadata.distribution(PROJECT).entry_points.select(group=PROJECT))
    except metadata.PackageNotFoundError:
        points = []
    return Plugins(entry_points=_with_own(points)).get(kind, name)


def base_of(kind: str) -> type[Plugin]:
    """Return the base class of the plugins of `kind`.

    It is looked up late, for messages: the contracts lie in rooms above this one.
    """
    front = import_module(PROJECT)
    names = (getattr(front, name) for name in front.__all__)
    return next(v for v in names if isinstance(v, type) and vars(v).get("kind") == kind)


def check_name(cls: type[Plugin]) -> None:
    """Refuse a plugin class without a name, before a trace or a table has to name it.

    Raises:
        PluginError: names the class.
    """
    name = getattr(cls, "name", None)
    if not isinstance(name, str):
        msg = (
            f"{cls.kind} plugin {qualified(cls)} has no name ({name!r}): give the class one, "
            f"such as name = {cls.__name__.lower()!r}"
        )
        raise PluginError(msg)


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...], disabled: str | None) -> Plugins:
    """Return the plugins found on this `sys.path`; remembered for names given in code."""
    del path, disabled
    return Plugins()


def _installed_points() -> list[EntryPoint]:
    from importlib import metadata  # noqa: PLC0415 - takes 20 ms

    return _with_own(list(metadata.entry_points(group=PROJECT)))


def _with_own(points: list[EntryPoint]) -> list[EntryPoint]:
    """Return `points`, among which are kvcore's own.

    Raises:
        PluginError: they are missing; says what to run.
    """
    if not any(point.dist and point.dist.name == PROJECT for point in points):
        from kvcore.plugins._installation import missing  # noqa: PLC0415

        raise PluginError(missing())
    return points


def _imported(origin: Origin, point: EntryPoint) -> object:
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        msg = f"{origin} ({point.value}) cannot be imported: {reason}{origin.way_out}"
        raise PluginError(msg) from error


def _misfit(plugin: object, error: PluginValidationError) -> str:
    """Return what is wrong with the hooks of `plugin`, which pluggy refused with `error`."""
    known = list(KINDS.values())
    for name in dir(plugin):
        function = getattr(plugin, name, None)
        if not hasattr(function, f"{PROJECT}_impl"):
            continue
        if name not in known:
            return (
                f"implements {name!r}, which is no hook of kvcore{nearest(name, known)}. "
                f"The hooks are {', '.join(known)}"
            )
        if surplus := list(signature(function).parameters):  # type: ignore[arg-type]
            return (
                f"implements {name!r} with an argument {surplus[0]!r}, which kvcore does not "
                f"pass: write {name}()"
            )
    return f"has a hook that does not fit: {error}"


def _unavailable(cls: type[Plugin]) -> str | None:
    try:
        return cls.unavailable()
    except Exception as error:  # noqa: BLE001 - a listing must not fail at one plugin
        return f"{qualified(cls)}.unavailable raised {error!r}"


def _fault(cls: object, kind: str) -> str | None:
    """Return what is wrong with `cls` as a plugin class of `kind`, or None."""
    if not (isinstance(cls, type) and issubclass(cls, Plugin) and cls.kind == kind):
        return f"{cls!r}, which is not a class derived from {qualified(base_of(kind))}"
    missing = getattr(cls, "__abstractmethods__", ())
    if missing:
        return f"{qualified(cls)}, which does not define {', '.join(sorted(missing))}"
    if fault := undecorated(cls):
        return f"{qualified(cls)}, {fault}"
    name = getattr(cls, "name", None)
    if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)):
        return (
            f"{qualified(cls)}, whose name is {name!r}; a plugin class needs an attribute "
            "`name` of letters, digits, `_`, `-` and `.`"
        )
    return None
