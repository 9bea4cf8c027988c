"""Report on a simulated cluster: its results, and the load of each replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from kvcore.sections import Section, Table
from kvcore.serving.result import Reported
from kvcore.units import format_bytes, format_number, format_seconds
from kvcore_cli.report.simulation import SimulationReport, pool_text
from kvcore_cli.report.tables import TableRow, cell, counted, share
from kvcore_cluster.dispatcher import is_crowded

MOST_ROWS = 16
"""The most replicas that have a row each; more are summed up in groups."""

GROUPS = 8
"""Number of groups of replicas."""

FEW_REQUESTS = 10
"""Requests a replica below which nothing is said of how they were spread."""

MOST_NAMES = 8
"""The most replicas that a sentence names."""


class ClusterReport(SimulationReport):
    """The summary of a cluster as sentences and tables, the most important first."""

    def _details(self) -> list[Section]:
        """Return the sections on the replicas."""
        headers = [
            "replica",
            "blocks",
            "requests",
            "busy",
            "mean TTFT",
            "token hits",
            "evicted",
        ]
        headers += [] if self._planned else ["failed"]
        return [Table(headers, self.replicas), self.reading]

    @property
    def replicas(self) -> list[TableRow]:
        """Rows of the table of replicas; of many replicas, the means of groups."""
        replicas = self.summary["replicas"]
        if len(replicas) <= MOST_ROWS:
            return [self._row(str(row["replica"]), [row]) for row in replicas]
        ranked = iter(sorted(replicas, key=lambda row: -(row["busy"] or 0)))
        sizes = [len(replicas) // GROUPS + (n < len(replicas) % GROUPS) for n in range(GROUPS)]
        names = [f"{sizes[0]} busiest", *(f"next {size}" for size in sizes[1:-1])]
        names.append(f"{sizes[-1]} least busy")
        parts = [list(islice(ranked, size)) for size in sizes]
        return [self._row(name, part) for name, part in zip(names, parts, strict=True)]

    @property
    def reading(self) -> str:
        """Sentences about groups, and about replicas that failed, started or stopped."""
        summary, lines = self.summary, []
        if len(summary["replicas"]) > MOST_ROWS:
            line = "Replicas by the time they were busy; figures are means of a group"
            lines.append(
                f"{line}." if self._planned else f"{line}, and the sum of its failures."
            )
        if self._planned:
            changes, all_replicas = summary["changes"], len(summary["replicas"])
            starts, mean = sum(change["up"] for change in changes), self._mean_up
            decided = "The planner started and stopped no replica"
            if changes:
                stops = counted(len(changes) - starts, "stop")
                decided = f"The planner decided on {counted(starts, 'start')} and {stops}"
            lines.append(
                f"{decided}; in the mean {format_number(mean)} of {all_replicas:,} replicas "
                f"were up ({share(mean / all_replicas)}). One that stops loses its K/V."
            )
        lines += filter(None, [self._crowded])
        failed = [row for row in summary["replicas"] if row["failures"]]
        if failed:
            times = counted(sum(row["failures"] for row in failed), "time")
            which = ", ".join(str(row["replica"]) for row in failed[:MOST_NAMES])
            which += " and others" if len(failed) > MOST_NAMES else ""
            again = counted(summary["retried"], "request")
            several = len(failed) > 1
            lines.append(
                f"Failed, {times} in all: replica{'s' * several} {which}. "
                f"{'Their' if several else 'Its'} K/V was lost, and {again} in flight there "
                "began again."
            )
        return "\n".join(lines)

    @property
    def _crowded(self) -> str:
        """A sentence about a replica with nearly all of many requests."""
        rows, uneven = self.summary["replicas"], self.summary["imbalance"]["requests"]
        total = sum(row["requests"] for row in rows)
        few = total < FEW_REQUESTS * len(rows)
        if self._planned or few or "phases" in self.summary:
            return ""
        if uneven is None or not is_crowded(uneven["most"], len(rows)):
            return ""
        most = max(rows, key=lambda row: row["requests"])
        router = self.config["plugins"]["router"]["name"]
        return (
            f"Replica {most['replica']} got {most['requests']:,} of {total:,} requests: "
            f"{router} follows what is cached there, and the others rest. 'kvcore routers' "
            "shows which router spreads them."
        )

    @property
    def _planned(self) -> bool:
        """Whether a planner starts and stops replicas; beside one none fails."""
        return bool(self.config.get("autoscale"))

    @property
    def _sized(self) -> dict[str, Any]:
        """The fields of a header on the pool of the first replica, and the view of a router."""
        return {
            "count": "tokens",
            "block_size": self.config["block_size"],
            "blocks": self.config["replicas"][0]["blocks"],
            "routing": {"view": self.config["view"]},
        }

    @property
    def _blocks(self) -> int:
        return sum(group["count"] * group["blocks"] for group in self.config["replicas"])

    @property
    def _devices(self) -> str:
        groups = self.config["replicas"]
        kinds: dict[str, int] = {}
        for group in groups:
            kind = f"{group['tensor_parallel']} x {group['device']}"
            kinds[kind] = kinds.get(kind, 0) + group["count"]
        count = sum(kinds.values())
        devices = " and ".join(
            f"{replicas} of {kind}" if len(kinds) > 1 else kind
            for kind, replicas in kinds.items()
        )
        return f"{counted(count, 'replica')}{', ' if len(kinds) > 1 else ' of '}{devices}"

    @property
    def _able(self) -> str:
        if not self._planned:
            return self._devices
        up = format_number(self._mean_up)
        return f"the {up} of {self._devices} that the planner has up in the mean"

    @property
    def _mean_up(self) -> float:
        """Number of replicas that are up, in the mean over the time of the run."""
        seconds: float = self.summary["simulated_s"]
        replica_s: float = self.summary["replica_s"]
        return replica_s / seconds if seconds else float(len(self.summary["replicas"]))

    @property
    def _rate(self) -> str:
        return f" routed by {self.config['plugins']['router']['name']},{super()._rate}"

    @property
    def _pool(self) -> str:
        groups, size = self.config["replicas"], self.config["block_size"]
        if any(group.keys() & {"cache_groups", "layer_pools"} for group in groups):
            return "\n".join(_pool_of_each(group, size) for group in groups)
        memory = sum(
            group["count"] * group["blocks"] * group["bytes_per_block"] for group in groups
        )
        pools = " and ".join(f"{group['count']:,} x {group['blocks']:,}" for group in groups)
        codecs = " and ".join(dict.fromkeys(group["codec"] for group in groups))
        return (
            f"Pools: {pools} blocks of {counted(size, 'token')}, {self._blocks * size:,} "
            f"tokens in all, {format_bytes(memory)} in {codecs}."
        )

    @property
    def _has_tiers(self) -> bool:
        return bool(self.config["tiers"])

    def _amounts(self) -> Iterator[tuple[str, str]]:
        summary = self.summary
        yield from self._served()
        yield "evicted", counted(summary["evicted_blocks"], "block")
        phases = summary.get("phases")
        if phases is not None and phases["transfers"]:
            moved = format_bytes(phases["moved_bytes"])
            yield "K/V moved", f"{moved} for {counted(phases['transfers'], 'request')}"
            yield "", f"{format_seconds(phases['gap_s'])} from prefill to decode"
            busiest = max(phases["links"], key=phases["links"].__getitem__)
            yield "busiest link", f"{share(phases['links'][busiest])} of the time ({busiest})"
        for name, label in (("requests", "requests a replica"), ("busy", "busy time of one")):
            uneven = summary["imbalance"][name]
            if uneven is not None:
                ratio, deviation = format_number(uneven["most"]), share(uneven["variation"])
                yield label, f"at most {ratio} times the mean, deviation {deviation} of it"

    def _row(self, name: str, replicas: Sequence[Mapping[str, Any]]) -> TableRow:
        """Return the row of a group of replicas: means, and without a planner all failures."""

        def mean(key: str) -> float | None:
            values = [row[key] for row in replicas if row[key] is not None]
            return sum(values) / len(values) if values else None

        looked, hit = (
            sum(row["hit"][key] for row in replicas) for key in ("lookup_tokens", "hit_tokens")
        )
        cells = [
            name,
            f"{mean('blocks'):,.0f}",
            f"{mean('requests'):,.0f}",
            share(mean("busy")),
            cell(mean("ttft_s"), format_seconds),
            share(hit / looked if looked else None),
            f"{mean('evicted_blocks'):,.0f}",
        ]
        failures = sum(row["failures"] for row in replicas)
        return cells if self._planned else [*cells, f"{failures:,}"]


def _pool_of_each(group: Mapping[str, Any], size: int) -> str:
    """Return a sentence on the pool of each replica of a group."""
    each = " of each" if group["count"] > 1 else ""
    of = f"{each} of {counted(group['count'], 'replica')}"
    return pool_text(group["blocks"], size, group, of)


def report_of(result: Reported, document: Mapping[str, Any], **words: Any) -> ClusterReport:
    """Return the report of a cluster; `words` are further attributes of it."""
    refusal = next(iter(result.log.reasons.values()), None)
    return ClusterReport(document, document["config"], refusal, **words)
