"""Report on a what-if: tables and sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import isclose
from typing import Any

import attrs

from kvcore.plugins.options import as_text
from kvcore.sections import Chart, Panel, Section, Table
from kvcore.units import format_dollars, format_number, format_seconds
from kvcore_cli.report.simulation import overload
from kvcore_cli.report.tables import (
    NONE,
    TableRow,
    cell,
    counted,
    plugin_text,
    setup,
    share,
    slo_times,
)
from kvcore_replay.recorded_run import RunSummary
from kvcore_replay.what_if import Change, WhatIf

SAME, ABOUT = "=", "≈"

MANY = 10
"""The factor above which a change is reported as a factor."""

COSTS = (
    ("usd_per_day", "cost a day, $"),
    ("usd_per_million_output_tokens", "$ per million generated tokens"),
    ("usd_per_million_tokens", "$ per million tokens in all"),
)

TIMES = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E"), ("queue_s", "queueing"))


@attrs.frozen
class WhatIfReport:
    """Two runs of the same requests, side by side.

    Attributes:
        whatif: the result of the what-if.
        rows: the most rows of each table of requests.
    """

    whatif: WhatIf
    rows: int = 5

    @property
    def sections(self) -> list[Section]:
        """The whole report on both runs, with their bills if there are prices."""
        old, new = (run.bill for run in self._runs.values())
        bills: list[Section] = []
        if old is not None and new is not None:
            from kvcore_replay.report.billing import OF_TRACE, bill_sections  # noqa: PLC0415 - for prices alone

            bills = [*bill_sections(old.as_dict(), new.as_dict()["run"]), OF_TRACE]
        return [
            self.warning,
            self.headline,
            self.table,
            self.verdict,
            self.prices,
            self.chart(),
            *self.tables,
            self.setup,
            *bills,
        ]

    @property
    def _runs(self) -> dict[str, RunSummary]:
        return {"recorded": self.whatif.recorded, "what if": self.whatif.rerun}

    @property
    def warning(self) -> str:
        """A warning of overload for each of the runs whose queue grows."""
        lines = []
        for name, run in self._runs.items():
            if run.saturated:
                load = run.saturation or {}, run.offered_load, run.slo_met
                why = overload(*load, _able(run.config), "times marked *")
                lines.append(f"SATURATED, {name}: {self.whatif.workload} {why}")
        return "\n".join(lines)

    @property
    def headline(self) -> str:
        """Sentences about the run and the options that changed."""
        whatif = self.whatif
        one, other = (settings_of(run.config) for run in self._runs.values())
        requests = counted(whatif.recorded.requests, "request")
        lines = [f"{whatif.workload}: {requests} of {whatif.file}."]
        # The configuration of a run without a retention policy has no such key.
        names = [n for n in {**one, **other} if one.get(n) != other.get(n)]
        if not names:
            lines.append("Run again as recorded: nothing was to be different.")
        for name in names:
            old, new = (_setting(name, config.get(name)) for config in (one, other))
            lines.append(f"{name.replace('_', ' ')}: {new} instead of {old}")
        if whatif.kvcore != whatif.here:
            lines.append(
                f"Recorded by kvcore {whatif.kvcore}; this is {whatif.here}, which may decide "
                "otherwise by itself: run it again as recorded (--export FILE) to see."
            )
        if whatif.header.get("anonymised") and (names or whatif.changes):
            lines.append(
                "Its names are hashes (export --anonymise), by which plugins may decide "
                "otherwise that draw from ids of requests, or hash sessions, tenants or keys: "
                "run it again as recorded to see."
                if names
                else "It differs all the same: its names are hashes (export --anonymise), and "
                "a plugin draws from ids of requests, or hashes sessions, tenants or keys."
            )
        return "\n".join(lines)

    @property
    def setup(self) -> str:
        """A sentence with all options of the new run."""
        whatif, config = self.whatif, self.whatif.rerun.config
        plugins = {n: v for n, v in config.items() if isinstance(v, Mapping) and "options" in v}
        return setup({**whatif.header, **config, "kvcore": whatif.here, "plugins": plugins})

    @property
    def table(self) -> Table:
        """Both runs, the most important figures first."""
        rows = run_rows([*self._runs.values()], timed=self.whatif.timed)
        return Table(["", *self._runs, "change"], [*rows])

    @property
    def verdict(self) -> str:
        """Sentences about the numbers of requests that gained and lost."""
        changes = self.whatif.changes
        gained = sum(change.tokens > 0 for change in changes)
        lost = sum(change.tokens < 0 for change in changes)
        text = f"{counted(gained, 'request')} hit more, {lost:,} less."
        if self.whatif.timed:
            sooner = sum(change.ttft < 0 for change in changes)
            later = sum(change.ttft > 0 for change in changes)
            text += f" The first token comes earlier for {sooner:,}, later for {later:,}."
        served = sum(change.recorded.rejected > change.rerun.rejected for change in changes)
        refused = sum(change.recorded.rejected < change.rerun.rejected for change in changes)
        if served or refused:
            text += f" Served only now: {served:,}; rejected only now: {refused:,}."
        return text

    @property
    def prices(self) -> str:
        """A sentence with the prices of the GPUs of both runs; empty without costs."""
        prices: dict[str, None] = {}  # in order, and one of both runs once
        for run in self._runs.values():
            if run.cost:
                prices |= dict.fromkeys(run.cost["prices"].split("; "))
        return f"GPUs: {'; '.join(prices)}." if prices else ""

    @property
    def tables(self) -> Iterator[Table]:
        """Tables of the requests that gained and lost most."""
        whatif = self.whatif
        times = ["TTFT, recorded", "TTFT, what if"] if whatif.timed else []
        for title, changes in (
            ("gained hits", whatif.gained(self.rows)),
            ("lost hits", whatif.lost(self.rows)),
            ("first token earlier", whatif.sooner(self.rows)),
            ("first token later", whatif.later(self.rows)),
        ):
            if changes:
                rows = [self._request(change) for change in changes]
                yield Table([title, "prompt", "hit, recorded", "hit, what if", *times], rows)

    def chart(self) -> Chart:
        """Return a chart of the share of blocks that hit in both runs."""
        ratios = ((name, run.hit["ratio"]["block"]) for name, run in self._runs.items())
        hits = {name: [(0.0, ratio or 0.0)] for name, ratio in ratios}
        return Chart("", "", "", [Panel("blocks looked up that hit", hits, share)])

    def _request(self, change: Change) -> TableRow:
        fates = [fate.as_dict() for fate in (change.recorded, change.rerun)]
        hits = [f"{fate['hit_tokens']:,}" for fate in fates]
        clocked = fates if self.whatif.timed else []
        times = [cell(fate["ttft_s"], format_seconds) for fate in clocked]
        return [str(change.request), f"{change.prompt:,}", *hits, *times]


def run_rows(runs: Sequence[RunSummary], *, timed: bool) -> Iterator[TableRow]:  # noqa: C901 - in order
    """Yield the rows of a table of runs, the most important first.

    A row has its name, the value of the first run, and for each other run its value and the
    change from the first.
    """
    hits = [run.hit for run in runs]
    for weight in ("block", "token", "request"):
        ratios = [hit["ratio"][weight] for hit in hits]
        yield _row(f"hit ratio by {weight}", ratios, share)
    yield _row("blocks hit", [hit["hit_blocks"] for hit in hits], _count)
    own = [hit["self_hit_blocks"] for hit in hits]
    if any(own):
        yield _row("own blocks found again", own, _count)
    yield _row("blocks evicted", [run.evicted_blocks for run in runs], _count)
    forgotten = [run.forgotten_blocks for run in runs]
    if any(forgotten):
        yield _row("blocks forgotten", forgotten, _count)
    if any(run.compactions for run in runs):
        yield _row("compactions", [run.compactions for run in runs], _count)
        yield _row("tokens forgotten", [run.compacted_tokens for run in runs], _count)
    if not timed:
        return
    marks = [" *" if run.saturated else "" for run in runs]
    for key, name in TIMES:
        spreads = [getattr(run, key) or {} for run in runs]
        for column in ("mean", "p50", "p99"):
            times = [spread.get(column) for spread in spreads]
            yield _row(f"{name}, {column}", times, format_seconds, marks)
    yield _row("generated tokens/s", [r.throughput_tokens_s for r in runs], format_number)
    if any(run.goodput is not None for run in runs):
        yield _row("goodput, requests/s", [run.goodput for run in runs], format_number)
        yield _row("within the SLO", [run.slo_met for run in runs], share)
    costs = [run.cost or {} for run in runs]
    if any(costs):
        for key, name in COSTS:
            yield _row(name, [cost.get(key) for cost in costs], format_dollars)
    for how, name in (("pause", "paused"), ("recompute", "recomputed")):
        yield _row(f"preempted, {name}", [run.preemptions[how] for run in runs], _count)
    if any(run.config.get("tiers") for run in runs):
        swaps = [run.preemptions["swap"] for run in runs]
        yield _row("preempted, swapped", swaps, _count)
        yield _row("tokens from tiers", [run.loaded_tokens for run in runs], _count)
    yield _row("rejected", [run.rejected for run in runs], _count)


def _row(
    name: str,
    values: Sequence[float | None],
    write: Callable[[Any], str],
    marks: Sequence[str] = (),
) -> TableRow:
    """Return a row of runs; a run's mark follows its value."""
    before = values[0]
    cells = [
        cell(value, write) + mark
        for value, mark in zip(values, marks or [""] * len(values), strict=True)
    ]
    changes = [change_text(before, after, write) for after in values[1:]]
    return [name, cells[0], *chain(*zip(cells[1:], changes, strict=True))]


def change_text(before: float | None, after: float | None, write: Callable[[Any], str]) -> str:
    """Return a change in words: of shares in points, of counts as a number, else in percent.

    `=` stands for no change, `≈` for a change that rounds to 0.
    """
    if before is None or after is None:
        return NONE
    if before == after or (write is not _count and isclose(before, after)):
        return SAME
    if write is _count:
        change = f"{after - before:+,}"
    elif write is share:
        change = f"{100 * (after - before):+.1f} points"
    elif not before:
        change = NONE
    elif after > MANY * before:
        change = f"{format_number(after / before)} times"
    elif before > MANY * after > 0:
        change = f"{format_number(before / after)} times less"
    else:
        change = f"{after / before - 1:+.1%}"
    return ABOUT if change[1:] in ("0.0%", "0.0 points") else change


def _count(count: int) -> str:
    return f"{count:,}"


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration, each limit of a step as one of them.

    Options of the latency model that only repeat the deployment are left out.
    """
    alone = {name: value for name, value in config.items() if name != "batching"}
    if "latency" in config and "device" in config:
        model, device = config.get("model", {}), config["device"]
        deployment = {
            "model": model.get("name"),
            "codec": model.get("codec"),
            "block_size": config["block_size"],
            "device": device["name"],
            "tensor_parallel": device.get("count", 1),
        }
        options = {
            name: value
            for name, value in config["latency"]["options"].items()
            if (value.get("name") if isinstance(value, Mapping) else value)
            != deployment.get(name)
        }
        alone["latency"] = config["latency"] | {"options": options}
    return {**alone, **(config.get("batching") or {})}


def _setting(name: str, value: Any) -> str:
    """Format a setting of a configuration as the command line has it."""
    if name == "slo" and isinstance(value, Mapping):
        return slo_times(value)
    if name == "device" and isinstance(value, Mapping):
        return f"{value['count']} x {value['name']}"
    if name == "model" and isinstance(value, Mapping):
        return str(value["name"])
    return config_text(value)


def _able(config: Mapping[str, Any]) -> str:
    """Return the devices of a run in words."""
    if "device" not in config:
        return "this server"
    replicas = config.get("replicas", 1)
    if not isinstance(replicas, int):
        replicas = sum(table.get("count", 1) for table in replicas)
    several = f"{counted(replicas, 'replica')} of " if replicas > 1 else ""
    return f"{several}{_setting('device', config['device'])}"


def config_text(value: Any) -> str:
    """Format a part of a configuration as on the command line."""
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(config_text, value))
    if isinstance(value, Mapping) and value.keys() - {"source"} == {"name", "options"}:
        edition = f" (source {value['source'][:8]})" if "source" in value else ""
        return plugin_text(value["name"], value["options"]) + edition
    if isinstance(value, Mapping):
        return plugin_text("", value).removeprefix(":") or "none"
    return f"{value:,}" if type(value) is int else as_text(value)
