"""Report on a plan: fleets that meet an SLO, and why no smaller one does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvcore.plugins.options import as_text
from kvcore.report.tables import NONE, cell, counted, share
from kvcore.sections import Chart, Panel, Section, Table
from kvcore.trace.fields import version
from kvcore.units import BINARY, format_bytes, format_number, format_seconds
from kvcore_replay.report.charts import as_percent

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
    """A plan as a table with sentences.

    Attributes:
        plan: the plan as a JSON object, from `FleetPlan.as_dict()`.
    """

    plan: Mapping[str, Any]

    @property
    def sections(self) -> list[Section]:
        """The whole report on the plan."""
        chart = [self.chart()] if self.plan["plans"] else []
        return [self.headline, self.table, *chart, self.limit, self.closing]

    @property
    def headline(self) -> str:
        """Sentences about the workload, the SLO and the best fleet."""
        plan, setup = self.plan, self.plan["setup"]
        asked = (
            f"{setup['workload']}: {counted(plan['requests'], 'request')} to {setup['model']} "
            f"on {setup['device']}, of which {plan['percentile']:g}% are to meet "
            f"{setup['slo']}."
        )
        if not plan["plans"]:
            return f"{asked}\nNo fleet of up to {counted(plan['max_gpus'], 'GPU')} does."
        best = plan["plans"][0]
        return f"{asked}\nTake {self.fleet(best)}: {best['slo_met']:.1%} do."

    @property
    def table(self) -> Table:
        """The fleets that meet the SLO, the best first."""
        headers = ["replicas", "GPUs each", "GPUs", "pool each", "host RAM each", "within SLO"]
        headers += ["TTFT p99", "TPOT p99", "hits", "busiest"]
        return Table(headers, [*map(_cells, self.plan["plans"])], headers)

    @property
    def limit(self) -> str:
        """Sentences about why no smaller fleet meets the SLO."""
        limit = self.plan["limit"]
        text = f"Limit: {limit['verdict']}: {LIMITS[limit['verdict']]}."
        if limit["fleet"] is None:
            return text
        policies = [
            f"{each['kind']} {each['name']} {each['slo_met']:.1%}" for each in limit["policies"]
        ]
        if len(policies) > SHOWN:
            policies[SHOWN:] = [f"{len(policies) - SHOWN} more"]
        others = f"with {', '.join(policies)}; " if policies else ""
        grants = limit["granted"]
        return (
            f"{text} Of {self.fleet(limit['fleet'])}, {share(limit['slo_met'])} of the "
            f"requests meet the SLO; {others}if eviction foresaw the future, "
            f"{grants['foresight']:.1%}; with a pool that never fills, "
            f"{grants['endless']:.1%}; if every prompt had been there before, "
            f"{grants['seen']:.1%}."
        )

    @property
    def closing(self) -> str:
        """Sentences about the search, and the options that all simulations share."""
        setup = self.plan["setup"]
        parts = [
            f"{name} {as_text(value)}" for name, value in setup.items() if value is not None
        ]
        return (
            "Sessions are divided among replicas by hash; busiest: the share of the prompt "
            "tokens that one replica gets.\n"
            f"Setup: kvcore {version()}; {'; '.join(parts)}."
        )

    def chart(self) -> Chart:
        """Return a chart of the GPUs, the memory and the requests in time of each fleet."""
        plan, setup = self.plan, self.plan["setup"]
        fleets = {self.fleet(fleet): fleet for fleet in plan["plans"]}

        def bars(value: Callable[[Any], float]) -> dict[str, list[tuple[float, float]]]:
            return {name: [(0, value(fleet))] for name, fleet in fleets.items()}

        gib = BINARY["GiB"]
        pools = bars(lambda fleet: fleet["pool_bytes"] * fleet["replicas"] / gib)
        hosts = bars(lambda fleet: fleet["host_bytes"] * fleet["replicas"] / gib)
        within = bars(lambda fleet: fleet["slo_met"])
        asked = ("asked for", plan["percentile"] / 100)
        panels = [
            Panel("GPUs", bars(lambda fleet: fleet["gpus"]), "{:g}".format),
            Panel("K/V memory in all, GiB", pools, format_number),
            Panel("host RAM in all, GiB", hosts, format_number),
            Panel("within the SLO", within, as_percent, asked),
        ]
        title = self.headline.splitlines()[-1]
        if fleets:
            requests = counted(plan["requests"], "request")
            title = f"Fleets for {setup['workload']}, {requests}, {setup['slo']}"
        return Chart(title, self.closing, "", panels)

    def fleet(self, fleet: Mapping[str, Any]) -> str:
        """Return a fleet in words."""
        each = " each" if fleet["replicas"] > 1 else ""
        host = ""
        if fleet["host_bytes"]:
            host = f" and {format_bytes(fleet['host_bytes'])} of host RAM"
        return (
            f"{counted(fleet['replicas'], 'replica')} on {fleet['tensor_parallel']} x "
            f"{self.plan['setup']['device']},{each} with {format_bytes(fleet['pool_bytes'])} "
            f"of K/V{host}"
        )


def _cells(fleet: Mapping[str, Any]) -> list[str]:
    """Return the cells of a fleet that meets the SLO."""
    times = (fleet["ttft_s"], fleet["tpot_s"])
    return [
        *(str(fleet[name]) for name in ("replicas", "tensor_parallel", "gpus")),
        format_bytes(fleet["pool_bytes"]),
        format_bytes(fleet["host_bytes"]) if fleet["host_bytes"] else NONE,
        share(fleet["slo_met"]),
        *(cell(time["p99"] if time else None, format_seconds) for time in times),
        share(fleet["hit_ratio"]),
        share(fleet["busiest"]),
    ]
