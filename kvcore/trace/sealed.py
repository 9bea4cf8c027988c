"""Files of lines that are whole, sealed by their END, or not there."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from kvcore.trace.sink import Sink


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
