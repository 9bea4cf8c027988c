"""Report on miss-ratio curves: sections, CSV and a JSON object."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

import attrs

from kvcore.models.memory import KVLayout
from kvcore.sections import Chart, Panel, Section, Table
from kvcore.units import format_bytes, format_number
from kvcore_cli.report.tables import NONE, counted, no_full_block, plugin_text
from kvcore_lab.comparison import SHARING
from kvcore_lab.curves.mrc import Curve, Curves
from kvcore_lab.report.policies import (
    block_bytes,
    left_out,
    looked_up,
    memory_fields,
    named,
    replay_setup,
)
from kvcore_replay.report.charts import as_percent

if TYPE_CHECKING:
    from kvcore_plugins.cache_groups import GroupPlan

DENSE = 600
"""Number of points in the line of a curve that is known at every size."""


COLUMNS = (
    *("workload", "count", "block_size", "eviction", "options"),
    *("blocks", "bytes", "hit_blocks", "hit_ratio"),
)


@attrs.frozen
class CurvesReport:
    """Curves as a table, a chart, CSV and a JSON object.

    Attributes:
        curves: the curves.
        layout: the bytes of a block; None: sizes are reported in blocks alone.
        groups: the cache groups of the pools, which say what a block takes; None: there is one.
    """

    curves: Curves
    layout: KVLayout | None = None
    groups: GroupPlan | None = None

    @property
    def sections(self) -> list[Section]:
        """The whole report on the curves."""
        if self.empty:
            return [self.headline]
        return [self.headline, self.table, f"{self.reading}\n{self.setup}", self.chart()]

    @property
    def headline(self) -> str:
        """Sentences about the workload and the numbers."""
        curves, source = self.curves, self.curves.workload
        if self.empty:
            requests = counted(source.requests, "request")
            nothing = no_full_block(source.longest_prompt, curves.block_size)
            nothing = nothing or "Nothing in them has a key to look up."
            return f"{source.name}: {requests}.\n{nothing}"
        lookups = looked_up(source, curves.lookup_blocks, curves.block_size, curves.accounting)
        return f"{lookups}\nThe share of these that hit, by the size of the pool."

    @property
    def setup(self) -> str:
        """A sentence with all options of the run."""
        curves, shared = self.curves, {"name": SHARING, "options": {}}
        policies = ", ".join(plugin_text(c.eviction, c.options) for c in curves.curves)
        return replay_setup(
            curves.workload,
            curves.block_size,
            curves.accounting,
            plugins={"prefix": shared, "eviction": {"name": policies, "options": {}}},
        )

    @property
    def empty(self) -> bool:
        """True if nothing was looked up, so that there is nothing but the headline."""
        return not self.curves.lookup_blocks

    @property
    def table(self) -> Table:
        """The share of blocks that hit: a row per pool size, and a column per policy."""
        curves, distinct = self.curves.curves, self.curves.distinct_blocks
        memory = [] if self.layout is None else ["memory"]
        headers = ["blocks", "of all", *memory, *(name for name, _ in named(curves))]
        rows = []
        for index, blocks in enumerate(curves[0].blocks):
            taken = self.bytes_of(blocks)
            rows.append(
                [
                    f"{blocks:,}",
                    percent(blocks / distinct) if distinct else NONE,
                    *([] if taken is None else [format_bytes(taken)]),
                    *(f"{self.curves.ratio(c.hit_blocks[index]):.1%}" for c in curves),
                ]
            )
        return Table(headers, rows, headers)

    @property
    def reading(self) -> str:
        """Sentences about the results in the table."""
        curves = self.curves
        text = (
            f"A cache that never evicts holds {counted(curves.distinct_blocks, 'block')} in "
            f"the end and hits {curves.ratio(curves.hit_blocks):.1%}."
        ) + left_out(curves.answers_left_out)
        text += self._reported()
        if self.layout is not None:
            text += f"\n{block_bytes(self.layout, self.groups)}"
        return text

    def _reported(self) -> str:
        """Return a sentence on the pool in which LRU hits as much as the log reports."""
        curves, ratio = self.curves, self.curves.workload.reported_hit_ratio
        steps = next((curve.steps for curve in curves.curves if curve.steps is not None), None)
        if ratio is None or steps is None:
            return ""
        size = steps.size_for(ratio * curves.lookup_blocks)
        where = "in no pool" if size is None else f"from {counted(size, 'block')} on"
        return f" lru hits the {ratio:.1%} that the log reports {where}."

    def chart(self) -> Chart:
        """Return a chart of the share of blocks that hit, by the size of the pool.

        A curve that is known at every size has as many points as a smooth line needs.
        """
        curves, source, layout = self.curves, self.curves.workload, self.layout
        lines = {
            name: [(size, curves.ratio(hits) or 0.0) for size, hits in _points(curve)]
            for name, curve in named(curves.curves)
        }
        bound = "never evicts", curves.ratio(curves.hit_blocks) or 0.0
        across = f"pool, blocks of {counted(curves.block_size, 'token')}"
        if layout is not None:
            across = f"K/V memory of the pool ({layout.model.name}, {layout.codec})"
        return Chart(
            f"{source.name}, {counted(source.requests, 'request')}, {curves.accounting} "
            "counting",
            self.setup,
            across,
            [Panel("blocks looked up that hit", lines, as_percent, bound)],
            self._size,
        )

    def document(self) -> dict[str, Any]:
        """Return the curves as a JSON object."""
        curves = self.curves
        document = {
            "workload": curves.workload.as_dict(),
            **curves.workload.told(),
            "count": curves.accounting,
            "block_size": curves.block_size,
            "weighting": "block",
            "lookup_blocks": curves.lookup_blocks,
            "infinite": {
                "distinct_blocks": curves.distinct_blocks,
                "hit_blocks": curves.hit_blocks,
                "hit_ratio": curves.ratio(curves.hit_blocks),
                "answers_left_out": curves.answers_left_out,
            },
            "curves": [
                {
                    "eviction": curve.eviction,
                    "options": curve.options,
                    "every_size": curve.steps is not None,
                    "points": list(curves.points(curve)),
                }
                for curve in curves.curves
            ],
        }
        if self.layout is not None:
            document["memory"] = memory_fields(self.layout, self.groups)
        return document

    def write_csv(self, file: TextIO) -> None:
        """Write a row per policy and size, with a header; ratios in full precision.

        The options are one column, as JSON. An empty cell is a missing value.
        """
        curves = self.curves
        about = curves.workload.name, curves.accounting, curves.block_size
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for curve in curves.curves:
            policy = curve.eviction, json.dumps(curve.options)
            for point in curves.points(curve):
                blocks, *figures = point.values()
                writer.writerow([*about, *policy, blocks, self.bytes_of(blocks), *figures])

    def _size(self, blocks: float) -> str:
        """Return a size of the pool as text: in bytes, if a layout says what a block takes."""
        taken = self.bytes_of(int(blocks))
        return format_number(blocks) if taken is None else format_bytes(taken)

    def bytes_of(self, blocks: int) -> int | None:
        """Return the bytes of `blocks` blocks; None without a layout."""
        taken = self.groups or self.layout
        return None if taken is None else blocks * taken.bytes_per_block


def _points(curve: Curve) -> Iterable[tuple[int, int]]:
    """Return sizes of the pool and hits; more, in equal ratios, if every size is known."""
    if curve.steps is None:
        return zip(curve.blocks, curve.hit_blocks, strict=True)
    low, ratio = curve.blocks[0], curve.blocks[-1] / curve.blocks[0]
    sizes = (round(low * ratio ** (step / DENSE)) for step in range(DENSE + 1))
    return [(size, curve.steps.at(size)) for size in sorted({*sizes, *curve.blocks})]


def percent(share: float) -> str:
    """Format a share with about two digits, from 10 on with all: `0.1%`, `100%`, `1,234%`."""
    if share >= 10:  # noqa: PLR2004
        return f"{100 * share:,.0f}%"
    return f"{float(f'{100 * share:.2g}'):.10g}%"
