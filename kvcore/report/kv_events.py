"""Table of the contents of a KV-event recording."""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.kv_events import RecordingReport
from kvcore.kv_events.block_tracker import KINDS


def rows(report: RecordingReport) -> list[tuple[str, str]]:
    """Return the rows of the table: counts, then anomalies."""
    return [*_counts(report), *_faults(report)]


def _counts(report: RecordingReport) -> Iterator[tuple[str, str]]:
    yield "format", report.format
    if report.engine is not None:
        yield "engine", report.engine
    yield "batches", f"{report.batches:,}"
    for event, count in report.events.items():
        yield f"  {event}", f"{count:,}"
    for what, count in report.blocks.items():
        if count or what in ("stored", "removed"):
            yield f"blocks {what.replace('_', ' ')}", f"{count:,}"
    for medium, count in report.resident.items():
        yield f"resident on {medium}", f"{count:,}"


def _faults(report: RecordingReport) -> Iterator[tuple[str, str]]:
    for what in ("restarts", "replayed", "garbage"):
        count = getattr(report, what)
        if count:
            yield what, f"{count:,}"
    for gap in report.gaps:
        last = gap["first"] + gap["count"] - 1
        yield f"missing from {gap['publisher']}", f"batches {gap['first']:,} to {last:,}"
    for kind, count in report.anomalies.items():
        if count:
            yield KINDS[kind], f"{count:,}"
    for example in report.examples:
        yield f"  {example.where}", example.what
