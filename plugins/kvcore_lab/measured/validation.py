"""Validation: simulated TTFT, TPOT and throughput against those of measured servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from statistics import median
from typing import Any, Unpack, get_args

import attrs

from kvcore.api import flat_options
from kvcore.config import RunConfig, RunParts, SimulateOptions
from kvcore.config.options import check_names, option_names
from kvcore.errors import InputError, PolicyError
from kvcore.histogram import nearest_rank
from kvcore.models.catalogue import load_model
from kvcore.models.memory import is_pooled
from kvcore.plugins import Plugins
from kvcore.plugins.options import Spec, as_text
from kvcore.progress import Progress, silent
from kvcore.serving import Result, Rules, simulate
from kvcore.units import check_whole
from kvcore_lab.measured.rows import (
    FORMATS,
    LABELS,
    MEASURES,
    SERVER,
    check_columns,
    read_measured,
    typed,
)
from kvcore_lab.measured.samples import Measured, written
from kvcore_plugins.latency.engine_times import EngineName

ROUNDS, SPREAD = 10, 0.2
"""Requests of each client of a closed loop, and the share by which their lengths vary."""

REQUESTS = 1_000
"""Requests of an open loop."""

GROUPS = (
    *("model", "device", "engine", "tensor_parallel", "weights_dtype", "concurrency"),
    *("split", "model+engine+device"),
)
"""The columns by which rows are grouped, one after another."""


@attrs.frozen
class Errors:
    """Relative errors of one measure over some rows: simulated / measured - 1.

    Attributes:
        rows: number of rows.
        signed: the median error; below 0 if simulated values are too small.
        absolute, p90: the median and the 90th percentile of the absolute errors.
    """

    rows: int
    signed: float
    absolute: float
    p90: float

    @classmethod
    def from_errors(cls, errors: Sequence[float]) -> Errors | None:
        """Return the statistics of errors; None if there are none."""
        if not errors:
            return None
        absolute = sorted(map(abs, errors))
        p90 = absolute[nearest_rank(90, len(absolute)) - 1]
        return cls(len(errors), median(errors), median(absolute), p90)


@attrs.frozen
class Compared:
    """A measured row and its simulation.

    Attributes:
        row: the measured row.
        options: the options of `RunConfig` of its simulation, without the workload.
        config: the configuration of its simulation.
        values: the simulated values, by the names of `MEASURES`.
    """

    row: Measured
    options: Mapping[str, Any]
    config: RunConfig
    values: Mapping[str, float]

    def error(self, measure: str) -> float | None:
        """Return simulated / measured - 1; None if one of the two is missing."""
        measured, simulated = self.row.values.get(measure), self.values.get(measure)
        return None if measured is None or simulated is None else simulated / measured - 1


@attrs.frozen
class Validation:
    """Measured rows beside their simulations.

    Attributes:
        source: the file.
        compared: the rows that were simulated, in the order of the file.
        left_out: number of rows that were not simulated, by reason.
    """

    source: str
    compared: list[Compared]
    left_out: Mapping[str, int]

    @property
    def measures(self) -> list[str]:
        """The `MEASURES` that at least one row has."""
        return [name for name in MEASURES if self.errors(name) is not None]

    def errors(self, measure: str, of: Iterable[Compared] | None = None) -> Errors | None:
        """Return the errors of a measure over rows (None: all rows); None without any."""
        errors = (compared.error(measure) for compared in (self.compared if of is None else of))
        return Errors.from_errors([error for error in errors if error is not None])

    def groups(self, by: str) -> dict[str, list[Compared]]:
        """Return the rows by the value of a column, or of several: `model+engine`."""
        check_columns(by.split("+"))
        by_label: dict[str, list[Compared]] = {}
        for compared in self.compared:
            by_label.setdefault(compared.row.label(by), []).append(compared)
        return dict(sorted(by_label.items(), key=_natural))

    def worst(self, measure: str, most: int = 5) -> list[Compared]:
        """Return the rows with the largest absolute errors of a measure, largest first."""
        rows = [compared for compared in self.compared if compared.error(measure) is not None]
        return sorted(rows, key=lambda compared: -abs(compared.error(measure) or 0))[:most]


def validate(
    source: str | PathLike[str],
    *,
    where: Mapping[str, str] | None = None,
    rounds: int = ROUNDS,
    spread: float = SPREAD,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
    **options: Unpack[SimulateOptions],
) -> Validation:
    """Simulate each row of a file of measurements, and compare the two.

    `kvcore.validate("rows.csv").errors("tpot")` has the errors of the time per token, as
    `kvcore validate rows.csv` prints them. A row with a `concurrency` is served as
    by a benchmark: that number of clients start together, and each sends a request as soon as
    its last one is answered. A row with a `rate` has Poisson arrivals; with an infinite rate
    all requests arrive at once. A row of a known `engine` is served by its rules (`like`), in
    the times of that engine (`latency="roofline:engine=..."`). Costs about 30 ms per row.

    Args:
        source: a file in CSV or JSON Lines, or `aic`: the samples of the package
            aiconfigurator-core.
        where: values that rows have in columns, several with commas between them; other rows
            are not taken.
        rounds: requests of each client, in rows without a number of requests.
        spread: share by which lengths vary, as in the workload `bench`, in rows without one.
        plugins: the plugins by name; None: those that are installed.
        progress: shows the number of rows that have been simulated; None: shows nothing.
        options: options of `RunConfig` for rows that do not have them.

    Raises:
        InputError: the file cannot be read, or none of its rows can be simulated.
        PluginError: a plugin that cannot work here, or a package that is not installed.
    """
    check_whole(rounds, 1)
    file, given = fspath(source), flat_options(options)
    check_names(given, option_names())
    plugins = plugins or Plugins()
    wanted = {
        name: {
            value if name in LABELS else written(typed(value)) for value in values.split(",")
        }
        for name, values in (where or {}).items()
    }
    check_columns(wanted)
    rows: list[Measured] = []
    left_out: Counter[str] = Counter()
    names = (*SERVER, *FORMATS)
    server = {name: given[name] for name in names if given.get(name) is not None}
    for row in read_measured(file, server):
        if isinstance(row, str):
            left_out[row] += 1
        elif all(row.label(name) in values for name, values in wanted.items()):
            rows.append(row)
    compared = []
    with (progress or silent)("simulating rows", len(rows)) as tick:
        for row in rows:
            try:
                compared.append(_compare(row, rounds, spread, plugins, given))
            except (InputError, PolicyError) as error:
                left_out[str(error)] += 1
            tick(1)
    if not compared:
        reason = next((f"; the first: {row}" for row in left_out), "")
        if where and not left_out:
            labels = ", ".join(f"{name}={values}" for name, values in where.items())
            reason = f": no row has {labels}"
        msg = f"{file}: none of {sum(left_out.values()):,} rows can be simulated{reason}"
        raise InputError(msg)
    return Validation(file, compared, dict(left_out.most_common()))


def _compare(
    row: Measured, rounds: int, spread: float, plugins: Plugins, options: Mapping[str, Any]
) -> Compared:
    """Simulate a row."""
    clients = row.load.get("concurrency")
    requests = REQUESTS if clients is None else clients * rounds
    load = {"requests": requests, "spread": spread, **row.load}
    workload = Spec("bench", {name: as_text(value) for name, value in load.items()})
    engine = row.labels.get("engine")
    known: dict[str, Any] = {}
    if engine in plugins.names("rules"):
        model = load_model(row.options["model"])
        # Models with states are served by kvcore's own rules where these have no cache groups.
        if is_pooled(model) or plugins.get("rules", engine).layer_plan is Rules.layer_plan:
            known["like"] = engine
    if engine in get_args(EngineName):
        known["latency"] = f"roofline:engine={engine}"
    options_of_row = {**known, **options, **row.options}
    config = RunConfig("simulate", plugins, **options_of_row, workload=workload)
    parts = RunParts(config, plugins)
    values = _values(simulate(parts.workload, residency=False, **parts.arguments()))
    if not values.keys() & row.values.keys():
        msg = f"its simulation has no {' or '.join(row.values)}, which is all that was measured"
        raise InputError(msg)
    return Compared(row, options_of_row, config, values)


def _values(result: Result) -> dict[str, float]:
    """Return the simulated values, in the units of `MEASURES`.

    Raises:
        InputError: a request was rejected.
    """
    if result.log.reasons:
        msg = f"requests are rejected: {next(iter(result.log.reasons.values()))}"
        raise InputError(msg)
    times = {"ttft": result.ttft, "tpot": result.tpot}
    values = {name: time.mean for name, time in times.items() if time is not None}
    throughput = result.throughput_tokens_s
    return values if throughput is None else {**values, "throughput": throughput}


def _natural(group: tuple[str, object]) -> tuple[bool, float, str]:
    """Return the sort key of a group: numbers by size, then names."""
    name = group[0]
    number = name == "inf" or name.replace(".", "", 1).isdecimal()
    return (False, float(name), "") if number else (True, 0.0, name)
