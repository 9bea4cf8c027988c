"""JSON documents in a report: the kinds, and how each is recognised, read back and shown.

A kind is a function that reads a document back into the result that wrote it, and yields the
sections of its report, with what a page adds to them: charts, and the commands that make the
result again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar, cast

import attrs

from kvcore.errors import InputError
from kvcore.plugins.options import as_text
from kvcore.sections import Chart, Panel, Section, Table
from kvcore.units import format_bytes, format_seconds
from kvcore_cli.report.tables import NONE, cell, counted, nanoseconds, share
from kvcore_lab.comparison import Comparison, Infinite, Row, Source
from kvcore_lab.curves.mrc import Curve, Curves
from kvcore_lab.curves.plane import Plane, PlanePoint
from kvcore_lab.quality import Quality, QualityRow
from kvcore_lab.report.comparison import ComparisonReport, residency_sections
from kvcore_lab.report.mrc import CurvesReport
from kvcore_lab.report.plan import DevicePlansReport, PlanReport
from kvcore_lab.report.plane import PlaneReport
from kvcore_lab.report.policies import named
from kvcore_lab.report.quality import QualityReport
from kvcore_lab.report.size import size_sections
from kvcore_lab.report.sweep import SweepReport, chart_axis
from kvcore_lab.sweep import Sweep
from kvcore_lab.sweep.grid import axes_of
from kvcore_pages.report_parts import (
    REASONS,
    Axis,
    Document,
    Part,
    Result,
    again,
    against,
    chart,
    command,
    heading,
    panel_lines,
    recorded,
    sentences,
    settings,
    shown,
    table,
)
from kvcore_replay.belady import Belady
from kvcore_replay.billing import Bill, Bills
from kvcore_replay.misses.reasons import CATEGORIES, OF_CLUSTERS, OF_GROUPS, OF_POOLS
from kvcore_replay.pricing import PriceModel
from kvcore_replay.recorded_run import RunSummary
from kvcore_replay.report.billing import BILLS, bill_sections
from kvcore_replay.report.misses import SummaryReport, spaced
from kvcore_replay.report.whatif import WhatIfReport, change_text
from kvcore_replay.what_if import Change, RequestOutcome, WhatIf

Content: TypeAlias = Iterator[Section | Part]
"""The sections of a report, and the parts that only a page has."""

Reader: TypeAlias = Callable[[Document], Content]
"""Reads a document back, and yields what is shown of it."""

T = TypeVar("T")

HITS, POOL = "Hits by pool size", "blocks in the pool"

NEEDS_TRACE = (
    "Why prompts missed, and what happened at each moment, is in a trace, and this document "
    "holds none: `kvcore compare --trace run.jsonl.gz` writes one, of one policy in a pool of "
    "one size. Report it too."
)


@attrs.frozen
class Form:
    """A kind of JSON document.

    Attributes:
        keys: the keys that identify the kind.
        kind, plural: the title of one document, and of several.
        titles: titles of its tables and charts, in order.
        content: yields what is shown of a document.
    """

    keys: frozenset[str]
    kind: str
    plural: str
    titles: Sequence[str]
    content: Reader


FORMS: list[Form] = []
"""The kinds of documents."""


def _form(keys: str, kind: str, *titles: str, plural: str = "") -> Callable[[Reader], Reader]:
    """Return a decorator that adds a reader of documents to `FORMS`."""

    def add(content: Reader) -> Reader:
        FORMS.append(Form(frozenset(keys.split()), kind, plural or kind, titles, content))
        return content

    return add


@attrs.frozen(kw_only=True, eq=False)
class DocumentResult(Result):
    """A result that was read from a JSON document.

    Attributes:
        form: the kind of the document.
        content: what is shown of it.
    """

    form: Form
    content: Sequence[Section | Part]

    @classmethod
    def read(cls, name: str, document: Document, form: Form) -> DocumentResult:
        """Read a document of a kind back."""
        # Plans and sizes have notes of their own, among their sentences.
        notes = document.get("notes", ()) if "workload" in document else ()
        content = [*sentences("\n".join(notes), "notice"), *form.content(document)]
        return cls(name=name, kind=form.kind, plural=form.plural, form=form, content=content)

    def parts(self) -> Iterator[Part]:
        """Yield the parts of a report on the document."""
        yield from shown(self.content, *self.form.titles)

    @classmethod
    def together(cls, results: Sequence[Result], labels: Sequence[str]) -> Iterator[Part]:
        """Yield the lines of hits in one chart, or the tables of equal headers as one."""
        documents = [result for result in results if isinstance(result, DocumentResult)]
        if HITS in documents[0].form.titles:
            charts = _first(Chart, documents)
            if len(charts) == len(documents):
                yield from _side_by_side([hits.panels[0] for hits in charts], labels)
            return
        tables = _first(Table, documents)
        if len(tables) == len(documents) and len({tuple(t.headers) for t in tables}) == 1:
            rows = [
                [label, *row] for label, t in zip(labels, tables, strict=True) for row in t.rows
            ]
            headers = tables[0].headers
            yield from table("All results", ["result", *headers], rows, headers[1:])


def _first(kind: type[T], documents: Iterable[DocumentResult]) -> list[T]:
    """Return the first section of a class in each document that has one."""
    firsts = (
        next((part for part in document.content if isinstance(part, kind)), None)
        for document in documents
    )
    return [part for part in firsts if part is not None]


def _side_by_side(panels: Sequence[Panel], labels: Sequence[str]) -> Iterator[Part]:
    """Yield one chart of all lines, and a table of hits by result, policy and size."""
    colours: dict[str, int] = {}
    lines = [
        line
        for turn, (panel, label) in enumerate(zip(panels, labels, strict=True))
        for line in panel_lines(panel, colours, f", {label}", turn)
    ]
    about = f"By {POOL}, in all results."
    yield from chart(HITS, about, Axis(POOL, log=True), Axis(panels[0].label, "%"), lines)
    hits: defaultdict[tuple[str, float], list[float | None]]
    hits = defaultdict(lambda: [None] * len(panels))
    for result, panel in enumerate(panels):
        for name, points in panel.lines.items():
            for blocks, ratio in points:
                hits[name, blocks][result] = ratio
    rows = []
    for (name, blocks), (first, *others) in hits.items():
        changes = ((share(other), change_text(first, other, share)) for other in others)
        rows.append([name, f"{blocks:,}", share(first), *chain.from_iterable(changes)])
    headers = ["eviction", "blocks", *against(labels)]
    yield from table("Hits by policy and pool size", headers, rows)


def _read(kind: type[T], document: Document, **others: Any) -> T:
    """Return an object of an attrs class from the fields of a document, and other fields."""
    names = (field.name for field in attrs.fields(cast("Any", kind)))
    fields = {name: document[name] for name in names if name in document}
    return kind(**fields | others)


def _layout(document: Document, block_size: int) -> Any:
    """Return the fields of a block's layout that reports need; None without memory sizes."""
    memory = document.get("memory")
    if memory is None:
        return None
    return SimpleNamespace(
        block_size=block_size,
        model=SimpleNamespace(name=memory["model"]),
        pool_note=memory.get("note", ""),
        codec=memory["codec"],
        bytes_per_block=memory["bytes_per_block"],
    )


def _over_blocks(sections: Iterable[Section]) -> Iterator[Section]:
    """Yield sections with charts over numbers of blocks, also for sizes in bytes."""
    for section in sections:
        yield section._replace(across=POOL) if isinstance(section, Chart) else section


def _needs_trace(words: Sequence[str] = ()) -> Iterator[Part]:
    """Yield how to make a trace, with the command `words` if there is one."""
    yield from sentences(NEEDS_TRACE, "missing")
    if words:
        yield command(*words)
        yield command("kvcore", "report", "run.jsonl.gz", "-o", "run.html")


@_form(
    "rows infinite workload count",
    "Comparison of eviction policies",
    *("Hits by policy and pool size", HITS, "Bill by policy and pool size"),
    plural="Comparisons of eviction policies",
)
def _comparison(document: Document) -> Content:
    def bill(fields: Document | None) -> Bill | None:
        return None if fields is None else Bill(**fields)

    bills = None
    if fields := document.get("bill"):
        kinds: Any = {kind: bill(fields[kind]) for kind in BILLS}
        bills = Bills(price=PriceModel(**fields["price"]), **kinds)
    rows = [_read(Row, row, bill=bill(row.get("bill"))) for row in document["rows"]]
    source, memory = document["workload"], document.get("memory")
    comparison = Comparison(
        workload=Source(**source),
        accounting=document["count"],
        rows=rows,
        infinite=Infinite(**document["infinite"]),
        bills=bills,
    )
    report = ComparisonReport(
        comparison,
        memory and {size["blocks"]: format_bytes(size["bytes"]) for size in memory["budgets"]},
        layout=_layout(document, rows[0].block_size),
        residency=False,
        **{name: document[name] for name in ("prefix",) if name in document},
    )
    yield from _over_blocks(report.sections)
    if report.empty:
        return
    yield heading("Regret")
    yield from _regret(comparison)
    if rested := residency_sections(comparison):
        yield heading("Blocks in the cache")
        yield from shown(rested, "How long blocks rest")
    yield from again(recorded(document, "--json"))
    traced = len(rows) == 1 and rows[0].eviction != Belady.name
    yield from _needs_trace(recorded(document, "--trace", "run.jsonl.gz") if traced else ())


def _regret(comparison: Comparison) -> Iterator[Part]:
    """Yield how far each policy is from the optimum, and that from an endless pool."""
    infinite = comparison.infinite
    best = {
        row.blocks: row.hit_blocks
        for row in comparison.rows
        if row.eviction == Belady.name and not row.options.get("bypass")
    }
    if not best:
        yield from sentences(
            "How far each policy is from the optimum is not known: the comparison was made "
            "without it. Add `optimum` to --eviction, in keys counting.",
            "missing",
        )
        return
    rows = []
    for name, row in named(comparison.rows):
        if row.eviction == Belady.name or row.blocks not in best:
            continue
        best_hits = best[row.blocks]
        less = best_hits - row.hit_blocks
        counts = row.blocks, row.hit_blocks, best_hits, less, less * row.block_size
        part = share(less / row.lookup_blocks if row.lookup_blocks else None)
        cells = [f"{count:,}" for count in counts]
        rows.append([name, *cells, part, f"{infinite.hit_blocks - best_hits:,}"])
    headers = ["eviction", "blocks", "hits", "optimum", "less", "less in tokens"]
    headers += ["of all", "no pool has"]
    yield from table("Blocks that hit, against the optimum in the same pool", headers, rows)
    yield from sentences(
        "Less: blocks that hit in the optimum and not here, which is what the policy lost, "
        "and their tokens, which were computed again. No pool has: what the optimum loses "
        "against a cache that never evicts, for lack of memory."
    )


@_form("curves infinite workload", "Hit curves", "Hits by pool size and policy", HITS)
def _curves(document: Document) -> Content:
    def points(curve: Document) -> dict[str, list[int]]:
        names = "blocks", "hit_blocks"
        return {name: [point[name] for point in curve["points"]] for name in names}

    curves = _read(
        Curves,
        document | document["infinite"],
        workload=Source(**document["workload"]),
        accounting=document["count"],
        curves=[_read(Curve, curve, **points(curve)) for curve in document["curves"]],
    )
    report = CurvesReport(curves, _layout(document, document["block_size"]))
    yield from _over_blocks(report.sections)
    if report.empty:
        return
    yield from again(recorded(document, "--json"))
    yield from _needs_trace()


@_form("points tier infinite", "Hits by the sizes of pool and tier", "Hits", "Prefill saved")
def _plane(document: Document) -> Content:
    points = [_read(PlanePoint, point) for point in document["points"]]
    tier, tiers = document["tier"], sorted({point.tier_blocks for point in points})
    plane = _read(
        Plane,
        document | document["infinite"],
        workload=Source(**document["workload"]),
        tier=SimpleNamespace(name=tier["name"], options=lambda: tier["options"]),
        pools=sorted({point.pool_blocks for point in points}),
        tiers=tiers,
        points=[[point for point in points if point.tier_blocks == size] for size in tiers],
    )
    report = PlaneReport(plane, _layout(document, plane.block_size))
    yield from _over_blocks(report.sections)
    yield from again(recorded(document, "--json"))


def seen_grid(mode: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return the grid of a sweep, found from its rows: mode, axes, and those that vary.

    `blocks` is no axis if the others distinguish all cells.
    """
    seen = {
        name: [*dict.fromkeys(row[name] for row in rows)]
        for name in axes_of(mode)
        if rows and name in rows[0] and any(row[name] is not None for row in rows)
    }
    varied = [name for name, values in seen.items() if len(values) > 1]
    others = [name for name in varied if name != "blocks"]
    distinct = len({tuple(row[name] for name in others) for row in rows}) == len(rows)
    if distinct and "blocks" in varied:
        del seen["blocks"]
        varied = others
    return SimpleNamespace(mode=mode, axes=seen, varied=varied)


@_form("mode cells rows", "Sweep", "The best of each contest", plural="Sweeps")
def _sweep(document: Document) -> Content:
    rows = document["rows"]
    grid = seen_grid(document["mode"], rows)
    report = SweepReport(Sweep(grid, rows, 0, 0))
    yield from (report.headline, report.setup, *report.tables, report.reading)
    for name in grid.varied:
        with suppress(InputError):  # no axis of numbers
            across = "pool, bytes" if name == "memory" else name.replace("_", " ")
            yield report.chart(chart_axis(grid, name))._replace(across=across)
            break
    yield heading("All cells")

    def texts(row: Document) -> list[str]:
        return [cell(row[name], as_text) for name in grid.varied]

    measures = report.measures
    headers = [f"{measure.column} ({measure.unit})" for measure in measures]
    cells = [[*texts(row), *(cell(row[m.column], m.text) for m in measures)] for row in rows]
    yield from table("Every cell", [*grid.varied, *headers], cells, headers)
    failed = [[*texts(row), row["error"]] for row in report.sweep.failed]
    yield from table("Cells that failed", [*grid.varied, "because"], failed, ())
    yield from again(recorded(document, "--json"))


def _answered(report: PlanReport | DevicePlansReport) -> Content:
    """Yield the sections of a plan, its last sentences before the table as its answer."""
    for section in report.sections:
        if section == report.headline:
            yield section.removesuffix(report.answer)
            yield from sentences(report.answer, "answer")
        else:
            yield section


@_form(
    "plans limit setup",
    "Plan of a fleet",
    "Fleets that meet the SLO, the best first",
    plural="Plans of fleets",
)
def _plan(document: Document) -> Content:
    yield from _answered(PlanReport(document))
    yield from sentences("\n".join(document["notes"]), "notice")
    yield from again(recorded(document, "--json"))


@_form(
    "fleets plans notes",
    "Plans for several devices",
    "Fleets that meet the SLO, the cheapest first",
)
def _device_plans(document: Document) -> Content:
    report = DevicePlansReport(document)
    yield from _answered(report)
    if document["fleets"]:
        yield report.chart()
    notes = (note for note in document["notes"] if note not in report.left_out)
    yield from sentences("\n".join(notes), "notice")
    yield from again(recorded(document, "--json"))


@_form("recorded rerun changes", "What if", "Recorded, and what if", "Blocks that hit")
def _whatif(document: Document) -> Content:
    def outcome(fields: Document) -> RequestOutcome:
        ttft = fields["ttft_s"]
        ns = None if ttft is None else nanoseconds(ttft)
        return RequestOutcome(fields["hit_tokens"], ns, fields["rejected"])

    runs = "recorded", "rerun"
    whatif = _read(
        WhatIf,
        document,
        header={},
        kvcore=document["kvcore"]["recorded"],
        here=document["kvcore"]["rerun"],
        **{run: _read(RunSummary, document[run], bill=None) for run in runs},
        changes=[
            Change(fields["id"], fields["prompt"], *(outcome(fields[run]) for run in runs))
            for fields in document["changes"]
        ],
    )
    report = WhatIfReport(whatif)
    yield from sentences(report.warning, "warning")
    yield report.headline
    yield from sentences(report.verdict, "answer")
    yield from (report.table, report.chart())
    for changes in report.tables:
        yield from shown([changes], f"Requests: {changes.headers[0]}")
    bills, rebilled = (document[run].get("bill") for run in runs)
    if bills is not None:
        yield heading("Bills")
        yield from shown(bill_sections(bills, rebilled["run"]))
    yield heading("What was run")
    before, after = whatif.recorded.config, whatif.rerun.config
    one, other = dict(settings(before)), dict(settings(after))
    rows = [[name, one.get(name, NONE), other.get(name, NONE)] for name in {**one, **other}]
    yield from table("All settings", ["setting", "recorded", "what if"], rows, (), folded=True)
    yield from again(recorded(document, "--json"))
    told = f"Regret and miss reasons are those of the trace: give {whatif.file} to"
    yield from sentences(f"{told} `kvcore report` too.", "missing")


@_form("lost places optimum", "Miss reasons", *REASONS)
def _explanation(document: Document) -> Content:
    report = SummaryReport(document)
    yield from (report.headline, report.table, report.places, report.requests, report.notes)
    yield from _explained(document)


@_form("losses request optimum", "Miss reasons", "Missed tokens, in the order of the prompt")
def _request(document: Document) -> Content:
    yield (
        f"Request {document['request']} of {document['source']}: {document['state']}. Of "
        f"{counted(document['prompt_tokens'], 'token')}, {document['hit_tokens']:,} hit and "
        f"{document['missed_tokens']:,} missed."
    )
    rows = []
    kinds = {"layer_pools": OF_POOLS, "cache_groups": OF_GROUPS, "replica": OF_CLUSTERS}
    reasons = next((kinds[name] for name in kinds if name in document), CATEGORIES)
    for loss in document["losses"]:
        gone, why = loss["eviction"], reasons[loss["category"]]
        if gone is not None:
            why += f" (at {gone['t_s']:.12g} s by {gone['by']} for request {gone['for']})"
        tokens = (f"{loss[name]:,}" for name in ("first_token", "tokens"))
        prefill = format_seconds(loss["prefill_s"])
        rows.append([*tokens, prefill, spaced(loss["category"]), why])
    headers = ["from token", "tokens", "prefill", "lost", "because"]
    yield Table(headers, rows, headers[:3])
    yield from _explained(document)


def _explained(document: Document) -> Iterator[Part]:
    """Yield the command that explains it again, and what a trace has besides."""
    yield from again(recorded(document, "--json"))
    told = "What was run, the regret, and what happened over time are in a trace: give it to"
    yield from sentences(f"{told} `kvcore report` too.", "missing")


@_form(
    "generator full_codec rows",
    "Quality under bounded or shrunk K/V",
    "Retention, codec and budget",
)
def _quality(document: Document) -> Content:
    rows = [QualityRow(**row) for row in document["rows"]]
    quality = _read(Quality, document, rows=rows)
    yield from QualityReport(quality).sections
    yield from again(recorded(document, "--json"))


@_form(
    "kv tokens batch model",
    "Size of K/V",
    "What it takes, and what fits",
    plural="Sizes of K/V",
)
def _size(document: Document) -> Content:
    yield from size_sections(document)
    yield from again(recorded(document, "--json"))
