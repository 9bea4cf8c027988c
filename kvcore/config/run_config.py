"""`RunConfig`: the options of a run, given in Python, by a TOML file or by a trace."""

from __future__ import annotations

import os
from typing import Any, Self

import attrs

from kvcore.config.files import read_toml
from kvcore.config.like import LIKENESSES
from kvcore.config.options import (
    DEFAULTS,
    Mode,
    RunOptions,
    check_names,
    option_names,
    read_option,
    renamed,
)
from kvcore.config.recorded import recorded_options
from kvcore.plugins.manager import Plugins
from kvcore.serving import Batching


@attrs.frozen(kw_only=True)
class RunConfig(RunOptions):
    """The configuration of a run: its options, as Python, a TOML file or a trace gives them.

    Attributes are those of `RunOptions`.

    Raises:
        InputError: a value that an option cannot have; begins with the option's name.
    """

    @classmethod
    def of(cls, mode: Mode = "simulate", **options: Any) -> Self:
        """Return the configuration of a mode, with that mode's defaults.

        Raises:
            InputError: an unknown option, or a value that an option cannot have.
        """
        mode, options = read_option("mode", mode), renamed(options)
        check_names(options, option_names())
        like = read_option("like", options.get("like"))
        rules = {} if like is None else LIKENESSES[like].options
        return cls(**{"mode": mode, **DEFAULTS[mode], **rules, **options})

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], mode: Mode = "simulate") -> Self:
        """Return the configuration of a TOML file, with defaults for keys that it lacks.

        Paths in the file are relative to it.

        Raises:
            InputError: no such file, no TOML, an unknown key, or a value that its option
                cannot have; names the file and the key.
        """
        return cls.of(mode, **read_toml(path))

    @classmethod
    def from_trace(cls, path: str | os.PathLike[str], plugins: Plugins | None = None) -> Self:
        """Return the configuration of the run that wrote a trace.

        Its plugins are functions that build the recorded ones, which are looked up in
        `plugins` (None: those that are installed) when they are called.

        Raises:
            InputError: the header lacks a field, or has a value that no run can have.
            TraceError: the file is no trace.
        """
        from kvcore.trace import TraceWorkload  # noqa: PLC0415 - of traces alone

        trace = TraceWorkload(path)
        header, plugins = trace.header.as_dict(), plugins or Plugins()
        return cls(**recorded_options(trace.file, header, trace, plugins))

    @property
    def timed(self) -> bool:
        """Whether the run has a clock."""
        return self.mode != "compare"

    @property
    def is_cluster(self) -> bool:
        """Whether the run is a cluster: several servers, or one that fails or stops."""
        alone = self.replicas == 1 and not self.fail
        return not alone or self.autoscale is not None or self.disaggregate is not None

    @property
    def batching(self) -> Batching:
        """The caps of a step.

        Raises:
            InputError: caps that let nothing run.
        """
        names = attrs.fields_dict(Batching)
        return Batching(**{name: getattr(self, name) for name in names})
