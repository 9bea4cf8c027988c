"""`kvcore tour`: a page that explains the KV cache to learners."""

from __future__ import annotations

from pathlib import Path

import click

from kvcore.cli.output import file_path
from kvcore.cli.verb import echo, verb
from kvcore.files import atomic_file
from kvcore.units import DECIMAL, format_bytes


@verb("kvcore tour -o tour.html")
@click.option(
    "-o", "--out", required=True, callback=file_path, metavar="FILE", help="File for the page."
)
def tour(*, out: Path) -> None:
    """Make a page that explains the KV cache, for learners.

    Six questions, each answered by pictures of what a small model and a real cache do while
    the page is made. It is one file, which a browser opens without a server or a network.
    Needs torch.
    """
    from kvcore.pages.tour import tour_page  # noqa: PLC0415 - it imports the engine

    with atomic_file(out) as file:
        page = tour_page()
        file.buffer.write(page)
    echo(f"{out}: {format_bytes(len(page), DECIMAL)}")
