"""Where verbs that serve put what came of it: a trace, or a directory of results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvcore.cli.setup import Options, Setup
from kvcore.errors import InputError
from kvcore.serving.result import REQUESTS, SUMMARY
from kvcore.trace import Trace
from kvcore.workloads import spare

TRACE = "trace.jsonl.gz"


@contextmanager
def outputs(options: Options, setup: Setup) -> Iterator[Trace | None]:
    """Open the trace to write, if any, and before it the directory that it goes to.

    If the body raises, no file is left of it, nor a directory that was made for it.
    """
    path, others = options.trace, []
    if options.out is not None:
        path, *others = (options.out / name for name in (TRACE, SUMMARY, REQUESTS))
        if options.allocation == "contiguous":
            path = None
    for written in filter(None, (path, *others)):
        spare(setup.workload, written)
    with ExitStack() as stack:
        if options.out is not None:
            stack.enter_context(_directory(options.out))
        yield None if path is None else stack.enter_context(Trace(path, **setup.header()))


@contextmanager
def _directory(path: Path) -> Iterator[None]:
    """Make a directory, if need be; if the body raises, not for good."""
    made = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        msg = f"--out {path}: cannot be made a directory: {reason}; name another one"
        raise InputError(msg) from error
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):
                path.rmdir()
        raise
