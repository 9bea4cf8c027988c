"""`kvcore view`: a page that plays a trace, or two side by side."""

from __future__ import annotations

from pathlib import Path

import click

from kvcore.cli.output import file_path, input_file, progress
from kvcore.cli.verb import echo, verb
from kvcore.files import atomic_file, refuse_overwrite
from kvcore.units import DECIMAL, format_bytes


@verb(
    "kvcore view run.jsonl.gz -o run.html",
    "kvcore view lru.jsonl.gz lfu.jsonl.gz -o both.html",
)
@click.argument("trace", callback=input_file)
@click.argument("other", required=False, callback=input_file)
@click.option(
    "-o", "--out", required=True, callback=file_path, metavar="FILE", help="File for the page."
)
def view(*, trace: Path, other: Path | None, out: Path) -> None:
    """Make a page that plays the TRACE of a run, or TRACE and OTHER side by side.

    The page is one file, which a browser opens without a server or a network: the pool as a
    map of blocks, the prefix tree, requests over time, curves, and why each request missed,
    at any moment of the run.
    """
    from kvcore.pages import view_page  # noqa: PLC0415 - `--help` does without

    traces = [trace] if other is None else [trace, other]
    refuse_overwrite(out, traces)
    with atomic_file(out) as file:
        page = view_page(traces, progress=progress)
        file.buffer.write(page)
    echo(f"{out}: {format_bytes(len(page), DECIMAL)}")
