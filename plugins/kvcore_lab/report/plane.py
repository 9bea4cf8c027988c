"""Report on a plane of hits and saved prefill: tables, a plot with contours, CSV and JSON."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, TextIO

import attrs

from kvcore.errors import InputError
from kvcore.models.memory import KVLayout
from kvcore.sections import Chart, Panel, Section, Table
from kvcore.trace.fields import plain
from kvcore.units import BINARY, format_bytes, format_seconds
from kvcore_cli.report.tables import counted, share
from kvcore_lab.curves.plane import Plane, PlanePoint
from kvcore_lab.report.policies import block_bytes, looked_up, memory_fields, replay_setup
from kvcore_replay.report.figure import INK, log_axis, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (10.5, 4.6)

LEVELS = 8
"""About the number of contours."""

COLUMNS = (
    *("workload", "block_size", "tier", "exact", "pool_blocks", "pool_bytes", "tier_blocks"),
    *("tier_bytes", "hit_blocks", "found_blocks", "loaded_blocks", "hit_ratio", "saved_s"),
    "saved_ratio",
)


@attrs.frozen
class PlaneReport:
    """A plane as tables with sentences, CSV, a JSON object and a plot.

    Attributes:
        plane: the plane.
        layout: the bytes of a block.
    """

    plane: Plane
    layout: KVLayout

    @property
    def sections(self) -> list[Section]:
        """The whole report on the plane: a table of hits, and one of saved prefill."""
        return [
            f"{self.headline}\nThe share of these that hit in the pool, or are loaded:",
            self.table(self.plane.ratio),
            "The share of all prefill time that this saves, less the time to load:",
            self.table(self.plane.saved),
            f"{self.reading}\n{self.setup}",
            self.chart(),
        ]

    @property
    def headline(self) -> str:
        """A sentence about the lookups of the workload."""
        plane = self.plane
        return looked_up(plane.workload, plane.lookup_blocks, plane.block_size, "keys")

    @property
    def below(self) -> str:
        """The name of the tier in tables; that of host memory is `host RAM`."""
        return "host RAM" if self.plane.tier.name == "host" else self.plane.tier.name

    def table(self, value: Callable[[PlanePoint], float]) -> Table:
        """Return the share `value` for each size of the tier, a row, and of the pool."""
        sizes = zip(self.plane.tiers, self.plane.points, strict=True)
        rows = [
            [self.size(blocks), *(share(value(point)) for point in points)]
            for blocks, points in sizes
        ]
        headers = [f"{self.below} / pool", *map(self.size, self.plane.pools)]
        return Table(headers, rows, headers)

    def chart(self) -> Chart:
        """Return a chart of both shares by the size of the pool, a line a size of the tier."""
        plane = self.plane
        shares = ("blocks that hit", plane.ratio), ("prefill saved", plane.saved)
        panels = [
            Panel(
                label,
                {
                    f"{self.below} {self.size(blocks)}": [
                        (point.pool_blocks, value(point)) for point in points
                    ]
                    for blocks, points in zip(plane.tiers, plane.points, strict=True)
                },
                share,
            )
            for label, value in shares
        ]
        title = f"{plane.workload.name}, {counted(plane.workload.requests, 'request')}"
        return Chart(
            title, self.setup, "pool on the GPUs", panels, lambda size: self.size(int(size))
        )

    @property
    def reading(self) -> str:
        """Sentences on how the numbers were computed."""
        plane, never = self.plane, self.plane.hit_blocks / (self.plane.lookup_blocks or 1)
        how = (
            "The hierarchy was replayed at each point."
            if plane.exact
            else "Pool and tier taken for one LRU cache of both sizes; --exact replays them."
        )
        return (
            f"A cache that never evicts holds {self.size(plane.distinct_blocks)} in "
            f"the end and hits {never:.1%}; without any, prefill takes "
            f"{format_seconds(plane.prefill_s)}.\n{how}\n{block_bytes(self.layout)}"
        )

    @property
    def setup(self) -> str:
        """A sentence with all options of the run."""
        plane = self.plane
        plugins = {
            "eviction": {"name": plane.eviction, "options": {}},
            "tier": {"name": plane.tier.name, "options": plain(plane.tier.options())},
        }
        return replay_setup(plane.workload, plane.block_size, "keys", plugins=plugins)

    def size(self, blocks: int) -> str:
        """Format a number of blocks as bytes."""
        return format_bytes(self._bytes(blocks)) if blocks else "none"

    def document(self) -> dict[str, Any]:
        """Return the plane as a JSON object, without its `schema`."""
        plane = self.plane
        return {
            "workload": plane.workload.as_dict(),
            **plane.workload.told(),
            "count": "keys",
            "block_size": plane.block_size,
            "eviction": plane.eviction,
            "tier": {"name": plane.tier.name, "options": plain(plane.tier.options())},
            "exact": plane.exact,
            "lookup_blocks": plane.lookup_blocks,
            "prefill_s": plane.prefill_s,
            "infinite": {
                "distinct_blocks": plane.distinct_blocks,
                "hit_blocks": plane.hit_blocks,
            },
            "points": list(self._points()),
            "memory": memory_fields(self.layout),
        }

    def write_csv(self, file: TextIO) -> None:
        """Write a row per point, with a header; ratios in full precision."""
        plane = self.plane
        about = plane.workload.name, plane.block_size, plane.tier.name, plane.exact
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for point in self._points():
            sizes = {
                f"{of}_bytes": self._bytes(point[f"{of}_blocks"]) for of in ("pool", "tier")
            }
            writer.writerow(dict(zip(COLUMNS, about, strict=False)) | point | sizes)

    def _points(self) -> Iterator[dict[str, Any]]:
        """Yield the fields of each point, with its shares."""
        for point in chain.from_iterable(self.plane.points):
            shares = {
                "hit_ratio": self.plane.ratio(point),
                "saved_ratio": self.plane.saved(point),
            }
            yield attrs.asdict(point) | shares

    def contours(self, form: str) -> bytes:
        """Return contours of hits and saved time over both sizes, as a file of `FORMS`.

        Raises:
            InputError: there is one size of the pool or of the tier, so there are no contours.
            PluginError: matplotlib is not installed.
        """
        pools, tiers = len(self.plane.pools), len(self.plane.tiers) - 1
        if min(pools, tiers) < 2:  # noqa: PLR2004 - a contour needs a plane
            msg = (
                "a plot of a plane needs two sizes of the pool and of the tier: "
                f"it has {pools} of the pool and {tiers} of the tier"
            )
            raise InputError(msg)
        return picture(form, self._draw, INCHES)

    def _draw(self, figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        plane = self.plane
        self._contours(left, plane.ratio, "blocks that hit, in the pool or loaded")
        self._contours(right, plane.saved, "prefill time saved, less the time to load")
        left.set_ylabel(f"{self.below}, GiB")
        title = f"{plane.workload.name}, {plane.workload.requests:,} requests"
        figure.suptitle(f"{title}; {self.layout.model.name}, {self.layout.codec}", fontsize=10)

    def _contours(self, axes: Axes, value: Callable[[PlanePoint], float], title: str) -> None:
        """Draw lines of equal shares. A tier of size 0 has no place on the logarithmic axis."""
        plane = self.plane
        sizes = plane.pools, plane.tiers[1:]
        across, up = ([self._bytes(n) / BINARY["GiB"] for n in size] for size in sizes)
        shares = [[100 * value(point) for point in points] for points in plane.points[1:]]
        # Its lightness rises with the share, so that it can be read without colours.
        axes.contourf(across, up, shares, LEVELS, cmap="cividis", alpha=0.85)
        lines = axes.contour(across, up, shares, LEVELS, colors=INK, linewidths=0.8)
        # A label for each line, where it crosses the diagonal.
        middle = [(shares[n][n], (across[n], up[n])) for n in range(min(len(across), len(up)))]
        inside = [level for level in lines.levels if middle[0][0] < level < middle[-1][0]]
        positions = [
            min(middle, key=lambda point: abs(point[0] - level))[1] for level in inside
        ]
        for label in axes.clabel(
            lines, inside, fmt="%g%%", fontsize=8, inline=False, manual=positions
        ):
            label.set_rotation(0)
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8})
        axes.set_xscale("log")
        axes.set_yscale("log")
        log_axis(axes.xaxis, across[0], across[-1], "pool on the GPUs, GiB")
        log_axis(axes.yaxis, up[0], up[-1], "")
        axes.set_title(title, fontsize=10)

    def _bytes(self, blocks: int) -> int:
        return blocks * self.layout.bytes_per_block
