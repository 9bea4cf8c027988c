"""Report on miss-ratio curves: tables, CSV, a JSON object, and a plot."""

from __future__ import annotations

import csv
import json
from itertools import cycle
from math import ceil
from typing import TYPE_CHECKING, Any, TextIO

import attrs

from kvcore.models.memory import KVLayout
from kvcore.report.tables import counted, plugin_text
from kvcore.sections import Section, Table
from kvcore.units import BINARY, format_bytes
from kvcore_lab.comparison import SHARING
from kvcore_lab.curves.mrc import Curves
from kvcore_lab.report.policies import (
    block_bytes,
    looked_up,
    memory_fields,
    named,
    replay_setup,
)
from kvcore_replay.belady import Belady
from kvcore_replay.report.figure import COLOURS, GREY, INK, MARGIN, MARKERS, log_axis, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


INSIDE, COLUMN = 7, 15
"""The most names in a legend below the curves, and in a column of one beside them."""

DENSE = 600
"""Number of points in the line of a curve that is known at every size."""


def draw(axes: Axes, report: CurvesReport) -> None:
    """Draw the curves into matplotlib `axes`."""
    curves = report.curves
    footprint = max(curves.distinct_blocks, 1)
    looks = zip(cycle(COLOURS), cycle(MARKERS), strict=False)
    for name, curve in named(curves.curves):
        sizes, hits = curve.blocks, curve.hit_blocks
        style: dict[str, Any]
        if curve.eviction == Belady.name:
            dashes = "--" if curve.options["bypass"] else "-"
            style = {"color": INK, "linewidth": 1, "marker": ".", "linestyle": dashes}
        else:
            colour, marker = next(looks)
            style = {"color": colour, "linewidth": 0.8, "marker": marker, "markersize": 4}
        if curve.steps is not None:
            sizes = _dense(sizes[0], sizes[-1])
            hits = [curve.steps.at(size) for size in sizes]
            style |= {"linewidth": 2, "marker": None}
        shares = [_percent(curves.ratio(hit)) for hit in hits]
        axes.plot([100 * size / footprint for size in sizes], shares, label=name, **style)
    bound = _percent(curves.ratio(curves.hit_blocks))
    axes.axhline(bound, color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        f"never evicts: {bound:.1f}%",
        xy=(0, bound),
        xycoords=("axes fraction", "data"),
        xytext=(6, 4),
        textcoords="offset points",
        color=GREY,
        fontsize="small",
    )
    axes.set_ylim(0, 1.12 * bound or 1)
    axes.yaxis.set_major_formatter("{x:g}%")
    axes.set_ylabel("blocks looked up that hit")
    axes.grid()
    _legend(axes, len(curves.curves))
    axes.set_title(_title(report), loc="left", fontsize="medium", pad=12)
    _scales(axes, report, footprint)


def _legend(axes: Axes, names: int) -> None:
    """Place a legend where it hides no curve."""
    if names <= INSIDE:
        axes.legend(loc="lower right", edgecolor="none", framealpha=1)
        return
    columns = ceil(names / COLUMN)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, ncols=columns)


def _scales(axes: Axes, report: CurvesReport, footprint: int) -> None:
    """Set logarithmic axes: share of the footprint below, pool size above."""
    sizes = [size for curve in report.curves.curves for size in curve.blocks]
    low, high = 100 * min(sizes) / footprint, 100 * max(sizes) / footprint
    axes.set_xscale("log")
    axes.set_xlim(low / MARGIN, high * MARGIN)
    blocks = counted(report.curves.distinct_blocks, "distinct block")
    tokens = counted(report.curves.block_size, "token")
    log_axis(axes.xaxis, low, high, f"pool, as a share of the {blocks} of {tokens}", "%")
    layout = report.layout
    factor, unit = footprint / 100, "blocks"
    if layout is not None:
        factor *= layout.bytes_per_block
        size = "GiB" if high * factor >= BINARY["GiB"] else "MiB"
        factor /= BINARY[size]
        unit = f"{size} of K/V ({layout.model.name}, {layout.codec})"

    def amount(share: Any) -> Any:
        return share * factor

    def share(amount: Any) -> Any:
        return amount / factor

    above = axes.secondary_xaxis("top", functions=(amount, share))
    above.spines["top"].set_visible(True)
    log_axis(above.xaxis, low * factor, high * factor, unit)


def _title(report: CurvesReport) -> str:
    curves, source = report.curves, report.curves.workload
    return f"{source.name}, {counted(source.requests, 'request')}, {curves.accounting} counting"


def _dense(low: int, high: int) -> list[int]:
    """Return sizes from `low` to `high` in equal ratios, enough for a smooth line."""
    ratio = high / low
    sizes = (round(low * ratio ** (step / DENSE)) for step in range(DENSE + 1))
    return list(dict.fromkeys(sizes))


def _percent(ratio: float | None) -> float:
    return 100 * (ratio or 0.0)


COLUMNS = (
    *("workload", "count", "block_size", "eviction", "options"),
    *("blocks", "bytes", "hit_blocks", "hit_ratio"),
)


@attrs.frozen
class CurvesReport:
    """Curves as a table, CSV and a JSON object.

    Attributes:
        curves: the curves.
        layout: the bytes of a block; None: sizes are reported in blocks alone.
    """

    curves: Curves
    layout: KVLayout | None = None

    @property
    def sections(self) -> list[Section]:
        """The whole report on the curves."""
        if self.empty:
            return [self.headline]
        return [self.headline, self.table, f"{self.reading}\n{self.setup}"]

    @property
    def headline(self) -> str:
        """Sentences about the workload and the numbers."""
        curves, source = self.curves, self.curves.workload
        if self.empty:
            requests = counted(source.requests, "request")
            return f"{source.name}: {requests}.\nNothing in them has a key to look up."
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
        curves = self.curves.curves
        memory = [] if self.layout is None else ["memory"]
        headers = ["blocks", "of all", *memory, *(name for name, _ in named(curves))]
        rows = []
        for place, blocks in enumerate(curves[0].blocks):
            taken = self.bytes_of(blocks)
            rows.append(
                [
                    f"{blocks:,}",
                    percent(blocks / self.curves.distinct_blocks),
                    *([] if taken is None else [format_bytes(taken)]),
                    *(f"{self.curves.ratio(c.hit_blocks[place]):.1%}" for c in curves),
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
        )
        if self.layout is not None:
            text += f"\n{block_bytes(self.layout)}"
        return text

    def document(self) -> dict[str, Any]:
        """Return the curves as a JSON object."""
        curves = self.curves
        document = {
            "workload": attrs.asdict(curves.workload),
            "count": curves.accounting,
            "block_size": curves.block_size,
            "weighting": "block",
            "lookup_blocks": curves.lookup_blocks,
            "infinite": {
                "distinct_blocks": curves.distinct_blocks,
                "hit_blocks": curves.hit_blocks,
                "hit_ratio": curves.ratio(curves.hit_blocks),
            },
            "curves": [
                {
                    "eviction": curve.eviction,
                    "options": curve.options,
                    "every_size": curve.steps is not None,
                    "points": [
                        {"blocks": blocks, "hit_blocks": hits, "hit_ratio": curves.ratio(hits)}
                        for blocks, hits in zip(curve.blocks, curve.hit_blocks, strict=True)
                    ],
                }
                for curve in curves.curves
            ],
        }
        if self.layout is not None:
            document["memory"] = memory_fields(self.layout)
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
            for blocks, hits in zip(curve.blocks, curve.hit_blocks, strict=True):
                found = blocks, self.bytes_of(blocks), hits, curves.ratio(hits)
                writer.writerow([*about, *policy, *found])

    def plot(self, form: str) -> bytes:
        """Return a plot of the curves as `png` or `svg` bytes.

        Curves that are known at every size are lines, others a point for each size. The axis
        below is the pool as a share of the footprint; the one above is the pool in GiB or,
        without a layout, in blocks. Equal curves give equal bytes with the same matplotlib.

        Raises:
            PluginError: matplotlib is not installed.
        """
        return picture(form, lambda figure: draw(figure.add_subplot(), self))

    def bytes_of(self, blocks: int) -> int | None:
        """Return the bytes of `blocks` blocks; None without a layout."""
        return None if self.layout is None else blocks * self.layout.bytes_per_block


def percent(share: float) -> str:
    """Format a share of the footprint with about two digits: `0.1%`, `1.6%`, `100%`."""
    return f"{float(f'{100 * share:.2g}'):.10g}%"
