"""Tables and progress bars as rich draws them. Imported when the first one is drawn."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

import click
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

Column: TypeAlias = tuple[str, ...]

WHOLE, FOLDED, GAP = 20, 12, 3
"""Columns of the longest cell that never folds, of the narrowest that does, and between two."""


def draw_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Collection[str],
    split_at: int | None,
    width: int | None,
) -> None:
    """Print a table for a terminal of `width` columns, or a pipe; see `print_table`.

    A table wider than `split_at` columns is printed as several.
    """
    columns: list[Column] = list(zip(headers, *(map(str, row) for row in rows), strict=True))
    parts = [columns] if split_at is None else _parts(columns, split_at)
    for number, part in enumerate(parts):
        if number:
            click.echo()
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for header, *cells in part:
            table.add_column(
                header,
                justify="right" if header in right else "left",
                no_wrap=_width([header, *cells]) <= WHOLE,
                overflow="fold",
            )
        for row in zip(*(cells for _, *cells in part), strict=True):
            table.add_row(*row)
        # Without a height too, rich takes a dumb terminal for one of 80 columns.
        console = Console(
            width=_fitting(part, width),
            height=len(columns[0]),
            markup=False,
            highlight=False,
            emoji=False,
        )
        with console.capture() as captured:
            console.print(table)
        click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _parts(columns: list[Column], width: int) -> list[list[Column]]:
    """Divide columns into as few tables as fit the width, the first column in each."""
    first, *others = columns
    parts = [[first]]
    for column in others:
        wide = sum(_width(each) + GAP for each in parts[-1]) + _width(column)
        if wide > width and len(parts[-1]) > 1:
            parts.append([first])
        parts[-1].append(column)
    return parts


def _fitting(columns: list[Column], width: int | None) -> int:
    """Return the terminal's width, or more if folding cannot make the columns fit."""
    widths = [_width(column) for column in columns]
    gaps = GAP * (len(columns) - 1)
    least = sum(width if width <= WHOLE else FOLDED for width in widths) + gaps
    return max(width or sum(widths) + gaps, least)


def _width(column: Iterable[str]) -> int:
    return max(map(cell_len, column))


def progress_bar() -> Progress:
    """Return a progress bar for stderr that leaves nothing behind."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
