"""The journal of a sweep or a plan: one line per finished run, on the disk before the next."""

from __future__ import annotations

import os
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import orjson

from kvcore.errors import InputError
from kvcore.files import storage_errors, unreadable_reason

if sys.platform != "win32":
    import fcntl

SCHEMA = 2

DIGEST_BYTES = 8

HEAD = b'{"schema":'
"""How the first line of a journal begins, of any schema."""


class Journal:
    """The results of finished cells, in a file that only grows.

    A line is written at once and synced, so that a killed sweep loses at most the cells that
    were running. A last line that is incomplete is cut off when the journal is opened. Each
    line ends with a digest of itself; a line whose digest is wrong is skipped, so that its cell
    is run again. A kernel lock allows one sweep at a time (not on Windows, which has none); it
    ends with its process, so that no stale lock remains. Use it as a context manager.

    Args:
        path: the file; it is created if it does not exist.
        option: the option that names it, for errors.

    Attributes:
        path: the file.
        results: the results of the finished cells, by digest.
        damaged: numbers of the lines that were skipped.

    Raises:
        InputError: another process uses the journal (the error names it), or the file cannot be
            used, is no journal, or has another schema.
        StorageError: the disk refused a line (from `add`).
    """

    def __init__(self, path: str | os.PathLike[str], option: str = "journal") -> None:
        self.path = Path(path)
        self._option = option
        self.results: dict[str, dict[str, Any]] = {}
        self.damaged: list[int] = []
        self._file = -1

    def __enter__(self) -> Self:
        """Lock the file, read it, and write the id of this process into it."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            self._file = os.open(self.path, flags, 0o666)
        except OSError as error:
            msg = f"{self.path}: cannot be written: {unreadable_reason(self.path, error)}"
            raise InputError(msg) from error
        try:
            self._lock()
            self._read()
            self._write({"schema": SCHEMA, "run": {"pid": os.getpid()}})
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Release the lock. The number of the file may soon be that of another one."""
        file, self._file = self._file, -1
        os.close(file)

    def add(
        self, digest: str, row: dict[str, Any], result: dict[str, Any], wall_s: float
    ) -> None:
        """Write a finished cell: its digest, its axes, its result, the seconds it took."""
        self._write({"cell": digest, "axes": row, "result": result, "wall_s": wall_s})
        self.results[digest] = result

    def _write(self, entry: dict[str, Any]) -> None:
        content = orjson.dumps(entry)[:-1]
        line = content + _seal(content)
        with storage_errors(f"the journal {self.path}"):
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)

    def _lock(self) -> None:
        if sys.platform == "win32":  # no locks: two sweeps must not share a journal there
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            msg = (
                f"{self.path}: {self._holder()} is using it: wait for that one, or "
                f"give another {self._option}"
            )
            raise InputError(msg) from error
        except OSError as error:  # a file system without locks
            msg = (
                f"{self.path}: cannot be locked against other processes ({error.strerror}): "
                f"give another {self._option}, on another file system"
            )
            raise InputError(msg) from error

    def _holder(self) -> str:
        """Return the name of the process that uses the journal: the last to write its id."""
        for line in reversed(self.path.read_bytes().splitlines(keepends=True)):
            entry = _entry(line)
            if entry is not None and "run" in entry:
                return f"process {entry['run']['pid']}"
        return "another process"

    def _read(self) -> None:
        """Store the finished cells, note damaged lines, and cut off an incomplete last one."""
        *lines, torn = self.path.read_bytes().split(b"\n")
        entries = [_entry(line + b"\n") for line in lines]
        if not any(entries) and (lines or not HEAD.startswith(torn[: len(HEAD)])):
            msg = (
                f"{self.path}:1: no line has its digest: this is no journal, or one "
                "of an older kvcore: remove the file to run all cells again, or give another "
                f"{self._option}"
            )
            raise InputError(msg)
        self.damaged = [line for line, entry in enumerate(entries, 1) if entry is None]
        cells = [entry for entry in entries if entry is not None and "cell" in entry]
        self.results = {entry["cell"]: entry["result"] for entry in cells}
        if torn:
            os.ftruncate(self._file, os.fstat(self._file).st_size - len(torn))


def _seal(content: bytes) -> bytes:
    """Return the end of the line that begins with `content`: its digest.

    Lines are not chained, since any of them may be skipped; nor do they name their sweep, since
    the digest of a cell stands for everything that its result depends on.
    """
    digest = blake2b(content, digest_size=DIGEST_BYTES, person=b"kvcore.sweep.%d" % SCHEMA)
    return b',"digest":"%s"}\n' % digest.hexdigest().encode()


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return the entry of a line; None if its digest is wrong."""
    content = line[: -len(_seal(b""))]
    if line != content + _seal(content):
        return None
    entry: dict[str, Any] = orjson.loads(line)
    return entry
