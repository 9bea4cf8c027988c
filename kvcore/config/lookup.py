"""Find a workload among plugins and files, and a model in the catalogue or in a file."""

from __future__ import annotations

import os.path
from pathlib import Path

from kvcore.errors import InputError
from kvcore.files import unreadable_reason
from kvcore.models.catalogue import MODELS, find_model
from kvcore.models.spec import ModelSpec
from kvcore.plugins.manager import Plugins
from kvcore.plugins.options import nearest, takes_path
from kvcore.workloads import Workload, recognise

BUNDLED = "mooncake"
"""The workload that comes with kvcore."""


def find_workload(text: str | None, plugins: Plugins, seed: int | None = None) -> Workload:
    """Return the workload that `text` names: a plugin with options, or the path of a file.

    None is the trace that comes with kvcore. A plugin's name comes first: `./zipf` is a
    file. `trace:FILE` is short for `trace:path=FILE`, of any plugin that takes a path.
    `seed` is that of a plugin with an option `seed` that does not set it.

    Raises:
        InputError: neither, or a plugin or file that cannot be used as given.
    """
    text = BUNDLED if text is None else text
    if not text:
        msg = "workload '': empty path; name a file or a workload plugin"
        raise InputError(msg)
    name, _, rest = (part.strip() for part in text.partition(":"))
    names = plugins.names("workload")
    if name in names:
        if rest and "=" not in rest and takes_path(plugins.get("workload", name), "path"):
            text = f"{name}:path={rest}"
        defaults = {} if seed is None else {"seed": seed}
        workload: Workload = plugins.build("workload", text, defaults)
        return workload
    path = Path(text)
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


def load_model(text: str, weights_dtype: str | None = None) -> ModelSpec:
    """Return the well-known model called `text`, or the one that the file at `text` describes.

    A file or folder that exists is read, as is whatever looks like a path; a name of the
    catalogue means the catalogue all the same.

    Args:
        text: a name, the path of a Hugging Face `config.json`, or the folder it lies in.
        weights_dtype: number format of the weights; None: as released.

    Raises:
        InputError: neither a known name nor a file that can be used.
    """
    is_path = text.endswith(".json") or os.sep in text
    if is_path or (text not in MODELS and os.path.exists(text)):  # noqa: PTH110 - never raises
        from kvcore.models.huggingface import read_config  # noqa: PLC0415 - for files alone

        return read_config(text, weights_dtype)
    try:
        model = find_model(text)
    except InputError as error:
        msg = f"{error}; or give the path of a model's config.json"
        raise InputError(msg) from None
    return model.with_weights(weights_dtype) if weights_dtype else model
