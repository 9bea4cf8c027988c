"""Tables of well-known models and GPUs, found by name.

They are files of data, whose README says where each row is from: `kvcore/data/models.json`, and
`devices.json` with the figures that `find_device` reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import kvcore
from kvcore.errors import InputError
from kvcore.files import DATA
from kvcore.models.layers import LayerCache
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.units import parse_bytes, parse_rate, parse_whole
from kvcore.untrusted import parse_json

Spec = TypeVar("Spec", ModelSpec, DeviceSpec)


def find_model(name: str) -> ModelSpec:
    """Return the well-known model called `name`, such as `llama-3.1-8b`.

    Raises:
        InputError: no such model; names the nearest ones.
    """
    return _find("model", MODELS, name)


def load_model(text: str, weights_dtype: str | None = None) -> ModelSpec:
    """Return the well-known model called `text`, or the one that the file at `text` describes.

    A text with a separator, or one that ends in `.json` or `.toml`, is a path. A name of the
    catalogue is that model, even if a file has the name; any other name of a file or folder is
    a path.

    Args:
        text: a name, the path of a Hugging Face `config.json`, or the folder it lies in, or
            the path of a table of TOML with the fields of a `ModelSpec`.
        weights_dtype: number format of the weights; None: as released.

    Raises:
        InputError: no known name, and no file that can be used.
    """
    if text not in MODELS:
        exists = os.path.exists(text)  # noqa: PTH110 - never raises
        near = _near(MODELS, text.partition("/")[2]) if _is_hub_id(text) and not exists else []
        if near:
            msg = (
                f"{text}: there is no such file or folder; ids of a hub are not looked up: "
                f"did you mean {' or '.join(near)}, or the config.json of that model?"
            )
            raise InputError(msg)
        if exists or os.sep in text or text.endswith((".json", ".toml")):
            # This call imports what reads files, which a model of the table does without.
            return kvcore.read_config(text, weights_dtype)
    model = _find("model", MODELS, text, "; or give the path of a model's config.json")
    return model.with_weights(weights_dtype) if weights_dtype else model


def _flops(text: str) -> int:
    return parse_whole(text.upper().removesuffix("FLOP/S").removesuffix("FLOPS"))


BY_FIGURES = "memory=141GB,bandwidth=4.8TB,flops=989T, or h100:memory=84.9GB"

_FIGURES: Mapping[str, tuple[str, Callable[[str], int]]] = {
    "memory": ("hbm_bytes", parse_bytes),
    "bandwidth": ("bandwidth", parse_rate),
    "flops": ("flops", _flops),
    "fp8_flops": ("fp8_flops", _flops),
    "fp4_flops": ("fp4_flops", _flops),
    "host_link": ("host_link", parse_rate),
    "link": ("link", parse_rate),
    "server_size": ("server_size", parse_whole),
}


def find_device(name: str) -> DeviceSpec:
    """Return the well-known GPU called `name`, such as `h100`, or one that is given by figures.

    Figures are `memory=141GB,bandwidth=4.8TB,flops=989T`, and if they are known `fp8_flops`,
    `fp4_flops`, `host_link` (else that of PCIe 5), `link` and `server_size` (else 8). After a
    name, as in `h100:memory=84.9GB`, they replace its own. The text is the name of that device.

    Raises:
        InputError: no such GPU; names the nearest ones. Figures that are none, or are missing.
    """
    if "=" not in name:
        return _find("device", DEVICES, name, f"; or give its figures, such as {BY_FIGURES}")
    try:
        return _by_figures(name)
    except InputError as error:
        msg = f"device {name!r}: {error}; give such as {BY_FIGURES}"
        raise InputError(msg) from None


def _by_figures(text: str) -> DeviceSpec:
    known, colon, given = text.rpartition(":")
    figures = {"host_link": "64GB"}  # of PCIe 5
    if colon:
        figures = {**DEVICES.rows[_find("device", DEVICES, known).name]}
    left = dict(_FIGURES)
    for piece in given.split(","):
        figure, _, value = (part.strip() for part in piece.partition("="))
        if left.pop(figure, None) is None:
            msg = f"{piece!r} is none of {', '.join(left)}, with = and a value, each once"
            raise InputError(msg)
        figures[figure] = value
    missing = [name for name in ("memory", "bandwidth", "flops") if name not in figures]
    if missing:
        msg = f"there is no {' and no '.join(missing)}"
        raise InputError(msg)
    return _gpu(text, figures)


def _find(what: str, table: Mapping[str, Spec], name: str, otherwise: str = "") -> Spec:
    key = name.strip().lower().replace("_", "-")
    if key in table:
        return table[key]
    near = _near(table, key)
    hint = f"known: {', '.join(sorted(table))}"
    if near:
        hint = f"did you mean {' or '.join(near)}? `kvcore size --help` lists all"
    msg = f"unknown {what} {name!r}; {hint}{otherwise}"
    raise InputError(msg)


def _is_hub_id(text: str) -> bool:
    """Return True if `text` is written as `owner/name`."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(?<!\.json)", text) is not None


def _near(table: Iterable[str], name: str) -> list[str]:
    """Return the names of a table that are most like `name`, at most three."""
    from difflib import get_close_matches  # noqa: PLC0415 - for errors alone

    return get_close_matches(name.lower(), table, n=3, cutoff=0.5)


class Source(NamedTuple):
    """The origin of the shape of a model.

    Attributes:
        config: the repository of the maker whose `config.json` has it.
        checked: the day on which the row was compared to it.
    """

    config: str
    checked: str


class _Table(Mapping[str, Spec]):
    """Rows of a file of data by name, each made when it is first asked for.

    Args:
        file: the name of the file in `kvcore/data`.
        make: makes a model or a GPU from a name and its row.
    """

    def __init__(self, file: str, make: Callable[[str, Mapping[str, Any]], Spec]) -> None:
        self.rows: Mapping[str, Mapping[str, Any]] = parse_json((DATA / file).read_bytes())
        self._make: Callable[[str, Mapping[str, Any]], Spec] = make
        self._made: dict[str, Spec] = {}

    def __getitem__(self, name: str) -> Spec:
        """Return the model or GPU called `name`."""
        if name not in self._made:
            self._made[name] = self._make(name, self.rows[name])
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        """Return True if there is one called `name`, without making it."""
        return name in self.rows

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self.rows)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.rows)


def _model(name: str, row: Mapping[str, Any]) -> ModelSpec:
    fields = {field: row[field] for field in row.keys() - _OF_SOURCES}
    if "windows" in fields:
        fields["windows"] = tuple(fields["windows"])
    fields["caches"] = tuple(LayerCache(**cache) for cache in row.get("caches", ()))
    return ModelSpec(name=name, **fields)


def _gpu(name: str, figures: Mapping[str, str]) -> DeviceSpec:
    pairs = ((*_FIGURES[figure], text) for figure, text in figures.items())
    return DeviceSpec(name=name, **{field: read(text) for field, read, text in pairs})


_OF_SOURCES = {*Source._fields, "note"}

MODELS = _Table("models.json", _model)
"""Models that were released, by name."""

SOURCES: Mapping[str, Source] = {
    name: Source(row["config"], row["checked"]) for name, row in MODELS.rows.items()
}
"""Where each model of `MODELS` is from."""

DEVICES = _Table("devices.json", _gpu)
"""GPUs by name."""
