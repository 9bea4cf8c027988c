"""The trace writer: one line of JSON a decision, to a file that is whole or not there."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, Protocol, Self

from kvcore.errors import InputError
from kvcore.request import Request
from kvcore.trace.fields import plain, request_fields
from kvcore.trace.schema import EVENTS, MODES, SCHEMA
from kvcore.trace.sink import Sink

if TYPE_CHECKING:
    from kvcore.policy.workload import Workload

BUFFER_BYTES = 1 << 20


class WriteLine(Protocol):
    """What `Trace.line` is."""

    def __call__(self, event: str, now: int, **fields: Any) -> None:
        """Write one event at `now` (ns), with its fields."""


class Trace:
    """Writes the decisions of one cache to a JSONL file, `.gz` and `.zst` by name.

    Give it to one `KVCache`, which begins it, and close it when the run is over, best by
    a `with` block: only then the file appears under its name. A run that ends in an
    exception leaves nothing; a process that is killed leaves `<path>.part`, readable up
    to where it was cut. Equal runs give equal bytes: there is no wall-clock time in it.

    Args:
        file: a path, or a binary file object (written to as it is, and left open).
        mode: whose clock the times are of: `untimed`, `model` or `wall`.
        workload: where the requests come from; or its name, digest and options; or None.
        seed: what random choices of the run are drawn from.
        extras: more of the header: `model`, `device`, `recompute`.

    Attributes:
        line: writes one event: `trace.line("FREE", now, seq=1, runs=[], reason="close")`.
            Blocks are given as runs, or as an `array` of ids. Costs 0.7 µs.

    Raises:
        InputError: the file cannot be opened, an unknown mode or header field.
        StorageError: the disk is full (from `line` and `close`).
    """

    line: WriteLine

    def __init__(
        self,
        file: str | os.PathLike[str] | BinaryIO,
        *,
        mode: str = "untimed",
        workload: Workload | Mapping[str, Any] | None = None,
        seed: int | None = None,
        **extras: Any,
    ) -> None:
        """Open the file. Nothing is written before `begin`."""
        if mode not in MODES:
            msg = f"trace mode {mode!r} is not known; there are: {', '.join(MODES)}"
            raise InputError(msg)
        known = EVENTS["HEADER"].optional
        for name in extras.keys() - known.keys():
            msg = f"header field {name!r} is not known; there are: {', '.join(sorted(known))}"
            raise InputError(msg)
        self._head = {"mode": mode}
        self._tail = {"workload": _source(workload), "seed": seed, **extras}
        self._seen: set[int | str] = set()
        self._sink = Sink(file)
        self._buffer = io.BufferedWriter(self._sink, BUFFER_BYTES)
        self._closed = False
        self.line = self._not_begun

    def begin(self, **cache: Any) -> None:
        """Write HEADER. `cache`: its count, block_size, key_tokens, blocks and plugins.

        Raises:
            InputError: a second cache wants to write, or a value that JSON cannot hold.
        """
        if self.line != self._not_begun:
            msg = f"the trace {self._sink.name} has begun: every cache needs a Trace of its own"
            raise InputError(msg)
        from kvcore.trace.logger import bind_logger  # noqa: PLC0415  (imports structlog)

        header = {"schema": SCHEMA, "kvcore": _version(), **self._head, **cache, **self._tail}
        self._logger = bind_logger(self._buffer)
        _write(self._logger.line, "the header", "HEADER", 0, plain(header))
        self.line = self._logger.line

    def request(self, request: Request, now: int) -> None:
        """Write REQUEST, the first time a request is seen. O(keys) in C.

        Raises:
            InputError: a key that is no int below 2**63, no 16 bytes and no 32-digit hex
                string, or another field that JSON cannot hold.
        """
        if request.id in self._seen:
            return
        fields = request_fields(request)
        _write(self.line, f"request {request.id!r}", "REQUEST", now, fields)
        self._seen.add(request.id)

    def close(self) -> None:
        """Write END and give the file its name. A second call does nothing.

        Raises:
            InputError: no cache has begun it, so there is nothing to keep.
            StorageError: the disk is full. In both cases no file is left.
        """
        if self._closed:
            return
        try:
            self._end()
        except BaseException:
            self.discard()
            raise
        self._shut()

    def discard(self) -> None:
        """Give up: remove the unfinished file. A second call does nothing."""
        if not self._closed:
            self._sink.discard()
            self._shut()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Close the trace, or discard it if the block raised."""
        if kind is None:
            self.close()
        else:
            self.discard()

    def _end(self) -> None:
        if self.line == self._not_begun:
            msg = f"the trace {self._sink.name} is empty: no KVCache was made with it"
            raise InputError(msg)
        from kvcore.trace.logger import events_written  # noqa: PLC0415  (imports structlog)

        self._buffer.flush()
        logger = self._logger
        self.line(
            "END",
            logger.time,
            lines=logger.lines,
            events=events_written(logger),
            digest=self._sink.hexdigest(),
        )
        self._buffer.flush()
        self._sink.finish()

    def _shut(self) -> None:
        self._closed = True
        self.line = self._is_closed
        self._buffer.close()

    def _not_begun(self, event: str, now: int, **fields: Any) -> NoReturn:
        del now, fields
        msg = f"{event} before the header: give the Trace to a KVCache, which begins it"
        raise InputError(msg)

    def _is_closed(self, event: str, now: int, **fields: Any) -> NoReturn:
        del now, fields
        msg = f"{event} after the end: the trace {self._sink.name} is closed"
        raise InputError(msg)


def _write(line: WriteLine, what: str, event: str, now: int, fields: Mapping[str, Any]) -> None:
    try:
        line(event, now, **fields)
    except TypeError as error:
        msg = f"{what} cannot be written to a trace: {error}"
        raise InputError(msg) from error


def _source(workload: Workload | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if workload is None or isinstance(workload, Mapping):
        return workload
    return {"name": workload.name, "digest": workload.digest, "options": workload.options()}


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  (slow)

    try:
        return version("kvcore")
    except PackageNotFoundError:
        return "not installed"
