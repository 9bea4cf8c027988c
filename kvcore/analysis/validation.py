"""Measured servers beside simulated ones: the errors of TTFT, TPOT and throughput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import attrs

from kvcore.analysis.measured import MEASURES, Measured, read_all
from kvcore.config import RunConfig, RunParts
from kvcore.errors import InputError, PolicyError
from kvcore.histogram import nearest_rank
from kvcore.plugins import Plugins
from kvcore.plugins.options import Spec, as_text
from kvcore.progress import Tick, unseen
from kvcore.serving import Result, simulate

ROUNDS, SPREAD = 4, 0.2
"""Requests of a client of a closed loop, and the share by which lengths vary."""

REQUESTS = 1_000
"""Requests of an open loop."""

GROUPS = ("model", "device", "engine", "tensor_parallel", "weights_dtype", "concurrency")
"""By which rows are grouped, each for itself."""


@attrs.frozen
class Errors:
    """Relative errors of one measure over some rows: simulated / measured - 1.

    Attributes:
        rows: how many rows these are.
        signed, absolute, p90: the median error, the median and the 90th percentile of the
            absolute ones.
    """

    rows: int
    signed: float
    absolute: float
    p90: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors | None:
        """Return the statistics of some errors; None without any."""
        if not errors:
            return None
        absolute = sorted(map(abs, errors))
        p90 = absolute[nearest_rank(90, len(absolute)) - 1]
        return cls(len(errors), median(errors), median(absolute), p90)


@attrs.frozen
class Compared:
    """A measured row and its simulation.

    Attributes:
        row: what was measured.
        config: what was simulated.
        values: what the simulation has for each of `MEASURES`.
    """

    row: Measured
    config: RunConfig
    values: Mapping[str, float]

    def error(self, measure: str) -> float | None:
        """Return simulated / measured - 1; None if that was not measured."""
        measured, simulated = self.row.values.get(measure), self.values.get(measure)
        return None if measured is None or simulated is None else simulated / measured - 1

    def label(self, names: str) -> str:
        """Return the value of a column, or of several with `+` between their names."""
        row = self.row
        known = {**row.load, **row.options, **row.labels}
        return " ".join(as_text(known.get(name, "-")) for name in names.split("+"))

    @property
    def command(self) -> str:
        """The command that simulates the row."""
        given = {**self.row.options, "workload": None}
        options = " ".join(
            f"--{name.replace('_', '-')} {as_text(value)}"
            for name, value in given.items()
            if value is not None
        )
        return f"kvcore simulate {self.config.workload} {options}"


@attrs.frozen
class Validation:
    """Measured rows beside their simulations.

    Attributes:
        source: the file.
        compared: the rows that were simulated, in the order of the file.
        left_out: of the other rows how many, by reason.
    """

    source: str
    compared: list[Compared]
    left_out: Mapping[str, int]

    def errors(self, measure: str, of: Iterable[Compared] | None = None) -> Errors | None:
        """Return the errors of a measure, over all rows or some."""
        found = (each.error(measure) for each in (self.compared if of is None else of))
        return Errors.of([error for error in found if error is not None])

    def groups(self, by: str) -> dict[str, list[Compared]]:
        """Return the rows by the value of a column, or of several: `model+engine`."""
        found: dict[str, list[Compared]] = {}
        for each in self.compared:
            found.setdefault(each.label(by), []).append(each)
        return found

    def worst(self, measure: str, most: int = 5) -> list[Compared]:
        """Return the rows that are furthest off in a measure."""
        rows = [each for each in self.compared if each.error(measure) is not None]
        return sorted(rows, key=lambda each: -abs(each.error(measure) or 0))[:most]


def validate(
    source: str | Path,
    *,
    rounds: int = ROUNDS,
    spread: float = SPREAD,
    plugins: Plugins | None = None,
    tick: Tick = unseen,
    **options: Any,
) -> Validation:
    """Simulate the rows of a file of measurements, and compare.

    A row of a closed loop is served as a benchmark does it: `concurrency` clients start
    together, and each sends `rounds` requests, one after the other. `options` are those of
    `RunConfig` for rows that do not have them.
    """
    plugins = plugins or Plugins()
    rows, left_out = read_all(source)
    compared = []
    for row in rows:
        try:
            compared.append(compare_row(row, rounds, spread, plugins, options))
        except (InputError, PolicyError) as error:
            left_out[str(error)] += 1
        tick(1)
    return Validation(str(source), compared, left_out)


def compare_row(
    row: Measured, rounds: int, spread: float, plugins: Plugins, options: Mapping[str, Any]
) -> Compared:
    """Simulate one row."""
    load = {"spread": spread, **row.load}
    clients = load.get("concurrency")
    load.setdefault("requests", REQUESTS if clients is None else clients * rounds)
    workload = Spec("bench", {name: as_text(value) for name, value in load.items()})
    config = RunConfig.of("simulate", **{**options, **row.options, "workload": workload})
    parts = RunParts(config, plugins)
    result = simulate(parts.workload, residency=False, **parts.arguments())
    return Compared(row, config, _values(result))


def _values(result: Result) -> dict[str, float]:
    if result.log.reasons:
        msg = f"requests are rejected: {next(iter(result.log.reasons.values()))}"
        raise InputError(msg)
    values = {
        "ttft": result.ttft and result.ttft.mean,
        "tpot": result.tpot and result.tpot.mean,
        "throughput": result.throughput_tokens_s,
    }
    return {name: value for name, value in values.items() if value}
