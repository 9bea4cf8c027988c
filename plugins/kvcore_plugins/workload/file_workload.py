"""The bases of workloads in one file, whose rows may have times or get random ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import attrs
from attrs.validators import gt, in_
from attrs.validators import optional as if_given

from kvcore import InputError, Request, Workload
from kvcore.files import as_path
from kvcore.workloads import file_digest, poisson_arrivals
from kvcore_plugins.workload.rows import Row
from kvcore_plugins.workload.times import UNITS


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
                f"{path}: the file has changed while it was read: begin again, with a copy if "
                "it still grows"
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


@attrs.define(eq=False)
class FileWorkload(FromFiles):
    """A workload in one file.

    Attributes:
        path: path of the file.
        by_line: whether ids are numbers of lines, from 0; else of rows, without blank lines.
    """

    by_line: ClassVar[bool] = False

    path: Path = attrs.field(converter=as_path)

    @property
    def digest(self) -> str:
        """The digest of the file's bytes and of the other options."""
        options = self.options()
        return self._file_digest(options.pop("path"), **options)


@attrs.define(eq=False)
class TimedFile(FileWorkload):
    """A workload in one file whose rows have times, or get random ones.

    Attributes:
        path: path of the file.
        unit: unit of times that are numbers: s, ms, us, ns; None: that of the field's name, or
            of their size.
        rate: where rows have no times, requests a second, at random times (Poisson); `inf`:
            all at once.
        seed: seed of the random times.
    """

    unit: str | None = attrs.field(default=None, validator=if_given(in_(UNITS)), kw_only=True)
    rate: float | None = attrs.field(default=None, validator=if_given(gt(0)), kw_only=True)
    seed: int = attrs.field(default=0, kw_only=True)

    @property
    def digest(self) -> str:
        """The digest of the file's bytes and of the other options, a unit in any case."""
        options = self._digested
        return self._file_digest(options.pop("path"), **options)

    @property
    def _digested(self) -> dict[str, Any]:
        """The options as they are hashed: a unit that is found as `s`, since it always was."""
        units = {None: "s", "s": "seconds"}
        return self.options() | {"unit": units.get(self.unit, self.unit)}

    def drawn_arrivals(self) -> Iterator[int]:
        """Yield the times in ns of rows without times."""
        draw = Random(f"{self.seed}/arrivals").random  # noqa: S311 - a workload, no secret
        return poisson_arrivals(draw, math.inf if self.rate is None else self.rate)

    def refuse_rate(self, row: Row, field: str) -> None:
        """Raise InputError if a rate is given though `row` has a time in `field`."""
        if self.rate is not None:
            msg = (
                f"{row.path}:{row.line}: it has times ({field!r}): leave out rate={self.rate}; "
                "--rate-scale of `kvcore simulate` makes them faster"
            )
            raise InputError(msg)
