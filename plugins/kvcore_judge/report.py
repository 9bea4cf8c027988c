"""The leaderboard as tables, and as a page of one file that opens offline."""

from __future__ import annotations

from html import escape

import attrs

from kvcore.sections import Section, Table
from kvcore.units import format_seconds
from kvcore_cli.report.tables import NONE
from kvcore_judge.leaderboard import BASE, Leaderboard

WIDTH, HEIGHT, MARGIN = 300, 170, 28
"""The size of a picture on the page, in pixels."""

BEST = 3
"""Policies that a picture shows beside LRU and the optimum."""


@attrs.frozen
class HitCurves:
    """Hits by pool size on a stream: LRU, the best other policies, and the optimum.

    Attributes:
        stream: name of the stream.
        sizes: pool sizes, in percent of the footprint.
        lines: hits over lookups by size, by the name of the policy; the optimum is the last.
    """

    stream: str
    sizes: list[str]
    lines: dict[str, list[float]]

    @property
    def top(self) -> float:
        """The largest value; 1 if all are 0."""
        return max(map(max, self.lines.values())) or 1

    @property
    def label(self) -> str:
        """The quantity of the curves, with its largest value."""
        return f"Share of blocks that hit, by size, on {self.stream}; at most {self.top:.1%}"


@attrs.frozen
class LeaderboardReport:
    """The tables of a leaderboard.

    Attributes:
        board: the leaderboard.
    """

    board: Leaderboard

    @property
    def sections(self) -> list[Section]:
        """The whole report: scores, times, and what they mean."""
        return [self.headline, self.table, self.times, self.reading]

    @property
    def headline(self) -> str:
        """A sentence about the panel."""
        streams = ", ".join(
            f"{name} ({about['requests']:,} requests, {about['footprint_blocks']:,} blocks)"
            for name, about in self.board.streams.items()
        )
        return f"Panel {self.board.panel.name}: {streams}."

    @property
    def table(self) -> Table:
        """The scores, the best first."""
        board = self.board
        rows = []
        for text, score in board.scores.items():
            entry = next(entry for entry in board.entries if entry.text == text)
            worst = NONE if score.worst is None else f"{score.worst[0]} {score.worst[1]}"
            rows.append(
                [
                    text,
                    score.headline or NONE,
                    score.all_cells or NONE,
                    worst,
                    score.of_optimum or NONE,
                    f"{board.cost(entry):.1f}",
                ]
            )
        headers = ["policy", "score", "all cells", "worst cell", "of optimum", "cost"]
        return Table(headers, rows)

    @property
    def times(self) -> Table:
        """Times to the first token under a clock, by stream and size; seconds saved."""
        board = self.board
        timed = [
            column
            for column in board.columns
            if board.results[BASE.text, column.name].timed is not None
        ]
        rows = []
        for text in board.scores if timed else ():
            cells = [text]
            for column in timed:
                times = board.results[text, column.name].timed or {}
                mean, p99 = times["mean_ttft_us"] / 1e6, times["p99_ttft_us"] / 1e6
                cells.append(f"{format_seconds(mean)}, {format_seconds(p99)}")
            rows.append(cells)
        return Table(["mean, p99 TTFT", *(column.name for column in timed)], rows, split=True)

    @property
    def curves(self) -> list[HitCurves]:
        """The curves of each stream."""
        return [self._curves(stream) for stream in self.board.streams]

    def _curves(self, stream: str) -> HitCurves:
        board = self.board
        columns = [column for column in board.columns if column.stream.name == stream]
        lookups = max(board.results[BASE.text, columns[0].name].lookups, 1)
        best = [text for text in board.scores if text != BASE.text][:BEST]
        lines = {
            text: [board.results[text, column.name].total / lookups for column in columns]
            for text in (BASE.text, *best)
        }
        lines["optimum"] = [column.optimum / lookups for column in columns]
        return HitCurves(stream, [f"{column.share / 10:g}%" for column in columns], lines)

    @property
    def reading(self) -> str:
        """Sentences about the columns."""
        least, most = (f"{end(self.board.panel.shares) / 10:g}" for end in (min, max))
        scores = (
            "Score: geometric mean of hits over those of LRU in the cells on which the policy "
            f"was not tuned; a cell is a stream and a pool of {least} to {most} % of its "
            "footprint. Cost: CPU time for each block looked up or evicted, over that of LRU "
            "in this run."
        )
        times = (
            "Hits are not time: the table of TTFT has the same policies under a clock, on the "
            "default server."
        )
        return f"{scores}\n{times}" if self.times.rows else scores


def leaderboard_page(board: Leaderboard) -> str:
    """Return the page of a leaderboard: its tables, and a picture of hits for each stream."""
    report = LeaderboardReport(board)
    parts = [f"<h1>Eviction policies: panel {escape(board.panel.name)}</h1>"]
    parts += [f"<p>{escape(report.headline)}</p>", _table(report.table)]
    parts += [_picture(curves) for curves in report.curves]
    if report.times.rows:
        parts.append(_table(report.times))
    lines = *report.reading.splitlines(), *board.panel.notes
    parts += [f"<p>{escape(line)}</p>" for line in lines]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>kvcore leaderboard</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(str(header))}</th>" for header in table.headers)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>\n"
        for row in table.rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>\n{rows}</table></div>'


def _picture(curves: HitCurves) -> str:
    """Return a picture of hit ratios by pool size: the best policies between the bounds."""
    # The optimum, which is the last, has a style of its own however many policies there are.
    styles = [*(f"l{index}" for index in range(len(curves.lines) - 1)), "optimum"]
    drawn = [
        f'<polyline class="{style}" points="{_points(line, curves.top)}"/>'
        for style, line in zip(styles, curves.lines.values(), strict=True)
    ]
    names = "".join(
        f'<span class="{style}">{escape(name)}</span> '
        for style, name in zip(styles, curves.lines, strict=True)
    )
    ticks = "".join(
        f'<text x="{_x(len(curves.sizes), index)}" y="{HEIGHT - 8}">{size}</text>'
        for index, size in enumerate(curves.sizes)
    )
    label = escape(curves.label)
    return (
        f"<figure><figcaption>{label}<br>{names}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(drawn)}{ticks}</svg></figure>"
    )


def _x(count: int, index: int) -> int:
    return MARGIN + index * (WIDTH - 2 * MARGIN) // max(count - 1, 1)


def _points(line: list[float], top: float) -> str:
    height = HEIGHT - 2 * MARGIN
    return " ".join(
        f"{_x(len(line), index)},{MARGIN + height - round(height * value / top)}"
        for index, value in enumerate(line)
    )


_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem;
  padding: 0 1rem }
table { border-collapse: collapse }
.wide { overflow-x: auto }
td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8886 }
td:first-child, th:first-child { text-align: left }
figure { display: inline-block; width: 300px; margin: 1rem 1rem 0 0; vertical-align: top }
figcaption { font-size: 13px }
@media (max-width: 40rem) { td, th { padding: .2rem .25rem; font-size: 12px } }
svg { width: 100% }
text { fill: currentColor; font-size: 9px; text-anchor: middle }
polyline { fill: none; stroke-width: 2; stroke: currentColor }
.l0 { color: #808080 } .l1 { color: #0072b2 } .l2 { color: #d55e00 } .l3 { color: #009e73 }
.optimum { color: canvastext } polyline.optimum { stroke-dasharray: 4 3 }
"""
