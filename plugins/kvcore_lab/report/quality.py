"""Report on the quality of bounded and quantised K/V: a table, a JSON object and a plot."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from kvcore.report.tables import counted
from kvcore.sections import Section, Table
from kvcore.trace.fields import version
from kvcore.units import format_number
from kvcore_lab.quality import FULL, Quality, QualityRow
from kvcore_lab.report.mrc import percent
from kvcore_replay.report.figure import (
    COLOURS,
    GREY,
    INK,
    MARGIN,
    MARKERS,
    add_title,
    log_axis,
    picture,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (9.6, 6.6)

DASHES = ("-", "--", ":", "-.")
"""Lines of the codecs; policies differ by colour."""

PANELS: tuple[tuple[str, str, float], ...] = (
    ("attention_error", "error of attention's output", 100),
    ("kl", "KL divergence of next tokens, nats", 1),
    ("top1", "same likeliest token", 100),
    ("needle", "needles found", 100),
)
"""The panels of the plot: the field of a row, its label, and the factor of its unit."""


@attrs.frozen
class QualityReport:
    """Report on the loss of quality, as text and as JSON.

    Attributes:
        quality: the measured losses.
    """

    quality: Quality

    @property
    def sections(self) -> list[Section]:
        """The whole report on the losses."""
        return [self.headline, self.table, f"{self.reading}\n{self.setup}".lstrip()]

    @property
    def headline(self) -> str:
        """Sentences about the texts and the budgets."""
        found = self.quality
        texts = counted(found.texts, "text")
        return (
            f"{found.generator}: {texts} of {found.prompt_tokens:,} + "
            f"{counted(found.tokens, 'token')}, against the same with all K/V in "
            f"{found.dtype}.\nBudgets are shares of what all tokens take in "
            f"{found.full_codec}: {format_number(found.full_bytes_per_token)} bytes a token of "
            "context."
        )

    @property
    def table(self) -> Table:
        """The losses: a row per policy, codec and budget, those with most bytes first."""
        headers = ["retention", "codec", "budget", "bytes/token", "of full"]
        headers += ["attention error", "KL", "KL p95", "top-1"]
        headers += ["needles"] if self.quality.needles else []
        rows = [
            [
                row.retention,
                row.codec,
                "" if row.budget is None else percent(row.budget),
                format_number(row.bytes_per_token),
                f"{row.share:.0%}",
                percent(row.attention_error),
                f"{row.kl:.2g}",
                f"{row.kl_p95:.2g}",
                f"{row.top1:.0%}",
                *([] if row.needle is None else [f"{row.needle:.0%}"]),
            ]
            for row in self.quality.rows
        ]
        return Table(headers, rows, headers[2:])

    @property
    def reading(self) -> str:
        """Sentences about the results in the table."""
        lines = [
            self._best("Least divergence", lambda row: -row.kl),
            self._best("Most needles", lambda row: row.needle or 0.0),
            self._left_out(),
        ]
        return "\n".join(line for line in lines if line)

    @property
    def setup(self) -> str:
        """A sentence with the other options of the run."""
        found = self.quality
        needles = ""
        if found.needles:
            announced = "announced" if found.announced else "not announced"
            needles = (
                f" Needles: {counted(found.needles, 'question')} {announced} about each of "
                f"{counted(found.texts, 'prompt')}, answered by {found.needle_generator}."
            )
        return (
            f"kvcore {version()}; blocks of {counted(found.block_size, 'token')}; "
            f"seed {found.seed}.{needles}"
        )

    def document(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        return attrs.asdict(self.quality)

    def plot(self, form: str) -> bytes:
        """Return a plot of the losses by bytes per token, as `png` or `svg` bytes.

        One panel per measure. Policies differ by colour, codecs by line and marker; the black
        line keeps all tokens, in one codec after another.

        Raises:
            PluginError: matplotlib is not installed.
        """
        return picture(form, lambda figure: draw(figure, self), INCHES)

    def _best(self, what: str, of: Callable[[QualityRow], float]) -> str:
        """Return a sentence about the best row at each budget; empty without one."""
        won: dict[str, list[str]] = {}
        for budget in sorted({row.budget or 0.0 for row in self.quality.rows} - {0.0}):
            rows = sorted((r for r in self.quality.rows if r.budget == budget), key=of)
            if len(rows) > 1 and of(rows[-1]) > of(rows[-2]):
                name = f"{rows[-1].retention} in {rows[-1].codec}"
                won.setdefault(name, []).append(percent(budget))
        winners = (f"{name} at {' and '.join(budgets)}" for name, budgets in won.items())
        return f"{what}: {', '.join(winners)}." if won else ""

    def _left_out(self) -> str:
        """Return a sentence about budgets in which a codec keeps all tokens; empty if none."""
        rows = self.quality.rows
        bounded = {(row.codec, row.budget) for row in rows if row.budget is not None}
        budgets = sorted({budget for _, budget in bounded})
        names = [
            f"{row.codec} at {percent(budget)}"
            for row in rows
            if row.retention == FULL
            for budget in budgets
            if (row.codec, budget) not in bounded
        ]
        return f"All tokens take no more, so nothing goes: {', '.join(names)}." if names else ""


def draw(figure: Figure, report: QualityReport) -> None:
    """Draw the panels and a legend into a matplotlib `figure`."""
    quality = report.quality
    panels = PANELS if quality.needles else PANELS[:-1]
    every: Any = figure.subplots(2, 2).flat
    for axes, (field, label, factor) in zip(every, panels, strict=False):
        _panel(axes, quality, field, label, factor)
    if len(panels) < len(PANELS):
        every[-1].set_axis_off()
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    texts = f"{counted(quality.texts, 'text')} of {quality.prompt_tokens:,}"
    tokens = counted(quality.tokens, "token")
    add_title(figure, f"{quality.generator}, {texts} + {tokens}")


def _panel(axes: Axes, quality: Quality, field: str, label: str, factor: float) -> None:
    rows = sorted(quality.rows, key=lambda row: row.bytes_per_token)
    policies = list(dict.fromkeys(row.retention for row in rows if row.retention != FULL))
    codecs = list(dict.fromkeys(row.codec for row in quality.rows))
    lines: dict[tuple[str, str], list[QualityRow]] = {}
    for row in rows:
        key = (FULL, "") if row.retention == FULL else (row.retention, row.codec)
        lines.setdefault(key, []).append(row)
    for (policy, codec), points in sorted(lines.items()):
        style: dict[str, Any] = {"color": INK, "linewidth": 1, "marker": "."}
        if policy != FULL:
            place = codecs.index(codec)
            style = {
                "color": COLOURS[policies.index(policy) % len(COLOURS)],
                "linewidth": 1,
                "linestyle": DASHES[place % len(DASHES)],
                "marker": MARKERS[place % len(MARKERS)],
                "markersize": 4,
            }
        axes.plot(
            [row.bytes_per_token for row in points],
            [factor * getattr(row, field) for row in points],
            label=f"{policy}, {codec}" if codec else "all tokens",
            **style,
        )
    for row in lines[FULL, ""]:
        axes.annotate(
            row.codec,
            (row.bytes_per_token, factor * getattr(row, field)),
            xytext=(0, 5),
            textcoords="offset points",
            color=GREY,
            fontsize="x-small",
            ha="center",
        )
    low, high = rows[0].bytes_per_token, rows[-1].bytes_per_token
    axes.set_xscale("log")
    axes.set_xlim(low / MARGIN, high * MARGIN)
    log_axis(axes.xaxis, low, high, "bytes held, a token of context")
    axes.set_ylim(bottom=0, top=None if factor == 1 or field == PANELS[0][0] else 108)
    if factor != 1:
        axes.yaxis.set_major_formatter("{x:g}%")
    axes.set_title(label, loc="left", fontsize="small")
    axes.xaxis.label.set_fontsize("small")
    axes.grid()
