"""`kvcore report`: a page with the settings, figures, regret and miss reasons of results."""

from __future__ import annotations

from pathlib import Path

import click

from kvcore.errors import InputError
from kvcore.files import input_path, refuse_overwrite
from kvcore_cli.output import page_option, progress, write_page
from kvcore_cli.verb import verb
from kvcore_replay.cli.trace_options import replica_option


@verb(
    "kvcore report results -o report.html",
    "kvcore report lru lfu compare.json -o report.html --title 'LRU or LFU?'",
)
@click.argument("results", metavar="RESULT...", nargs=-1, required=True, type=click.Path())
@replica_option
@page_option(required=True)
@click.option(
    "--title", metavar="TEXT", help="Title of the page.  [default: names the results]"
)
def report(
    *, results: tuple[str, ...], replica: str | None, out: Path, title: str | None
) -> None:
    """Make a page that reports results: one file to send, which opens offline.

    A RESULT is a folder that `simulate --out` or `run --out` wrote; a trace; the JSON that
    compare, curve, plan, whatif, explain, quality or size print with
    --json; or the table of a sweep. Each is recognised by its content. Several of one kind
    are put side by side, with their differences from the first.

    Regret, the distance from the optimum, and miss reasons are reported where there is a
    trace.
    """
    from kvcore_pages.report import report_page  # noqa: PLC0415 - `--help` does without

    if "" in results:
        msg = "an empty path is no RESULT; name a file or a folder"
        raise InputError(msg)
    paths = [input_path(result) for result in results]
    read = [file for path in paths for file in (path.iterdir() if path.is_dir() else [path])]
    refuse_overwrite(out, read)
    write_page(out, lambda: report_page(paths, title=title, replica=replica, progress=progress))
