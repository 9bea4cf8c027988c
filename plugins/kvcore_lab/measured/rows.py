"""Rows of measured servers: the deployment, the load, and the latencies."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import inf, isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import orjson

from kvcore.config.options import read_option
from kvcore.config.values import shown
from kvcore.errors import InputError
from kvcore.models.catalogue import MODELS
from kvcore.plugins.options import nearest
from kvcore.workloads import lines
from kvcore_cluster.options import OF_REPLICAS
from kvcore_lab.measured.samples import COLUMNS as SAMPLE_COLUMNS
from kvcore_lab.measured.samples import VARIANT, Measured, read_samples, samples_path
from kvcore_plugins.csv_rows import split_row

MEASURES = ("ttft", "tpot", "throughput")
"""The columns of measured values: mean seconds, mean seconds, output tokens per second."""

LOAD = ("input_tokens", "output_tokens", "concurrency", "rate", "requests", "spread")
"""The columns of the load: options of the workload plugin `bench`."""

NEEDED = ("model", "device", "tensor_parallel", "input_tokens", "output_tokens")
"""The columns that every row has, besides a load and a measure."""

SERVER = ("model", "device", "tensor_parallel")
"""The columns that a file may lack if options name the server of all its rows."""

FORMATS = ("weights_dtype", "codec")
"""The columns that the name of a benchmarked model tells, if no option does."""

LABELS = ("id", "engine", "version", "source", "split")
"""The columns that name the source of a row."""

OPTIONS = (*OF_REPLICAS, "block_size")
"""The columns that are options of `RunConfig`."""

COLUMNS = (*LABELS, *LOAD, *MEASURES, *OPTIONS)
"""All columns that a row may have."""

AIC = "aic"
"""The name of the samples of the package aiconfigurator-core, in place of a file."""

_NUMBERS = (*LOAD, *MEASURES)
_BENCH_COLUMNS = {"completed", "request_rate", "total_input_tokens", "total_output_tokens"}
_INFINITE_RATE = re.compile(rb'("(?:request_)?rate"\s*:\s*)Infinity\b')
"""What Python writes into JSON, which has no such number, where a rate is infinite."""

Taken: TypeAlias = "Measured | str"
"""A row that can be simulated, or the reason why it cannot be."""


def read_measured(
    path: str | Path, given: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[Taken]:
    """Yield the rows of a file of measurements; for a row that cannot be simulated, the reason.

    The file is a CSV file with a header, or JSON Lines, with the columns of `COLUMNS`; an empty
    cell is a missing value. A result of `vllm bench serve` or of SGLang's `bench_serving` is a
    row. `aic` names the silicon samples of AIConfigurator (Apache-2.0), if its package is
    installed.

    Args:
        path: the file.
        given: columns that a row may lack, and their values then.

    Raises:
        InputError: no such file, an unknown column, or a cell that cannot be read; names
            file, line and column.
        PluginError: `aic`, and the package is not installed.
    """
    path = samples_path() if str(path) == AIC else Path(path)
    samples = []
    for line, fields in _rows(path):
        if fields.keys() >= SAMPLE_COLUMNS:
            samples.append((line, fields))
            continue
        try:
            if fields.keys() >= _BENCH_COLUMNS:
                fields = _bench(fields, given)  # noqa: PLW2901 - the same row, by other names
            check_columns(fields)
            own = {k: v for k, v in fields.items() if v not in ("", None)}
            yield _own(line, {**given, **own})
        except InputError as error:
            msg = f"{path}:{line}: {error}"
            raise InputError(msg) from error
    yield from read_samples(path, samples, _own)


def check_columns(names: Iterable[str]) -> None:
    """Raise InputError for a name that is not in `COLUMNS`; it names the nearest column."""
    for name in names:
        if name not in COLUMNS:
            known = ", ".join(COLUMNS)
            msg = f"there is no column {name!r}{nearest(name, COLUMNS)}. There are: {known}"
            raise InputError(msg)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each line and its fields: of a JSON object, or of a table."""
    header: list[str] = []
    for line_number, line in lines(path):
        if line.lstrip().startswith(b"{"):
            try:
                yield line_number, orjson.loads(_INFINITE_RATE.sub(rb'\1"inf"', line))
            except orjson.JSONDecodeError as error:
                msg = f"{path}:{line_number}: not a JSON object: {error}"
                raise InputError(msg) from error
            continue
        try:
            cells = split_row(line.decode())
        except (csv.Error, UnicodeDecodeError) as error:
            msg = f"{path}:{line_number}: not a row of a table: {error}"
            raise InputError(msg) from error
        cells = [cell.strip() for cell in cells]
        if not header:
            header = cells
            twice = [name for name, times in Counter(header).items() if times > 1]
            if twice:
                msg = f"{path}:{line_number}: two columns are called {twice[0]!r}"
                raise InputError(msg)
        elif len(cells) != len(header):
            msg = f"{path}:{line_number}: {len(cells)} cells under {len(header)} columns"
            raise InputError(msg)
        else:
            yield line_number, dict(zip(header, cells, strict=True))


def _own(line: int, fields: Mapping[str, Any]) -> Measured:
    """Read a row with kvcore's column names."""
    for name in NEEDED:
        if name not in fields:
            option = f", or the option --{name.replace('_', '-')}" if name in OPTIONS else ""
            msg = f"a row needs a value of {name}{option}"
            raise InputError(msg)
    if not fields.keys() & {"concurrency", "rate"}:
        msg = "a row needs a concurrency (of a closed loop) or a rate (requests/s, or inf)"
        raise InputError(msg)
    numbers = {name: _number(name, fields[name]) for name in _NUMBERS if name in fields}
    values = {name: numbers[name] for name in MEASURES if name in numbers}
    if not values:
        msg = f"a row needs something measured: {', '.join(MEASURES)}"
        raise InputError(msg)
    options = {
        name: read_option(name, typed(fields[name])) for name in OPTIONS if name in fields
    }
    labels = {name: str(fields[name]) for name in LABELS if name in fields}
    load = {name: numbers[name] for name in LOAD if name in numbers}
    return Measured(line, labels, options, load, values)


def _bench(fields: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of the result of a benchmark of vLLM or SGLang.

    Lengths are means over the requests that were completed. Device and tensor parallelism are
    there if they were given as metadata, under the names of columns. A model whose name ends
    with FP8 or NVFP4 has weights in it, and K/V in fp8, if metadata and `given` say nothing.

    Raises:
        InputError: no request was completed.
    """
    completed = fields["completed"]
    if type(completed) is not int or completed < 1:
        msg = f"completed {shown(completed)}: expected a whole number from 1"
        raise InputError(msg)
    row = {name: fields[name] for name in ("label", *OPTIONS) if fields.get(name) is not None}
    row["id"] = row.pop("label", fields.get("date"))
    released = str(fields.get("model_id")).rpartition("/")[2].lower()
    model = VARIANT.sub("", released)
    if model in MODELS:
        row.setdefault("model", model)
    for dtype in ("fp8", "nvfp4"):
        if f"-{dtype}" in released[len(model) :]:
            row = {"weights_dtype": dtype, "codec": "fp8", **given, **row}
    backend = str(fields.get("backend", ""))
    row["engine"] = next(
        (name for name in ("vllm", "sglang") if backend.startswith(name)), None
    )
    for name in ("input", "output"):
        row[f"{name}_tokens"] = max(
            1, round(_figure(fields, f"total_{name}_tokens") / completed)
        )
    rate, clients = fields["request_rate"], fields.get("max_concurrency")
    unlimited = rate in ("inf", inf, None)
    if clients is not None:
        row["concurrency"] = clients
    if clients is None or not unlimited:
        row["rate"] = "inf" if unlimited else rate
    row |= {"requests": completed, "spread": 0, "throughput": fields.get("output_throughput")}
    for name in ("ttft", "tpot"):
        row[name] = _figure(fields, f"mean_{name}_ms") / 1000 or None
    return row


def _figure(fields: Mapping[str, Any], name: str) -> int | float:
    """Return a number of a result; 0 if it has none. Raises InputError for anything else."""
    value = fields.get(name) or 0
    if type(value) in (int, float) and isfinite(value):
        return value
    msg = f"{name} {shown(value)}: expected a number"
    raise InputError(msg)


def _number(name: str, cell: Any) -> int | float:
    """Return the number of a cell, which may be text."""
    value: Any = typed(cell)
    least = 0 if name == "spread" else 1
    if name in ("rate", *MEASURES, "spread"):
        finite = isinstance(value, int | float) and isfinite(value) and not value < 0
        if not isinstance(value, bool) and finite and (value if least else value < 1):
            return float(value)
        if name == "rate" and cell in ("inf", inf):
            return inf
        expected = "a number above 0" if least else "a share below 1"
    elif type(value) is int and value >= least:
        return int(value)
    else:
        expected = "a whole number from 1"
    msg = f"{name} {shown(cell)}: expected {expected}"
    raise InputError(msg)


def typed(cell: Any) -> Any:
    """Return the boolean or number that the text of a cell stands for; other text as it is."""
    if not isinstance(cell, str):
        return cell
    try:
        value = orjson.loads(cell)
    except orjson.JSONDecodeError:
        return cell
    return value if isinstance(value, bool | int | float) else cell
