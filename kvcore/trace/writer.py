"""The trace writer: a line of JSON for each decision, in a file that is whole or absent.

What `Trace.write` is, one after the other:

    _not_begun    until a cache calls `begin`: there is no header to write
    _write_first  HEADER may still be added to; RECOVER lines wait, any other line writes it
    the logger's  from then on: `describe` is refused
    _is_closed    after `close`, which writes END, or after the file was given up
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from kvcore.cache.pool import Ids
from kvcore.cache.recorder import Growth, Recorder, Victim
from kvcore.errors import InputError
from kvcore.files import to_json
from kvcore.request import Key, Request
from kvcore.trace.fields import (
    CLOCKS,
    SCHEMA,
    encode_runs,
    key_fields,
    plain,
    request_fields,
    version,
)
from kvcore.trace.jsonl_file import SealedWriter
from kvcore.units import INT64_LIMIT

if TYPE_CHECKING:
    from kvcore.trace._logger import TraceLogger
    from kvcore.workloads.base import Workload


_PLAIN_FIELDS = 8
"""Number of fields that every REQUEST has, all of which JSON can hold if it can hold the id."""


class JsonRecorder(Recorder):
    """Makes lines as JSON has them, in which keys and new blocks need a form of their own.

    Methods that write keys raise InputError for a key that a trace cannot hold.
    """

    def prefetch(
        self, now: int, *, request: int | str, keys: Iterable[Key], **fields: Any
    ) -> None:
        """Write PREFETCH, the keys as JSON has them."""
        super().prefetch(now, request=request, keys=key_fields(keys, request), **fields)

    def compact(self, now: int, *, new: Ids | None = None, **fields: Any) -> None:
        """Write COMPACT, the new blocks as runs."""
        runs: Any = encode_runs(new) if new else None
        super().compact(now, new=runs, **fields)

    def recover(
        self, now: int, *, request: int | str, keys: Iterable[Key], **fields: Any
    ) -> None:
        """Write RECOVER, the keys as JSON has them."""
        super().recover(now, request=request, keys=key_fields(keys, request), **fields)

    def keys(self, now: int, *, request: int | str, keys: Iterable[Key]) -> None:
        """Write KEYS, the keys as JSON has them."""
        super().keys(now, request=request, keys=key_fields(keys, request))

    def finish(
        self,
        now: int,
        *,
        request: int | str,
        output_keys: Iterable[Key] | None = None,
        **fields: Any,
    ) -> None:
        """Write FINISH, the keys as JSON has them."""
        keys = key_fields(output_keys, request) if output_keys else None
        super().finish(now, request=request, output_keys=keys, **fields)


class Trace(SealedWriter, JsonRecorder):
    """Writes the decisions of one cache to a JSONL file, `.gz` and `.zst` by name.

    Pass it to one `KVCache`, which begins it, and close it when the run is over, best by
    a `with` block: only then the file appears under its name. A run that ends in an
    exception leaves no file; a process that is killed leaves `<path>.part`, readable up
    to the cut. Equal runs write equal bytes, since no line has a wall-clock time.

    Args:
        file: path, or a binary file object, which is written to as it is and left open.
        mode: clock of the times: `untimed`, `model` or `wall`.
        workload: the workload of the run; or its name, digest and options; or None.
        seed: seed of the random choices of the run.
        on_lines: called with the JSON of each line, at once, before it is written; None: lines
            are rendered and written in batches.
        extras: more fields of the header: `model`, `device`, `recompute`, or any other field
            of `describe`, by which a run adds further ones.

    Attributes:
        write: writes one line, and sets its number `n`. The methods of `Recorder` make lines,
            as `trace.free(now, seq=1, runs=ids, reason="close")`. Costs 0.7 µs a line, most of
            it when a batch of lines is rendered. Look it up for every line, since the first
            line changes it.

    Raises:
        InputError: the file cannot be opened, an unknown mode or header field.
        StorageError: the disk is full (from `write` and `close`).
    """

    write: Callable[[dict[str, Any]], None]

    def __init__(
        self,
        file: str | os.PathLike[str] | BinaryIO,
        *,
        mode: str = "untimed",
        workload: Workload | Mapping[str, Any] | None = None,
        seed: int | None = None,
        on_lines: Callable[[bytes], object] | None = None,
        **extras: Any,
    ) -> None:
        """Open the file. HEADER is written with the first line."""
        self._run: dict[str, Any] = {"mode": "untimed", "workload": None, "seed": None}
        self._cache: dict[str, Any] = {}
        self._plugins: dict[str, Any] = {}
        self._logger: TraceLogger | None = None
        self._on_lines = on_lines
        self._seen: set[int | str] = set()
        # RECOVER lines: they are there before the header is complete.
        self._recovered: list[dict[str, Any]] = []
        self.write = self._not_begun
        # Before the file is opened: a wrong description leaves none.
        self.describe(mode=mode, workload=workload, seed=seed, **extras)
        super().__init__(file, kind="trace")

    def begin(
        self,
        *,
        count: str,
        block_size: int,
        key_tokens: int,
        blocks: int,
        plugins: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Store the fields of HEADER that describe the cache.

        HEADER is written just before the first other line, or by `close`; until then
        `describe` adds to it.

        Raises:
            InputError: the trace has begun with another cache, or is closed.
        """
        if self._cache or self._closed:
            msg = f"the trace {self.name} is not new: every cache needs a Trace of its own"
            raise InputError(msg)
        self._cache = {
            "count": count,
            "block_size": block_size,
            "key_tokens": key_tokens,
            "blocks": blocks,
            "plugins": plugins,
        }
        self.write = self._write_first

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
        """Add fields of the run to HEADER, before the first line is written.

        Args:
            mode: clock of the times; None: that of the trace stays.
            workload: workload of the run, unless the trace was made with one.
            seed: seed of the run, unless the trace was made with one.
            plugins: more plugins by kind, each with name and options.
            key_tokens: tokens of a block key; None: those given to `begin`.
            fields: other header fields, which replace earlier ones: `batching` (the caps of a
                step), `latency` (the coefficients), `rate_scale`, `executor`, `slo`, and the
                `extras` of the trace.

        Raises:
            InputError: HEADER is written, the trace is closed, an unknown mode or field, or a
                value that the field cannot have. Nothing has changed.
        """
        if self._logger is not None or self.write == self._is_closed:
            msg = (
                f"the trace {self.name} is closed, or its header is written: describe the run "
                "before anything happens in it"
            )
            raise InputError(msg)
        if mode is not None and mode not in CLOCKS:
            msg = f"trace mode {mode!r} is not known; there are: {', '.join(CLOCKS)}"
            raise InputError(msg)
        given = {"workload": _source(workload), "seed": seed}
        given = {name: value for name, value in given.items() if self._run[name] is None}
        given |= {"plugins": plugins, "key_tokens": key_tokens}
        given = {name: value for name, value in given.items() if value is not None}
        run = _check_header(fields | given)
        if mode is not None:
            run["mode"] = mode
        self._plugins |= run.pop("plugins", {})
        self._run |= run

    def request(self, request: Request, now: int) -> None:
        """Write REQUEST, the first time a request is seen. O(keys) in C.

        Raises:
            InputError: a key that is no int below 2**63, no 16 bytes and no 32-digit hex
                string, or another field that a trace cannot hold.
        """
        if request.id not in self._seen:
            self.write(self.request_line(request, now))
            self._seen.add(request.id)

    def grow(
        self,
        now: int,
        *,
        grown: Sequence[Growth],
        by: str | None = None,
        victims: Sequence[Victim] | None = None,
        requesters: Sequence[int | str] | None = None,
    ) -> None:
        """Write GROW, which stands for lines of `Recorder`; or add to it, if it is the last."""
        line = {"n": 0, "t": now, "event": "GROW", "grown": [*grown]}
        if victims:
            line |= {"by": by, "victims": [*victims], "for": [*(requesters or ())]}
        if self._logger is None or not self._logger.extend(line):
            self.write(line)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended, in a run without end; its id may come again."""
        self._seen.discard(request.id)

    @staticmethod
    def request_line(request: Request, now: int) -> dict[str, Any]:
        """Return the line REQUEST. O(keys) in C.

        Raises:
            InputError: as for `request`.
        """
        line = {"n": 0, "t": now, "event": "REQUEST", **request_fields(request)}
        name = request.id
        if len(line) > _PLAIN_FIELDS or type(name) is not int or not 0 <= name < INT64_LIMIT:
            # An error in a batch would not name the line that cannot be rendered or read.
            raw = to_json(line, f"request {name!r} cannot be written to a trace")
            from kvcore.trace.events import decode  # noqa: PLC0415  (imports msgspec)

            try:
                decode(raw)
            except ValueError as error:
                msg = f"request {name!r} cannot be written to a trace: {error}"
                raise InputError(msg) from error
        return line

    def flush(self) -> None:
        """Write all buffered lines, which stay readable if the process is killed later.

        Each call makes a compressed file some bytes longer.
        """
        if self._logger is not None:
            self._logger.flush()
        super().flush()

    def _write_first(self, line: dict[str, Any]) -> None:
        """Write HEADER before the first line that is not RECOVER, after which it may change."""
        if line["event"] == "RECOVER":
            self._recovered.append(line)
            return
        self._write_header()
        self.write(line)

    def _write_header(self) -> TraceLogger:
        """Return the logger; write HEADER if it is not written."""
        if self._logger is None:
            from kvcore.trace._logger import bind_logger  # noqa: PLC0415  (imports structlog)

            plugins = {**self._cache["plugins"], **self._plugins}
            run, cache = dict(self._run), {**self._cache, "plugins": plugins}
            about = {"schema": SCHEMA, "kvcore": version(), "mode": run.pop("mode")}
            logger = bind_logger(self._buffer, self._on_lines)
            line = {"n": 0, "t": 0, "event": "HEADER", **plain({**about, **cache, **run})}
            to_json(line, "the header cannot be written to a trace")
            logger.write(line)
            self._logger, self.write = logger, logger.write
            for line in self._recovered:
                logger.write(line)
        return self._logger

    def _write_end(self) -> None:
        if not self._cache:
            msg = f"the trace {self.name} is empty: no KVCache was made with it"
            raise InputError(msg)
        logger = self._write_header()
        logger.flush()
        logger.write({
            "n": 0, "t": logger.time, "event": "END",
            "lines": logger.lines,
            "events": dict(logger.events),
            "digest": self._digest_so_far(),
        })  # fmt: skip
        logger.flush()

    def _shut(self) -> None:
        self.write = self._is_closed
        if self._logger is not None:
            self._logger.discard()
        super()._shut()

    def _not_begun(self, line: dict[str, Any]) -> NoReturn:
        event = line["event"]
        msg = f"{event} before the header: give the Trace to a KVCache, which begins it"
        raise InputError(msg)

    def _is_closed(self, line: dict[str, Any]) -> NoReturn:
        msg = f"{line['event']} after the end: the trace {self.name} is closed"
        raise InputError(msg)


def _check_header(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return optional header fields for JSON, if readers accept them."""
    if not fields:
        return {}
    from kvcore.trace.events import Header, describe_fields  # noqa: PLC0415  (imports msgspec)

    known = {
        name: field
        for name, field in describe_fields(Header).items()
        if name in ("workload", "seed", "plugins", "key_tokens")
        or not (field.required or name == "replica")  # which lines after HEADER have
    }
    checked = {}
    for name, value in fields.items():
        if name not in known:
            msg = f"header field {name!r} is not known; there are: {', '.join(sorted(known))}"
            raise InputError(msg)
        checked[name] = plain(value)
        reason = known[name].fault(checked[name])
        if reason is not None:
            msg = f"header field {name!r} {reason}"
            raise InputError(msg)
    return checked


def _source(workload: Any) -> Any:
    if not hasattr(workload, "digest"):
        return workload
    return {"name": workload.name, "digest": workload.digest, "options": workload.options()}
