"""Tables of well-known models and GPUs, found by name.

Models: `kvcore/data/models.json`. GPUs: the makers' data sheets; see `docs/reference/size.md`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import kvcore
from kvcore.errors import InputError
from kvcore.models.layers import LayerCache
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.units import parse_bytes, parse_rate, parse_whole
from kvcore.untrusted import parse_json

Spec = TypeVar("Spec", ModelSpec, DeviceSpec)


def find_model(name: str) -> ModelSpec:
    """Return the well-known model called `name`, such as `llama-3-8b`.

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
    is_path = text.endswith((".json", ".toml")) or os.sep in text
    if is_path or (text not in MODELS and os.path.exists(text)):  # noqa: PTH110 - never raises
        near = _near(MODELS, text.partition("/")[2]) if _is_hub_id(text) else []
        if near:
            msg = (
                f"{text}: there is no such file or folder; ids of a hub are not looked up: "
                f"did you mean {' or '.join(near)}, or the config.json of that model?"
            )
            raise InputError(msg)
        # The front door says where files are read: most runs name a model of the table.
        return kvcore.read_config(text, weights_dtype)
    try:
        model = find_model(text)
    except InputError as error:
        msg = f"{error}; or give the path of a model's config.json"
        raise InputError(msg) from None
    return model.with_weights(weights_dtype) if weights_dtype else model


def _flops(text: str) -> int:
    return parse_whole(text.upper().removesuffix("FLOP/S").removesuffix("FLOPS"))


BY_FIGURES = "memory=141GB,bandwidth=4.8TB,flops=989T"

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
    `fp4_flops`, `host_link` (else that of PCIe 5), `link` and `server_size` (else 8). The text
    is the name of that device.

    Raises:
        InputError: no such GPU; names the nearest ones. Figures that are none, or are missing.
    """
    if "=" not in name:
        return _find("device", DEVICES, name)
    try:
        return _by_figures(name)
    except InputError as error:
        msg = f"device {name!r}: {error}; give such as {BY_FIGURES}"
        raise InputError(msg) from None


def _by_figures(text: str) -> DeviceSpec:
    figures: dict[str, Any] = {"host_link": _PCIE5 * 10**9}
    for piece in text.split(","):
        figure, _, value = (part.strip() for part in piece.partition("="))
        if figure not in _FIGURES:
            msg = f"{piece!r} is none of {', '.join(_FIGURES)}, with = and a value"
            raise InputError(msg)
        field, read = _FIGURES[figure]
        figures[field] = read(value)
    missing = [
        name for name in ("memory", "bandwidth", "flops") if _FIGURES[name][0] not in figures
    ]
    if missing:
        msg = f"there is no {' and no '.join(missing)}"
        raise InputError(msg)
    return DeviceSpec(name=text, **figures)


def _find(what: str, table: Mapping[str, Spec], name: str) -> Spec:
    key = name.strip().lower().replace("_", "-")
    if key in table:
        return table[key]
    near = _near(table, key)
    hint = f"known: {', '.join(sorted(table))}"
    if near:
        hint = f"did you mean {' or '.join(near)}? `kvcore size --help` lists all"
    if what == "device":
        hint += f"; or give its figures, such as {BY_FIGURES}"
    msg = f"unknown {what} {name!r}; {hint}"
    raise InputError(msg)


def _is_hub_id(text: str) -> bool:
    """Return True if `text` is written as `owner/name`, and no file has that path."""
    named = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(?<!\.json)", text)
    return named is not None and not os.path.exists(text)  # noqa: PTH110 - never raises


def _near(table: Iterable[str], name: str) -> list[str]:
    """Return the names of a table that are most like `name`, at most three."""
    from difflib import get_close_matches  # noqa: PLC0415 - for errors alone

    return get_close_matches(name.lower(), table, n=3, cutoff=0.5)


class Source(NamedTuple):
    """Where the shape of a model is from.

    Attributes:
        config: the repository of the maker whose `config.json` has it.
        checked: the day on which the row was compared to it.
    """

    config: str
    checked: str


class _Released(Mapping[str, ModelSpec]):
    """The models by name; each is made when it is first asked for."""

    def __init__(self, rows: Mapping[str, dict[str, Any]]) -> None:
        self._rows = rows
        self._made: dict[str, ModelSpec] = {}

    def __getitem__(self, name: str) -> ModelSpec:
        """Return the model called `name`."""
        model = self._made.get(name)
        if model is None:
            row = self._rows[name]
            fields = {field: row[field] for field in row.keys() - _OF_SOURCES}
            if "windows" in fields:
                fields["windows"] = tuple(fields["windows"])
            fields["caches"] = tuple(LayerCache(**cache) for cache in row.get("caches", ()))
            model = self._made[name] = ModelSpec(name=name, **fields)
        return model

    def __contains__(self, name: object) -> bool:
        """Return True if there is a model called `name`, without making it."""
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._rows)

    def __len__(self) -> int:
        """Return the number of models."""
        return len(self._rows)


_OF_SOURCES = {*Source._fields, "note"}

_ROWS: Mapping[str, dict[str, Any]] = parse_json(
    (Path(kvcore.__path__[0]) / "data" / "models.json").read_bytes()
)

MODELS: Mapping[str, ModelSpec] = _Released(_ROWS)
"""Models that were released, by name."""

SOURCES: Mapping[str, Source] = {
    name: Source(row["config"], row["checked"]) for name, row in _ROWS.items()
}
"""Where each model of `MODELS` is from."""


def _device(
    name: str,
    memory: int,
    bandwidth: int,
    tflops: float,
    host_link: int,
    link: int = 0,
    *,
    fp8: bool = False,
    fp4: int = 0,
    server_size: int = 8,
) -> DeviceSpec:
    """Return a row of GB, GB/s, dense fp16 TFLOP/s and, one way, GB/s to host and peers.

    A GPU with `fp8` has twice the FLOP/s in fp8, one with `fp4` so many times them in fp4.
    """
    giga = 10**9
    flops = round(tflops * 1000) * giga
    return DeviceSpec(
        name=name,
        hbm_bytes=memory * giga,
        bandwidth=bandwidth * giga,
        flops=flops,
        host_link=host_link * giga,
        link=link * giga,
        fp8_flops=2 * flops if fp8 else 0,
        fp4_flops=fp4 * flops,
        server_size=server_size,
    )


# Two GPUs of a GB200 or GB300 share the link to their CPU.
_PCIE3, _PCIE4, _PCIE5, _NVLINK_C2C, _SHARED_C2C = 16, 32, 64, 450, 225

# Half of what data sheets name, which is both ways together: of 6, 12 and 18 links of 25 GB/s,
# of 18 of 50, and of 7 of 64 and of 77. Bridges that are sold apart (A30, A40, H100 PCIe,
# RTX 3090) and join two GPUs are not counted.
_NVLINK2, _NVLINK3, _NVLINK4, _NVLINK5, _INFINITY, _INFINITY4 = 150, 300, 450, 900, 448, 537
_NVL72 = _SHARED_C2C, _NVLINK5


DEVICES: Mapping[str, DeviceSpec] = {
    device.name: device
    for device in (
        _device("v100-16g", 16, 900, 125, _PCIE3, _NVLINK2),
        _device("v100-32g", 32, 900, 125, _PCIE3, _NVLINK2),
        _device("a10", 24, 600, 125, _PCIE4),
        _device("a10g", 24, 600, 70, _PCIE4),
        _device("a30", 24, 933, 165, _PCIE4),
        _device("a40", 48, 696, 149.7, _PCIE4),
        _device("a100-40g", 40, 1555, 312, _PCIE4, _NVLINK3),
        _device("a100-80g", 80, 2039, 312, _PCIE4, _NVLINK3),
        _device("rtx-3090", 24, 936, 71, _PCIE4),
        _device("rtx-4090", 24, 1008, 165.2, _PCIE4, fp8=True),
        _device("rtx-5090", 32, 1792, 209.5, _PCIE5, fp8=True, fp4=8),
        _device("rtx-pro-6000", 96, 1792, 503.8, _PCIE5, fp8=True, fp4=4),
        _device("l4", 24, 300, 121, _PCIE4, fp8=True),
        _device("l40s", 48, 864, 362, _PCIE4, fp8=True),
        _device("h20", 96, 4000, 148, _PCIE5, _NVLINK4, fp8=True),
        _device("h100", 80, 3350, 989.5, _PCIE5, _NVLINK4, fp8=True),
        _device("h100-pcie", 80, 2000, 756.5, _PCIE5, fp8=True),
        _device("h100-nvl", 94, 3900, 835.5, _PCIE5, 300, fp8=True),
        _device("gh200", 96, 4000, 989.5, _NVLINK_C2C, _NVLINK4, fp8=True),
        _device("h200", 141, 4800, 989.5, _PCIE5, _NVLINK4, fp8=True),
        _device("b200", 180, 8000, 2250, _PCIE5, _NVLINK5, fp8=True, fp4=4),
        _device("b300", 288, 8000, 2250, _PCIE5, _NVLINK5, fp8=True, fp4=6),
        _device("gb200", 186, 8000, 2500, *_NVL72, fp8=True, fp4=4, server_size=72),
        _device("gb300", 288, 8000, 2500, *_NVL72, fp8=True, fp4=6, server_size=72),
        _device("mi300x", 192, 5300, 1307.4, _PCIE5, _INFINITY, fp8=True),
        _device("mi325x", 256, 6000, 1307.4, _PCIE5, _INFINITY, fp8=True),
        _device("mi355x", 288, 8000, 2516.6, _PCIE5, _INFINITY4, fp8=True, fp4=4),
    )
}
