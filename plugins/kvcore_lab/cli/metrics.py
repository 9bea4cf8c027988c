"""The option of a file for Prometheus metrics, and the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcore.config import RunParts
from kvcore.errors import InputError
from kvcore.files import atomic_file, refuse_overwrite
from kvcore.hookspecs import Running
from kvcore.untrusted import escaped
from kvcore.workloads import Workload
from kvcore_cli.output import STDOUT, file_option, file_or_stdout
from kvcore_cli.verb import echo

prometheus_option = file_option(
    "--prometheus",
    callback=file_or_stdout,
    help="File to write Prometheus metrics to; - prints them on stdout alone.",
)


@contextmanager
def metrics_file(
    path: Path | None, source: Workload, *, as_json: bool
) -> Iterator[Callable[[str], object] | None]:
    """Open the file for metrics; yield the function that writes them, None without a path.

    If the body raises, no file is left.

    Raises:
        InputError: the file is read by the workload, or cannot be written; or both metrics
            and JSON go to stdout.
        PluginError: the package that writes metrics is not installed.
    """
    if path is None:
        yield None
        return
    from kvcore_lab.report.prometheus import require_prometheus  # noqa: PLC0415 - no other option needs reports

    require_prometheus()
    if path == STDOUT:
        if as_json:
            msg = "--json and --prometheus - both print a document: give a file to one of them"
            raise InputError(msg)
        yield lambda text: echo(text, nl=False)
        return
    refuse_overwrite(path, source.options().values())
    with atomic_file(path) as file:
        yield lambda text: file.write(escaped(text))


@contextmanager
def measuring(parts: RunParts, given: Mapping[str, Any]) -> Iterator[Running]:
    """Open the file for the metrics of a run, which are written when it has ended."""
    path, as_json = given["prometheus"], given["as_json"]
    with metrics_file(path, parts.workload, as_json=as_json) as write:
        from kvcore_lab.report.prometheus import run_metrics  # noqa: PLC0415 - no other option needs it

        assert write is not None
        yield Running(
            ran=lambda result, document: write(run_metrics(document, result.requests)),
            silences=path == STDOUT,
        )
