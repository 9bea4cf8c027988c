"""How every verb reads a model: a name of the catalogue, or a config file."""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING

from kvcore.errors import InputError
from kvcore.models.catalogue import MODELS, find_model
from kvcore.models.huggingface import read_config

if TYPE_CHECKING:
    from kvcore.models.spec import ModelSpec


def find_or_read(text: str, weights_dtype: str | None = None) -> ModelSpec:
    """Return the well-known model called `text`, or the one that the file at `text` describes.

    A file or folder that exists is read, as is whatever looks like a path; a name of the
    catalogue means the catalogue all the same.

    Args:
        text: a name, a Hugging Face `config.json`, or the folder it lies in.
        weights_dtype: of the weights, if not as released.

    Raises:
        InputError: neither a known name nor a file that can be used.
    """
    is_path = text.endswith(".json") or os.sep in text
    if is_path or (text not in MODELS and os.path.exists(text)):  # noqa: PTH110 - never raises
        return read_config(text, weights_dtype)
    try:
        model = find_model(text)
    except InputError as error:
        msg = f"{error}; or give the path of a model's config.json"
        raise InputError(msg) from None
    return model.with_weights(weights_dtype) if weights_dtype else model
