"""Hits by policy and pool size in a report: comparisons, curves, and planes of two sizes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import attrs

from kvcore.analysis import Belady, Comparison, Curve, Curves, Infinite, Row, Source
from kvcore.analysis.billing import Bill, Bills
from kvcore.analysis.plane import Plane, PlanePoint
from kvcore.models.pricing import PriceModel
from kvcore.pages.report_parts import (
    COLOURS,
    DASHES,
    Axis,
    Document,
    Line,
    Part,
    Result,
    again,
    against,
    chart,
    command,
    curves,
    heading,
    opening,
    sections,
    sentences,
    table,
)
from kvcore.report.comparison import ComparisonReport, ResidencyReport
from kvcore.report.comparison_bill import comparison_bill
from kvcore.report.mrc import CurvesReport
from kvcore.report.plane import PlaneReport
from kvcore.report.policies import block_bytes, named
from kvcore.report.tables import counted, plugin_text, share
from kvcore.report.whatif import change_text
from kvcore.units import format_bytes

HITS = Axis("blocks looked up that hit", "%")
POOL = Axis("blocks in the pool", log=True)

NEEDS_TRACE = (
    "Why prompts missed, and what happened at each moment, is in a trace, and this document "
    "holds none. To make one, and then to report it too:"
)


def _layout(document: Document, block_size: int) -> Any:
    """Return the fields of a block's layout that reports need; None without memory sizes."""
    memory = document.get("memory")
    if memory is None:
        return None
    return SimpleNamespace(
        block_size=block_size,
        model=SimpleNamespace(name=memory["model"]),
        codec=memory["codec"],
        bytes_per_block=memory["bytes_per_block"],
    )


def _needs_trace(source: Document, policy: str, blocks: int) -> Iterator[Part]:
    """Yield the commands that make a trace for the result of a document."""
    yield from sentences(NEEDS_TRACE, "missing")
    run = command("compare", source, eviction=policy, blocks=blocks, trace="run.jsonl.gz")
    yield from sentences(f"{run}\n{command('report', 'run.jsonl.gz')} -o run.html", "command")


def _bill(document: Document | None) -> Bill | None:
    return None if document is None else Bill(**document)


def _infinite(sizes: Sequence[int], ratio: float, after: str = "") -> Line:
    """Return the line of the cache that never evicts."""
    ends = [min(sizes), max(sizes)]
    if ends[0] == ends[1]:
        ends = [ends[0], 2 * ends[0]]
    return Line(f"never evicts{after}", ends, [100 * ratio] * 2, "soft", "dash")


class HitResult(Result):
    """Hits by policy and pool size: the common part of comparisons and curves."""

    @abstractmethod
    def hits(self) -> dict[tuple[str, int], float]:
        """Return the share of blocks that hit, by policy and blocks of the pool."""

    @property
    @abstractmethod
    def infinite(self) -> float:
        """The share that a cache hits that never evicts."""

    def lines(
        self, colours: dict[str, str] | None = None, after: str = "", dash: str = "solid"
    ) -> list[Line]:
        """Return the lines of a chart: one a policy, and the cache that never evicts.

        Args:
            colours: colours of policies, to which others are added. The optimum is ink.
            after: text after the names.
            dash: dash of the lines.
        """
        colours = {} if colours is None else colours
        points: dict[str, list[tuple[int, float]]] = {}
        for (name, blocks), ratio in self.hits().items():
            points.setdefault(name, []).append((blocks, 100 * ratio))
        lines = []
        for name, found in points.items():
            if name.partition(":")[0] == Belady.name:
                colour = "ink"
            else:
                colour = colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
            sizes, shares = zip(*sorted(found), strict=True)
            lines.append(Line(f"{name}{after}", sizes, shares, colour, dash, points=True))
        pools = [blocks for _, blocks in self.hits()]
        return [*lines, *([_infinite(pools, self.infinite, after)] if lines else [])]

    @classmethod
    def together(cls, results: Sequence[Result], labels: Sequence[str]) -> Iterator[Part]:
        """Yield one chart of all lines, and a table of hits by result, policy and size."""
        found = [each for each in results if isinstance(each, HitResult)]
        colours: dict[str, str] = {}
        lines = [
            line
            for number, (each, label) in enumerate(zip(found, labels, strict=True))
            for line in each.lines(colours, f", {label}", DASHES[number % len(DASHES)])
        ]
        about = (
            "The share of looked-up blocks that hit, by the size of the pool, in all results."
        )
        yield from chart("Hits by pool size", about, POOL, HITS, lines)
        hits = [each.hits() for each in found]
        keys = dict.fromkeys(key for each in hits for key in each)
        rows = []
        for key in keys:
            first, *others = [each.get(key) for each in hits]
            cells = [key[0], f"{key[1]:,}", share(first)]
            for other in others:
                cells += [share(other), change_text(first, other, share)]
            rows.append(cells)
        headers = ["eviction", "blocks", *against(labels)]
        yield from table("Hits by policy and pool size", headers, rows)


@attrs.frozen(kw_only=True, eq=False)
class Compared(HitResult):
    """The document that `compare --json` prints."""

    kind: ClassVar[str] = "Comparison of eviction policies"
    plural: ClassVar[str] = "Comparisons of eviction policies"

    document: Document
    report: ComparisonReport

    @classmethod
    def of(cls, name: str, document: Document) -> Compared:
        """Read a document back."""
        bills = None
        if bill := document.get("bill"):
            kinds = {kind: _bill(bill[kind]) for kind in ("uncached", "api", "reported", "run")}
            bills = Bills(price=PriceModel(**bill["price"]), **cast("Any", kinds))
        comparison = Comparison(
            workload=Source(**document["workload"]),
            accounting=document["count"],
            rows=[Row(**{**row, "bill": _bill(row.get("bill"))}) for row in document["rows"]],
            infinite=Infinite(**document["infinite"]),
            bills=bills,
        )
        memory = document.get("memory")
        labels = memory and {
            each["blocks"]: format_bytes(each["bytes"]) for each in memory["budgets"]
        }
        prefix = {"prefix": document["prefix"]} if "prefix" in document else {}
        report = ComparisonReport(comparison, labels, **prefix)
        return cls(name=name, document=document, report=report)

    def hits(self) -> dict[tuple[str, int], float]:
        """Return the share of blocks that hit, by policy and blocks of the pool."""
        rows = named(self.report.comparison.rows)
        return {(name, row.blocks): row.hit_ratio["block"] or 0.0 for name, row in rows}

    @property
    def infinite(self) -> float:
        """The share that a cache hits that never evicts."""
        return self.report.comparison.infinite.hit_ratio["block"] or 0.0

    def parts(self) -> Iterator[Part]:
        """Yield the parts of a report on one comparison."""
        report, comparison = self.report, self.report.comparison
        yield from opening(report)
        if report.empty:
            return
        yield heading("Hits")
        hits = report.table
        yield from table("Hits by policy and pool size", hits.headers, hits.rows)
        yield from sentences(report.reading)
        about = (
            "The share of looked-up blocks that hit, by the size of the pool, on a logarithmic "
            "scale, with the optimum and a cache that never evicts."
        )
        yield from chart("Hits by pool size", about, POOL, HITS, self.lines())
        if layout := _layout(self.document, comparison.rows[0].block_size):
            yield from sentences(block_bytes(layout))
        yield heading("Regret")
        yield from self._regret()
        rested = ResidencyReport(comparison)
        if rows := rested.rows:
            yield heading("Blocks in the cache")
            yield from table("How long blocks rest", rested.headers, rows)
            yield from sentences(rested.reading)
        if comparison.bills is not None:
            bill = comparison_bill(comparison, report.memory)
            yield heading("Bill")
            yield from sections(*bill, caption="Bill by policy and pool size")
        yield from again(self._command())
        one = next((row for row in comparison.rows if row.eviction != Belady.name), None)
        if one is not None:
            policy = plugin_text(one.eviction, one.options)
            yield from _needs_trace(attrs.asdict(comparison.workload), policy, one.blocks)

    def _regret(self) -> Iterator[Part]:
        """Yield how far each policy is from the optimum, and that from an endless pool."""
        comparison = self.report.comparison
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
            less = best[row.blocks] - row.hit_blocks
            rows.append(
                [
                    name,
                    f"{row.blocks:,}",
                    f"{row.hit_blocks:,}",
                    f"{best[row.blocks]:,}",
                    f"{less:,}",
                    f"{less * row.block_size:,}",
                    share(less / row.lookup_blocks if row.lookup_blocks else None),
                    f"{infinite.hit_blocks - best[row.blocks]:,}",
                ]
            )
        headers = ["eviction", "blocks", "hits", "optimum", "less", "less in tokens"]
        headers += ["of all", "no pool has"]
        yield from table("Blocks that hit, against the optimum in the same pool", headers, rows)
        yield from sentences(
            "Less: blocks that hit in the optimum and not here, which is what the policy lost, "
            "and their tokens, which were computed again. No pool has: what the optimum loses "
            "against a cache that never evicts, for lack of memory."
        )

    def _command(self) -> str:
        comparison, memory = self.report.comparison, self.document.get("memory")
        rows = comparison.rows
        policies = dict.fromkeys(plugin_text(row.eviction, row.options) for row in rows)
        pool: dict[str, Any] = {"blocks": [*dict.fromkeys(row.blocks for row in rows)]}
        if memory:
            budgets = [f"{each['bytes']}B" for each in memory["budgets"]]
            pool = {"memory": budgets, "model": memory["model"], "codec": memory["codec"]}
        return command(
            "compare",
            attrs.asdict(comparison.workload),
            eviction=[*policies],
            **pool,
            block_size=rows[0].block_size,
            accounting=comparison.accounting,
            prefix=self.document.get("prefix"),
            price=None if comparison.bills is None else comparison.bills.price.name or None,
            json=True,
        )


@attrs.frozen(kw_only=True, eq=False)
class Curved(HitResult):
    """The document that `curve` writes as JSON."""

    kind: ClassVar[str] = "Hit curves"

    report: CurvesReport

    @classmethod
    def of(cls, name: str, document: Document) -> Curved:
        """Read a document back."""
        infinite = document["infinite"]
        curves = Curves(
            workload=Source(**document["workload"]),
            accounting=document["count"],
            block_size=document["block_size"],
            lookup_blocks=document["lookup_blocks"],
            distinct_blocks=infinite["distinct_blocks"],
            hit_blocks=infinite["hit_blocks"],
            curves=[
                Curve(
                    eviction=each["eviction"],
                    options=each["options"],
                    blocks=[point["blocks"] for point in each["points"]],
                    hit_blocks=[point["hit_blocks"] for point in each["points"]],
                )
                for each in document["curves"]
            ],
        )
        return cls(name=name, report=CurvesReport(curves, _layout(document, curves.block_size)))

    def hits(self) -> dict[tuple[str, int], float]:
        """Return the share of blocks that hit, by policy and blocks of the pool."""
        curves = self.report.curves
        return {
            (name, blocks): curves.ratio(hits) or 0.0
            for name, curve in named(curves.curves)
            for blocks, hits in zip(curve.blocks, curve.hit_blocks, strict=True)
        }

    @property
    def infinite(self) -> float:
        """The share that a cache hits that never evicts."""
        return self.report.curves.ratio(self.report.curves.hit_blocks) or 0.0

    def parts(self) -> Iterator[Part]:
        """Yield the parts of a report on one set of curves."""
        report, curves = self.report, self.report.curves
        yield from opening(report)
        if report.empty:
            return
        yield heading("Hits")
        about = (
            "The share of looked-up blocks that hit, by the size of the pool, on a logarithmic "
            f"scale up to all {counted(curves.distinct_blocks, 'distinct block')}."
        )
        yield from chart("Hits by pool size", about, POOL, HITS, self.lines())
        yield from sections(report.table, caption="Hits by pool size and policy")
        yield from sentences(report.reading)
        layout = report.layout
        line = command(
            "curve",
            attrs.asdict(curves.workload),
            eviction=[plugin_text(each.eviction, each.options) for each in curves.curves],
            sizes=curves.curves[0].blocks,
            block_size=curves.block_size,
            accounting=curves.accounting,
            model=None if layout is None else layout.model.name,
            codec=None if layout is None else layout.codec,
            json=True,
        )
        yield from again(line)
        one = next((each for each in curves.curves if each.eviction != Belady.name), None)
        if one is not None:
            policy = plugin_text(one.eviction, one.options)
            yield from _needs_trace(attrs.asdict(curves.workload), policy, one.blocks[-1])


@attrs.frozen(kw_only=True, eq=False)
class Planed(Result):
    """The document that `curve --tier` writes as JSON."""

    kind: ClassVar[str] = "Hits by the sizes of pool and tier"

    document: Document
    report: PlaneReport

    @classmethod
    def of(cls, name: str, document: Document) -> Planed:
        """Read a document back."""
        fields = {"hit_ratio", "saved_ratio"}
        found = [
            PlanePoint(**{key: value for key, value in point.items() if key not in fields})
            for point in document["points"]
        ]
        tier, infinite = document["tier"], document["infinite"]
        tiers = sorted({point.tier_blocks for point in found})
        plane = Plane(
            workload=Source(**document["workload"]),
            tier=cast(
                "Any", SimpleNamespace(name=tier["name"], options=lambda: tier["options"])
            ),
            eviction=document["eviction"],
            exact=document["exact"],
            block_size=document["block_size"],
            lookup_blocks=document["lookup_blocks"],
            distinct_blocks=infinite["distinct_blocks"],
            hit_blocks=infinite["hit_blocks"],
            prefill_s=document["prefill_s"],
            pools=sorted({point.pool_blocks for point in found}),
            tiers=tiers,
            points=[[each for each in found if each.tier_blocks == size] for size in tiers],
        )
        report = PlaneReport(plane, _layout(document, plane.block_size))
        return cls(name=name, document=document, report=report)

    def parts(self) -> Iterator[Part]:
        """Yield the parts of a report on one plane."""
        report, plane = self.report, self.report.plane
        yield from opening(report)
        yield heading("Hits, and the prefill that they save")
        hits = "The share of looked-up blocks that hit in the pool, or are loaded"
        saved = "The share of prefill time saved, less the time to load"
        for title, told, value in (
            ("Hits", hits, plane.ratio),
            ("Prefill saved", saved, plane.saved),
        ):
            found = report.table(value)
            yield from table(told, found.headers, found.rows)
            lines = {
                report.size(size): [(point.pool_blocks, value(point)) for point in points]
                for size, points in zip(plane.tiers, plane.points, strict=True)
            }
            about = f"{told}, by the size of the pool; a line for each size of {report.below}."
            yield from chart(title, about, POOL, Axis("share", "%"), curves(lines, 100))
        yield from sentences(report.reading)
        layout = report.layout
        line = command(
            "curve",
            attrs.asdict(plane.workload),
            tier=self.document["tier"],
            eviction=plane.eviction,
            sizes=plane.pools,
            block_size=plane.block_size,
            model=layout.model.name,
            codec=layout.codec,
            exact=plane.exact,
            json=True,
        )
        yield from again(line)
