"""Rows of measured servers: what served what under which load, and how fast it was."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import orjson

from kvcore.config.run_config import option_names, read_option
from kvcore.errors import InputError, PluginError
from kvcore.models.catalogue import DEVICES, MODELS
from kvcore.plugins.options import nearest
from kvcore.workloads import lines

MEASURES = ("ttft", "tpot", "throughput")
"""What a row may have measured: mean seconds, mean seconds, output tokens a second."""

LOAD = ("input_tokens", "output_tokens", "concurrency", "rate", "requests", "spread")
"""The columns of the load: those of the workload plugin `bench`."""

LABELS = ("id", "engine", "version", "source")
"""Columns that say where a row comes from."""

NOT_OF_A_ROW = ("mode", "workload", "limit", "window", "rate_scale", "slo")
"""Options of a run that no row has."""

AIC = "aic"
"""In place of a file: the samples of the package aiconfigurator-core."""

_AIC_COLUMNS = {"silicon_ttft_ms", "silicon_tpot_ms", "model_path", "system", "batch_size"}
_CONCURRENCY = re.compile(r"silicon_concurrency=(\d{1,9})\b")
_VARIANT = re.compile(r"-(instruct|fp8|nvfp4)$")

Taken: TypeAlias = "Measured | str"
"""A row that can be simulated, or why it cannot."""


@attrs.frozen
class Measured:
    """One measurement.

    Attributes:
        line: number of its line in the file, from 1.
        labels: its id, engine, version and source, where they are given.
        options: options of `RunConfig`: the model, device, and what else is known.
        load: options of the workload `bench`.
        values: what was measured, by the names of `MEASURES`.
    """

    line: int
    labels: Mapping[str, str]
    options: Mapping[str, Any]
    load: Mapping[str, Any]
    values: Mapping[str, float]

    def label(self, names: str) -> str:
        """Return the value of a column, or of several with `+` between their names.

        A column that the row does not have is `-`.
        """
        known = {**self.load, **self.options, **self.labels}
        return " ".join(str(known.get(name, "-")) for name in names.split("+"))


def read_measured(path: str | Path) -> Iterator[Taken]:
    """Yield the rows of a file of measurements; of those that are no such row, why.

    A CSV file with a header, or JSON Lines: columns are those of `MEASURES`, `LOAD` and
    `LABELS`, and options of `RunConfig`; a cell that is empty is not given. Or the silicon
    samples of AIConfigurator (Apache-2.0), which `aic` names where the package is installed.

    Raises:
        InputError: no such file, an unknown column, or a cell that cannot be read; names
            file, line and column.
        PluginError: `aic`, and the package is not installed.
    """
    path = _samples() if str(path) == AIC else Path(path)
    known = [*LABELS, *LOAD, *MEASURES, *_row_options()]
    columns: set[str] = set()
    for line, fields in _rows(path):
        if fields.keys() >= _AIC_COLUMNS:
            yield _silicon(path, line, fields)
            continue
        for name in fields.keys() - columns:
            if name not in known:
                hint = f"{nearest(name, known)}. There are: {', '.join(known)}"
                msg = f"{path}:{line}: there is no column {name!r}{hint}"
                raise InputError(msg)
            columns.add(name)
        try:
            yield _own(line, {k: v for k, v in fields.items() if v not in ("", None)})
        except InputError as error:
            msg = f"{path}:{line}: {error}"
            raise InputError(msg) from error


def _row_options() -> list[str]:
    return [name for name in option_names() if name not in NOT_OF_A_ROW]


def _samples() -> Path:
    """Return the path of AIConfigurator's samples, without importing the package."""
    found = find_spec("aiconfigurator_core")
    for place in (found and found.submodule_search_locations) or ():
        path = Path(place) / "systems" / "silicon_sample.csv"
        if path.is_file():
            return path
    msg = (
        "the measurements `aic` come with the package aiconfigurator-core, which is not "
        "installed: pip install aiconfigurator-core, or name a file"
    )
    raise PluginError(msg)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each line and its fields: of a JSON object, or of a table."""
    header: list[str] = []
    for number, line in lines(path):
        if line.lstrip().startswith(b"{"):
            try:
                yield number, orjson.loads(line)
            except orjson.JSONDecodeError as error:
                msg = f"{path}:{number}: not a JSON object: {error}"
                raise InputError(msg) from error
            continue
        try:
            (cells,) = csv.reader([line.decode().rstrip("\r\n")], strict=True)
        except (csv.Error, UnicodeDecodeError) as error:
            msg = f"{path}:{number}: not a row of a table: {error}"
            raise InputError(msg) from error
        cells = [cell.strip() for cell in cells]
        if not header:
            header = cells
            twice = [name for name, times in Counter(header).items() if times > 1]
            if twice:
                msg = f"{path}:{number}: two columns are called {twice[0]!r}"
                raise InputError(msg)
        elif len(cells) != len(header):
            msg = f"{path}:{number}: {len(cells)} cells under {len(header)} columns"
            raise InputError(msg)
        else:
            yield number, dict(zip(header, cells, strict=True))


def _own(line: int, fields: Mapping[str, Any]) -> Measured:
    """Read a row whose columns have the names of kvcore."""
    for name in ("model", "device", "input_tokens", "output_tokens"):
        if name not in fields:
            msg = f"a row needs a {name}"
            raise InputError(msg)
    if not fields.keys() & {"concurrency", "rate"}:
        msg = "a row needs a concurrency (of a closed loop) or a rate (requests/s, or inf)"
        raise InputError(msg)
    values = {name: _number(name, fields[name]) for name in MEASURES if name in fields}
    if not values:
        msg = f"a row needs something measured: {', '.join(MEASURES)}"
        raise InputError(msg)
    options = {
        name: read_option(name, _typed(fields[name]))
        for name in _row_options()
        if name in fields
    }
    labels = {name: str(fields[name]) for name in LABELS if name in fields}
    load = {name: _number(name, fields[name]) for name in LOAD if name in fields}
    return Measured(line, labels, options, load, values)


def _number(name: str, value: Any) -> float:
    """Return a number above 0; whole if it is written so."""
    try:
        number = value if isinstance(value, int | float) else float(value)
    except (TypeError, ValueError):
        number = -1
    if isinstance(value, bool) or not number > 0 or not (isfinite(number) or name == "rate"):
        if name == "spread" and number == 0:
            return 0
        msg = f"{name} {value!r}: expected a number above 0"
        raise InputError(msg)
    return int(number) if isfinite(number) and number == int(number) else number


def _typed(cell: Any) -> Any:
    """Return true, false and numbers of a table as such; other text stays."""
    if not isinstance(cell, str):
        return cell
    try:
        value = orjson.loads(cell)
    except orjson.JSONDecodeError:
        return cell
    return value if isinstance(value, bool | int | float) else cell


def _silicon(path: Path, line: int, fields: Mapping[str, str]) -> Taken:
    """Read a row of AIConfigurator's samples: one server, divided by tensors alone."""
    concurrency = _CONCURRENCY.search(fields.get("silicon_data_source", ""))
    model = fields["model_path"].rpartition("/")[2].lower()
    while shorter := _VARIANT.sub("", model):
        if shorter == model:
            break
        model = shorter
    device = fields["system"].removesuffix("_sxm")
    weights = fields.get("gemm_quant_mode") or fields.get("precision", "")
    problem = None
    if fields.get("mode", "agg") != "agg":
        problem = "prefill and decode on servers of their own"
    elif concurrency is None:
        problem = "no concurrency recorded"
    elif concurrency[1] != fields["batch_size"]:
        problem = "attention or requests divided among replicas"
    elif fields.get("pp_size", "1") not in ("", "1"):
        problem = "pipeline stages"
    elif model not in MODELS:
        problem = f"model {model} is not in the catalogue"
    elif device not in DEVICES:
        problem = f"device {device} is not in the catalogue"
    elif weights == "nvfp4" and MODELS[model].expert_dtype != "mxfp4":
        problem = "weights in nvfp4"
    if problem:
        return problem
    assert concurrency is not None
    dtype = {"fp8": "fp8", "fp8_block": "fp8", "int4_wo": "int4", "bf16": "bf16"}.get(weights)
    try:
        return _own(
            line,
            {
                "id": fields["id"],
                "engine": fields["backend"],
                **({"version": fields["backend_version"]} if fields["backend_version"] else {}),
                "model": model,
                "device": device,
                "tensor_parallel": fields["tp_size"],
                **({"weights_dtype": dtype} if dtype else {}),
                "codec": "fp8" if dtype == "fp8" else "fp16",
                "input_tokens": fields["isl"],
                "output_tokens": fields["osl"],
                "concurrency": concurrency[1],
                "ttft": float(fields["silicon_ttft_ms"]) / 1e3,
                "tpot": float(fields["silicon_tpot_ms"]) / 1e3,
            },
        )
    except (InputError, KeyError, ValueError) as error:
        msg = f"{path}:{line}: {error}"
        raise InputError(msg) from error
