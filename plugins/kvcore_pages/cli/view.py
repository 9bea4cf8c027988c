"""`kvcore view`: a page that plays a trace, or two side by side."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from kvcore.errors import InputError
from kvcore.files import refuse_overwrite
from kvcore.units import parse_window
from kvcore_cli.output import page_option, progress, trace_file, write_page
from kvcore_cli.verb import Time, echo, verb
from kvcore_replay.cli.trace_options import replica_option


@verb(
    "kvcore view run.jsonl.gz -o run.html",
    "kvcore view lru.jsonl.gz lfu.jsonl.gz -o both.html",
    "kvcore view run.jsonl.gz --window 600:900 --serve",
)
@click.argument("trace", callback=trace_file)
@click.argument("other", required=False, callback=trace_file)
@page_option()
@click.option(
    "--serve", is_flag=True, help="Serve the page to browsers on this machine until Ctrl-C."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of --serve; 0 takes a free one.",
)
@click.option(
    "--window",
    metavar="START:END",
    help="Part of the trace that the page plays, START:END in seconds; either may be left out.",
)
@click.option(
    "--at",
    type=Time(),
    help="Time of the trace, in seconds, at which the page opens; at most its end.  "
    "[default: time of the costliest eviction]",
)
@replica_option
@click.option(
    "--events",
    type=click.IntRange(min=1),
    default=1_000_000,
    help="Largest number of lines of a trace that the page plays.",
)
def view(
    *,
    trace: Path,
    other: Path | None,
    out: Path | None,
    serve: bool,
    port: int,
    window: str | None,
    at: int | None,
    replica: str | None,
    events: int,
) -> None:
    """Make a page that plays the TRACE of a run, or TRACE and OTHER side by side.

    The page is one file, which a browser opens without a server or a network: the pool as a
    map of blocks, the prefix tree, requests over time, curves, and why each request missed,
    at any moment of the run. If a trace is longer than --events, the page has its first lines,
    or those from the start of --window on, and says so. A TRACE may be the directory that --out
    of simulate or run wrote.
    """
    from kvcore_pages.playback import Window  # noqa: PLC0415 - as above
    from kvcore_pages.view import view_page  # noqa: PLC0415 - `--help` does without

    if out is None and not serve:
        msg = "where to? Give a file for the page with -o FILE, or --serve it to this machine"
        raise InputError(msg)
    start, end = (0, None) if window is None else parse_window(window)
    traces = [trace] if other is None else [trace, other]
    make = partial(
        view_page,
        traces,
        window=Window(start, end, events),
        at=at,
        replica=replica,
        progress=progress,
        notify=lambda notice: echo(f"kvcore: {notice}", err=True),
    )
    if out is not None:
        refuse_overwrite(out, traces)
    page = make() if out is None else write_page(out, make)
    if serve:
        from kvcore_pages.server import PageServer  # noqa: PLC0415 - most pages are files

        with PageServer(page, port) as server:
            echo(f"{server.url} (Ctrl-C ends it)")
            server.serve_forever()
