"""Other JSON documents in a report: sweeps, plans, what-ifs, miss reasons, quality, sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import attrs

from kvcore.analysis import Change, Explanation, RequestOutcome, RunSummary, WhatIf
from kvcore.analysis.fleet import Fleet, Served
from kvcore.analysis.miss_reasons import (
    OF_CLUSTERS,
    DivergencePoint,
    MissedTokens,
    Summary,
)
from kvcore.analysis.planning import FleetPlan, Limit, Option
from kvcore.analysis.quality import FULL, Quality, QualityRow
from kvcore.analysis.sweep import Sweep, axes_of
from kvcore.pages.report_parts import (
    COLOURS,
    DASHES,
    Axis,
    Document,
    Line,
    Part,
    Result,
    again,
    bars,
    chart,
    command,
    curves,
    heading,
    opening,
    reason_tables,
    sections,
    sentences,
    settings,
    table,
)
from kvcore.plugins.options import as_text
from kvcore.report import WhatIfReport
from kvcore.report.billing import bill_sections
from kvcore.report.misses import SummaryReport, spaced
from kvcore.report.plan import PlanReport
from kvcore.report.quality import PANELS, QualityReport
from kvcore.report.size import size_table, size_title
from kvcore.report.sweep import MEASURES, POLICIES, SweepReport
from kvcore.report.tables import NONE, counted
from kvcore.sections import Table
from kvcore.units import NS_PER_S, format_seconds


@attrs.frozen
class SeenGrid:
    """The grid of a sweep, found from its rows.

    Attributes:
        mode: mode of the cells.
        axes: the values of each axis, in the order of the rows.
    """

    mode: str
    axes: Mapping[str, Sequence[Any]]

    @classmethod
    def of(cls, mode: str, rows: Sequence[Mapping[str, Any]]) -> SeenGrid:
        """Return the axes of rows; `blocks` is none if the others distinguish all cells."""
        seen = {
            name: [*dict.fromkeys(row[name] for row in rows)]
            for name in axes_of(mode)
            if rows and name in rows[0] and any(row[name] is not None for row in rows)
        }
        others = [name for name, values in seen.items() if len(values) > 1 and name != "blocks"]
        distinct = len({tuple(row[name] for name in others) for row in rows}) == len(rows)
        if distinct and len(seen.get("blocks", ())) > 1:
            del seen["blocks"]
        return cls(mode, seen)

    @property
    def varied(self) -> list[str]:
        """The axes with more than one value, in order."""
        return [name for name, values in self.axes.items() if len(values) > 1]


@attrs.frozen(kw_only=True, eq=False)
class Swept(Result):
    """The table of a sweep."""

    kind: ClassVar[str] = "Sweep"
    plural: ClassVar[str] = "Sweeps"

    grid: SeenGrid
    report: SweepReport

    @classmethod
    def of(cls, name: str, document: Document) -> Swept:
        """Read a document back."""
        rows, mode = document["rows"], document["mode"]
        grid = SeenGrid.of(mode, rows)
        return cls(
            name=name, grid=grid, report=SweepReport(Sweep(cast("Any", grid), rows, 0, 0))
        )

    @property
    def table(self) -> Table:
        """The best cell of each contest."""
        return self.report.table

    def parts(self) -> Iterator[Part]:
        """Yield the parts of a report on one sweep."""
        report, grid = self.report, self.grid
        yield from opening(report)
        yield heading("The best")
        yield from sections(report.table, caption="The best of each contest")
        yield from sentences(report.reading)
        yield from self._charts()
        yield heading("All cells")
        rows = report.sweep.rows
        measures = [
            each
            for each in MEASURES[grid.mode]
            if any(row[each.column] is not None for row in rows)
        ]
        cells = [
            [
                *(NONE if row[name] is None else as_text(row[name]) for name in grid.varied),
                *(NONE if row[m.column] is None else m.text(row[m.column]) for m in measures),
            ]
            for row in rows
        ]
        headers = [*grid.varied, *(f"{each.column} ({each.unit})" for each in measures)]
        yield from table("Every cell", headers, cells, headers[len(grid.varied) :])
        failed = [
            [*(as_text(row[name]) for name in grid.varied), row["error"]]
            for row in report.sweep.failed
        ]
        yield from table("Cells that failed", [*grid.varied, "because"], failed, ())
        toml = [f'mode = "{grid.mode}"']
        toml += [f"{name} = {json.dumps(values)}" for name, values in grid.axes.items()]
        grid_file, run = again("kvcore sweep grid.toml --out results.csv")
        yield from (grid_file, {"kind": "command", "text": "\n".join(toml)}, run)

    def _charts(self) -> Iterator[Part]:
        """Yield a chart for each measure, by the first axis of numbers; a line a policy."""
        grid, rows = self.grid, self.report.sweep.rows
        across = next(
            (
                name
                for name in grid.varied
                if name not in POLICIES
                and all(type(value) in (int, float) for value in grid.axes[name])
            ),
            None,
        )
        if across is None:
            return
        others = [name for name in grid.varied if name != across]
        for measure in MEASURES[grid.mode]:
            points: dict[str, list[tuple[float, float]]] = {}
            for row in rows:
                if row[measure.column] is not None:
                    name = ", ".join(as_text(row[other]) for other in others) or measure.unit
                    points.setdefault(name, []).append((row[across], row[measure.column]))
            unit, factor = {"ttft_s_mean": ("s", 1)}.get(measure.column, ("%", 100))
            if measure.column == "goodput":
                unit, factor = "", 1
            title = f"{measure.title.partition(' ')[2]}, {measure.unit}"
            x = Axis(across.replace("_", " "), log=_spread(grid.axes[across]))
            by = f"; a line for each {' and '.join(others)}" if others else ""
            about = f"Of each cell, by {x.title}{by}."
            yield from chart(
                f"{title[0].upper()}{title[1:]}",
                about,
                x,
                Axis(title, unit),
                curves(points, factor),
            )


def _spread(values: Sequence[float]) -> bool:
    """Return True if values are so far apart that they need a logarithmic scale."""
    return min(values) > 0 and max(values) >= 4 * min(values)


@attrs.frozen(kw_only=True, eq=False)
class Planned(Result):
    """The document that `plan --json` prints."""

    kind: ClassVar[str] = "Plan of a fleet"
    plural: ClassVar[str] = "Plans of fleets"

    report: PlanReport

    @classmethod
    def of(cls, name: str, document: Document) -> Planned:
        """Read a document back."""
        limit = document["limit"]
        options = [_option(each) for each in document["plans"]]
        sized = [*document["plans"], *filter(None, [limit["fleet"]])]
        plan = FleetPlan(
            setup=document["setup"],
            requests=document["requests"],
            percentile=document["percentile"],
            max_gpus=document["max_gpus"],
            block_bytes={
                each["tensor_parallel"]: each["pool_bytes"] // each["blocks"] for each in sized
            },
            options=options,
            limit=Limit(
                verdict=limit["verdict"],
                fleet=None if limit["fleet"] is None else _fleet(limit["fleet"]),
                attainment=limit["slo_met"],
                grants=limit["granted"],
                policies={
                    (each["kind"], each["name"]): each["slo_met"] for each in limit["policies"]
                },
            ),
            simulations=document["simulations"],
            notes=document["notes"],
        )
        return cls(name=name, report=PlanReport(plan))

    @property
    def table(self) -> Table:
        """The fleets that meet the SLO."""
        return self.report.table

    def parts(self) -> Iterator[Part]:
        """Yield the parts of a report on one plan."""
        report, plan = self.report, self.report.plan
        yield from sentences(report.headline)
        yield heading("Fleets")
        yield from sections(report.table, caption="Fleets that meet the SLO, the best first")
        yield heading("What limits a smaller fleet")
        yield from sentences(report.limit)
        limit = plan.limit
        if limit.attainment is not None:
            met = {"as it is": limit.attainment}
            met |= {GRANTED.get(name, name): each for name, each in limit.grants.items()}
            met |= {f"{kind} {name}": each for (kind, name), each in limit.policies.items()}
            yield from bars(
                "Requests within the SLO",
                "The share of requests that meet the SLO on a fleet that is too small: as it "
                "is, and with what no server has.",
                [*met],
                {"requests": [100 * each for each in met.values()]},
                lambda percent: f"{percent:.1f}%",
            )
        yield heading("What was run")
        yield from sentences(report.closing)
        yield from sentences("\n".join(plan.notes))
        options = {name: value for name, value in plan.setup.items() if name != "workload"}
        more = {"percentile": plan.percentile, "max_gpus": plan.max_gpus}
        yield from again(command("plan", plan.setup["workload"], **options, **more))


GRANTED = {
    "foresight": "eviction with foresight",
    "endless": "a pool that never fills",
    "seen": "every prompt seen before",
}


def _fleet(document: Document) -> Fleet:
    return Fleet(
        replicas=document["replicas"],
        devices=document["tensor_parallel"],
        blocks=document["blocks"],
        host_bytes=document["host_bytes"],
    )


def _option(document: Document) -> Option:
    names = {field.name for field in attrs.fields(Served)} - {"whole", "requests"}
    served = Served(
        requests=document["judged"], whole=True, **{name: document[name] for name in names}
    )
    return Option(fleet=_fleet(document), pool_bytes=document["pool_bytes"], served=served)


@attrs.frozen(kw_only=True, eq=False)
class Rerun(Result):
    """The document that `replay --json` prints for a run with other options."""

    kind: ClassVar[str] = "What if"

    document: Document
    report: WhatIfReport

    @classmethod
    def of(cls, name: str, document: Document) -> Rerun:
        """Read a document back."""
        recorded, rerun = (
            RunSummary(**{key: each for key, each in document[run].items() if key != "bill"})
            for run in ("recorded", "rerun")
        )
        whatif = WhatIf(
            file=document["file"],
            header={},
            kvcore=document["kvcore"]["recorded"],
            here=document["kvcore"]["rerun"],
            workload=document["workload"],
            timed=document["timed"],
            recorded=recorded,
            rerun=rerun,
            changes=[
                Change(
                    each["id"],
                    each["prompt"],
                    _outcome(each["recorded"]),
                    _outcome(each["rerun"]),
                )
                for each in document["changes"]
            ],
        )
        return cls(name=name, document=document, report=WhatIfReport(whatif))

    def parts(self) -> Iterator[Part]:
        """Yield the parts of a report on one what-if."""
        report, found = self.report, self.report.whatif
        yield from sentences(report.headline)
        yield heading("Both runs")
        yield from sections(report.table, caption="Recorded, and what if")
        yield from sentences(report.verdict)
        for each in report.tables:
            yield from sections(each, caption=f"Requests: {each.headers[0]}")
        bills = self.document["recorded"].get("bill")
        if bills is not None:
            yield heading("Bills")
            yield from sections(*bill_sections(bills, self.document["rerun"]["bill"]["run"]))
        yield heading("What was run")
        one, other = (dict(settings(run.config)) for run in (found.recorded, found.rerun))
        rows = [[name, one.get(name, NONE), other.get(name, NONE)] for name in {**one, **other}]
        yield from table("All settings", ["setting", "recorded", "what if"], rows, ())
        before, after = found.recorded.config, found.rerun.config
        changed = {n: v for n, v in after.items() if before.get(n) != v and n != "batching"}
        changed |= {
            name: value
            for name, value in (after.get("batching") or {}).items()
            if (before.get("batching") or {}).get(name) != value
        }
        if "tiers" in changed:
            changed["tier"] = changed.pop("tiers") or "none"
        yield from again(command("replay", found.file, **changed, json=True))
        yield from sentences(
            f"Regret and miss reasons are those of the trace: give {found.file} to `kvcore "
            "report` too.",
            "missing",
        )


def _outcome(document: Document) -> RequestOutcome:
    ttft = document["ttft_s"]
    ns = None if ttft is None else round(ttft * NS_PER_S)
    return RequestOutcome(document["hit_tokens"], ns, document["rejected"])


@attrs.frozen(kw_only=True, eq=False)
class Explained(Result):
    """The document that `explain --json` prints, on all requests or one."""

    kind: ClassVar[str] = "Miss reasons"

    document: Document
    explanation: Explanation
    summary: Summary | None

    @classmethod
    def of(cls, name: str, document: Document) -> Explained:
        """Read a document back."""
        names = ("mode", "count", "block_size", "key_tokens", "blocks", "recompute")
        header = {each: document[each] for each in names}
        header["plugins"] = {kind: {"name": document[kind]} for kind in ("eviction", "prefix")}
        explanation = Explanation(
            source=document["source"],
            header=header,
            complete=document["complete"],
            cut_reason=document["cut_reason"],
            requests={},
        )
        summary = _summary(document) if "lost" in document else None
        return cls(name=name, document=document, explanation=explanation, summary=summary)

    @property
    def table(self) -> Table | None:
        """The missed tokens by reason."""
        if self.summary is None:
            return None
        return SummaryReport(self.explanation, self.summary).table

    def parts(self) -> Iterator[Part]:
        """Yield the parts of a report on one explanation."""
        source, asked = self.explanation.source, (self.document.get("request"),)
        if self.summary is None:
            yield from self._request()
            line = command("explain", source, *asked, json=True)
        else:
            report = SummaryReport(self.explanation, self.summary)
            yield from sentences(report.headline)
            yield from reason_tables(report)
            line = command("explain", source, summary=True, json=True)
        yield from again(line)
        yield from sentences(
            f"What was run, the regret, and what happened over time are in the trace: give "
            f"{source} to `kvcore report` too.",
            "missing",
        )

    def _request(self) -> Iterator[Part]:
        """Yield why one request missed."""
        found = self.document
        yield from sentences(
            f"Request {found['request']} of {found['source']}: {found['state']}. Of "
            f"{counted(found['prompt_tokens'], 'token')}, {found['hit_tokens']:,} hit and "
            f"{found['missed_tokens']:,} missed."
        )
        rows = []
        for each in found["losses"]:
            first, tokens, gone = each["first_token"], each["tokens"], each["eviction"]
            why = OF_CLUSTERS[each["category"]]
            if gone is not None:
                why += f" (at {gone['t_s']:.12g} s by {gone['by']} for request {gone['for']})"
            cells = [f"{first:,}", f"{tokens:,}", format_seconds(each["prefill_s"])]
            rows.append([*cells, spaced(each["category"]), why])
        headers = ["from token", "tokens", "prefill", "lost", "because"]
        yield from table(
            "Missed tokens, in the order of the prompt", headers, rows, headers[:3]
        )


def _lost(document: Document) -> dict[str, MissedTokens]:
    return {
        name: MissedTokens(each["tokens"], each["prefill_s"], each["stopped"])
        for name, each in document.items()
    }


def _place(document: Document) -> DivergencePoint:
    return DivergencePoint(
        first=document["first_token"],
        width=document["key_tokens"],
        example=document["example"],
        other=document["other"],
        requests=document["requests"],
        tokens=document["tokens"],
        shares=document["prompt_share"] * document["requests"],
    )


def _summary(document: Document) -> Summary:
    def ranked(name: str) -> list[tuple[int | str, int]]:
        return [(each["request"], each["tokens"]) for each in document[name]]

    return Summary(
        **document["requests"],
        prompt_tokens=document["prompt_tokens"],
        hit_tokens=document["hit_tokens"],
        categories=_lost(document["lost"]),
        ways=_lost(document["compulsory"]),
        salted=_lost({"": document["other_salts"]})[""],
        places=[*map(_place, document["places"])],
        victims=ranked("victims"),
        beneficiaries=ranked("beneficiaries"),
        load_s=document["load_s"],
    )


@attrs.frozen(kw_only=True, eq=False)
class Measured(Result):
    """The document that `quality --json` prints."""

    kind: ClassVar[str] = "Quality under bounded or shrunk K/V"

    report: QualityReport

    @classmethod
    def of(cls, name: str, document: Document) -> Measured:
        """Read a document back."""
        fields = {key: value for key, value in document.items() if key != "schema"}
        quality = Quality(**fields | {"rows": [QualityRow(**row) for row in document["rows"]]})
        return cls(name=name, report=QualityReport(quality))

    @property
    def table(self) -> Table:
        """The losses of all policies and codecs."""
        return self.report.table

    def parts(self) -> Iterator[Part]:
        """Yield the parts of a report on one measurement."""
        report, quality = self.report, self.report.quality
        yield from opening(report)
        yield heading("What is lost")
        yield from sections(report.table, caption="Retention, codec and budget")
        yield from sentences(report.reading)
        codecs = [*dict.fromkeys(row.codec for row in quality.rows)]
        groups: dict[tuple[str, str], list[QualityRow]] = {}
        for row in sorted(quality.rows, key=lambda row: row.bytes_per_token):
            full = row.retention == FULL
            groups.setdefault((FULL, "") if full else (row.retention, row.codec), []).append(
                row
            )
        policies = [*dict.fromkeys(name for name, codec in groups if codec)]
        for field, label, factor in PANELS if quality.needles else PANELS[:-1]:
            lines = [
                Line(
                    f"{policy}, {codec}" if codec else "all tokens",
                    [row.bytes_per_token for row in found],
                    [factor * (getattr(row, field) or 0) for row in found],
                    COLOURS[policies.index(policy) % len(COLOURS)] if codec else "ink",
                    DASHES[codecs.index(codec) % len(DASHES)] if codec else "solid",
                    points=True,
                )
                for (policy, codec), found in groups.items()
            ]
            label = f"{label[0].upper()}{label[1:]}"  # noqa: PLW2901 - as a title
            about = "By the bytes held a token of context, on a logarithmic scale."
            unit = "" if factor == 1 else "%"
            x = Axis("bytes a token of context", log=True)
            yield from chart(label, about, x, Axis(label, unit), lines)


@attrs.frozen(kw_only=True, eq=False)
class Sized(Result):
    """The document that `size --json` prints."""

    kind: ClassVar[str] = "Size of K/V"
    plural: ClassVar[str] = "Sizes of K/V"

    document: Document
    table: Table

    @classmethod
    def of(cls, name: str, document: Document) -> Sized:
        """Read a document."""
        return cls(name=name, document=document, table=size_table(document))

    def parts(self) -> Iterator[Part]:
        """Yield the parts of a report on one model."""
        found, model = self.document, self.document["model"]
        yield from sentences(size_title(model))
        headers, rows = self.table.headers, self.table.rows
        yield from table("What it takes, and what fits", headers, rows)
        device = found.get("device")
        line = command(
            "size",
            model["name"],
            tokens=found["tokens"],
            batch=found["batch"],
            codec=found["codec"],
            block_size=found["block_size"],
            window=found["kv"].get("window"),
            device=device and device["name"],
            reserve=device and f"{found['fit']['reserve_bytes']}B",
            json=True,
        )
        yield from again(line)
