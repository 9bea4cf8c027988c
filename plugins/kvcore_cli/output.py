"""The output of verbs: JSON alone or a table on stdout, progress on stderr, files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from textwrap import fill
from time import monotonic
from typing import Any, TextIO, TypeAlias

import click

from kvcore.errors import InputError, redact
from kvcore.files import STDIN, atomic_file, file_bytes, input_path, part_path
from kvcore.hookspecs import OUTPUT
from kvcore.progress import Tick, unseen
from kvcore.sections import Section, Table
from kvcore.units import DECIMAL, NS_PER_S, format_bytes, format_number, parse_seconds
from kvcore.untrusted import escaped, escaped_json
from kvcore.workloads import Workload, notes_of
from kvcore_cli.verb import (
    COMMAND_LINE,
    Unrecorded,
    VerbT,
    echo,
    option,
    results,
    results_alone,
)

PROGRESS_SECONDS = "KVCORE_PROGRESS_SECONDS"
"""Environment variable: seconds between two lines of progress in a pipe; 0 prints none."""

FEW = 1000
"""Total from which on progress is a percentage, not a number."""

TEXT_WIDTH = 80
"""Columns of sentences in a pipe or file."""

STDOUT = Path("-")
"""Standard output, where a verb can write a file to it: see `file_or_stdout`."""

_NAMED = "kvcore.named"
"""Key in a context's `meta`: the files that a command line names, each with its flag."""


output_option = partial(option, cls=Unrecorded, heading=OUTPUT)
"""Return a decorator that gives a verb an option of where results are written, or how."""


def json_option(verb: VerbT) -> VerbT:
    """Add the flag `--json` to a verb, which receives it as `as_json`.

    With the flag and without it, output of plugins goes to stderr: see `results_alone`.
    """
    text = "Print one JSON document instead of a table."
    return output_option("--json", "as_json", is_flag=True, help=text)(results_alone(verb))


def file_path(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Return the path of a file that a command line names once; `-` is refused.

    Raises:
        BadParameter: the path is empty (`Path("")` is the working directory), or `-`.
        InputError: another option of the command line names the same file.
    """
    if value == "":
        msg = "empty path; name a file"
        raise click.BadParameter(msg, ctx=ctx, param=param)
    if value == STDIN:
        msg = "a file is needed, not '-' (write './-' for a file of that name)"
        raise click.BadParameter(msg, ctx=ctx, param=param)
    if value is None:
        return None
    path = Path(value)
    if part_path(path) != path:  # a device may be named twice
        flag = param.opts[-1] if isinstance(param, click.Option) else param.human_readable_name
        other = ctx.meta.setdefault(_NAMED, {}).setdefault(path.resolve(), flag)
        if other != flag:
            msg = f"{other} and {flag} name the same file, {path}: give each its own"
            raise InputError(msg)
    return path


def file_or_stdout(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> Path | None:
    """Return the path of a file, as `file_path` does, or `STDOUT` for `-`."""
    return STDOUT if value == STDIN else file_path(ctx, param, value)


def input_file(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Return the path of a file to read; `-` is standard input, copied into a file."""
    if value is None or ctx.resilient_parsing:
        return None
    return input_path(value) if value else file_path(ctx, param, value)


file_option = partial(output_option, callback=file_path, metavar="FILE")
"""Return a decorator that gives a verb an option of a file to write."""

input_option = partial(option, callback=input_file, metavar="FILE")
"""Return a decorator that gives a verb an option of a file to read."""


def trace_in(source: str) -> str:
    """Return the path of the trace in a directory that `--out` wrote; else `source`.

    Raises:
        InputError: the directory has no trace.
    """
    if not source or not Path(source).is_dir():
        return source
    from kvcore.serving.result import TRACE  # noqa: PLC0415 - `--help` does without

    trace = Path(source) / TRACE
    if not trace.exists():
        msg = f"{source} is a directory without {TRACE}: give a trace, or what --out wrote"
        raise InputError(msg)
    return str(trace)


def trace_file(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Return the path of a trace to read, which a directory that `--out` wrote has too."""
    return input_file(ctx, param, value if value is None else trace_in(value))


def terminal_width() -> int | None:
    """Return the columns of the terminal; None if stdout is no terminal."""
    if not results().isatty():
        return None
    from shutil import get_terminal_size  # noqa: PLC0415 - for terminals alone

    return get_terminal_size().columns


def command_field() -> dict[str, list[str]]:
    """Return the field `command` of documents: the command line that makes them.

    It has no options without which the results are the same, unless the verb requires them,
    and no users and passwords of URLs. Outside a command line there is no field.
    """
    context = click.get_current_context(silent=True)
    if context is None or COMMAND_LINE not in context.meta:
        return {}
    params = [param for param in context.command.params if isinstance(param, click.Option)]
    named = {flag: param for param in params for flag in (*param.opts, *param.secondary_opts)}
    kept, rest = ["kvcore"], iter(context.meta[COMMAND_LINE])
    for word in rest:
        # The value of an option is its next word, or stands behind `=`, or behind one letter.
        flag = word.partition("=")[0] if word.startswith("--") else word[:2]
        param = named.get(flag)
        values = 0 if param is None or param.is_flag or word != flag else param.nargs
        words = [word, *(rest if word == "--" else islice(rest, values))]
        if param is None or param.required or not isinstance(param, Unrecorded):
            kept += words
    return {"command": [redact(click.format_filename(word)) for word in kept]}


def json_bytes(payload: Mapping[str, Any]) -> bytes:
    """Return `payload` as indented JSON, with `command_field` and a newline at the end.

    Raises:
        ValueError: it has no key `schema`.
    """
    if "schema" not in payload:
        msg = f"JSON for other programs needs a 'schema'; this has {', '.join(payload)}"
        raise ValueError(msg)
    import orjson  # noqa: PLC0415 - for `--json` alone

    payload = {"schema": payload["schema"], **command_field(), **payload}
    try:
        return orjson.dumps(payload, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        import json  # noqa: PLC0415 - for integers beyond 64 bits alone

        # Read again: a number that is none, or infinite, is null, as orjson has it.
        payload = json.loads(json.dumps(payload), parse_constant=lambda _: None)
        return json.dumps(payload, indent=2).encode() + b"\n"


def emit_json(payload: Mapping[str, Any]) -> None:
    """Print `payload` on stdout as `json_bytes` has it."""
    click.echo(escaped_json(json_bytes(payload)), nl=False, file=results())


def optional_file(path: Path | None) -> AbstractContextManager[TextIO | None]:
    """Open a file as `atomic_file` does; without a path yield None."""
    return nullcontext() if path is None else atomic_file(path)


def print_text(text: str) -> None:
    """Print sentences on stdout, each of their lines wrapped to the terminal."""
    width = terminal_width() or TEXT_WIDTH
    for line in escaped(text).splitlines():
        echo(fill(line, width, break_long_words=False, break_on_hyphens=False))


def print_notes(workload: Workload) -> None:
    """Print on stderr the notes of `workload` on the requests that were read."""
    for note in notes_of(workload):
        echo(f"kvcore: {note}", err=True)


Column: TypeAlias = tuple[str, ...]

WHOLE, FOLDED, GAP = 20, 12, 3
"""Columns of the longest cell that never folds, of the narrowest that folds, and of a gap."""


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[str] = (),
    split: bool = False,
) -> None:
    """Print a table on stdout, the columns named in `right` flush right.

    No cell is cut. In a pipe every row is one line, of any width. On a terminal long cells
    fold; with `split` a table that is too wide is printed as several, one below another, each
    with the first column. Brackets in cells are no markup. Without columns nothing is printed.
    """
    width = terminal_width()
    if not headers:
        return
    inert = [[escaped(str(cell)) for cell in row] for row in (headers, *rows)]
    columns: list[Column] = list(zip(*inert, strict=True))
    flush = set(map(escaped, right))
    if width is None and _is_even(inert):
        _print_even(columns, flush)
        return
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - few tables need it
    from rich.console import Console  # noqa: PLC0415 - as above
    from rich.table import Table  # noqa: PLC0415 - as above

    parts = [columns] if width is None or not split else _parts(columns, width)
    for index, part in enumerate(parts):
        if index:
            echo()
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for header, *cells in part:
            table.add_column(
                header,
                justify="right" if header in flush else "left",
                no_wrap=_width([header, *cells]) <= WHOLE,
                overflow="fold",
            )
        for row in zip(*(cells for _, *cells in part), strict=True):
            table.add_row(*row)
        # Without a height, rich takes a dumb terminal to be 80 columns wide.
        console = Console(
            file=results(),
            width=_fitting(part, width),
            height=len(columns[0]),
            markup=False,
            highlight=False,
            emoji=False,
        )
        with console.capture() as captured:
            console.print(table)
        # The cells are escaped: the control characters that are left are rich's styles.
        text = "\n".join(line.rstrip() for line in captured.get().splitlines())
        click.echo(text, file=results())


EVEN = frozenset("×–—≈·²³…µ▁▂▃▄▅▆▇█")
"""Characters of kvcore's tables besides ASCII, each one column wide."""


def _is_even(rows: Iterable[Sequence[str]]) -> bool:
    """Return True if each character is one column wide and can be encoded and printed."""
    encoding = getattr(results(), "encoding", None) or "utf-8"
    cells = [cell for row in rows for cell in row]
    text = "".join(cells)
    return (
        bool(text)
        and encoding.lower().startswith("utf")
        and (text.isascii() or all(char.isascii() or char in EVEN for char in text))
        and text.isprintable()
        and all(cell == cell.strip() for cell in cells)
    )


def _print_even(columns: Sequence[Column], flush: Collection[str]) -> None:
    """Print a table as rich does in a pipe; most commands are faster than its import."""
    lines = []
    widths = [max(map(len, column)) for column in columns]
    adjust = [str.rjust if column[0] in flush else str.ljust for column in columns]
    for row in zip(*columns, strict=True):
        cells = (put(cell, width) for put, cell, width in zip(adjust, row, widths, strict=True))
        lines.append((" " * GAP).join(cells).rstrip())
    lines.insert(1, "─" * (sum(widths) + GAP * (len(widths) - 1)))
    echo("\n".join(lines))


def print_sections(*sections: Section, compact: bool = False) -> None:
    """Print sentences and tables, separated by blank lines; skip charts and empty sections.

    With `compact` a blank line stands only before each table but the first.
    """
    printed = tables = 0
    for section in sections:
        if isinstance(section, Table) and section.rows and section.headers:
            if tables or (printed and not compact):
                echo()
            print_table(
                section.headers, section.rows, right=section.flush_right, split=section.split
            )
            tables += 1
        elif isinstance(section, str) and section:
            if printed and not compact:
                echo()
            print_text(section)
        else:
            continue
        printed += 1


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show the progress of the body on stderr: a bar on a terminal, otherwise lines.

    Yields a function to call with the number of further items that are done, of `total` in
    all (None: unknown).
    """
    if not sys.stderr.isatty():
        yield _lines_of(description, total)
        return
    from rich.console import Console  # noqa: PLC0415 - for terminals alone
    from rich.progress import (  # noqa: PLC0415 - as above
        BarColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
    )
    from rich.text import Text  # noqa: PLC0415 - as above

    class Done(ProgressColumn):
        """The column with the part that is done, and the time that the rest takes."""

        def render(self, task: Task) -> Text:
            """Return the text."""
            return Text(done_so_far(task.completed, task.total, task.elapsed or 0))

    columns = TextColumn("{task.description}", markup=False), BarColumn(), Done()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escaped(description), total=total)
        yield lambda done: bar.advance(task, done)


def line_seconds() -> float:
    """Return the seconds between two lines of progress where stderr is no terminal.

    Raises:
        InputError: the environment variable is no number of seconds.
    """
    text = os.environ.get(PROGRESS_SECONDS)
    if text is None:
        return 10
    try:
        return parse_seconds(text) / NS_PER_S or inf
    except InputError as error:
        msg = f"{PROGRESS_SECONDS}: {error}"
        raise InputError(msg) from error


def reading(description: str, path: Path) -> AbstractContextManager[Tick]:
    """Return the `progress` of a reader, to be called with the number of bytes read."""
    return progress(description, file_bytes(path))


def done_so_far(done: float, total: float | None, seconds: float) -> str:
    """Return in words the work done in `seconds`, and the time left at this rate.

    For example `3 of 12, 40 s left`; from a thousand on `45%, 12 s left`; and without a total
    `2,300 (120/s)`.
    """
    if total is None or not 0 < done <= total:
        return f"{done:,.0f} ({format_number(done / seconds)}/s)" if done and seconds else ""
    # Rounded down: all is done at the end alone.
    part = f"{int(done)} of {total:.0f}" if total < FEW else f"{int(100 * done / total)}%"
    return f"{part}, {duration(seconds * (total - done) / done)} left"


def duration(seconds: float) -> str:
    """Return a duration in whole seconds: `12 s`, `3 min 20 s`, `2 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:  # noqa: PLR2004
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def _lines_of(description: str, total: int | None) -> Tick:
    """Return a tick that prints a line of progress every `line_seconds()`."""
    every = line_seconds()
    if every == inf:
        return unseen
    begun = printed = monotonic()
    done = 0

    def tick(more: int) -> None:
        nonlocal done, printed
        done += more
        now = monotonic()
        if now - printed >= every:
            printed = now
            far = done_so_far(done, total, now - begun)
            echo(f"kvcore: {description}: {far}", err=True)

    return tick


page_option = partial(file_option, "-o", "--out", help="File for the page.")


def write_page(out: Path, make: Callable[[], bytes]) -> bytes:
    """Write a page to a file, print its size, and return it. On errors no file is left."""
    with atomic_file(out) as file:
        page = make()
        file.buffer.write(page)
    echo(f"{out}: {format_bytes(len(page), DECIMAL)}")
    return page


def _parts(columns: list[Column], width: int) -> list[list[Column]]:
    """Divide columns into the fewest tables that fit the width, each with the first column."""
    first, *others = columns
    parts = [[first]]
    for column in others:
        wide = sum(_width(placed) + GAP for placed in parts[-1]) + _width(column)
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
    from rich.cells import cell_len  # noqa: PLC0415 - for tables alone

    return max(map(cell_len, column))
