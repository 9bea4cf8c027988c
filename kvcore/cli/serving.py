"""What `simulate` and `run` have in common: the files they write, and their report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.cli.output import print_sections
from kvcore.config import RunParts
from kvcore.files import make_directory, refuse_overwrite
from kvcore.serving import Result
from kvcore.serving.result import REQUESTS, SUMMARY
from kvcore.trace import Trace

if TYPE_CHECKING:
    from kvcore.report import SimulationReport

TRACE = "trace.jsonl.gz"
"""The name of the trace in a directory of results."""


@contextmanager
def outputs(parts: RunParts, trace: Path | None, out: Path | None) -> Iterator[Trace | None]:
    """Open the trace to write, if any, and before it the directory that it goes to.

    If the body raises, no file is left of it, nor a directory that was made for it.
    """
    path, others = trace, []
    if out is not None:
        path, *others = (out / name for name in (TRACE, SUMMARY, REQUESTS))
        if parts.config.allocation == "contiguous":
            path = None
    for written in filter(None, (path, *others)):
        refuse_overwrite(written, parts.workload.options().values())
    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(_directory(out))
        yield None if path is None else stack.enter_context(Trace(path, **parts.header()))


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
