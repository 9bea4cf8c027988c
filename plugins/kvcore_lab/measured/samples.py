"""The samples of measured servers that come with NVIDIA's AIConfigurator (Apache-2.0).

Which models the constants of `kvcore_plugins.latency.engine_times` are fitted to, and which
samples say too little of their servers to be compared with.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import attrs

from kvcore.config.values import shown
from kvcore.errors import InputError, PluginError
from kvcore.models.catalogue import DEVICES, MODELS
from kvcore.plugins.options import as_text

COLUMNS = {"silicon_ttft_ms", "silicon_tpot_ms", "model_path", "system", "batch_size"}

FITTED = {"llama-3.1-8b", "qwen3-32b", "gpt-oss-120b", "deepseek-r1", "deepseek-v3"}
"""Models to whose samples constants are fitted; all others are held out.

Of dense models and of mixtures, by their number of samples, every second is held out. DeepSeek
V3 and R1 are one: they have one shape, and some of their samples are the same measurements.
"""

APART = 1.25
"""The ratio of two TPOT from which they cannot be of servers that are alike."""

VARIANT = re.compile(r"(-instruct|-fp8|-nvfp4)+$")
"""What the name of a released model has after that of the catalogue, in lower case."""

_CONCURRENCY = re.compile(r"silicon_concurrency=(\d{1,9})\b")
_WEIGHTS = {"fp8_block": "fp8", "int4_wo": "int4"} | {w: w for w in ("bf16", "fp8", "nvfp4")}
_TIMES = "ttft", "tpot"
_FIXED = "gap-analysis"
"""In the source of samples whose requests all have the same lengths."""


@attrs.frozen
class Measured:
    """One measurement of a server, of these samples or of any table.

    Attributes:
        line: number of its line in the file, from 1.
        labels: its id, engine, version and source, if the row has them.
        options: options of `RunConfig`, such as the model and the device.
        load: options of the workload `bench`.
        values: the measured values, by the names of `MEASURES`.
    """

    line: int
    labels: Mapping[str, str]
    options: Mapping[str, Any]
    load: Mapping[str, Any]
    values: Mapping[str, float]

    def label(self, names: str) -> str:
        """Return the value of a column, or of several with `+` between their names.

        It is written as in a table, such as `2` and `true`; that which the row lacks is `-`.
        """
        known = {**self.values, **self.load, **self.options, **self.labels}
        return " ".join(written(known.get(name, "-")) for name in names.split("+"))


def written(value: Any) -> str:
    """Return a value as a table has it: `2` of 2.0."""
    text = as_text(value)
    return text.removesuffix(".0") if isinstance(value, float) else text


def samples_path() -> Path:
    """Return the path of the samples, without importing the package.

    Raises:
        PluginError: the package is not installed.
    """
    package = find_spec("aiconfigurator_core")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder) / "systems" / "silicon_sample.csv"
        if path.is_file():
            return path
    msg = (
        "the measurements `aic` come with the package aiconfigurator-core, which is not "
        "installed: pip install aiconfigurator-core, or name a file"
    )
    raise PluginError(msg)


def read_samples(
    path: Path,
    rows: Iterable[tuple[int, Mapping[str, Any]]],
    read: Callable[[int, Mapping[str, Any]], Measured],
) -> Iterator[Measured | str]:
    """Yield each sample as a row, or the reason why it is left out.

    Args:
        path: the file, for errors.
        rows: the number of each line, and its fields.
        read: makes a row of its line and its columns.

    Raises:
        InputError: a cell that cannot be read.
    """
    taken: list[Measured | str] = []
    for line, fields in rows:
        try:
            columns = _columns({k: "" if v is None else str(v) for k, v in fields.items()})
            taken.append(columns if isinstance(columns, str) else read(line, columns))
        except (InputError, ValueError) as error:
            msg = f"{path}:{line}: {error}"
            raise InputError(msg) from error
    reasons = _doubtful([row for row in taken if not isinstance(row, str)])
    for row in taken:
        yield row if isinstance(row, str) else reasons.get(row.line, row)


def _columns(fields: Mapping[str, str]) -> dict[str, Any] | str:
    """Return the columns of a sample under kvcore's names, or why it cannot be simulated."""
    match = _CONCURRENCY.search(fields.get("silicon_data_source", ""))
    concurrency = match[1] if match else ""
    model = VARIANT.sub("", fields["model_path"].rpartition("/")[2].lower())
    device = fields["system"].removesuffix("_sxm")
    weights = fields.get("gemm_quant_mode") or fields.get("precision", "")
    spec = MODELS.get(model)
    released = None if spec is None else spec.expert_dtype
    unlike = {
        "prefill and decode on servers of their own": fields.get("mode", "agg") != "agg",
        "no concurrency recorded": not concurrency,
        "attention or requests divided among replicas": concurrency != fields["batch_size"],
        "pipeline stages": fields.get("pp_size", "1") not in ("", "1"),
        f"model {model} is not in the catalogue": spec is None,
        f"device {device} is not in the catalogue": device not in DEVICES,
    }
    problem = next((why for why, holds in unlike.items() if holds), None)
    if problem is not None:
        return problem
    # What is called nvfp4 of models that were released in MXFP4 is that.
    dtype = None if weights == "nvfp4" and released == "mxfp4" else _WEIGHTS.get(weights)
    columns: dict[str, Any] = {
        "id": fields.get("id"),
        "engine": fields.get("backend"),
        "version": fields.get("backend_version"),
        "split": "fitted" if model in FITTED else "held-out",
        "model": model,
        "device": device,
        "tensor_parallel": fields.get("tp_size"),
        "weights_dtype": dtype,
        "codec": "fp8" if dtype in ("fp8", "nvfp4") else "fp16",
        "input_tokens": fields.get("isl"),
        "output_tokens": fields.get("osl"),
        "concurrency": concurrency,
        "spread": "0" if _FIXED in fields.get("silicon_data_source", "") else None,
        "ttft": fields["silicon_ttft_ms"],
        "tpot": fields["silicon_tpot_ms"],
    }
    for name in _TIMES:
        try:
            columns[name] = float(columns[name] or 0) / 1000
        except ValueError as error:
            msg = f"silicon_{name}_ms {shown(columns[name])}: expected a number of milliseconds"
            raise InputError(msg) from error
    return {name: value for name, value in columns.items() if value}


def _server(row: Measured) -> tuple[Any, ...]:
    """Return a server and the lengths of its requests: samples of equal ones are compared."""
    # R1 and V3 of DeepSeek have one shape, and their samples are partly the same.
    shape = attrs.evolve(MODELS[row.options["model"]], name="")
    options = map(row.options.get, ("weights_dtype", "device", "tensor_parallel"))
    lengths = map(row.load.get, ("input_tokens", "output_tokens"))
    return row.labels.get("engine", ""), shape, *options, *lengths


def _doubtful(rows: Iterable[Measured]) -> dict[int, str]:
    """Return why samples are left out that others contradict, by line."""
    reasons: dict[int, str] = {}
    copies: dict[Any, list[Measured]] = defaultdict(list)
    servers: dict[tuple[Any, ...], list[Measured]] = defaultdict(list)
    for row in rows:
        if row.options["tensor_parallel"] > DEVICES[row.options["device"]].server_size:
            reasons[row.line] = "more devices than a server has"
            continue
        # Some are written in hundredths of a millisecond.
        times = ((name, round(time, 5)) for name, time in row.values.items())
        copies[row.labels.get("engine", ""), *times].append(row)
        servers[_server(row)].append(row)
    for same in copies.values():
        if len({(_server(row), row.load["concurrency"]) for row in same}) > 1:
            refused, why = same, "one measurement of several servers"
        else:
            refused, why = same[1:], "the same measurement"
        for row in refused:
            reasons.setdefault(row.line, why)
    for of_server in servers.values():
        _refuse_contradictions(of_server, reasons)
    return reasons


def _refuse_contradictions(rows: list[Measured], reasons: dict[int, str]) -> None:
    """Add the reasons against samples of one server whose TPOT contradict one another."""
    longest = 0.0
    by_clients = sorted(rows, key=lambda row: row.load["concurrency"])
    for _, group in groupby(by_clients, key=lambda row: row.load["concurrency"]):
        same = list(group)
        times = [row.values["tpot"] for row in same if "tpot" in row.values]
        if not times:
            continue
        if max(times) > APART * min(times):
            why = "measured again with quite another TPOT"
        elif max(times) * APART < longest:
            why = "faster with more clients, so some waited"
        else:
            longest = max(longest, *times)
            continue
        for row in same:
            reasons.setdefault(row.line, why)
