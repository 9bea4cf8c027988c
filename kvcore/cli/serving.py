"""What `simulate` and `run` have in common: the files they write, and their report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.cli.output import metrics_file, print_sections
from kvcore.config import RunParts
from kvcore.files import make_directory, refuse_overwrite
from kvcore.serving import Result, Scheduler
from kvcore.serving.result import REQUESTS, SUMMARY
from kvcore.trace import Trace

if TYPE_CHECKING:
    from kvcore.report import SimulationReport

TRACE = "trace.jsonl.gz"
"""The name of the trace in a directory of results."""


@contextmanager
def outputs(
    parts: RunParts, given: Mapping[str, Any]
) -> Iterator[tuple[Trace | None, Callable[[Result, dict[str, Any]], None]]]:
    """Open what a run writes; yield its trace, if any, and a function that writes metrics.

    If the body raises, no file is left of it, nor a directory that was made for it.
    """
    path, out, others = given["trace"], given["out"], []
    if out is not None:
        path, *others = (out / name for name in (TRACE, SUMMARY, REQUESTS))
        if parts.config.allocation == "contiguous":
            path = None
    for written in filter(None, (path, *others)):
        refuse_overwrite(written, parts.workload.options().values())
    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(_directory(out))
        trace = None if path is None else stack.enter_context(Trace(path, **parts.header()))
        written = metrics_file(
            given["prometheus"], parts.workload, given["trace"], as_json=given["as_json"]
        )
        yield trace, partial(_write_metrics, stack.enter_context(written))


def _write_metrics(
    write: Callable[[str], object] | None, result: Result, document: dict[str, Any]
) -> None:
    if write is not None:
        from kvcore.report import run_metrics  # noqa: PLC0415 - no other option needs it

        write(run_metrics(document, result.requests))


@contextmanager
def _directory(path: Path) -> Iterator[None]:
    """Make a directory, if need be, which is removed if the body raises."""
    made = not path.exists()
    make_directory(path)
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):
                path.rmdir()
        raise


def document_of(parts: RunParts, result: Result, scheduler: Scheduler) -> dict[str, Any]:
    """Return the JSON document of a run."""
    cache = result.cache
    plugins = (scheduler, cache.eviction, cache.prefix, cache.retention, result.latency)
    return {**result.summary(), "config": parts.describe(*plugins)}


def report_of(
    result: Result, document: dict[str, Any], config: Any, **words: Any
) -> SimulationReport:
    """Return the report of a run; `words` are its other attributes."""
    from kvcore.report import SimulationReport  # noqa: PLC0415 - JSON does without it

    return SimulationReport(
        document,
        config,
        refusal=next(iter(result.log.reasons.values()), None),
        **words,
    )


def print_report(report: SimulationReport, *more: str) -> None:
    """Print the report of a run; the sentences `more` go with its headline."""
    columns = report.columns
    print_sections(
        report.warning,
        "\n".join([report.headline, *more]),
        (["time", *columns], report.times, columns),
        (["quantity", "amount"], report.amounts, ()),
        (["time of blocks", *columns], report.resting, columns),
        report.thrashing,
        f"{report.closing}\n{report.setup}",
    )
