"""What `simulate` and `run` have in common: the files they write, and remedies for overload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from decimal import ROUND_FLOOR, Context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvcore.cli.output import print_sections
from kvcore.config import RunParts
from kvcore.files import make_directory, refuse_overwrite
from kvcore.serving import LatencyModel, Result
from kvcore.serving.result import REQUESTS, SUMMARY, offered_load
from kvcore.trace import Trace

if TYPE_CHECKING:
    from kvcore.report import SimulationReport

TRACE = "trace.jsonl.gz"
"""The name of the trace in a directory of results."""

DOUBLINGS = 5
"""How often a pool or a number of GPUs is doubled, at most, to find one that is enough."""


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


def remedies(parts: RunParts, result: Result) -> Iterator[str]:
    """Yield options with which the workload would not be too much for the run.

    Each is tried on the work that the run came to: a larger pool where its size was
    given, more GPUs, fewer requests.
    """
    size, devices = parts.geometry.block_size, parts.deployment.devices

    def carries(latency: LatencyModel, blocks: int) -> bool:
        load = offered_load(result.log, parts.batching, latency, blocks * size)
        return load is not None and load <= 1

    if parts.sized:
        larger = (parts.blocks << doubling for doubling in range(1, DOUBLINGS))
        enough = next((b for b in larger if carries(result.latency, b)), None)
        if enough:
            yield f"--blocks {enough}"
    for more in (devices << doubling for doubling in range(1, DOUBLINGS)):
        blocks = parts.blocks
        if not parts.sized:
            blocks = attrs.evolve(parts.deployment, devices=more).blocks()
        if carries(parts.latency(more), blocks):
            yield f"--tensor-parallel {more}"
            break
    load = result.summary()["offered_load"]
    yield f"--rate-scale {_below(parts.config.rate_scale / load)}"


def report_of(
    parts: RunParts, result: Result, document: dict[str, Any], config: Any, **words: str
) -> SimulationReport:
    """Return the report of a run, with `words` for its clock and for what was done."""
    from kvcore.report import SimulationReport  # noqa: PLC0415 - JSON does without it

    load = document["offered_load"]
    return SimulationReport(
        document,
        config,
        refusal=next(iter(result.log.reasons.values()), None),
        remedies=[] if load is None or load <= 1 else list(remedies(parts, result)),
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


def _below(number: float) -> str:
    """Return a number with two digits, rounded down."""
    rounded = Context(prec=2, rounding=ROUND_FLOOR).create_decimal(number)
    return f"{rounded.normalize():f}"
