"""What verbs print: JSON alone or a table on stdout, progress on stderr."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

PIPE_WIDTH = 10_000
"""Columns of a table that goes into a pipe or file: enough never to wrap or cut a cell."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of a table."
)
"""The `--json` flag of every verb; the function receives it as `as_json`."""


def emit_json(payload: Mapping[str, Any]) -> None:
    """Print `payload` on stdout as indented JSON and a newline.

    Raises:
        ValueError: it does not say which `schema` it has.
    """
    if "schema" not in payload:
        msg = f"JSON for other programs needs a 'schema'; this has {', '.join(payload)}"
        raise ValueError(msg)
    click.echo(orjson.dumps(payload, option=orjson.OPT_INDENT_2))


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[str] = (),
    title: str | None = None,
) -> None:
    """Print a table on stdout, the columns named in `right` flush right.

    On a terminal it is as wide as that at most, and cells wrap; in a pipe every row is
    one line, whatever its width. Text is printed as it is: brackets are no markup.
    """
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, title=title, title_justify="left"
    )
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left")
    for row in rows:
        table.add_row(*map(str, row))
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr while the body runs, if that is a terminal.

    Yields a function to call with how many more of `total` are done (None: unknown).
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)
