"""The option of a file for a plot, and the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import click

from kvcore.errors import InputError
from kvcore.files import atomic_file, refuse_overwrite
from kvcore.sections import Chart
from kvcore_cli.output import file_option, file_path


def _picture(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Return the path of a plot; refuse one that cannot be drawn here."""
    path = file_path(ctx, param, value)
    if path is not None and not ctx.resilient_parsing:
        from kvcore_replay.report.figure import FORMS, matplotlib  # noqa: PLC0415 - for plots alone

        if path.suffix[1:].lower() not in FORMS:
            flag, forms = param.opts[-1], ", .".join(FORMS)
            msg = f"{flag} {path}: a name says what is drawn; end it with one of .{forms}"
            raise InputError(msg)
        matplotlib()
    return path


picture_option = partial(file_option, callback=_picture)
"""Return the option of a file for a plot, from its flags and further settings."""

plot_option = picture_option("--plot", "picture", help="File for a plot: .png, .svg or .pdf.")


Plot: TypeAlias = Chart | Callable[[str], bytes]
"""A chart, or a function that returns a plot as `png`, `svg` or `pdf`."""


def drawn(plot: Plot, form: str) -> bytes:
    """Return a plot as `png`, `svg` or `pdf` bytes."""
    from kvcore_replay.report.charts import plot_chart  # noqa: PLC0415 - for plots alone

    return plot_chart(plot, form) if isinstance(plot, Chart) else plot(form)


@contextmanager
def plot_file(
    path: Path | None, inputs: Iterable[object] = ()
) -> Iterator[Callable[[Plot], object]]:
    """Open the file of a plot; yield the function that draws a plot into it.

    If the body raises, no file is left. Without a path nothing is drawn.

    Raises:
        InputError: the file is one of the `inputs`, or cannot be written.
    """
    if path is None:
        yield lambda _: None
        return
    refuse_overwrite(path, inputs)
    form = path.suffix[1:].lower()
    with atomic_file(path) as file:
        yield lambda plot: file.buffer.write(drawn(plot, form))
