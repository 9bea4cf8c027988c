"""Files that are whole or not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from kvcore.errors import InputError


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a text file for writing that appears at `path` when the body is done.

    If the body raises, what stood at `path` before still does. What is no regular file (a
    device, a pipe) is written in place.

    Raises:
        InputError: it cannot be opened for writing.
        OSError: it cannot be written, as on a full disk.
    """
    special = path.exists() and not path.is_file()
    part = path if special else path.with_name(f"{path.name}.part")
    try:
        file = part.open("w", encoding="utf-8", newline="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        msg = f"cannot write {path}: {reason}"
        raise InputError(msg) from error
    try:
        with file:
            yield file
        if not special:
            part.replace(path)
    except BaseException:
        if not special:
            part.unlink(missing_ok=True)
        raise
