"""Report on a benchmark: sentences and tables."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf, isnan

import attrs

from kvcore.sections import Section, Table
from kvcore.units import DECIMAL, format_bytes, format_number, format_seconds
from kvcore_engine.bench.result import BenchResult, Row, Target

RIGHT = ("moved", "time", "rate", "share", "target")


@attrs.frozen
class BenchReport:
    """The result of a benchmark as sentences and tables.

    Attributes:
        result: the result.
    """

    result: BenchResult

    @property
    def sections(self) -> list[Section]:
        """The whole report on the benchmark."""
        return [self.machine, self.ceilings, self.table, self.reading]

    @property
    def machine(self) -> str:
        """Sentences that name the machine and the software."""
        of = self.result.machine
        packages = ", ".join(f"{name} {version}" for name, version in of["packages"].items())
        lines = [
            f"kvcore {of['kvcore']}, {of['date']}; Python {of['python']}, {of['system']}.",
            f"{of['cpu']}, {of['cpus']} CPUs for this process; packages: {packages or 'none'}.",
        ]
        gpu = of.get("gpu")
        if gpu:
            lines.append(
                f"{gpu['name']}, {format_bytes(gpu['memory_bytes'])}, "
                f"{gpu['multiprocessors']} multiprocessors, capability {gpu['capability']}; "
                f"driver {gpu['driver'] or 'unknown'}, CUDA {gpu['cuda']}."
            )
        return "\n".join(lines)

    @property
    def ceilings(self) -> Table:
        """The rates of memory."""
        rows = [
            [
                ceiling.name,
                _bytes_rate(ceiling.first),
                "" if ceiling.last is None else _bytes_rate(ceiling.last),
            ]
            for ceiling in self.result.ceilings
        ]
        return Table(("ceiling", "first", "last"), rows)

    @property
    def table(self) -> Table:
        """The operations; without their speed, if results alone were checked."""
        timed = not self.result.settings.check
        headers = ["operation", "case", "by", *(RIGHT if timed else ()), "result", "note"]
        rows = []
        for row in self.result.rows:
            speed = _speed(row) if timed else ()
            rows.append([row.operation, row.case, row.by, *speed, _result(row), row.note])
        return Table(headers, rows, RIGHT)

    @property
    def reading(self) -> str:
        """Sentences that sum up the results."""
        rows, wrong = self.result.rows, self.result.wrong
        checked = [row for row in rows if row.correct is not None]
        lines = [f"{len(checked) - len(wrong)} of {len(checked)} checked results are right."]
        lines += [f"Wrong: {row.operation}, {row.case}, {row.by}." for row in wrong]
        aimed = [row for row in rows if row.reached is not None]
        if aimed:
            reached = sum(1 for row in aimed if row.reached)
            lines.append(f"{reached} of {len(aimed)} targets are reached.")
        spreads = [row.spread for row in rows if row.spread is not None]
        if spreads:
            lines.append(
                f"The same thing timed twice differs by up to {max(spreads):.0%}, by "
                f"{sorted(spreads)[len(spreads) // 2]:.1%} in the middle: less is noise."
            )
        return "\n".join([*lines, f"All of it took {self.result.seconds:.0f} s."])


def _speed(row: Row) -> Sequence[str]:
    """Return the cells of amount, time, rate, share and target."""
    amount = ""
    if row.amount is not None:
        bytes_moved = format_bytes(round(row.amount), DECIMAL)
        amount = bytes_moved if row.unit == "bytes" else f"{row.amount:,.0f} {row.unit}"
    rate = ""
    if row.rate is not None:
        rate = _bytes_rate(row.rate)
        if row.unit != "bytes":
            rate = f"{format_number(row.rate)} {row.unit}/s"
    share = ""
    if row.share is not None:
        share = f"{row.share:.2f}" if row.unit == "bytes" else f"{row.share:.1f} x"
    time = "" if row.seconds is None else _time(row.seconds, row.spread)
    return amount, time, rate, share, _target(row)


def _target(row: Row) -> str:
    """Return the target of a row, and whether it is met."""
    aim: Target | None = row.target
    if aim is None:
        return ""
    named = f"≥ {aim.share:.2f}" if aim.seconds is None else f"≤ {_time(aim.seconds, None)}"
    if row.reached is None:
        return named
    return f"{named}: {'reached' if row.reached else 'missed'}"


def _result(row: Row) -> str:
    if row.error is None:
        return ""
    if isnan(row.error):
        return "WRONG: NaN"
    if isinf(row.error):
        return "WRONG"
    if row.error == 0:
        return "exact"
    return f"{'off by' if row.correct else 'WRONG: off by'} {row.error:.1e}"


def _time(seconds: float, spread: float | None) -> str:
    """Format a time, with half of the spread between two measurements of the same operation."""
    time = format_seconds(seconds).replace("us", "µs")
    return time if spread is None else f"{time} ±{spread / 2:.0%}"


def _bytes_rate(rate: float) -> str:
    return f"{rate / 1e9:,.1f} GB/s"
