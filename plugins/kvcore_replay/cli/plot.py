"""`kvcore plot`: one plot of a trace, or of the result of a run."""

from __future__ import annotations

from pathlib import Path

import click

from kvcore.errors import InputError
from kvcore.files import input_path
from kvcore.serving.result import TRACE
from kvcore_cli.output import reading
from kvcore_cli.verb import echo, verb
from kvcore_replay.cli.plot_option import picture_option, plot_file
from kvcore_replay.cli.trace_options import replica_option
from kvcore_replay.report import plots
from kvcore_replay.state.residency import rebuild_residency
from kvcore_replay.timeline import Timeline

KINDS = ("occupancy", "hits", "ages", "timeline", "latency")


@verb(
    "kvcore plot run.jsonl.gz --kind occupancy -o pool.png",
    "kvcore plot results --kind latency -o latency.svg",
)
@click.argument("source", metavar="TRACE|RESULT")
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    required=True,
    help="Subject of the plot: blocks and requests over time (occupancy); hit ratios over time "
    "(hits); times that blocks rested in the cache (ages); phases of requests (timeline); or "
    "latencies of requests (latency).",
)
@replica_option
@picture_option("-o", "--out", required=True, help="File for the plot: .png, .svg or .pdf.")
def plot(*, source: str, kind: str, replica: str | None, out: Path) -> None:
    """Plot a TRACE, or the RESULT of a run: a directory that `--out` of simulate or run wrote.

    All kinds except `latency` need the trace, which a RESULT has too. A TRACE that is cut is
    drawn up to the cut, except for `ages`, and the plot says so.
    """
    if not source:
        msg = "an empty path is no TRACE and no RESULT; name a file or a folder"
        raise InputError(msg)
    folder = Path(source) if Path(source).is_dir() else None
    if folder is not None and kind == "latency":
        latencies = plots.Latencies.read(folder)
        with plot_file(out) as write:
            write(lambda form: plots.latency(latencies, form))
        return
    trace = input_path(source) if folder is None else folder / TRACE
    if folder is not None and not trace.is_file():
        msg = (
            f"{folder} has no {TRACE}, which --kind {kind} is drawn from; --kind latency needs "
            "none. `kvcore simulate --trace FILE` writes one"
        )
        raise InputError(msg)
    with plot_file(out, [trace]) as write, reading("plotting", trace) as tick:
        timeline = Timeline.read(trace, replica=replica, tick=tick)
        if kind == "ages":
            residency = rebuild_residency(trace, replica)
            write(lambda form: plots.ages(residency, timeline.header, form))
        elif kind == "latency":
            write(lambda form: plots.latency(plots.Latencies.from_timeline(timeline), form))
        else:
            draw = getattr(plots, kind)
            write(lambda form: draw(timeline, form))
    if not timeline.complete:
        echo(f"kvcore: {trace}: incomplete: {timeline.cut_reason}", err=True)
