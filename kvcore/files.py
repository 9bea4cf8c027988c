"""Files that are whole or not there."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EISDIR
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kvcore.errors import InputError, StorageError

if TYPE_CHECKING:
    from typing_extensions import Buffer


class WholeFile(io.FileIO):
    """A raw file that appears at `path` when it is finished; before, it is `<path>.part`.

    What stood at `path` stays until then, and so does a `<path>.part` that another run
    writes or has left behind: what it holds may be all there is of that run. What is no
    regular file (a device, a pipe) is written in place. Errors call it `what`, such as
    "the trace run.jsonl".

    Raises:
        InputError: it cannot be opened for writing, or `<path>.part` is there.
        StorageError: it cannot be written (from `write` and `finish`).
    """

    def __init__(self, path: Path, what: str) -> None:
        """Open it."""
        self._what = what
        self._path = path
        try:
            if path.is_dir():
                raise IsADirectoryError(EISDIR, "it is a directory; name a file in it")
            self._part = part_of(path)
            super().__init__(self._part, "w" if self._part == path else "x")
        except FileExistsError as error:
            msg = (
                f"cannot write {what}: {self._part} is being written by another run, or was "
                "left by one that was killed: remove it, or name another file"
            )
            raise InputError(msg) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            msg = f"cannot write {what}: {reason}"
            raise InputError(msg) from error

    def write(self, data: Buffer, /) -> int:
        """Write some of `data`; return how many bytes."""
        with storing(self._what):
            return super().write(data)

    def finish(self) -> None:
        """Close it and give it its name."""
        with storing(self._what):
            self.close()
            if self._part != self._path:
                self._part.replace(self._path)

    def discard(self) -> None:
        """Close it and remove what is there of it. Never raises."""
        # The error that led here says more than a failed clean-up.
        with suppress(OSError):
            self.close()
            if self._part != self._path:
                self._part.unlink(missing_ok=True)
                # From now on a file of that name is another run's.
                self._part = self._path


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a text file for writing that appears at `path` when the body is done.

    If the body raises, what stood at `path` before still does.

    Raises:
        InputError: it cannot be opened for writing.
        StorageError: it cannot be written, as on a full disk.
    """
    raw = WholeFile(path, str(path))
    try:
        with io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", newline="") as file:
            yield file
        raw.finish()
    except BaseException:
        raw.discard()
        raise


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Turn an OSError of the body, which writes `what`, into a StorageError."""
    try:
        yield
    except OSError as error:
        msg = f"cannot write {what}: {error.strerror or error}"
        raise StorageError(msg) from error


def refusal(path: Path, error: OSError) -> str:
    """Say why `path` could not be read; of a link to nothing, where it leads as well."""
    if path == Path():
        return "empty path, or the working directory; name a file"
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return f"{reason}: it is a link to {path.readlink()}"
    return reason


def part_of(path: Path) -> Path:
    """Return where `path` is written until it is whole: in place if it is a device."""
    special = path.exists() and not path.is_file()
    return path if special else path.with_name(f"{path.name}.part")
