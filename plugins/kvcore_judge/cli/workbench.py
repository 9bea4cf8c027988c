"""`kvcore workbench`: a site in which a policy is typed and scored, in the browser alone."""

from __future__ import annotations

from pathlib import Path

import click

from kvcore.units import DECIMAL, format_bytes
from kvcore_cli.output import file_option
from kvcore_cli.verb import echo, verb


@verb("kvcore workbench --pyodide node_modules/pyodide -o site")
@click.option(
    "--pyodide",
    required=True,
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="The npm package pyodide, and in it a wheel of msgspec for it: Python for browsers.",
)
@file_option(
    "-o",
    "--out",
    required=True,
    metavar="FOLDER",
    help="Folder for the site. It is made if it is missing.",
)
def workbench(*, pyodide: Path, out: Path) -> None:
    """Make a site that scores an eviction policy in the browser.

    The page has an editor, the streams of `kvcore leaderboard`, and a place for a file of your
    own, which stays on the machine. A policy is run by kvcore itself, in WebAssembly. Any
    server of files will do, such as `python -m http.server -d FOLDER`; nothing is fetched from
    elsewhere, and after the first visit the page works offline.
    """
    from kvcore_judge.site import write_site  # noqa: PLC0415 - it imports the leaderboard

    size = write_site(out, pyodide)
    echo(f"{out}: {format_bytes(size, DECIMAL)}; `python -m http.server -d {out}` serves it")
