"""The trace of a run that cannot be repeated: what was written of it stays after an error."""

from __future__ import annotations

from pathlib import Path

from kvcore.errors import StorageError
from kvcore.files import part_path
from kvcore.trace import Trace


class LiveTrace(Trace):
    """A trace of a run that cannot be repeated: of a server, a proxy, or another engine.

    A run that ends in an exception leaves `<path>.part`, readable up to the cut, as a killed
    process does.
    """

    def give_up(self, error: BaseException | None) -> None:
        """Keep the unfinished file, unless nothing has happened. A second call does nothing.

        Raises:
            StorageError: `error` is one; says what is kept.
        """
        part = part_path(Path(self.name))
        if self._closed:
            return
        if self._logger is None or part == Path(self.name):
            self.discard()
            return
        self.keep()
        if isinstance(error, StorageError) and part.exists():
            msg = f"{error}. {part} keeps what was written before"
            raise StorageError(msg) from error
