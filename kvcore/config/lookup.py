"""Find a workload among plugins and files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvcore.errors import InputError
from kvcore.files import input_path, unreadable_reason
from kvcore.plugins.base import Plugin, options_of
from kvcore.plugins.manager import Plugins
from kvcore.plugins.options import nearest, takes_path
from kvcore.workloads import Workload, recognise

BUNDLED = "mooncake"
"""The workload that comes with kvcore."""


def find_workload(text: str | None, plugins: Plugins, seed: int | None = None) -> Workload:
    """Return the workload that `text` names: a plugin with options, or the path of a file.

    None is the trace that comes with kvcore. A plugin's name comes first: `./zipf` is a
    file, and `-` is standard input. `trace:FILE` is short for `trace:path=FILE`, of any
    plugin whose first option is a path; further options may follow. `seed` is that of a
    plugin with an option `seed` that does not set it.

    Raises:
        InputError: neither, or a plugin or file that cannot be used as given.
    """
    text = BUNDLED if text is None else text
    if not text:
        msg = "workload '': empty path; name a file or a workload plugin"
        raise InputError(msg)
    name = text.partition(":")[0].strip()
    names = plugins.names("workload")
    if name in names:
        text = with_path(text, plugins.get("workload", name))
        defaults = {} if seed is None else {"seed": seed}
        workload: Workload = plugins.build("workload", text, defaults)
        return workload
    path = input_path(text)
    try:
        path.lstat()
    except PermissionError as error:
        msg = f"{path}: cannot be read: {unreadable_reason(path, error)}"
        raise InputError(msg) from error
    except OSError:
        msg = (
            f"workload {text!r}: there is no such file, and no workload plugin is named "
            f"{name!r}{nearest(name, names)}. There are: {', '.join(names)}"
        )
        raise plugins.not_found("workload", msg) from None  # noqa: EM101 - the kind
    return recognise(path, [plugins.get("workload", known) for known in names])


def opened(workload: Any, plugins: Plugins) -> Any:
    """Return a workload: the one that a text or path names; anything else as it is."""
    if isinstance(workload, os.PathLike):
        return find_workload(str(Path(workload).absolute()), plugins)
    return find_workload(workload, plugins) if isinstance(workload, str) else workload


def with_path(text: str, cls: type[Plugin]) -> str:
    """Return the text of a plugin with the name of its option before a leading path."""
    name, _, rest = text.partition(":")
    first = rest.partition(",")[0]
    option = next((option.name for option in options_of(cls)), "")
    if first.strip() and "=" not in first and takes_path(cls, option):
        return f"{name}:{option}={rest.strip()}"
    return text
