"""The manager of plugins: finds classes by kind and name, and builds instances of them.

From an entry point to an instance, each step when it is first needed:

    entry points             _enabled, _register   imported: modules with hooks, for pluggy
    a kind                   _find, _collect       its hook is called: classes by name, or their
                                                   places; of two of one name neither counts
    a name                   get, _located         its class is imported from its place, and
                                                   checked; `my.py:Class` is in a file
    a text, `lfu:unit=s`     build                 an instance with these options

Verbs, modes and options of packages come by hooks in the same way (`_called`). What is broken
on the way is left out, and kept with its reason (`_refuse`): `listing` shows it, and the error
of a name that is not found (`not_found`) names what may have had it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import cache, lru_cache, partial
from importlib import import_module
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from pluggy import PluginManager, PluginValidationError

from kvcore import distributions, hookspecs
from kvcore.errors import InputError, KvcoreError, PluginError
from kvcore.hookspecs import PROJECT, Mode, Ran, Verb
from kvcore.plugins.base import FAILURES, Plugin, incomplete, qualified
from kvcore.plugins.options import Spec, instantiate, nearest, parse

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from kvcore.distributions import Point

KINDS = {
    "eviction": "kvcore_eviction_policies",
    "prefix": "kvcore_prefix_indexes",
    "retention": "kvcore_retention_policies",
    "scheduler": "kvcore_schedulers",
    "rules": "kvcore_rules",
    "latency": "kvcore_latency_models",
    "backend": "kvcore_backends",
    "codec": "kvcore_codecs",
    "tier": "kvcore_tiers",
    "generator": "kvcore_generators",
    "workload": "kvcore_workloads",
    "router": "kvcore_routers",
    "drafter": "kvcore_drafters",
    "checkpoint": "kvcore_checkpoint_policies",
}
"""The kinds of plugins, and the hook that returns the classes of each kind."""

EXTENSIONS = (
    *("kvcore_commands", "kvcore_modes", "kvcore_options", "kvcore_formats"),
    *("kvcore_running", "kvcore_ran"),
)
"""The other hooks: formats of files, and those that add to the command line."""

ALIASES = {("codec", "fp8"): "fp8-e4m3"}
"""Other names of plugins, by kind and name."""

REMOVED = {("eviction", "adaptive"): "it hit what lru hits; hazard hits more"}
"""Why plugins of an earlier release are no more, by kind and name."""

BOUNDS = ("belady", "optimum")
"""Names beside those of eviction policies in comparisons, which are not plugins."""

DISABLE = "KVCORE_DISABLE_PLUGINS"
"""Environment variable: the entry points to skip, by name, separated by commas."""


class Origin(NamedTuple):
    """The origin of a plugin: an entry point of a distribution, or code (no distribution)."""

    name: str
    distribution: str | None = None
    version: str | None = None

    @classmethod
    def from_point(cls, point: EntryPoint | Point) -> Origin:
        """Return the origin of the plugins of an entry point."""
        if point.dist is None:
            return cls(point.name)
        return cls(point.name, point.dist.name, point.dist.version)

    def __str__(self) -> str:
        """Return the origin in the words of error messages."""
        if self.distribution is None:
            return f"{self.name} (registered in code)"
        return f"entry point {self.name!r} of {self.distribution} {self.version}"


Found: TypeAlias = tuple[type[Plugin] | str, Origin]
"""A class, or its place as `package.module:Class`, and its origin."""


class PluginInfo(NamedTuple):
    """A plugin in a listing, which does not build it.

    Attributes:
        kind: its kind; None for an entry point that cannot be loaded.
        name: its name; that of the entry point if this cannot be loaded.
        distribution, version: its distribution; None for a plugin registered in code.
        module: the module of its class.
        usable: whether it can work here.
        reason: the reason why it cannot; None if it can.
    """

    kind: str | None
    name: str
    distribution: str | None
    version: str | None
    module: str
    usable: bool
    reason: str | None


class _Hooks(PluginManager):
    """Looks for hooks faster than pluggy, which asks `inspect` about each name of a module."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """Return the options of a hook; None if there is none of that name."""
        options = _marked(plugin, name, f"{PROJECT}_impl")
        return super().parse_hookimpl_opts(plugin, name) if options is ... else options

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> Any:
        """Return the options of a specification; None if there is none of that name."""
        options = _marked(module_or_class, name, f"{PROJECT}_spec")
        return super().parse_hookspec_opts(module_or_class, name) if options is ... else options


def _marked(module: object, name: str, mark: str) -> Any:
    """Return the options of a function of a module, or None; ... where pluggy has to look."""
    value = vars(module).get(name) if isinstance(module, ModuleType) else ...
    if value is ... or isinstance(value, (MethodType, classmethod, staticmethod)):
        return ...
    return vars(value).get(mark) if isinstance(value, FunctionType) else None


class Plugins:
    """The plugins of one program. There is no global instance.

    The constructor imports the modules of the entry points in the group `kvcore`, in order of
    (distribution, name), and then registers `extra`: more modules or objects with hooks. The
    hook of a kind is called once, at the first lookup of that kind. Entry points named in the
    environment variable KVCORE_DISABLE_PLUGINS, as `name` or `distribution:name`, are
    skipped; one that does not exist is a fault. `entry_points` replaces the installed ones.

    A broken entry point or plugin is listed as unusable, and named in the error of a plugin
    that is not found; all others work. One in `extra`, or of no distribution, raises at once.

    Raises:
        PluginError: kvcore is not installed, or one that raises at once is broken.
    """

    def __init__(
        self,
        extra: Iterable[object] = (),
        entry_points: Iterable[EntryPoint | Point] | None = None,
    ) -> None:
        """Load the entry points, then `extra`."""
        self._points = None if entry_points is None else list(entry_points)
        self._extra = list(extra)
        self._manager = _Hooks(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._origins: dict[str, Origin] = {}
        self._skipped: list[PluginInfo] = []
        self._misnamed: list[str] = []
        # By kind and name; a kind is there once it has been looked up.
        self._classes: dict[str, dict[str, Found]] = {}
        self._unusable: list[PluginInfo] = []
        # Verbs and modes, by hook and name.
        self._named: dict[str, dict[str, tuple[Any, Origin]]] = {}
        for origin, point in self._enabled():
            try:
                self._register(origin, _imported(origin, point))
            except PluginError as fault:
                from kvcore.plugins._installation import outdated  # noqa: PLC0415

                reason = "; ".join(filter(None, [str(fault), outdated([point])]))
                module = point.value.partition(":")[0]  # `point.module` needs a valid value
                self._refuse(None, origin.name, origin, module, reason)
        for index, plugin in enumerate(self._extra):
            self._register(Origin(f"extra[{index}]"), plugin)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments: a copy in another process loads the plugins again."""
        return type(self), (self._extra, self._points)

    def names(self, kind: str) -> list[str]:
        """Return the names of the plugins of `kind`, sorted."""
        return sorted(self._find(kind))

    def classes(self, kind: str, names: Collection[str] | None = None) -> dict[str, Any]:
        """Return the classes of `kind` by name, without those that cannot be loaded.

        `names` are the names of those to load, if there are such; None: all.
        """
        known = self._find(kind)
        names = [name for name in (known if names is None else names) if name in known]
        return {name: cls for name in names if (cls := self._class(kind, name)) is not None}

    def get(self, kind: str, name: str) -> Any:
        """Return the class named `name`, derived from the kind's base class.

        `my.py:Class` is the class of that name in the file `my.py`, which is run; `my.py`, or
        `my.py:`, is its only class of that kind.

        Raises:
            InputError: there is no such kind, no such plugin, or no such file.
            PluginError: the plugin is broken, or it is not found and a broken one may have
                that name, or an editable install is older than its checkout's entry points.
        """
        known = self._find(kind)
        if in_file := re.fullmatch(r"(.+\.py)(?::([^:]*))?", name):
            return _class_of_file(kind, in_file[1], in_file[2] or "")
        name = ALIASES.get((kind, name.lower()), name)
        if name not in known and name.lower() in known:
            name = name.lower()
        if name in known and (cls := self._class(kind, name)) is not None:
            return cls
        for info in self._unusable:
            if (info.kind, info.name) == (kind, name):
                raise PluginError(info.reason)
        names = sorted(known)
        bounds = BOUNDS if kind == "eviction" else ()
        msg = f"no {kind} plugin is named {name!r}"
        if name in bounds:
            msg += ": it is no policy but a bound, and comparisons alone know it"
        elif (kind, name) in REMOVED:
            msg += f" any more: {REMOVED[kind, name]}"
        else:
            msg += nearest(name, [*names, *bounds])
        msg += f". There are: {', '.join(names)}" if names else ". There are none"
        msg += f"; in comparisons also the bounds {', '.join(bounds)}" if bounds else ""
        raise self.not_found(kind, msg)

    def not_found(self, kind: str, message: str) -> KvcoreError:
        """Return the error `message` about a plugin of `kind` that is not found.

        It adds possible causes: skipped or broken plugins, or an outdated installation. `kind`
        may be a hook too: that of verbs, or that of modes, which have options. If it is empty,
        only entry points are named.
        """
        if kind in KINDS:
            self._find(kind)
        message += self.skips
        causes = [info.reason for info in self._unusable if info.kind in (None, kind)]
        if not causes:
            from kvcore.plugins._installation import outdated  # noqa: PLC0415

            causes = [outdated(self._points)]
        text = "\n".join([message, *filter(None, causes)])
        return InputError(text) if text == message else PluginError(text)

    @property
    def skips(self) -> str:
        """The entry points that are skipped, for the end of an error; empty if none is."""
        names = ", ".join(info.name for info in self._skipped)
        return f" ({DISABLE} skips {names})" if names else ""

    def build(
        self, kind: str, spec: str | Spec, defaults: Mapping[str, Any] | None = None
    ) -> Any:
        """Build the plugin that a text such as `lfu:half_life=300,unit=s` describes.

        `defaults` are values of options that the text leaves out; names that the plugin does
        not have are ignored.

        Raises:
            InputError: not one plugin, or an unknown name, option or value.
            PluginError: the plugin is broken or cannot work here.
        """
        wanted = [spec] if isinstance(spec, Spec) else parse(spec)
        if len(wanted) != 1:
            msg = f"{spec!r} names {len(wanted)} {kind} plugins where one is needed"
            raise InputError(msg)
        return _built(self.get(kind, wanted[0].name), wanted[0].options, defaults)

    def build_many(self, kind: str, text: str) -> list[Any]:
        """Build each plugin of a list such as `lru,lfu:half_life=300,unit=s,cost`.

        Raises:
            InputError, PluginError: as `build` does.
        """
        return [self.build(kind, spec) for spec in parse(text)]

    def verbs(self, taken: Collection[str] = ()) -> dict[str, Verb]:
        """Return the verbs that packages add to the command line, by name; none is `taken`."""
        added = self._collected("kvcore_commands", taken)
        return {name: verb for name, (verb, _) in added.items()}

    def modes(self, taken: Collection[str] = ()) -> dict[str, Mode]:
        """Return the modes that packages add, by name; none is `taken`."""
        added = self._collected("kvcore_modes", taken)
        return {name: mode for name, (mode, _) in added.items()}

    def formats(self) -> dict[str, list[set[str]]]:
        """Return fields of files that are of one workload alone, by its name."""
        results = self._called("kvcore_formats", _are_formats, "a dict of lists of sets")
        return {name: fields for _, formats in results for name, fields in formats.items()}

    def refuse_mode(self, name: str, error: BaseException) -> None:
        """Remove a mode that cannot be used, and list it as unusable."""
        mode, origin = self._named["kvcore_modes"].pop(name)
        reason = f"options of mode {name!r} of {origin} ({mode.options}) cannot be imported: "
        self._refuse("kvcore_modes", name, origin, "", f"{reason}{error!r}{error_line(error)}")

    def options(self, verb: str) -> Iterator[tuple[Origin, Callable[[Any], Any]]]:
        """Yield the options that packages add to a verb, each with its origin.

        Those of kvcore come first: no other package takes their flags.
        """
        hook, expected = "kvcore_options", "a list of options"
        results = self._called(hook, _are_options, expected, verb)
        for origin, added in sorted(
            results, key=lambda result: result[0].distribution != PROJECT
        ):
            yield from ((origin, option) for option in added)

    def refuse_option(self, origin: Origin, reason: str) -> None:
        """List an option that a package adds to a verb as unusable."""
        named = reason if str(origin) in reason else f"an option of {origin}: {reason}"
        self._refuse("kvcore_options", origin.name, origin, "", named)

    def results(self, hook: str, **arguments: Any) -> Iterator[Any]:
        """Call each implementation of a hook; yield the results that are not None.

        Raises:
            PluginError: one of them raised another error than those of kvcore, or returned
                something of another type.
        """
        context: tuple[type, str] = (AbstractContextManager, "context manager")
        wanted = (Ran, "Ran") if hook == "kvcore_ran" else context
        for implementation in self._implementations(hook):
            origin = self._origin(implementation)
            known = {name: arguments[name] for name in implementation.argnames}
            try:
                result = implementation.function(**known)
            except KvcoreError:
                raise
            except FAILURES as error:
                raise PluginError(_reason(hook, origin, error)) from error
            if isinstance(result, wanted[0]):
                yield result
            elif result is not None:
                msg = f"{hook} of {origin} returned {result!r:.200}, not a {wanted[1]}"
                raise PluginError(msg)

    def bug(self, error: BaseException) -> str | None:
        """Return an error text if a package or a file raised `error`; None if kvcore did.

        The innermost frame of either tells.
        """
        from traceback import walk_tb  # noqa: PLC0415 - for errors alone

        packages = {
            getattr(plugin, "__name__", type(plugin).__module__).partition(".")[0]: origin
            for name, plugin in self._manager.list_name_plugin()
            if (origin := self._origins[name]).distribution != PROJECT
        }
        for frame, line in reversed(list(walk_tb(error.__traceback__))):
            package = str(frame.f_globals.get("__name__")).partition(".")[0]
            file = frame.f_code.co_filename
            if package in packages or file in sys.modules:  # the module of a file has its path
                return f"{packages.get(package, 'a plugin')} raised {error!r} ({file}:{line})"
            if package.startswith(PROJECT):
                break
        return None

    def faults(self, *kinds: str | None) -> list[str]:
        """Return why plugins of some kinds, results of hooks, or entry points are unusable.

        The kind of an entry point that cannot be loaded is None. Names of entry points to skip
        that do not exist come first.
        """
        unusable = [info.reason or "" for info in self._unusable if info.kind in kinds]
        return [*self._misnamed, *unusable]

    def listing(self) -> list[PluginInfo]:
        """Return all plugins by kind and name, then entry points that are not used."""
        infos = []
        for kind in KINDS:
            for name, cls in self.classes(kind).items():
                origin = self._find(kind)[name][1]
                reason = _unavailable(cls)
                about = *origin[1:], cls.__module__
                infos.append(PluginInfo(kind, name, *about, reason is None, reason))
        kinds = [*KINDS, *EXTENSIONS, None]
        return sorted(
            [*infos, *self._unusable, *self._skipped],
            key=lambda info: (kinds.index(info.kind), info.name),
        )

    def additions(self) -> list[PluginInfo]:
        """Return the verbs and the modes that packages add; none of them is imported."""
        infos = []
        for kind, hook in (("verb", "kvcore_commands"), ("mode", "kvcore_modes")):
            for name, (value, origin) in sorted(self._collected(hook, ()).items()):
                import_path = value.command if kind == "verb" else value.parts
                about = *origin[1:], import_path.partition(":")[0]
                infos.append(PluginInfo(kind, name, *about, usable=True, reason=None))
        return infos

    def _enabled(self) -> Iterator[tuple[Origin, EntryPoint | Point]]:
        """Yield the entry points that are not skipped, in the order of loading."""
        disabled = {name.strip() for name in os.environ.get(DISABLE, "").split(",")} - {""}
        points = self._points
        if points is None:
            points = _with_own(distributions.entry_points(PROJECT))
        pairs = [(Origin.from_point(point), point) for point in points]
        unknown = set(disabled)
        for origin, point in sorted(pairs, key=lambda o: (o[0].distribution or "", o[0].name)):
            names = {origin.name, f"{origin.distribution}:{origin.name}"}
            unknown -= names
            if disabled.isdisjoint(names):
                yield origin, point
            else:
                about = *origin, point.value.partition(":")[0]
                reason = f"{DISABLE} skips it"
                self._skipped.append(PluginInfo(None, *about, usable=False, reason=reason))
        if unknown and self._points is None:
            known = sorted({origin.name for origin, _ in pairs})
            named = ", ".join(f"{name!r}{nearest(name, known)}" for name in sorted(unknown))
            text = f"{DISABLE}: no entry point is named {named}. There are: {', '.join(known)}"
            self._misnamed.append(text)

    def _register(self, origin: Origin, plugin: object) -> None:
        manager, name = self._manager, str(len(self._origins))
        if manager.is_registered(plugin):
            return
        self._origins[name] = origin
        try:
            manager.register(plugin, name)
            manager.check_pending()
        except FAILURES as error:
            manager.unregister(name=name)
            msg = f"{origin} {_misfit(plugin, error)}"
            raise PluginError(msg) from error
        if not manager.get_hookcallers(plugin):
            msg = (
                f"{origin} has no hooks: it is {plugin!r}, where no function is marked with "
                "kvcore.hookimpl"
            )
            raise PluginError(msg)

    def _find(self, kind: str) -> dict[str, Found]:
        """Return the classes of `kind` by name, or their places, each with its origin."""
        if kind not in KINDS:
            msg = f"{kind!r} is no kind of plugin{nearest(kind, KINDS)}. The kinds are: "
            raise InputError(msg + ", ".join(KINDS))
        if kind not in self._classes:
            self._classes[kind] = self._collect(kind)
        return self._classes[kind]

    def _implementations(self, hook: str) -> list[Any]:
        """Return the implementations of a hook, in the order of their registration."""
        return list(getattr(self._manager.hook, hook).get_hookimpls())

    def _origin(self, implementation: Any) -> Origin:
        return self._origins[implementation.plugin_name]

    def _called(
        self,
        hook: str,
        fits: Callable[[Any], bool],
        expected: str,
        *arguments: str,
        kind: str | None = None,
    ) -> Iterator[tuple[Origin, Any]]:
        """Call each implementation of a hook; yield the results that fit, with their origins.

        An implementation that raises, or returns something else, is listed as unusable.
        """
        for implementation in self._implementations(hook):
            origin, module = self._origin(implementation), implementation.function.__module__
            try:
                result = implementation.function(*arguments[: len(implementation.argnames)])
                if not fits(result):
                    msg = f"{hook} of {origin} returned {result!r:.200}, not {expected}"
                    raise PluginError(msg)
            except FAILURES as error:
                reason = _reason(hook, origin, error)
                self._refuse(kind or hook, origin.name, origin, module, reason)
            else:
                yield origin, result

    def _collected(self, hook: str, taken: Collection[str]) -> dict[str, tuple[Any, Origin]]:
        """Return the verbs or the modes of packages by name, each with its origin.

        Of two of the same name neither is returned, and none whose name is `taken`.
        """
        if hook not in self._named:
            self._named[hook] = self._gathered(hook)
        named = self._named[hook]
        for name in sorted(named.keys() & taken):
            origin = named.pop(name)[1]
            reason = f"{hook} of {origin}: {name!r} is of the core; rename it"
            self._refuse(hook, name, origin, "", reason)
        return named

    def _gathered(self, hook: str) -> dict[str, tuple[Any, Origin]]:
        wanted = Verb if hook == "kvcore_commands" else Mode
        fits, expected = partial(_are_named, wanted), f"a dict of {wanted.__name__}"
        claims: dict[str, list[tuple[Any, Origin]]] = {}
        for origin, result in self._called(hook, fits, expected):
            for name, value in result.items():
                claims.setdefault(name, []).append((value, origin))
        for name, ((_, first), *others) in claims.items():
            for _, origin in others:
                reason = (
                    f"{hook}: {name!r} is of {first} and of {origin}; rename one, or skip an "
                    f"entry point with {DISABLE}"
                )
                self._refuse(hook, name, origin, "", reason)
        return {name: own[0] for name, own in claims.items() if len(own) == 1}

    def _claims(self, kind: str) -> dict[str, list[Found]]:
        """Return the results of the hook of `kind`, by name; broken ones become unusable."""
        hook, expected = KINDS[kind], "a list of classes"
        claims: dict[str, list[Found]] = {}
        for origin, classes in self._called(hook, _are_classes, expected, kind=kind):
            if isinstance(classes, dict):
                for name, import_path in classes.items():
                    claims.setdefault(name, []).append((import_path, origin))
                continue
            for cls in classes:
                fault = _fault(cls, kind)
                if fault:
                    name, module = (getattr(cls, n, None) for n in ("name", "__module__"))
                    reason = f"{hook} of {origin} returned {fault}"
                    self._refuse(kind, str(name), origin, str(module), reason)
                else:
                    claims.setdefault(cls.name, []).append((cls, origin))
        return claims

    def _collect(self, kind: str) -> dict[str, Found]:
        """Return the classes of `kind` by name; of two of the same name, neither.

        A class that is registered twice is one.
        """
        claims = self._claims(kind)
        for name, claimed in claims.items():
            if len(claimed) == 1:
                continue
            usable: list[tuple[type[Plugin], Origin]] = []
            for place, origin in claimed:
                cls = self._located(kind, name, place, origin)
                if cls is not None and all(cls is not other for other, _ in usable):
                    usable.append((cls, origin))
            claims[name] = list(usable)
            if len(usable) > 1:
                first, second, *_ = (f"{qualified(cls)} of {origin}" for cls, origin in usable)
                reason = (
                    f"two {kind} plugins are named {name!r}: {first}, and {second}; rename "
                    f"one, or skip the entry point of one with {DISABLE}"
                )
                for cls, origin in usable:
                    self._refuse(kind, name, origin, cls.__module__, reason)
        return {name: usable[0] for name, usable in claims.items() if len(usable) == 1}

    def _class(self, kind: str, name: str) -> type[Plugin] | None:
        """Return the class of that name, importing it first; None if it is broken."""
        known = self._find(kind)
        cls = self._located(kind, name, *known[name])
        if cls is None:
            del known[name]
        else:
            known[name] = cls, known[name][1]
        return cls

    def _located(
        self, kind: str, name: str, place: type[Plugin] | str, origin: Origin
    ) -> type[Plugin] | None:
        """Return the class at a place, or None if it has another name or kind."""
        if isinstance(place, type):
            return place
        module = place.partition(":")[0]
        try:
            cls = imported_place(place)
        except FAILURES as error:
            fault = f"which cannot be imported: {error!r}"
        else:
            wrong = _fault(cls, kind)
            if not wrong and cls.name == name:
                return cast("type[Plugin]", cls)
            fault = f"where there is {wrong or f'{qualified(cls)}, named {cls.name!r}'}"
        reason = f"{KINDS[kind]} of {origin} returned {place!r} for {name!r}, {fault}"
        self._refuse(kind, name, origin, module, reason)
        return None

    def _refuse(
        self, kind: str | None, name: str, origin: Origin, module: str, reason: str
    ) -> None:
        """List a plugin, or a whole entry point, as unusable.

        Raises:
            PluginError: it was registered in code, so it is no part of an installation.
        """
        if origin.distribution is None:
            raise PluginError(reason)
        info = PluginInfo(kind, name, *origin[1:], module, usable=False, reason=reason)
        if info not in self._unusable:  # the options of a verb may be asked for twice
            self._unusable.append(info)


def resolve(
    kind: str, given: object, default_name: str | None = None, plugins: Plugins | None = None
) -> Any:
    """Return the plugin of `kind` that `given` stands for.

    `given` may be an instance, which is returned; a class, which is built without options, or
    a function that builds one; a text such as `lfu:half_life=300` or a `Spec`, which is looked
    up in `plugins` (None: in the installed ones); or None, which stands for the built-in plugin
    `default_name`, or for None without a default.

    Raises:
        InputError: `given`, or what it builds, has another type or kind, or an unknown name.
        PluginError: the plugin is broken, has no name, or cannot work here.
    """
    if given is None:
        return default_name and default(kind, default_name)()
    if callable(given) and not isinstance(given, type | Plugin):
        given = given()
    if isinstance(given, (str, Spec)):
        known = plugins or installed()
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
    if fault := _fault(cls, kind):
        msg = f"{kind} plugin {fault}"
        raise PluginError(msg)
    return _built(cls, {})


@cache
def default(kind: str, name: str) -> Any:
    """Return the built-in class of `kind` named `name`, through its entry point.

    Reads kvcore's own entry points alone. The result is cached.

    Raises:
        InputError, PluginError: as `Plugins.get` does.
    """
    points = _with_own(distributions.entry_points(PROJECT, of=PROJECT))
    return Plugins(entry_points=points).get(kind, name)


def base_of(kind: str) -> type[Plugin]:
    """Return the base class of the plugins of `kind`.

    It is looked up only for messages: the base classes are in packages above this one.
    """
    front = import_module(PROJECT)
    for name in front.__all__:
        with suppress(ImportError):  # of a package that is not installed
            value = getattr(front, name)
            if isinstance(value, type) and vars(value).get("kind") == kind:
                return value
    raise LookupError(kind)


def check_name(plugin: Plugin | type[Plugin]) -> None:
    """Check that a plugin, or a class of plugins, has a name, which traces and tables need.

    Raises:
        PluginError: it has none.
    """
    cls = plugin if isinstance(plugin, type) else type(plugin)
    name = getattr(plugin, "name", None)
    if not isinstance(name, str):
        msg = (
            f"{cls.kind} plugin {qualified(cls)} has no name ({name!r}): give the class one, "
            f"such as name = {cls.__name__.lower()!r}"
        )
        raise PluginError(msg)


def installed() -> Plugins:
    """Return the installed plugins. The result is cached.

    They are loaded again after `sys.path` or KVCORE_DISABLE_PLUGINS has changed.

    Raises:
        PluginError: kvcore is not installed.
    """
    return _installed(tuple(sys.path), os.environ.get(DISABLE))


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...], disabled: str | None) -> Plugins:
    """Return the plugins on this `sys.path`, without the disabled ones."""
    del path, disabled
    return Plugins()


def _with_own(points: list[EntryPoint | Point]) -> list[EntryPoint | Point]:
    """Return `points` after a check that kvcore's own are among them.

    Raises:
        PluginError: they are missing; the message has the command to run.
    """
    if not any(point.dist and point.dist.name == PROJECT for point in points):
        from kvcore.plugins._installation import missing  # noqa: PLC0415

        raise PluginError(missing())
    return points


def _imported(origin: Origin, point: EntryPoint | Point) -> object:
    try:
        return point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as a panic of a module in Rust is
        reason = f"{type(error).__name__}: {error}{error_line(error)}"
        msg = f"{origin} ({point.value}) cannot be imported: {reason}"
        raise PluginError(msg) from error


def _reason(hook: str, origin: Origin, error: BaseException) -> str:
    """Return an error text for a hook that raised `error`."""
    if isinstance(error, PluginError):
        return str(error)
    return f"{hook} of {origin} raised {error!r}{error_line(error)}"


def error_line(error: BaseException) -> str:
    """Return the file and the line of a plugin where an error was raised, in brackets."""
    from traceback import extract_tb  # noqa: PLC0415 - for errors alone

    frames = extract_tb(error.__traceback__)[1:]
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in frames
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    return f" ({lines[-1]})" if lines else ""


def imported_place(place: str) -> Any:
    """Import and return the object at a place, `package.module:name`."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def _class_of_file(kind: str, file: str, name: str) -> type[Plugin]:
    """Return the class `name` of a file, which is run once; without a name its only one.

    Raises:
        InputError: there is no such file, or it has other classes, or several.
        PluginError: it raised an error, or has no class of this kind.
    """
    path = Path(file).resolve()
    if not path.is_file():
        msg = f"{kind} plugin {file}{name and ':'}{name}: there is no such file"
        raise InputError(msg)
    # Its path is a name that no installed module has.
    module_name = str(path)
    module = sys.modules.get(module_name)
    if module is None:
        from importlib.util import module_from_spec, spec_from_file_location  # noqa: PLC0415

        spec: Any = spec_from_file_location(module_name, path)
        module = sys.modules[module_name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except FAILURES as error:
            del sys.modules[module_name]
            msg = f"{kind} plugin {file}:{name} raised {error!r}{error_line(error)}"
            absent = str(error.name) if isinstance(error, ModuleNotFoundError) else "."
            if {path.parent / absent, path.parent / f"{absent}.py"} & {*path.parent.iterdir()}:
                msg += f": it is beside the file: set PYTHONPATH={path.parent}"
            raise PluginError(msg) from error
    defined = {key: cls for key, cls in vars(module).items() if isinstance(cls, type)}
    classes = {key: cls for key, cls in defined.items() if not _fault(cls, kind)}
    if name in classes:
        return cast("type[Plugin]", classes[name])
    own = sorted(key for key, cls in classes.items() if cls.__module__ == module_name)
    if not name and len(own) == 1:
        return cast("type[Plugin]", classes[own[0]])
    # None, or several: the error says what there is instead.
    unusable = [
        cls
        for cls in defined.values()
        if cls.__module__ == module_name and issubclass(cls, Plugin) and not own
    ]
    if not name and unusable:
        msg = f"{file} has {_fault(unusable[0], kind)}"
    elif not name:
        msg = f"{file} has {len(own) or 'no'} classes to choose from; write {file}:CLASS"
    elif name in vars(module):
        msg = f"{file}:{name} is {_fault(vars(module)[name], kind)}"
    else:
        msg = f"{file} has no class {name!r}{nearest(name, own)}"
    msg += f". Its {kind} plugins: {', '.join(own) or 'none'}"
    raise (InputError if own and name not in vars(module) else PluginError)(msg)


def _misfit(plugin: object, error: BaseException) -> str:
    """Return an error text for the hooks of `plugin`, which pluggy refused with `error`."""
    from inspect import signature  # noqa: PLC0415 - for errors alone

    if not isinstance(error, PluginValidationError):
        return f"has hooks that cannot be read: {error!r}"
    known = [*KINDS.values(), *EXTENSIONS]
    for name in dir(plugin):
        function = getattr(plugin, name, None)
        if not hasattr(function, f"{PROJECT}_impl"):
            continue
        if name not in known:
            return (
                f"implements {name!r}, which is no hook of kvcore{nearest(name, known)}. "
                f"The hooks are {', '.join(known)}"
            )
        passed = list(signature(getattr(hookspecs, name)).parameters)
        wanted = list(signature(function).parameters)  # type: ignore[arg-type]
        if surplus := [parameter for parameter in wanted if parameter not in passed]:
            return (
                f"implements {name!r} with an argument {surplus[0]!r}, which kvcore does not "
                f"pass: write {name}({', '.join(passed)})"
            )
    return f"has a hook that does not fit: {error}"


def _built(cls: Any, options: Mapping[str, Any], defaults: Any = None) -> Any:
    if (reason := _unavailable(cls)) is not None:
        msg = f"{cls.kind} plugin {cls.name!r} cannot work here: {reason}"
        raise PluginError(msg)
    return instantiate(cls, options, defaults)


def _unavailable(cls: type[Plugin]) -> str | None:
    try:
        return cls.unavailable()
    except FAILURES as error:  # a listing must not fail at one plugin
        return f"{qualified(cls)}.unavailable raised {error!r}"


def _are_classes(result: object) -> bool:
    """Return True if `result` is a list, or has places of classes, by the names of plugins."""
    return isinstance(result, list) or (
        _are_named(str, result)
        and all(":" in import_path for import_path in cast("Any", result).values())
    )


def _are_named(kind: Any, result: object) -> bool:
    """Return True if `result` is a dict of texts, verbs or modes, by name."""
    return isinstance(result, dict) and all(
        isinstance(name, str)
        and isinstance(value, kind)
        # Both fields of a verb are texts.
        and (kind is not Verb or all(isinstance(field, str) for field in value))
        for name, value in result.items()
    )


def _are_formats(result: object) -> bool:
    """Return True if `result` has lists of sets of names of fields, by names of workloads."""
    return isinstance(result, dict) and all(
        isinstance(formats, list) and all(isinstance(fields, set) for fields in formats)
        for formats in result.values()
    )


def _are_options(result: object) -> bool:
    """Return True if `result` is a list of decorators, as `click.option` returns them."""
    return isinstance(result, list) and all(map(callable, result))


def _fault(cls: object, kind: str) -> str | None:
    """Return an error text if `cls` is no usable plugin class of `kind`, or None."""
    if not (
        isinstance(cls, type) and issubclass(cls, Plugin) and getattr(cls, "kind", None) == kind
    ):
        return f"{cls!r}, which is not a class derived from {qualified(base_of(kind))}"
    if fault := incomplete(cls):
        return f"{qualified(cls)}, {fault}"
    name = getattr(cls, "name", None)
    if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)):
        return (
            f"{qualified(cls)}, whose name is {name!r}; a plugin class needs an attribute "
            "`name` of letters, digits, `_`, `-` and `.`"
        )
    return None
