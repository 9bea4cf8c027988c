"""The trace writer: one line of JSON a decision, to a file that is whole or not there."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, Protocol, Self, TypeVar

from kvcore.errors import InputError
from kvcore.files import Compressor, WholeFile, compressor, storing
from kvcore.request import Request
from kvcore.trace.events import EVENTS, MODES, SCHEMA, plain, request_fields

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from typing_extensions import Buffer

    from kvcore.trace._logger import TraceLogger
    from kvcore.workloads.base import Workload


class SealedFile(ABC):
    """Writes lines to a sink through a buffer. The file has its name once END is in it."""

    def __init__(self, sink: Sink, buffer_bytes: int) -> None:
        """Start empty."""
        self._sink = sink
        self._buffer = io.BufferedWriter(sink, buffer_bytes)
        self._closed = False

    def close(self) -> None:
        """Write END and give the file its name. A second call does nothing.

        Raises:
            InputError: there is nothing to keep.
            StorageError: the disk is full. In both cases no file is left.
        """
        if self._closed:
            return
        try:
            self._end()
            self._buffer.flush()
            self._sink.finish()
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
        """Close the file, or discard it if the block raised."""
        if kind is None:
            self.close()
        else:
            self.discard()

    @abstractmethod
    def _end(self) -> None:
        """Write END. What was written before may still be in the buffer."""

    def _shut(self) -> None:
        """Take no more lines."""
        self._closed = True
        self._buffer.close()


_T = TypeVar("_T")


DIGEST_BYTES = 16


class Sink(io.RawIOBase):
    """The raw file below a write buffer.

    A thread digests, compresses (`.gz`, `.zst`) and writes, one buffer behind the writer;
    what it meets is raised by the next call. A path is a `WholeFile`, a file object is written
    to as it is.

    Args:
        file: the path, or the file object.
        kind: what errors call it, with its name.

    Raises:
        InputError: the path cannot be opened for writing.
        StorageError: a write failed (from `write`, `hexdigest` and `finish`).
    """

    def __init__(self, file: str | os.PathLike[str] | BinaryIO, *, kind: str = "trace") -> None:
        """Open `file`, if it is a path."""
        super().__init__()
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (10 ms)

        self._file: WholeFile | BinaryIO
        self._compressor = None
        if isinstance(file, (str, os.PathLike)):
            self.name = os.fspath(file)
            self._what = f"the {kind} {self.name}"
            self._file = WholeFile(Path(file), self._what)
            self._compressor = compressor(Path(file))
        else:
            self.name = str(getattr(file, "name", "a file object"))
            self._what = f"the {kind} {self.name}"
            self._file = file
        self._digest = blake2b(digest_size=DIGEST_BYTES)
        self._worker = ThreadPoolExecutor(1, "kvcore-trace")
        self._job: Future[None] | None = None
        self._dead = False

    def writable(self) -> bool:
        """Say yes: `io.BufferedWriter` asks."""
        return True

    def write(self, data: Buffer, /) -> int:
        """Take all of a write buffer."""
        view = memoryview(data)
        self._do(self._put, bytes(view))
        return len(view)

    def sync(self) -> None:
        """Write what the compressor holds, so that all up to here can be read from the file."""
        if self._compressor is not None:
            self._do(self._sync, self._compressor)

    def hexdigest(self) -> str:
        """Return the BLAKE2b digest of all that was written so far."""
        self._wait()
        return self._digest.hexdigest()

    def finish(self) -> None:
        """Write what the compressor still holds, close, and give the file its name."""
        self._wait()
        self._worker.shutdown()
        with storing(self._what):
            if self._compressor is not None:
                _write_all(self._file, self._compressor.finish())
            if isinstance(self._file, WholeFile):
                self._file.finish()
            else:
                self._file.flush()

    def discard(self) -> None:
        """Drop what comes from now on, and remove the unfinished file. Never raises."""
        self._dead = True
        self._worker.shutdown()
        if isinstance(self._file, WholeFile):
            self._file.discard()

    def _do(self, job: Callable[[_T], None], given: _T) -> None:
        """Let the thread do a job, once it is done with the one before."""
        if self._dead:
            return
        self._wait()
        try:
            self._job = self._worker.submit(job, given)
        except RuntimeError:
            # The interpreter is going down, and its threads with it.
            job(given)

    def _sync(self, compressor: Compressor) -> None:
        """Write what the compressor holds: what the thread does."""
        _write_all(self._file, compressor.sync())

    def _put(self, data: bytes) -> None:
        """Digest, compress and write: what the thread does."""
        self._digest.update(data)
        if self._compressor is not None:
            data = self._compressor.compress(data)
        _write_all(self._file, data)

    def _wait(self) -> None:
        """Wait until the thread is done; raise what it met."""
        if self._job is not None:
            with storing(self._what):
                self._job.result()


def _write_all(file: WholeFile | BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


BUFFER_BYTES = 1 << 20


class WriteLine(Protocol):
    """What `Trace.line` is."""

    def __call__(self, event: str, now: int, **fields: Any) -> None:
        """Write one event at `now` (ns), with its fields."""


class Trace(SealedFile):
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
        extras: more of the header: `model`, `device`, `recompute`, or what else `describe`
            takes, which a run calls to tell the rest.

    Attributes:
        line: writes one event: `trace.line("FREE", now, seq=1, runs=[], reason="close")`.
            Blocks are given as runs, or as an `array` of ids. Costs 0.7 µs. Look it up
            for every line: it changes with the first.

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
        """Open the file. Nothing is written before the first line."""
        self._run: dict[str, Any] = {"mode": "untimed", "workload": None, "seed": None}
        self._cache: dict[str, Any] = {}
        self._plugins: dict[str, Any] = {}
        self._logger: TraceLogger | None = None
        self._seen: set[int | str] = set()
        self.line = self._not_begun
        self.describe(mode=mode, workload=workload, seed=seed, **extras)
        super().__init__(Sink(file), BUFFER_BYTES)

    def begin(self, **cache: Any) -> None:
        """Take what the cache is: its count, block_size, key_tokens, blocks and plugins.

        HEADER is written just before the first other line, or by `close`: until then
        `describe` can add to it.

        Raises:
            InputError: a second cache wants to write.
        """
        if self._cache:
            msg = f"the trace {self._sink.name} has begun: every cache needs a Trace of its own"
            raise InputError(msg)
        self._cache = cache
        self.line = self._first_line

    def describe(
        self,
        *,
        mode: str | None = None,
        workload: Workload | Mapping[str, Any] | None = None,
        seed: int | None = None,
        plugins: Mapping[str, Mapping[str, Any]] | None = None,
        key_tokens: int | None = None,
        **fields: Any,
    ) -> None:
        """Say more of the run in HEADER, before the first line is written.

        Args:
            mode: whose clock the times are of, from now on; None: as before.
            workload: as for the trace itself; that of the trace stays if it was given one.
            seed: likewise.
            plugins: more of them by kind, each with name and options.
            key_tokens: of the cache, in place of what `begin` said.
            fields: other header fields, which replace those given before: `batching` (the
                loop's caps), `latency` (its coefficients), `rate_scale`, `executor`, `slo`,
                and as for the trace itself.

        Raises:
            InputError: the header is written, an unknown mode or field, or a value that is
                not of the field's kind. Nothing has changed.
        """
        if self._logger is not None:
            msg = (
                f"the header of the trace {self._sink.name} is written: describe the run "
                "before anything happens in it"
            )
            raise InputError(msg)
        if mode is not None and mode not in MODES:
            msg = f"trace mode {mode!r} is not known; there are: {', '.join(MODES)}"
            raise InputError(msg)
        run = {name: _checked(name, plain(value)) for name, value in fields.items()}
        if mode is not None:
            run["mode"] = mode
        if self._run["workload"] is None:
            run["workload"] = _source(workload)
        if self._run["seed"] is None:
            run["seed"] = seed
        self._run |= run
        self._plugins |= plugins or {}
        if key_tokens is not None:
            self._cache["key_tokens"] = key_tokens

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

    def _first_line(self, event: str, now: int, **fields: Any) -> None:
        """Write HEADER before the first line; the logger takes what comes after it."""
        self._header()
        self.line(event, now, **fields)

    def _header(self) -> TraceLogger:
        """Return the logger, which has written HEADER."""
        if self._logger is None:
            from kvcore.trace._logger import bind_logger  # noqa: PLC0415  (imports structlog)

            plugins = {**self._cache["plugins"], **self._plugins}
            run, cache = dict(self._run), {**self._cache, "plugins": plugins}
            about = {"schema": SCHEMA, "kvcore": version(), "mode": run.pop("mode")}
            logger = bind_logger(self._buffer)
            _write(logger.line, "the header", "HEADER", 0, plain({**about, **cache, **run}))
            self._logger, self.line = logger, logger.line
        return self._logger

    def _end(self) -> None:
        if not self._cache:
            msg = f"the trace {self._sink.name} is empty: no KVCache was made with it"
            raise InputError(msg)
        from kvcore.trace._logger import events_written  # noqa: PLC0415  (imports structlog)

        logger = self._header()
        self._buffer.flush()
        logger.line(
            "END",
            logger.time,
            lines=logger.lines,
            events=events_written(logger),
            digest=self._sink.hexdigest(),
        )

    def _shut(self) -> None:
        self.line = self._is_closed
        super()._shut()

    def _not_begun(self, event: str, now: int, **fields: Any) -> NoReturn:
        del now, fields
        msg = f"{event} before the header: give the Trace to a KVCache, which begins it"
        raise InputError(msg)

    def _is_closed(self, event: str, now: int, **fields: Any) -> NoReturn:
        del now, fields
        msg = f"{event} after the end: the trace {self._sink.name} is closed"
        raise InputError(msg)


def _checked(name: str, value: Any) -> Any:
    """Return the value of a header field, which must be one that readers take."""
    known = EVENTS["HEADER"].optional
    if name not in known:
        msg = f"header field {name!r} is not known; there are: {', '.join(sorted(known))}"
        raise InputError(msg)
    if not known[name].test(value):
        msg = f"header field {name!r} {known[name].refuse(value)}"
        raise InputError(msg)
    return value


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


def version() -> str:
    """Return the version of kvcore that a header names."""
    from importlib import metadata  # noqa: PLC0415  (slow)

    try:
        return metadata.version("kvcore")
    except metadata.PackageNotFoundError:
        return "not installed"
