"""Report on a plan: fleets that meet an SLO, and why no smaller one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from kvcore.analysis.fleet import Fleet
from kvcore.analysis.planning import FleetPlan, Limit, Option
from kvcore.config.options import is_plain
from kvcore.plugins.options import as_text
from kvcore.report.charts import as_percent
from kvcore.report.tables import NONE, cell, counted, share
from kvcore.sections import Chart, Panel, Section, Table
from kvcore.trace.fields import version
from kvcore.units import BINARY, format_bytes, format_number, format_seconds

SHOWN = 3
"""The most policies that are named as sufficient."""

LIMITS = {
    "policy": "another policy does at this size",
    "capacity": "more memory helps",
    "content": "prompts diverge, and nothing helps but changing them",
    "compute": "no memory is enough",
    "none": "all that were tried do",
}
"""The meaning of each verdict, in a few words."""


@attrs.frozen
class PlanReport:
    """A plan as a table with sentences, and as a JSON object.

    Attributes:
        plan: the plan.
    """

    plan: FleetPlan

    @property
    def sections(self) -> list[Section]:
        """The whole report on the plan."""
        chart = [self.chart()] if self.plan.options else []
        return [self.headline, self.table, *chart, self.limit, self.closing]

    @property
    def headline(self) -> str:
        """Sentences about the workload, the SLO and the best fleet."""
        plan, setup = self.plan, self.plan.setup
        asked = (
            f"{setup['workload']}: {counted(plan.requests, 'request')} to {setup['model']} on "
            f"{setup['device']}, of which {plan.percentile:g}% are to meet {setup['slo']}."
        )
        if plan.best is None:
            return f"{asked}\nNo fleet of up to {counted(plan.max_gpus, 'GPU')} does."
        met = plan.best.served.attainment
        return f"{asked}\nTake {self.fleet(plan.best.fleet)}: {met:.1%} do."

    @property
    def table(self) -> Table:
        """The fleets that meet the SLO, the best first."""
        headers = ["replicas", "GPUs each", "GPUs", "pool each", "host RAM each", "within SLO"]
        headers += ["TTFT p99", "TPOT p99", "hits", "busiest"]
        return Table(headers, [*map(self._cells, self.plan.options)], headers)

    @property
    def limit(self) -> str:
        """Sentences about why no smaller fleet meets the SLO."""
        limit = self.plan.limit
        text = f"Limit: {limit.verdict}: {LIMITS[limit.verdict]}."
        if limit.fleet is None:
            return text
        policies = [f"{kind} {name} {met:.1%}" for (kind, name), met in limit.policies.items()]
        if len(policies) > SHOWN:
            policies[SHOWN:] = [f"{len(policies) - SHOWN} more"]
        others = f"with {', '.join(policies)}; " if policies else ""
        grants = limit.grants
        return (
            f"{text} Of {self.fleet(limit.fleet)}, {share(limit.attainment)} of the requests "
            f"meet the SLO; {others}if eviction foresaw the future, {grants['foresight']:.1%}; "
            f"with a pool that never fills, {grants['endless']:.1%}; if every prompt had been "
            f"there before, {grants['seen']:.1%}."
        )

    @property
    def closing(self) -> str:
        """Sentences about the search, and the options that all simulations share."""
        setup = self.plan.setup
        parts = [
            f"{name} {as_text(value)}"
            for name, value in setup.items()
            if value is not None and not is_plain(name, value)
        ]
        return (
            "Sessions are divided among replicas by hash; busiest: the share of the prompt "
            "tokens that one replica gets.\n"
            f"Setup: kvcore {version()}; {'; '.join(parts)}."
        )

    def chart(self) -> Chart:
        """Return a chart of the GPUs, the memory and the requests in time of each fleet."""
        plan, setup = self.plan, self.plan.setup
        fleets = {self.fleet(option.fleet): option for option in plan.options}

        def bars(value: Callable[[Option], float]) -> dict[str, list[tuple[float, float]]]:
            return {name: [(0, value(option))] for name, option in fleets.items()}

        gib = BINARY["GiB"]
        pools = bars(lambda each: each.pool_bytes * each.fleet.replicas / gib)
        hosts = bars(lambda each: each.fleet.host_bytes * each.fleet.replicas / gib)
        within = bars(lambda each: each.served.attainment)
        asked = ("asked for", plan.percentile / 100)
        panels = [
            Panel("GPUs", bars(lambda each: each.fleet.gpus), "{:g}".format),
            Panel("K/V memory in all, GiB", pools, format_number),
            Panel("host RAM in all, GiB", hosts, format_number),
            Panel("within the SLO", within, as_percent, asked),
        ]
        title = self.headline.splitlines()[-1]
        if fleets:
            requests = counted(plan.requests, "request")
            title = f"Fleets for {setup['workload']}, {requests}, {setup['slo']}"
        return Chart(title, self.closing, "", panels)

    def fleet(self, fleet: Fleet) -> str:
        """Return a fleet in words."""
        size = fleet.blocks * self.plan.block_bytes[fleet.devices]
        each = " each" if fleet.replicas > 1 else ""
        host = f" and {format_bytes(fleet.host_bytes)} of host RAM" if fleet.host_bytes else ""
        return (
            f"{counted(fleet.replicas, 'replica')} on {fleet.devices} x "
            f"{self.plan.setup['device']},{each} with {format_bytes(size)} of K/V{host}"
        )

    def document(self) -> dict[str, Any]:
        """Return the plan as a JSON object, without its `schema`."""
        plan = self.plan
        return {
            "setup": plan.setup,
            "requests": plan.requests,
            "percentile": plan.percentile,
            "max_gpus": plan.max_gpus,
            "plans": [
                self._sizes(each.fleet)
                | {"slo_met": each.served.attainment, "hit_ratio": each.served.hit_ratio}
                | attrs.asdict(each.served, filter=attrs.filters.exclude("whole", "requests"))
                for each in plan.options
            ],
            "limit": self._limit(plan.limit),
            "simulations": plan.simulations,
            "notes": plan.notes,
        }

    def _limit(self, limit: Limit) -> dict[str, Any]:
        return {
            "verdict": limit.verdict,
            "why": self.limit,
            "fleet": None if limit.fleet is None else self._sizes(limit.fleet),
            "slo_met": limit.attainment,
            "granted": limit.grants,
            "policies": [
                {"kind": kind, "name": name, "slo_met": met}
                for (kind, name), met in limit.policies.items()
            ],
        }

    def _sizes(self, fleet: Fleet) -> dict[str, int]:
        return {
            "replicas": fleet.replicas,
            "tensor_parallel": fleet.devices,
            "gpus": fleet.gpus,
            "blocks": fleet.blocks,
            "pool_bytes": fleet.blocks * self.plan.block_bytes[fleet.devices],
            "host_bytes": fleet.host_bytes,
        }

    def _cells(self, option: Option) -> tuple[str, ...]:
        fleet, served = option.fleet, option.served
        times = (served.ttft_s, served.tpot_s)
        return (
            *map(str, (fleet.replicas, fleet.devices, fleet.gpus)),
            format_bytes(option.pool_bytes),
            format_bytes(fleet.host_bytes) if fleet.host_bytes else NONE,
            share(served.attainment),
            *(cell(time["p99"] if time else None, format_seconds) for time in times),
            share(served.hit_ratio),
            share(served.busiest),
        )
