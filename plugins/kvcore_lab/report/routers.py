"""Report on a comparison of routers: a table, and charts over the number of replicas."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import inf
from typing import Any

import attrs

from kvcore.sections import Chart, Panel, Section, Table
from kvcore.units import format_bytes, format_dollars, format_number, format_seconds
from kvcore_cli.report.tables import NONE, cell, counted, setup, share
from kvcore_cluster.dispatcher import is_crowded
from kvcore_cluster.report import FEW_REQUESTS
from kvcore_lab.report.policies import enumerated
from kvcore_lab.router_comparison import RouterComparison, RouterRow, SharedCache

NOISE = 0.01
"""Share of a figure by which another hour of the same traffic would change it."""

SHARED, OPTIMUM = "one shared cache", "optimum of one cache"


@attrs.frozen(slots=False)
class RoutersReport:
    """A comparison of routers as a table with sentences, as JSON, and as a chart.

    Attributes:
        comparison: the comparison.
    """

    comparison: RouterComparison

    @property
    def sections(self) -> list[Section]:
        """The whole report on the comparison."""
        return [self.headline, self.table, self.chart(), f"{self.reading}\n{self.setup}"]

    @property
    def headline(self) -> str:
        """A sentence about the workload and the clusters."""
        comparison, config = self.comparison, self.comparison.config
        source = comparison.workload
        *others, last = (str(shared.replicas) for shared in comparison.shared)
        fleets = f"{', '.join(others)} or {last}" if others else last
        memory = format_bytes(config["replicas"][0]["blocks"] * config["bytes_per_block"])
        first = "each" if len(config["replicas"]) == 1 else "in the first"
        return (
            f"{source.name}: {counted(source.requests, 'request')} to "
            f"{config['model']} on {fleets} replicas of {config['tensor_parallel']} x "
            f"{config['device']} with {memory} of K/V {first}; view {comparison.view}."
        )

    @property
    def table(self) -> Table:
        """The routers by replicas, those with the most goodput first, and the shared cache."""
        numbers = ["token hits", "of optimum", "busiest", "mean TTFT", "p99 TTFT", "p99 TPOT"]
        numbers += ["goodput", "in SLO"]
        replicas = ["replicas"] if self._several else []
        cells: list[list[str]] = []
        for shared in self.comparison.shared:
            first = [str(shared.replicas)] if self._several else []
            rows = map(_cells, self._ranked(shared))
            cells.extend([*first, *row] for row in (*rows, *_bounds(shared)))
        return Table([*replicas, "router", *numbers], cells, [*replicas, *numbers])

    def _ranked(self, shared: SharedCache) -> list[RouterRow]:
        """Return the rows of a cluster: the most goodput, and of near equals the least TTFT."""
        rows = [row for row in self.comparison.rows if row.replicas == shared.replicas]
        rows.sort(key=lambda row: -(row.goodput or 0))
        ranked: list[RouterRow] = []
        while rows:
            tied = _alike(rows)
            ranked += sorted(tied, key=_mean_ttft)
            rows = rows[len(tied) :]
        return ranked

    def _best(self) -> str:
        """Return the sentence about the best router of each cluster."""
        if len(self.comparison.rows) == len(self.comparison.shared):
            return ""
        best: dict[str, list[str]] = {}
        for shared in self.comparison.shared:
            tied = _alike(self._ranked(shared))
            most = _mean_ttft(tied[0]) * (1 + NOISE)
            routers = enumerated([row.router for row in tied if _mean_ttft(row) <= most])
            best.setdefault(routers, []).append(str(shared.replicas))
        names = [
            f"{router} with {enumerated(fleets)} replicas" if self._several else router
            for router, fleets in best.items()
        ]
        return f"Best: {'; '.join(names)} (by goodput, then by mean TTFT; within 1 % is alike)."

    @property
    def reading(self) -> str:
        """Sentences about the best router and the columns, and a warning about saturation."""
        table = (
            "Busiest: time in which the busiest replica ran steps, over the mean. Goodput: "
            "requests/s within their SLO."
        )
        bounded = any(shared.optimum is not None for shared in self.comparison.shared)
        optimum = "and the optimum, which is Belady's rule in that cache, serve"
        bounds = (
            "One shared cache has the memory of all replicas; it "
            f"{optimum if bounded else 'serves'} requests one after another, as they came, "
            "without a clock."
        )
        lines = [*filter(None, [self._best()]), table, bounds, *self._costs()]
        saturated = sum(bool(row.saturated) for row in self.comparison.rows)
        if saturated:
            lines.append(
                f"Saturated: {counted(saturated, 'run')}, marked *, whose queue grows for as "
                "long as requests arrive; their times tell how long the workload is."
            )
        crowded = {row.router for row in self.comparison.rows if self._is_crowded(row)}
        if crowded:
            lines.append(
                f"Crowded: with {enumerated(sorted(crowded))} one replica got at least ten "
                "times as many requests as the others in the mean."
            )
        return "\n".join(lines)

    def _is_crowded(self, row: RouterRow) -> bool:
        """Return True if one replica got nearly all requests of a workload that has many."""
        replicas = row.replicas
        if isinstance(replicas, str):
            replicas = sum(group["count"] for group in self.comparison.config["replicas"])
        many = self.comparison.workload.requests >= FEW_REQUESTS * replicas
        return many and is_crowded(row.imbalance_requests, replicas)

    def _costs(self) -> Iterator[str]:
        """Yield a sentence about the cost of each cluster."""
        for shared in self.comparison.shared:
            rows = [row for row in self.comparison.rows if row.replicas == shared.replicas]
            days = [row.usd_per_day for row in rows if row.usd_per_day is not None]
            rates = [
                (row.usd_per_million_output_tokens, row.router)
                for row in rows
                if row.usd_per_million_output_tokens is not None
            ]
            if not days:
                continue
            text = (
                f"{shared.replicas} replicas cost ${format_dollars(max(days))} a day "
                f"({self.comparison.gpu_prices})"
            )
            if rates:  # none where nothing is generated
                (least, cheap), (highest, dear) = min(rates), max(rates)
                text += f", and a million generated tokens ${format_dollars(least)}"
                if format_dollars(least) != format_dollars(highest):
                    text += f" with {cheap} to ${format_dollars(highest)} with {dear}"
            yield f"{text}."

    @property
    def setup(self) -> str:
        """A sentence with all options of the replicas, of the first where they differ."""
        config = self.comparison.config
        model = {"name": config["model"], "codec": config["codec"]}
        header = {
            **{name: value for name, value in config.items() if name != "replicas"},
            "mode": "model",
            "model": model | {"weights_dtype": config.get("weights_dtype")},
            "device": {"name": config["device"], "count": config["tensor_parallel"]},
            "count": "tokens",
            "blocks": config["replicas"][0]["blocks"],
            "slo": self.comparison.slo,
        }
        failures = [f"fail {failure}" for failure in config["fail"]]
        return f"{'; '.join([setup(header).removesuffix('.'), *failures])}."

    def document(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        source = self.comparison.workload.as_dict()
        return {"schema": 1, **attrs.asdict(self.comparison), "workload": source}

    def chart(self) -> Chart:
        """Return a chart of hits, latency and balance over the number of replicas."""
        shared, rows = self.comparison.shared, self.comparison.rows
        fleets = [fleet.replicas for fleet in shared]
        numbers = all(isinstance(fleet, int) for fleet in fleets)

        def at(replicas: int | str) -> float:
            return float(replicas) if numbers else fleets.index(replicas)

        def text(place: float) -> str:
            return format_number(place) if numbers else str(fleets[int(place)])

        def lines(name: str) -> dict[str, list[tuple[float, float]]]:
            lines: dict[str, list[tuple[float, float]]] = {}
            for row in rows:
                points, value = lines.setdefault(row.router, []), getattr(row, name)
                if value is not None:
                    points.append((at(row.replicas), value))
            return lines

        hits = lines("hit_ratio")
        for name, part in ((SHARED, "hit_ratio"), (OPTIMUM, "optimum")):
            known = [fleet for fleet in shared if getattr(fleet, part) is not None]
            hits |= {name: [(at(fleet.replicas), getattr(fleet, part)) for fleet in known]}
        panels = [
            Panel("hits, share of prompt tokens", hits, share),
            Panel("TTFT, mean", lines("ttft_mean_s"), format_seconds),
            Panel("busiest replica, over the mean", lines("imbalance_busy"), format_number),
        ]
        title = f"Routers on {self.comparison.workload.name}"
        return Chart(title, self.headline, "replicas", panels, text)

    @cached_property
    def _several(self) -> bool:
        return len(self.comparison.shared) > 1


def _alike(rows: list[RouterRow]) -> list[RouterRow]:
    """Return the rows with the most goodput, or so little less that it is noise."""
    least = max(row.goodput or 0 for row in rows) * (1 - NOISE)
    return [row for row in rows if (row.goodput or 0) >= least]


def _mean_ttft(row: RouterRow) -> float:
    """Return the mean TTFT; of a run without a first token it is the longest."""
    return inf if row.ttft_mean_s is None else row.ttft_mean_s


def _cells(row: RouterRow) -> Iterator[str]:
    yield f"{row.router} *" if row.saturated else row.router
    yield share(row.hit_ratio)
    yield share(row.share_of_optimum)
    yield cell(row.imbalance_busy, "{:.2f}".format)
    for time in (row.ttft_mean_s, row.ttft_p99_s, row.tpot_p99_s):
        yield cell(time, format_seconds)
    yield cell(row.goodput, format_number)
    yield share(row.slo_met)


def _bounds(shared: SharedCache) -> Iterator[list[str]]:
    """Yield the rows of one cache for all replicas."""
    best = shared.optimum
    for name, hits in ((SHARED, shared.hit_ratio), (OPTIMUM, best)):
        if hits is not None:
            part = share(hits / best if best else None)
            yield [name, share(hits), part, *[NONE] * 6]
