"""Workloads of files that must stay as they are: what several runs read is one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from kvcore import InputError, Request, Workload
from kvcore.workloads import file_digest


class FromFiles(Workload):
    """A workload whose options name files, which must stay as they are while it is used.

    It is copied and pickled by its options, with what its files were when it was first read.
    """

    _first: Mapping[Path, tuple[int, ...]] | None = None
    _count = -1

    def __init_subclass__(cls, **options: Any) -> None:
        """Make every reading of `cls` check the files."""
        method = vars(cls).get("__iter__")
        if method is not None and not hasattr(method, "__wrapped__"):
            cls.__iter__ = _checking(method)  # type: ignore[assignment, method-assign]
        super().__init_subclass__(**options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle it without what it reads."""
        return _rebuilt, (type(self), self.options(), self._first)

    def _file_digest(self, path: Path, **options: Any) -> str:
        """Return `file_digest` of a file that is still as it was."""
        self.check_files()
        return file_digest(path, **options)

    def check_files(self) -> None:
        """Raise InputError if a file has changed since the first call."""
        found = {}
        for path in self.options().values():
            if isinstance(path, Path) and path.is_file():
                status = path.stat()
                found[path] = status.st_size, status.st_mtime_ns, status.st_ino
        if self._first is None:
            self._first = found
        for path, _ in found.items() - self._first.items():
            msg = (
                f"{path}: the file has changed since it was first read: begin again, with a "
                "new workload, and with a copy of the file if it still grows"
            )
            raise InputError(msg)


def _checking(
    method: Callable[[FromFiles], Iterator[Request]],
) -> Callable[[FromFiles], Iterator[Request]]:
    """Wrap an `__iter__`: a later reading checks the files before, and before it differs."""

    @wraps(method)
    def requests(workload: FromFiles) -> Iterator[Request]:
        workload.check_files()
        number, known = 0, workload._count  # noqa: SLF001 - a method in the end
        for number, request in enumerate(method(workload), 1):
            if number - 1 == known:
                workload.check_files()
            yield request
        if known >= 0:
            workload.check_files()
        workload._count = number  # noqa: SLF001 - likewise

    return requests


def _rebuilt(cls: Callable[..., FromFiles], options: dict[str, Any], first: Any) -> FromFiles:
    workload = cls(**options)
    workload._first = first
    return workload
