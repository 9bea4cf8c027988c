"""Report on the quality of bounded and quantised K/V: sections and a JSON object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from kvcore.sections import Chart, Panel, Section, Table
from kvcore.trace.fields import version
from kvcore.units import format_number
from kvcore_cli.report.tables import counted
from kvcore_lab.quality import FULL, Quality, QualityRow
from kvcore_lab.report.mrc import percent
from kvcore_replay.report.charts import as_percent

PANELS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("attention_error", "error of attention's output", as_percent),
    ("kl", "KL divergence of next tokens, nats", format_number),
    ("top1", "same likeliest token", as_percent),
    ("needle", "needles found", as_percent),
)
"""The panels of the chart: the field of a row, its label, and what formats a value."""


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
        text = f"{self.reading}\n{self.setup}".lstrip()
        return [self.headline, self.table, text, self.chart()]

    @property
    def headline(self) -> str:
        """Sentences about the texts and the budgets."""
        quality = self.quality
        texts = counted(quality.texts, "text")
        size = format_number(quality.full_bytes_per_token)
        return (
            f"{quality.generator}: {texts} of {quality.prompt_tokens:,} + "
            f"{counted(quality.tokens, 'token')}, against the same with all K/V in "
            f"{quality.dtype}.\nBudgets are shares of what all tokens take in "
            f"{quality.full_codec}: {size} bytes a token of context."
        )

    @property
    def table(self) -> Table:
        """The losses: a row per policy, codec and budget, those with most bytes first."""
        headers = ["retention", "codec", "budget", "bytes/token", "of full", "read"]
        headers += ["attention error", "KL", "KL p95", "top-1"]
        headers += ["needles"] if self.quality.needles else []
        rows = [
            [
                row.retention,
                row.codec,
                "" if row.budget is None else percent(row.budget),
                format_number(row.bytes_per_token),
                f"{row.share:.0%}",
                f"{row.read_share:.0%}",
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
        quality = self.quality
        needles = ""
        if quality.needles:
            announced = "announced" if quality.announced else "not announced"
            needles = (
                f" Needles: {counted(quality.needles, 'question')} {announced} about each of "
                f"{counted(quality.texts, 'prompt')}, answered by {quality.needle_generator}."
            )
        return (
            f"kvcore {version()}; blocks of {counted(quality.block_size, 'token')}; "
            f"seed {quality.seed}.{needles}"
        )

    def document(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        return attrs.asdict(self.quality)

    def chart(self) -> Chart:
        """Return a chart of the losses by the bytes that are held: a panel for each measure."""
        quality = self.quality
        panels = []
        for field, label, text in PANELS if quality.needles else PANELS[:-1]:
            lines: dict[str, list[tuple[float, float]]] = {}
            for row in quality.rows:
                bounded = row.retention != FULL
                name = f"{row.retention}, {row.codec}" if bounded else "all tokens"
                point = row.bytes_per_token, getattr(row, field) or 0
                lines.setdefault(name, []).append(point)
            panels.append(Panel(label, lines, text))
        texts = f"{counted(quality.texts, 'text')} of {quality.prompt_tokens:,}"
        title = f"{quality.generator}, {texts} + {counted(quality.tokens, 'token')}"
        return Chart(title, self.setup, "bytes held, a token of context", panels)

    def _best(self, what: str, key: Callable[[QualityRow], float]) -> str:
        """Return a sentence about the best row at each budget; empty without one."""
        won: dict[str, list[str]] = {}
        for budget in sorted({row.budget or 0.0 for row in self.quality.rows} - {0.0}):
            rows = sorted((r for r in self.quality.rows if r.budget == budget), key=key)
            if len(rows) > 1 and key(rows[-1]) > key(rows[-2]):
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
