"""The journal of a sweep: a line for each finished cell, on the disk before the next."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any, Self

import orjson

from kvcore.errors import InputError
from kvcore.files import storage_errors, unreadable_reason

SCHEMA = 1


class Journal:
    """The results of finished cells, in a file that only grows.

    A line is written in one piece and synced, so that a sweep that is killed loses at most
    the cells it was at. A last line that was torn is cut off when the journal is opened. A
    lock of the kernel's keeps it to one sweep at a time; it dies with its process, so that
    none is ever stale. Use it as a context manager.

    Attributes:
        path: the file, made if need be.
        results: of the finished cells, by digest.

    Raises:
        InputError: another process has it, naming which; the file cannot be used, or is no
            journal, naming the line.
        StorageError: the disk refused a line (from `add`).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.results: dict[str, dict[str, Any]] = {}
        self._file = -1

    def __enter__(self) -> Self:
        """Lock the file, read it, and write the id of this process into it."""
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            msg = f"{self.path}: cannot be written: {unreadable_reason(self.path, error)}"
            raise InputError(msg) from error
        try:
            self._lock()
            self._read()
            self._write({"schema": SCHEMA, "run": {"pid": os.getpid()}})
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Release the lock."""
        os.close(self._file)

    def add(
        self, digest: str, row: dict[str, Any], result: dict[str, Any], wall_s: float
    ) -> None:
        """Write a finished cell: its digest, its axes, its result, the seconds it took."""
        self._write({"cell": digest, "axes": row, "result": result, "wall_s": wall_s})
        self.results[digest] = result

    def _write(self, entry: dict[str, Any]) -> None:
        line = orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
        with storage_errors(f"the journal {self.path}"):
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            msg = (
                f"{self.path}: {self._holder()} is sweeping with it: wait for that one, or "
                "give another --out"
            )
            raise InputError(msg) from error

    def _holder(self) -> str:
        """Return the name of the process that has the journal: the last that wrote its id."""
        for line in reversed(self.path.read_bytes().splitlines()):
            entry = _entry(line)
            if entry is not None and "run" in entry:
                return f"process {entry['run'].get('pid')}"
        return "another process"

    def _read(self) -> None:
        """Store the finished cells, and cut off a torn last line."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].splitlines(keepends=True)
        if lines and _entry(lines[-1]) is None:
            whole -= len(lines.pop())
        for number, line in enumerate(lines, 1):
            entry = _entry(line)
            if entry is None or (number == 1 and entry.get("schema") != SCHEMA):
                msg = (
                    f"{self.path}:{number}: is no line of a sweep's journal (schema {SCHEMA}): "
                    "remove the line, whose cell is then run again, or the file to begin "
                    "anew, or give another --out"
                )
                raise InputError(msg)
            if "cell" in entry:
                self.results[entry["cell"]] = entry["result"]
        if whole < len(data):
            os.ftruncate(self._file, whole)


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return the entry of a line; None if it is not one that a journal writes."""
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) and _known(entry) else None


def _known(entry: dict[str, Any]) -> bool:
    if "cell" not in entry:
        return isinstance(entry.get("run"), dict)
    cell, result = entry["cell"], entry.get("result")
    return (
        isinstance(cell, str)
        and isinstance(result, dict)
        and all(isinstance(each, int | float | None) for each in result.values())
    )
