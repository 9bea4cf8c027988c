"""Report on paged memory beside contiguous memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """Report on a run with contiguous memory, and on a paged one of the same requests.

    Attributes:
        alone: the report of the contiguous run, whose setup is that of both.
        both: the sections on both.
    """

    alone: SimulationReport
    both: Sequence[Section]

    @property
    def sections(self) -> list[Section]:
        """The page on both runs."""
        *both, reading = self.both
        last = f"{reading}\n{self.alone.setup}"
        return [self.alone.warning, self.alone.headline, *both, last]


def paging_sections(
    contiguous: Mapping[str, Any], paged: Mapping[str, Any], max_output: int
) -> list[Section]:
    """Return a sentence, a table with the most important rows first, and how to read it.

    Args:
        contiguous: the summary of the run in contiguous memory.
        paged: the summary of the other run.
        max_output: tokens that a request in contiguous memory reserves for its output.
    """
    tokens = paged["pool"]["blocks"] * paged["pool"]["block_size"]
    headline = (
        f"The same memory of {tokens:,} tokens, contiguous: a request reserves its prompt "
        f"and {max_output:,} tokens of output in one piece, and shares nothing."
    )
    cells = zip(_paging_cells(contiguous), _paging_cells(paged), strict=True)
    rows = [[name, before, after] for (name, before), (_, after) in cells]
    before, after = (run["fragmentation"]["running"] for run in (contiguous, paged))
    # If memory is not short, fewer run at a time because each ends earlier.
    more = after > before > 0
    bought = f"Paging runs {after / before:.2f} times as many at a time. " if more else ""
    reading = (
        f"{bought}Splintered is the time in which the next request waited although enough "
        "was free in sum, in holes too short for it."
    )
    return [headline, Table(["", "contiguous", "paged"], rows), reading]


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
    both = paging_sections(document, document["paged"], result.max_output or 0)
    return PagingReport(report_of_run(result, document, **words), both)
