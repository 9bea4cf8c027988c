"""Look up and build plugins by kind and name. pluggy registers them, it never runs them."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from kvcore.errors import InputError, KvcoreError, PluginError
from kvcore.loading import DISABLE, Origin, load
from kvcore.policy import (
    Backend,
    EvictionPolicy,
    Generator,
    LatencyModel,
    Plugin,
    PrefixCache,
    RetentionPolicy,
    Scheduler,
    Workload,
)
from kvcore.specs import Spec, instantiate, nearest, parse, qualified

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from importlib.metadata import EntryPoint

Found: TypeAlias = tuple[type[Plugin], Origin]

KINDS: dict[str, tuple[str, type[Plugin]]] = {
    "eviction": ("kvcore_eviction_policies", EvictionPolicy),
    "prefix": ("kvcore_prefix_caches", PrefixCache),
    "retention": ("kvcore_retention_policies", RetentionPolicy),
    "scheduler": ("kvcore_schedulers", Scheduler),
    "latency": ("kvcore_latency_models", LatencyModel),
    "backend": ("kvcore_backends", Backend),
    "generator": ("kvcore_generators", Generator),
    "workload": ("kvcore_workloads", Workload),
}
"""The kinds of plugins: the hook that returns their classes, and what these derive from."""

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
        if self._points is None:
            # Late, because importlib.metadata takes 20 ms that `import kvcore` need not.
            from kvcore.installation import all_entry_points  # noqa: PLC0415

            points = all_entry_points()
        else:
            points = self._points
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
        reason = _unusable(cls)
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
                reason = _unusable(cls)
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
        hook, base = KINDS[kind]
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
        from kvcore.installation import outdated  # noqa: PLC0415 - costs only who fails

        cause = outdated(self._points)
        return PluginError(f"{error}\n{cause}") if cause else error


@cache
def default(kind: str, name: str) -> Any:
    """Return the built-in class of `kind` named `name`, through its entry point.

    Looks at kvcore's own entry points alone; remembered, so a later call costs nothing.

    Raises:
        InputError, PluginError: as `Plugins.get` does.
    """
    from kvcore.installation import builtin_entry_points  # noqa: PLC0415 - as above

    return Plugins(entry_points=builtin_entry_points()).get(kind, name)


def _unusable(cls: type[Plugin]) -> str | None:
    try:
        return cls.unusable()
    except Exception as error:  # noqa: BLE001 - a listing must not fail at one plugin
        return f"{qualified(cls)}.unusable raised {error!r}"


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
