"""The base class of all plugins, whatever their kind, and the options of a plugin class."""

from __future__ import annotations

import inspect
import sys
import warnings
from abc import ABC
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from time import time_ns
from types import CodeType
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, cast

import attrs

from kvcore.blake2 import blake2b
from kvcore.errors import InputError, PluginError, PolicyError


class Plugin(ABC):
    """Base of the plugin kinds.

    The options of a plugin are the parameters of its constructor. A class may be a plain one
    with `__init__`, or be decorated with `attrs.define` or `dataclasses.dataclass`; names
    that start with an underscore are no options.

    This class keeps no fields that a constructor would have to set, so a plain `__init__`
    need not call it.

    Attributes:
        kind: the kind of the plugin, such as `eviction`; set by the base class of the kind.
        name: the name of the plugin in text; unique within its kind.
        renamed_options: new names of options by their names in an earlier release; text with
            an old name works, with a FutureWarning.
        later_options: options that were added in a later release than the plugin; traces and
            reports show them only if they differ from the default.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    renamed_options: ClassVar[Mapping[str, str]] = {}
    later_options: ClassVar[Collection[str]] = ()

    __loaded__: ClassVar[int]
    _bound = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Note when the class was loaded: code that was edited later is not what runs."""
        super().__init_subclass__(**options)
        cls.__loaded__ = time_ns()

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Create an instance, unless `cls` is incomplete.

        Raises:
            PluginError: `cls` lacks a method that its kind must have, or annotates an attribute
                without the decorator that makes it an option.
        """
        del args, kwargs
        fault = incomplete(cls)
        if fault is not None:
            msg = f"{cls.kind} plugin {qualified(cls)}, {fault}"
            raise PluginError(msg)
        return super().__new__(cls)

    def __init__(self) -> None:  # noqa: B027
        """Store nothing: a plugin class without a constructor has no options."""

    def __repr__(self) -> str:
        """Return the class and its options, as code that builds an equal plugin."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        return f"{type(self).__name__}({options})"

    def bind(self) -> None:
        """Mark this instance as in use: it serves one cache or run.

        Warns of a method whose name seems to be misspelled (`uncalled`).

        Raises:
            InputError: it is in use already.
        """
        cls = type(self)
        hint = None if cls.__module__.startswith("kvcore") else uncalled(cls)
        if hint is not None:
            warnings.warn(f"{self.kind} plugin {qualified(cls)} {hint}", stacklevel=2)
        self.check_unused()
        self._bound = True

    def check_unused(self) -> None:
        """Raise InputError if this instance is in use already."""
        if self._bound:
            msg = f"this {self.kind} plugin {self.name!r} is in use already: build another one"
            raise InputError(msg)

    @classmethod
    def unavailable(cls) -> str | None:
        """Return the reason why the plugin cannot work here (no GPU, no extra), or None."""
        return None

    def options(self) -> dict[str, Any]:
        """Return the options this instance was built with, by name.

        Raises:
            PluginError: the constructor has not stored an option in the attribute of its name.
        """
        cls = type(self)
        try:
            return {
                option.name: getattr(self, option.name)
                for option in options_of(cls)
                if option.name not in cls.later_options
                or getattr(self, option.name) != option.default
            }
        except AttributeError as error:
            name = error.name
            msg = (
                f"{cls.kind} plugin {qualified(cls)} does not keep its option {name!r}, which "
                f"traces and reports show: write `self.{name} = {name}` in its __init__"
            )
            raise PluginError(msg) from error


class Option(NamedTuple):
    """A parameter of a plugin's constructor that users may set.

    Attributes:
        name: name of the option, and of the attribute that keeps its value.
        parameter: name of the constructor's parameter, which attrs may choose differently.
        annotation: type of the parameter, perhaps as text.
        default: value without the option; `REQUIRED` or `COMPUTED` if it has no fixed one.
    """

    name: str
    parameter: str
    annotation: Any
    default: Any


REQUIRED: Any = inspect.Parameter.empty
"""The default of an option that has none."""

COMPUTED: Any = attrs.NOTHING
"""The default of an option that a factory makes for each instance."""


def options_of(cls: type[Plugin]) -> list[Option]:
    """Return the options of `cls`, in the order of its constructor's parameters."""
    return list(_options_of(cls))


def _options_of(cls: type[Plugin]) -> Iterator[Option]:
    fields = {f.alias: f for f in attrs.fields(cls) if f.init} if attrs.has(cls) else {}
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    for parameter in parameters:
        field = fields.get(parameter.name)
        name = field.name if field else parameter.name
        if name.startswith("_") or parameter.kind in _VARIADIC:
            continue
        default = parameter.default
        if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":  # of dataclasses
            default = COMPUTED
        # With a converter, attrs annotates the parameter as the converter annotates its own,
        # or not at all.
        annotation = parameter.annotation
        if annotation is REQUIRED:
            annotation = (field and field.type) or Any
        yield Option(name, parameter.name, annotation, default)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def incomplete(cls: type[Plugin]) -> str | None:
    """Return an error text if `cls` lacks a method or a decorator, or None.

    `width: int = 4` in a class without a decorator is a class attribute, though its author
    may mean an option. A decorator makes a constructor that calls no other, so it is not
    advised below a constructor that is written by hand.
    """
    missing = getattr(cls, "__abstractmethods__", ())
    if missing:
        return f"which does not define {', '.join(sorted(missing))}"
    *classes, contract = contract_and_above(cls)
    for index, base in enumerate(classes):
        if vars(base).keys() & {"__init__", *_DECORATED}:
            continue
        for name, annotation in inspect.get_annotations(base).items():
            public = not (name.startswith("_") or "ClassVar" in str(annotation))
            own = (vars(c).keys() | inspect.get_annotations(c) for c in contract.__mro__)
            if public and not any(name in names for names in own):
                todo = f"write `@attrs.define(eq=False)` above `class {base.__name__}`"
                above = next((c for c in classes[index:] if "__init__" in vars(c)), None)
                if above is not None and not vars(above).keys() & _DECORATED:
                    todo = f"write an `__init__` with it that calls that of {above.__name__}"
                return (
                    f"which annotates {name!r} but has no decorator that makes it an option: "
                    f"{todo}, or `{name}: ClassVar[...]` if it is none"
                )
    return None


_DECORATED = {"__attrs_attrs__", "__dataclass_fields__"}
"""Attributes of classes whose constructor a decorator has made."""


def contract_and_above(cls: type[Plugin]) -> list[type]:
    """Return `cls` and its base classes up to the base class of its kind, which is last.

    Classes above that one may repeat its `kind`.
    """
    classes = list(takewhile(lambda base: base is not Plugin, cls.__mro__))
    kinds = [base for base in classes if "kind" in vars(base)]
    return classes[: classes.index(kinds[-1]) + 1] if kinds else [*classes, Plugin]


def uncalled(cls: type[Plugin]) -> str | None:
    """Return an error text if a public method of `cls` seems to be misspelled, or None.

    Its name is similar to that of a method of the contract that `cls` does not define, such
    as `relased`, and no method of `cls` names it, as one would call a helper.
    """
    from difflib import get_close_matches  # noqa: PLC0415 - for plugins of others alone

    methods = [value for part in contract_and_above(cls)[:-1] for value in vars(part).values()]
    for part in cls.__mro__[: cls.__mro__.index(Plugin)]:
        known = {name for base in part.__mro__[1:] for name in vars(base) if name[0] != "_"}
        own = vars(part).keys()
        bare = {name.removeprefix("on_"): name for name in known - own}
        for name in own - known:
            if name[0] == "_" or not inspect.isfunction(vars(part)[name]):
                continue
            if any(
                _calls(method, name) for method in methods if method is not vars(part)[name]
            ):
                continue
            for close in get_close_matches(name.removeprefix("on_"), bare, 1, _CLOSE):
                return f"has a method {name}(), which nothing calls: {bare[close]}() is"
    return None


def _calls(function: object, name: str) -> bool:
    """Return True if the code of `function`, or of one inside it, reads an attribute `name`."""
    codes = [getattr(getattr(function, "__func__", function), "__code__", None)]
    for code in codes:
        if code is not None:
            if name in code.co_names:
                return True
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return False


_CLOSE = 0.75
"""The similarity, from 0 to 1, above which a name counts as a misspelled one."""


def find_override(plugin: Plugin, method: str) -> Callable[..., Any] | None:
    """Return the bound `method` of `plugin`, or None if its class does not override it.

    Callers look it up once, so a method that is not overridden costs nothing.
    """
    contract = contract_and_above(type(plugin))[-1]
    if getattr(type(plugin), method) is getattr(contract, method):
        return None
    return cast("Callable[..., Any]", getattr(plugin, method))


FAILURES = (Exception, SystemExit)
"""Exceptions that count as failures of a plugin that raises them; `sys.exit()` is one."""


def policy_error(plugin: Plugin, method: str, error: BaseException) -> PolicyError:
    """Return a PolicyError which reports that `plugin` raised `error` in `method`.

    It names the innermost line of the traceback in the file that defines the plugin's class,
    or else the innermost line of all. There is none where the core in C compares priorities,
    or calls a method with arguments that it does not take.
    """
    from traceback import extract_tb  # noqa: PLC0415 - for errors alone

    frames = extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(type(plugin).__module__), "__file__", None)
    frame = [call for call in frames if call.filename == file][-1:] or frames[-1:]
    where = [f" ({Path(call.filename).name}:{call.lineno}, {call.name})" for call in frame]
    failure = PolicyError(
        f"{plugin.kind} plugin {plugin.name!r} ({qualified(type(plugin))}) raised "
        f"{type(error).__name__} in {method}(): {error}{''.join(where)}"
    )
    failure.__cause__ = error  # some callers keep it, and raise it later or never
    return failure


def raise_policy_error(plugin: Plugin, method: str, error: BaseException) -> NoReturn:
    """Raise the error of `policy_error`, or `error` itself if it is a PolicyError."""
    if isinstance(error, PolicyError):
        raise error
    raise policy_error(plugin, method, error) from error


def wrong_answer(plugin: Plugin, question: str, why: str) -> PolicyError:
    """Return a PolicyError which reports that `plugin` answered `question` with `why`."""
    return PolicyError(
        f"{plugin.kind} plugin {plugin.name!r} ({qualified(type(plugin))}) answered "
        f"{question} with {why}"
    )


def has_no_order(value: Any) -> bool:
    """Return True if a score or a priority is None or NaN, or a tuple with NaN at any depth."""
    if isinstance(value, tuple):
        return any(part is not None and has_no_order(part) for part in value)
    return value is None or bool(value != value)  # noqa: PLR0124


def describe(plugin: Plugin) -> dict[str, Any]:
    """Return the name and the options of `plugin`, in the form of trace headers and reports.

    What is in a file or a program of its own changes under one name: such a plugin has the
    digest of its file too, `source`, which `b2sum -l 128` prints; none if the file was edited
    after it was loaded, and so is not what runs.
    """
    described = {"name": plugin.name, "options": plugin.options()}
    cls = type(plugin)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is not None and cls.__module__ in (file, "__main__"):
        path = Path(file)
        if path.is_file() and path.stat().st_mtime_ns <= cls.__loaded__:
            digest = blake2b(path.read_bytes(), digest_size=16)
            described["source"] = digest.hexdigest()
    return described


def qualified(cls: type) -> str:
    """Return the full name of `cls`: module and class."""
    return f"{cls.__module__}.{cls.__qualname__}"
