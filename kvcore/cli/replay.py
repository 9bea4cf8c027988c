"""`kvcore replay`: rebuild what a trace says happened, and check that it could have."""

from __future__ import annotations

from pathlib import Path

import click

from kvcore.cli.output import emit_json, file_path, json_option, print_table
from kvcore.errors import TraceError
from kvcore.trace import Report
from kvcore.trace import replay as replay_trace
from kvcore.units import parse_seconds


@click.command()
@click.argument("file", callback=file_path)
@click.option("--at", metavar="SECONDS", help="Report the state at this time of the trace.")
@json_option
def replay(*, file: Path, at: str | None, as_json: bool) -> None:
    """Replay the trace FILE: rebuild the cache line by line, and check every line.

    Fails if a line is damaged or cannot follow from those before it, and, after reporting
    what was readable, if the file is cut.
    """
    report = replay_trace(file, None if at is None else parse_seconds(at))
    if as_json:
        emit_json(report.as_dict())
    else:
        _print(report)
    if not report.complete:
        msg = f"{file}: incomplete: {report.cut_reason}"
        raise TraceError(msg)


def _print(report: Report) -> None:
    counts = [
        ("lines", report.lines),
        *((f"  {event}", count) for event, count in report.events.items()),
        *((f"blocks {place}", report.pool[place]) for place in ("free", "cached", "private")),
        ("spans", report.pool["spans"]),
        *((f"preempted by {how}", count) for how, count in report.preemptions.items() if count),
        ("blocks looked up", report.hit["lookup_blocks"]),
        ("blocks hit", report.hit["hit_blocks"]),
        ("own blocks found again", report.hit["self_hit_blocks"]),
    ]
    ratios = [
        (f"hit ratio by {unit}", "none" if ratio is None else f"{ratio:.4f}")
        for unit, ratio in report.hit["ratio"].items()
    ]
    rows = [*((what, f"{count:,}") for what, count in counts), *ratios]
    print_table(["trace", report.file], rows, right=[report.file])
