"""Report on paged memory beside contiguous memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from kvcore.sections import Section, Table
from kvcore.serving import Result
from kvcore.units import format_number, format_seconds
from kvcore_cli.report.simulation import SimulationReport
from kvcore_cli.report.simulation import report_of as report_of_run
from kvcore_cli.report.tables import NONE, cell, share


@attrs.frozen
class PagingReport:
    """Report on two runs of the same requests, paged and contiguous.

    Attributes:
        contiguous, paged: the summaries of the runs.
        max_output: tokens that a request in contiguous memory reserves for its output.
        alone: the report of the contiguous run, whose setup is that of both; None: no setup.
    """

    contiguous: Mapping[str, Any]
    paged: Mapping[str, Any]
    max_output: int
    alone: SimulationReport | None = None

    @property
    def sections(self) -> list[Section]:
        """The page on both runs."""
        both: list[Section] = [self.headline, Table(["", "contiguous", "paged"], self.rows)]
        if self.alone is None:
            return [*both, self.reading]
        reading = f"{self.reading}\n{self.alone.setup}"
        return [self.alone.warning, self.alone.headline, *both, reading]

    @property
    def headline(self) -> str:
        """A sentence about the comparison."""
        tokens = self.paged["pool"]["blocks"] * self.paged["pool"]["block_size"]
        return (
            f"The same memory of {tokens:,} tokens, contiguous: a request reserves its prompt "
            f"and {self.max_output:,} tokens of output in one piece, and shares nothing."
        )

    @property
    def rows(self) -> list[list[str]]:
        """Rows of the table, the most important first."""
        runs = zip(_paging_cells(self.contiguous), _paging_cells(self.paged), strict=True)
        return [[name, before, after] for (name, before), (_, after) in runs]

    @property
    def reading(self) -> str:
        """Sentences about the gain of paging and the words of the table."""
        paged, before = (
            run["fragmentation"]["running"] for run in (self.paged, self.contiguous)
        )
        # If memory is not short, fewer run at a time because each ends earlier.
        bought = (
            f"Paging runs {paged / before:.2f} times as many at a time. "
            if paged > before > 0
            else ""
        )
        return (
            f"{bought}Splintered is the time in which the next request waited although enough "
            "was free in sum, in holes too short for it."
        )


def _paging_cells(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows of one run: names and values."""
    seen, ttft = summary["fragmentation"], summary["ttft_s"]
    yield "running at a time", format_number(seen["running"])
    yield "completed", f"{summary['completed']:,}"
    yield "rejected", f"{summary['rejected']:,}"
    speed = summary["throughput_tokens_s"]
    yield "generated tokens/s", cell(speed, format_number)
    for kind in ("mean", "p99"):
        yield f"TTFT, {kind}", NONE if ttft is None else format_seconds(ttft[kind])
    yield "memory: tokens of open requests", f"{seen['used']:.1%}"
    yield "memory: cached for later ones", f"{seen['cached']:.1%}"
    yield "memory: reserved, no token yet", f"{seen['internal']:.1%}"
    yield "of this, prompts in prefill", f"{seen['uncomputed']:.1%}"
    yield "time splintered", f"{seen['external']:.1%}"
    free = seen["external_free"]
    yield "free at such times", share(free)


def report_of(result: Result, document: Mapping[str, Any], **words: Any) -> PagingReport:
    """Return the report of a run whose document has that of a paged one too."""
    alone = report_of_run(result, document, **words)
    return PagingReport(document, document["paged"], result.max_output or 0, alone)
