"""`RunConfig`: every option of a run, given by Python or by a TOML file."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, cast

import attrs

from kvcore.config.options import (
    CORE,
    find_mode,
    find_option,
    known_modes,
    option_named,
    option_names,
    read_option,
    renamed,
)
from kvcore.errors import InputError, PluginError
from kvcore.plugins.manager import imported_place, installed, resolve
from kvcore.plugins.options import Spec
from kvcore.serving import Rules

if TYPE_CHECKING:
    from kvcore.plugins import Plugins


@attrs.frozen(init=False)
class RunConfig:
    """The configuration of a run: its options by name, from which nothing is built yet.

    The options are those of `kvcore.config.options`, and those that packages declare for their
    modes; each is an attribute. Values are converted when they are stored: text such as
    `40GiB`, `ttft=30,tpot=0.1` or `lfu:half_life=300` is read. Plugins are names with options,
    instances, classes, or functions that build one. `changed` returns one with other values.

    Args:
        mode: the mode.
        plugins: the rules by name; None: those that are installed.
        options: the values of another configuration or of a record, as they are; None: the
            defaults of the mode, and of the rules in `like`.
        given: options by name.

    Attributes:
        mode: `simulate`: served in the time of a latency model; `compare`: replayed serially
            and untimed; or a mode of a package, such as `run`.
        options: the values of all options of the core, and of others those that differ from
            their defaults.

    Raises:
        InputError: an unknown mode or option, or a value that an option cannot have; begins
            with the option's name.
        PluginError: rules that are broken.
    """

    mode: str
    options: Mapping[str, Any]

    def __init__(
        self,
        mode: str = "simulate",
        plugins: Plugins | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        defaults = find_mode(mode).defaults
        if options is None:
            given = renamed(given)
            like = read_option("like", given.get("like"))
            try:
                options = {**defaults, **built_rules(like, plugins).defaults}
            except (InputError, PluginError) as error:
                msg = f"like: {error}"
                raise type(error)(msg) from error
        values = {name: option.default for name, option in CORE.items()}
        for name, value in {**options, **given}.items():
            option = option_named(name)
            read = option.read(value)
            if name in CORE or read != option.default:
                values[name] = read
        object.__setattr__(self, "mode", mode)
        object.__setattr__(self, "options", values)

    def __getattr__(self, name: str) -> Any:
        """Return the value of an option."""
        # Not yet there while a copy is being unpickled.
        if name in ("mode", "options") or name.startswith("_"):
            raise AttributeError(name)
        if name in self.options:
            return self.options[name]
        option = find_option(name)
        if option is None:
            msg = f"a configuration has no option {name!r}"
            raise AttributeError(installed().not_found("kvcore_modes", msg))
        return option.default

    def __dir__(self) -> list[str]:
        """Return the names of attributes, those of options too, for completion."""
        return sorted({*super().__dir__(), *option_names()})

    def changed(self, **options: Any) -> Self:
        """Return this configuration with other values of some options.

        Raises:
            InputError: an unknown option, or a value that an option cannot have.
        """
        return type(self)(self.mode, options=self.options, **options)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], mode: str = "simulate") -> Self:
        """Return the configuration of a TOML file, with defaults for keys that it lacks.

        Paths in the file are relative to it.

        Raises:
            InputError: no such file, no TOML, an unknown key, or a value that its option
                cannot have; names the file and the key.
        """
        from kvcore.config.files import read_toml  # noqa: PLC0415 - for files alone

        return cls(mode, **read_toml(path))

    @classmethod
    def from_trace(cls, path: str | os.PathLike[str], plugins: Plugins | None = None) -> Any:
        """Return `kvcore.recorded_config(path, plugins)`, which is this call's present name."""
        import kvcore  # noqa: PLC0415 - its table says where recorded runs are read

        text = "RunConfig.from_trace(...) is called kvcore.recorded_config(...) now; use that"
        warnings.warn(text, FutureWarning, stacklevel=2)
        return kvcore.recorded_config(path, plugins)

    @property
    def timed(self) -> bool:
        """Whether the run has a clock."""
        return self.mode != "compare"

    @property
    def chosen(self) -> dict[str, str]:
        """The modes that the options choose, by name, each with the first option that does."""
        if not self.options.keys() > CORE.keys():
            return {}
        choices = {
            name: [option for option in mode.chosen_by if option in self.options]
            for name, mode in known_modes().items()
        }
        return {name: options[0] for name, options in choices.items() if options}

    @property
    def mode_of_run(self) -> str:
        """The mode that the run is in: that which options choose, if its own is `simulate`."""
        return next(iter(self.chosen), self.mode) if self.mode == "simulate" else self.mode

    def build(self, plugins: Plugins | None = None, *, many: bool = True, **more: Any) -> Any:
        """Build the parts of the run, of the class that its mode has.

        Args:
            plugins: the plugins by name; None: those that are installed.
            many: whether they may be the parts of several servers.
            more: further arguments of `RunParts`.

        Raises:
            InputError, PluginError: as `RunParts`.
        """
        name = self.mode_of_run
        mode = find_mode(name)
        parts = imported_place(mode.parts)
        if parts.many and not many:
            msg = f"{self.chosen.get(name, 'mode')}: {mode.refusal}"
            raise InputError(msg)
        return parts(self, plugins, **more)


def built_rules(like: Any, plugins: Plugins | None = None) -> Rules:
    """Return the rules that a value of the option `like` stands for.

    `plugins` has them by name; None: those that are installed.

    Raises:
        InputError: no rules, or an option that they do not have.
        PluginError: the plugin is broken.
    """
    like = read_option("like", like)
    if like is None:
        return Rules()
    if isinstance(like, Spec):
        return cast("Rules", (plugins or installed()).build("rules", like))
    return cast("Rules", resolve("rules", like))
