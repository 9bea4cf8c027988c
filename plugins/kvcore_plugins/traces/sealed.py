"""The reader of sealed files: lines checked one by one, a digest at the end, a cut told.

`SealedWriter` of `kvcore/trace/jsonl_file.py` writes them. A subclass parses the lines::

    class Reader(SealedReader[Item]):
        kind = "recording"

        def _parse(self, raw):
            line = ...  # decode and check; `self.fail(reason)` raises with file and line number
            if line is END:
                self._expect_end({...})  # its fields but the digest, as the writer orders them
            return item
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, ClassVar, Generic, NoReturn, TypeVar

import orjson

from kvcore.blake2 import blake2b
from kvcore.errors import InputError, TraceError
from kvcore.files import CutError, DamageError, as_path, decompressed, unreadable_reason
from kvcore.trace.jsonl_file import DIGEST_BYTES
from kvcore.untrusted import LONGEST_LINE, TRACE_EXPANSION, line_fault, parse_json

ODD_BYTES = re.compile(rb"[ \\\r\t]")
"""Bytes between values, and those in texts that may be written in several ways."""

NOT_AS_WRITTEN = (
    "the line is not written as kvcore writes it: a name stands in an object twice, there are "
    "blanks between values, or a text or a number could be shorter"
)

_Item = TypeVar("_Item")


class SealedReader(ABC, Generic[_Item]):
    """Reads a sealed file once; `.gz` and `.zst` are recognised by their first bytes.

    Iterating yields an item a line, checked by `_parse`, and at END the digest. A file without
    END is *incomplete*: all items before the cut are yielded, then iteration just ends.

    A line has at most 16 MiB and 2^20 values, and a compressed file expands to at most
    `expansion` times its size past the first 16 MiB, so the size of a file bounds its cost.
    Traces expand 6 to 9 times, and 16 times from the level 19 of zstd.

    Attributes:
        kind: the word for the file in errors, before its name.
        expansion: largest number of bytes that a compressed byte expands to.
        file: the path.
        line: line number in the file, from 1, of the item yielded last.
        position: number of bytes of the file, compressed or not, that were read so far.
        complete: whether the file ends with END and its newline.
        cut_reason: where and how an incomplete file ends, once iteration is over.

    Raises:
        InputError: the file cannot be opened.
        TraceError: a line is damaged; the message has file, line number and reason.
    """

    kind: ClassVar[str]
    expansion: ClassVar[int] = TRACE_EXPANSION

    def __init__(self, file: str | os.PathLike[str]) -> None:
        """Store the path; the file is opened when iteration starts."""
        self.file = as_path(file)
        self.line = self.position = 0
        self.complete = False
        self.cut_reason: str | None = None
        self._end: Mapping[str, Any] | None = None
        self._digest = blake2b(digest_size=DIGEST_BYTES)
        self._odd_bytes = False

    def __iter__(self) -> Iterator[_Item]:
        """Yield the items."""
        try:
            with self._open() as file:
                yield from self._items(self._pieces(file))
        except OSError as error:
            reason = unreadable_reason(self.file, error)
            msg = f"cannot read the {self.kind} {self.file}: {reason}"
            raise InputError(msg) from error

    def fail(self, reason: str) -> NoReturn:
        """Raise TraceError for the line read last."""
        msg = f"{self.file}:{self.line}: {reason}"
        raise TraceError(msg)

    def require_complete(self) -> None:
        """Raise TraceError unless END was reached, once iteration is over."""
        if not self.complete:
            msg = f"{self.file}: incomplete: {self.cut_reason}"
            raise TraceError(msg)

    @abstractmethod
    def _parse(self, raw: bytes) -> _Item:
        """Return the item of line number `line`, once the line is checked by itself.

        Calls `fail` for a wrong line, and `_expect_end` for END.
        """

    def _expect_end(self, fields: Mapping[str, Any]) -> None:
        """Record that the line just parsed is END, and its fields before the digest."""
        self._end = fields

    def _open(self) -> BinaryIO:
        """Open the file for reading."""
        return self.file.open("rb")

    def _pieces(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the content of `file`, and keep `position` up to date."""
        for piece in decompressed(file, self.expansion):
            self.position = file.tell()
            yield piece

    @property
    def _sealed(self) -> bool:
        """Whether the file must have an END, once its first line is read."""
        return True

    def _items(self, pieces: Iterable[bytes]) -> Iterator[_Item]:
        # The pieces of an unfinished line: joined once, since joining each costs its square.
        begun: list[bytes] = []
        length, cut = 0, None
        try:
            for piece in pieces:
                block, newline, tail = piece.rpartition(b"\n")
                if newline:
                    begun.append(block)
                    block = b"".join(begun)
                    begun, length = [], 0
                    yield from self._block(block)
                begun.append(tail)
                length += len(tail)
                if length > LONGEST_LINE:
                    break
        except CutError as error:
            cut = str(error)
        except DamageError as error:
            self.line += 1
            self.fail(str(error))
        yield from self._tail(b"".join(begun))
        self.cut_reason = self.cut_reason or cut
        self.complete = self.cut_reason is None

    def _block(self, block: bytes) -> Iterator[_Item]:
        """Yield the items of whole lines, `block`, whose last newline is left out."""
        self._look_at(block)
        for raw in block.split(b"\n"):
            item = self._next(raw)
            if self._end is not None:
                self._digest.update(block[: block.find(raw)])
                self._check_end(raw, self._end)
            yield item
        # Once for each block: an update for each line would cost more than its check.
        self._digest.update(block)
        self._digest.update(b"\n")

    def _tail(self, rest: bytes) -> Iterator[_Item]:
        """Yield the item after the last newline if its line is whole; store `cut_reason`."""
        ended = self._end is not None
        if not rest:
            if self._sealed and not ended:
                where = f"ends after line {self.line}" if self.line else "is empty"
                self.cut_reason = f"the file {where}, without END"
            return
        self._look_at(rest)
        if not ended and not _is_json(rest):
            self.cut_reason = f"the file ends inside line {self.line + 1}"
            return
        item = self._next(rest)
        if self._end is not None:
            self._check_end(rest, self._end)
        if self._sealed:
            self.cut_reason = f"the file ends before the newline of line {self.line}"
        yield item

    def _look_at(self, block: bytes) -> None:
        """Refuse lines that are too large to be parsed; store whether there are `ODD_BYTES`."""
        # A block comes in pieces of 64 KiB: only its first line can be too large.
        if fault := line_fault(block.partition(b"\n")[0]):
            self.line += 1
            self.fail(fault)
        self._odd_bytes = any(byte in block for byte in (b" ", b"\\", b"\r", b"\t"))

    def _must_be_as_written(self, raw: bytes, line: Any) -> None:
        """Refuse the line `raw` unless kvcore writes its value, `line`, by the same bytes."""
        try:
            written = orjson.dumps(line)
        except TypeError as error:
            self.fail(f"the line cannot be written again: {error}")
        if raw != written:
            self.fail(NOT_AS_WRITTEN)

    def _next(self, raw: bytes) -> _Item:
        self.line += 1
        if self._end is not None:
            self.fail("a line follows END")
        return self._parse(raw)

    def _check_end(self, raw: bytes, fields: Mapping[str, Any]) -> None:
        """Check END, which no digest covers: there is one way to write it."""
        expected = {**fields, "digest": self._digest.hexdigest()}
        line = parse_json(raw)
        for field, value in expected.items():
            if line.get(field) != value:
                self.fail(
                    f"END has {field} {line.get(field)!r}; the lines before it make {value!r}"
                )
        if raw != orjson.dumps(expected):
            self.fail("END is not written as kvcore writes it")


def _is_json(raw: bytes) -> bool:
    try:
        parse_json(raw)
    except orjson.JSONDecodeError:
        return False
    return True
