"""`--prometheus`: where verbs that run something put its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from kvcore.cli.output import file_path
from kvcore.errors import InputError
from kvcore.files import whole_file
from kvcore.policy import Workload
from kvcore.workloads import spare

STDOUT = Path("-")

prometheus_option = click.option(
    "--prometheus",
    callback=file_path,
    metavar="FILE",
    help="Write metrics as Prometheus has them; - prints them alone.",
)


@contextmanager
def metrics_file(
    path: Path | None, source: Workload, *others: Path | None, as_json: bool
) -> Iterator[Callable[[str], object] | None]:
    """Open the file for metrics before there are any; yield what writes them, or None.

    If the body raises, no file is left. The `others` are written at the same time.

    Raises:
        InputError: the file of the workload, one of the `others`, one that cannot be
            written, or stdout where JSON goes.
        PluginError: the package that writes metrics is not installed.
    """
    if path is None:
        yield None
        return
    from kvcore.report import require_prometheus  # noqa: PLC0415 - nobody else needs reports

    require_prometheus()
    if path == STDOUT:
        if as_json:
            msg = "--json and --prometheus - both print a document: give a file to one of them"
            raise InputError(msg)
        yield lambda text: click.echo(text, nl=False)
        return
    if path.resolve() in [other.resolve() for other in others if other is not None]:
        msg = f"--prometheus {path}: another option writes that file; name another one"
        raise InputError(msg)
    spare(source, path)
    with whole_file(path) as file:
        yield file.write
