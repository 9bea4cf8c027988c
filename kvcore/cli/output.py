"""What verbs print: JSON alone or a table on stdout, progress on stderr."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Any, TypeVar

import click
import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

Item = TypeVar("Item")

TEXT_WIDTH = 80
"""Columns that sentences take in a pipe or file."""

STRIDE = 256
"""Items between two movements of a progress bar."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of a table."
)
"""The `--json` flag of every verb; the function receives it as `as_json`."""


def file_path(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Read a path, which may not be empty: `Path("")` would be the working directory."""
    if value == "":
        msg = "empty path; name a file"
        raise click.BadParameter(msg, ctx=ctx, param=param)
    return None if value is None else Path(value)


def terminal_width() -> int | None:
    """Return the columns of the terminal that stdout is; None if it is none."""
    return get_terminal_size().columns if sys.stdout.isatty() else None


def emit_json(payload: Mapping[str, Any]) -> None:
    """Print `payload` on stdout as indented JSON and a newline.

    Raises:
        ValueError: it does not say which `schema` it has.
    """
    if "schema" not in payload:
        msg = f"JSON for other programs needs a 'schema'; this has {', '.join(payload)}"
        raise ValueError(msg)
    click.echo(orjson.dumps(payload, option=orjson.OPT_INDENT_2))


def print_text(text: str) -> None:
    """Print sentences on stdout, wrapped to the terminal; a line that ends stays so."""
    width = terminal_width() or TEXT_WIDTH
    for line in text.splitlines():
        click.echo(fill(line, width, break_long_words=False, break_on_hyphens=False))


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[str] = (),
    split: bool = False,
) -> None:
    """Print a table on stdout, the columns named in `right` flush right.

    Nothing is ever cut off. In a pipe every row is one line, whatever its width. On a
    terminal long cells fold; with `split` a table that is too wide is printed as several,
    one below another, each with the first column. Text is printed as it is: brackets are
    no markup.
    """
    from kvcore.cli.tables import draw_table  # noqa: PLC0415 - rich takes 15 ms

    width = terminal_width()
    draw_table(headers, rows, right, width if split else None, width)


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr while the body runs, if that is a terminal.

    Yields a function to call with how many more of `total` are done (None: unknown).
    """
    if not sys.stderr.isatty():
        yield _unseen
        return
    from kvcore.cli.tables import progress_bar  # noqa: PLC0415 - as above

    with progress_bar() as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)


def watched(items: Iterable[Item], tick: Callable[[int], None]) -> Iterable[Item]:
    """Return `items`, which tell `tick` now and then how many there were if it is seen."""
    return items if tick is _unseen else _counted(items, tick)


def _unseen(done: int) -> None:
    del done


def _counted(items: Iterable[Item], tick: Callable[[int], None]) -> Iterator[Item]:
    fresh = 0
    for item in items:
        yield item
        fresh += 1
        if fresh == STRIDE:
            tick(fresh)
            fresh = 0
    tick(fresh)
