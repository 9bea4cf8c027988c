"""What is installed: the entry points plugins are found by, and why they may be missing."""

from __future__ import annotations

import json
import os
import re
import tomllib
from functools import cache
from importlib import import_module, metadata
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote, urlsplit

import attrs
from pluggy import PluginManager, PluginValidationError

from kvcore import hookspecs
from kvcore.errors import InputError, KvcoreError, PluginError
from kvcore.hookspecs import PROJECT
from kvcore.plugins.base import Plugin
from kvcore.plugins.options import Spec, instantiate, nearest, parse, qualified

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from importlib.metadata import Distribution, EntryPoint


def all_entry_points() -> list[EntryPoint]:
    """Return the plugin entry points of every installed distribution.

    Raises:
        PluginError: kvcore's own are missing.
    """
    points = list(metadata.entry_points(group=PROJECT))
    if not any(point.dist and point.dist.name == PROJECT for point in points):
        raise PluginError(_missing())
    return points


def builtin_entry_points() -> list[EntryPoint]:
    """Return the plugin entry points of kvcore itself, without looking at any other.

    Raises:
        PluginError: there are none.
    """
    try:
        points = list(metadata.distribution(PROJECT).entry_points.select(group=PROJECT))
    except metadata.PackageNotFoundError:
        points = []
    if not points:
        raise PluginError(_missing())
    return points


def outdated(points: Iterable[EntryPoint] | None = None) -> str | None:
    """Say which editable install is older than its checkout's pyproject.toml, or None.

    Entry points are copied when a checkout is installed; editing pyproject.toml does not
    change the copy. Looks at the distributions of `points`, or at all that are installed:
    for when something has gone wrong, not before.
    """
    if points is None:
        return _outdated(metadata.distributions())
    return _outdated(point.dist for point in points if point.dist)


def _outdated(distributions: Iterable[Distribution]) -> str | None:
    for dist in distributions:
        checkout = _checkout(dist)
        declared = _declared(checkout / "pyproject.toml") if checkout else None
        if declared is None:
            continue
        installed = {p.name: p.value for p in dist.entry_points if p.group == PROJECT}
        changed = sorted({name for name, _ in declared.items() ^ installed.items()})
        if changed:
            return (
                f"the installed entry points of {dist.name} {dist.version} are older than "
                f"{checkout}/pyproject.toml (they differ in {', '.join(changed)}); run "
                f"`pip install -e .` again in {checkout}"
            )
    return None


def _missing() -> str:
    here = Path(__file__).resolve().parents[1]
    try:
        dist = metadata.distribution(PROJECT)
    except metadata.PackageNotFoundError:
        return (
            "kvcore is not installed, so it has no plugins: they are found through entry "
            "points, which a checkout on PYTHONPATH does not have; run `pip install -e .` in "
            f"{here}"
        )
    return _outdated([dist]) or (
        f"kvcore {dist.version} is installed without its entry points, so there are no "
        "plugins; install it again: `pip install --force-reinstall kvcore`, or "
        "`pip install -e .` in a checkout"
    )


def _checkout(dist: Distribution) -> Path | None:
    """Return the directory that `dist` is an editable install of."""
    try:
        origin = json.loads(dist.read_text("direct_url.json") or "{}")
        editable = origin.get("dir_info", {}).get("editable", False)
        return Path(unquote(urlsplit(origin["url"]).path)) if editable else None
    except (ValueError, KeyError, AttributeError):
        return None


def _declared(pyproject: Path) -> dict[str, str] | None:
    """Return the plugin entry points in a pyproject.toml; None if it does not decide them."""
    try:
        project: dict[str, Any] = tomllib.loads(pyproject.read_text("utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return None
    if "entry-points" in project.get("dynamic", ()):
        return None
    return dict(project.get("entry-points", {}).get(PROJECT, {}))


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


Found: TypeAlias = tuple[type[Plugin], Origin]


KINDS: dict[str, tuple[str, str]] = {
    "eviction": ("kvcore_eviction_policies", "kvcore.cache.EvictionPolicy"),
    "prefix": ("kvcore_prefix_indexes", "kvcore.cache.PrefixIndex"),
    "retention": ("kvcore_retention_policies", "kvcore.cache.RetentionPolicy"),
    "scheduler": ("kvcore_schedulers", "kvcore.serving.Scheduler"),
    "latency": ("kvcore_latency_models", "kvcore.serving.LatencyModel"),
    "backend": ("kvcore_backends", "kvcore.engine.Backend"),
    "generator": ("kvcore_generators", "kvcore.engine.Generator"),
    "workload": ("kvcore_workloads", "kvcore.workloads.Workload"),
}
"""The kinds of plugins: the hook that returns their classes, and the base class of these."""


def base_of(kind: str) -> type[Plugin]:
    """Return the base class of the plugins of `kind`.

    It is imported late: the rooms of the contracts lie above this one.
    """
    module, _, name = KINDS[kind][1].rpartition(".")
    base: type[Plugin] = getattr(import_module(module), name)
    return base


NO_PLUGINS = {
    ("eviction", "optimum"): "it is no policy but a bound, and comparisons alone know it",
}
"""Names that are not to be found here, by kind and name, and why."""


@attrs.frozen
class PluginInfo:
    """What there is to say about a plugin without building it.

    `distribution` and `version` are None for a plugin registered in code; `reason` says
    why it cannot work here, and is None if it can.
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
    (distribution, name), and then takes `extra`: more modules or objects with hooks. The
    hook of a kind is called once, at the first look-up of that kind. Entry points named
    in the environment variable KVCORE_DISABLE_PLUGINS, as `name` or `distribution:name`,
    are skipped. `entry_points` replaces those that are installed.

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
        self._classes: dict[str, dict[str, Found]] = {}
        points = all_entry_points() if self._points is None else self._points
        try:
            self._loaded = load(points, extra)
        except PluginError as error:
            raise self._or_outdated(error) from error.__cause__

    def names(self, kind: str) -> list[str]:
        """Return the names of the plugins of `kind`, sorted."""
        return sorted(self._of(kind))

    def get(self, kind: str, name: str) -> Any:
        """Return the class named `name`, derived from the kind's base class.

        Raises:
            InputError: there is no such kind, or no such plugin.
            PluginError: a plugin of this kind is broken, or an editable install is older
                than its checkout's entry points.
        """
        found = self._of(kind)
        if name in found:
            return found[name][0]
        names = sorted(found)
        msg = f"no {kind} plugin is named {name!r}"
        if (kind, name) in NO_PLUGINS:
            msg += f": {NO_PLUGINS[kind, name]}"
        else:
            msg += nearest(name, names)
        msg += f". There are: {', '.join(names)}" if names else ". There are none"
        if self._loaded.skipped:
            msg += f" ({DISABLE} skips {', '.join(self._loaded.skipped)})"
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
            for name, (cls, origin) in sorted(self._of(kind).items()):
                reason = _unavailable(cls)
                infos.append(
                    PluginInfo(
                        kind=kind,
                        name=name,
                        distribution=origin.distribution,
                        version=origin.version,
                        module=cls.__module__,
                        usable=reason is None,
                        reason=reason,
                    )
                )
        return infos

    def _of(self, kind: str) -> dict[str, Found]:
        if kind not in KINDS:
            msg = f"{kind!r} is no kind of plugin{nearest(kind, KINDS)}. The kinds are: "
            raise InputError(msg + ", ".join(KINDS))
        if kind not in self._classes:
            self._classes[kind] = self._collect(kind)
        return self._classes[kind]

    def _collect(self, kind: str) -> dict[str, Found]:
        hook, base = KINDS[kind][0], base_of(kind)
        found: dict[str, Found] = {}
        for origin, classes in self._loaded.results(hook):
            if not isinstance(classes, list):
                msg = f"{hook} of {origin} returned {classes!r}, not a list of classes"
                raise PluginError(msg + origin.way_out)
            for cls in classes:
                fault = _fault(cls, base)
                if fault:
                    msg = f"{hook} of {origin} returned {fault}{origin.way_out}"
                    raise PluginError(msg)
                if cls.name in found:
                    msg = _clash(kind, cls.name, found[cls.name], (cls, origin))
                    raise PluginError(msg)
                found[cls.name] = (cls, origin)
        return found

    def _or_outdated(self, error: KvcoreError) -> KvcoreError:
        """Return `error`, or one that adds an outdated installation as its likely cause."""
        cause = outdated(self._points)
        return PluginError(f"{error}\n{cause}") if cause else error


@cache
def default(kind: str, name: str) -> Any:
    """Return the built-in class of `kind` named `name`, through its entry point.

    Looks at kvcore's own entry points alone; remembered, so a later call costs nothing.

    Raises:
        InputError, PluginError: as `Plugins.get` does.
    """
    return Plugins(entry_points=builtin_entry_points()).get(kind, name)


def _unavailable(cls: type[Plugin]) -> str | None:
    try:
        return cls.unavailable()
    except Exception as error:  # noqa: BLE001 - a listing must not fail at one plugin
        return f"{qualified(cls)}.unavailable raised {error!r}"


def _fault(cls: object, base: type[Plugin]) -> str | None:
    """Say what is wrong with `cls` as a plugin derived from `base`, if anything."""
    if not (isinstance(cls, type) and issubclass(cls, base)):
        return f"{cls!r}, which is not a class derived from {qualified(base)}"
    missing = getattr(cls, "__abstractmethods__", ())
    if missing:
        return f"{qualified(cls)}, which does not define {', '.join(sorted(missing))}"
    name = getattr(cls, "name", None)
    if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)):
        return (
            f"{qualified(cls)}, whose name is {name!r}; a plugin class needs an attribute "
            "`name` of letters, digits, `_`, `-` and `.`"
        )
    return None


def _clash(kind: str, name: str, *claims: Found) -> str:
    first, second = (f"{qualified(cls)} of {origin}" for cls, origin in claims)
    return (
        f"two {kind} plugins are named {name!r}: {first}, and {second}; rename one, or skip "
        f"the entry point of one with {DISABLE}"
    )


def check_name(cls: type[Plugin]) -> None:
    """Refuse a plugin class without a name, before a trace or a table has to call it by one.

    Raises:
        PluginError: says which class.
    """
    name = getattr(cls, "name", None)
    if not isinstance(name, str):
        msg = (
            f"{cls.kind} plugin {qualified(cls)} has no name ({name!r}): give the class one, "
            f"such as name = {cls.__name__.lower()!r}"
        )
        raise PluginError(msg)


def plugin_of(kind: type[Plugin], given: object, name: str) -> Any:
    """Return `given` if it is an instance of `kind`; the built-in `name` for None.

    Raises:
        InputError: `given` is a class, a name, or a plugin of another kind.
        PluginError: its class has no name.
    """
    if given is None:
        return default(kind.kind, name)()
    if isinstance(given, kind):
        check_name(type(given))
        return given
    what = given.__name__ if isinstance(given, type) else repr(given)
    msg = (
        f"{kind.kind}={what} is no {kind.kind} plugin: give an instance, such as one of "
        f"Plugins().build({kind.kind!r}, {name!r})"
    )
    raise InputError(msg)
