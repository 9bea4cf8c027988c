"""Files of requests: their lines, whatever the compression, and their digests."""

from __future__ import annotations

import codecs
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

from kvcore.blake2 import blake2b
from kvcore.errors import InputError
from kvcore.files import CHUNK_BYTES, CutError, DamageError, decompressed, unreadable_reason
from kvcore.untrusted import LONGEST_LINE, WORKLOAD_EXPANSION, line_fault

_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*(?=\{)")
_INDENTED = re.compile(rb"(?:\xef\xbb\xbf)?\s*\{\s*\n")
_BETWEEN = re.compile(r"[\s,]*")
_HEAD_BYTES = 1 << 10


def lines(path: Path) -> Generator[tuple[int, bytes], None, None]:
    """Yield the lines of a file that are not blank, with their numbers from 1.

    The lines of a JSON array of objects are its elements, those of indented JSON its objects.
    Plain, gzip and zstd files are recognised by their first bytes; a UTF-8 byte order mark is
    skipped. Memory: one line and a buffer.

    Raises:
        InputError: the file cannot be read, has no line, one that is too large, or its
            compressed data is damaged or cut off; names the line from which on nothing
            could be read.
    """
    line_number, empty = 0, True
    try:
        with path.open("rb") as file:
            rows = _rows(decompressed(file, WORKLOAD_EXPANSION))
            for line_number, line in enumerate(rows, 1):
                if line_number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)  # noqa: PLW2901
                if line and not line.isspace():
                    empty = False
                    yield line_number, line
    except (CutError, DamageError) as error:
        msg = f"{path}:{line_number + 1}: {error}"
        raise InputError(msg) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if empty:
        msg = f"{path}: the file is empty: expected one row a line"
        raise InputError(msg)


def file_digest(path: Path, **options: Any) -> str:
    """Return the 128-bit BLAKE2b digest, in hex, of a file's bytes followed by `options`.

    Give the options on which the requests depend; without any, the digest is what
    `b2sum -l 128` prints.

    Raises:
        InputError: the file cannot be read.
    """
    state = blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                state.update(chunk)
    except OSError as error:
        raise _unreadable(path, error) from error
    if options:
        import orjson  # noqa: PLC0415 - likewise

        state.update(orjson.dumps(options, option=orjson.OPT_SORT_KEYS))
    return state.hexdigest()


def _rows(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file; of a JSON array or of indented JSON, the objects."""
    head = b""
    try:
        for piece in pieces:
            head += piece
            if len(head) > _HEAD_BYTES:
                break
    except CutError as error:
        pieces = _cut(error)
    if start := _ARRAY.match(head):
        return _elements(chain([head[start.end() :]], pieces))
    if _INDENTED.match(head):
        return _elements(chain([head], pieces), array=False)
    return _split(chain([head], pieces))


def _cut(error: CutError) -> Iterator[bytes]:
    """Raise the error of a file that is cut, after what was read before."""
    raise error
    yield b""


def _elements(pieces: Iterable[bytes], *, array: bool = True) -> Iterator[bytes]:
    """Yield the elements of a JSON array whose opening bracket has been read.

    Without `array`, yield JSON objects that follow one another.
    """
    import json  # noqa: PLC0415 - for files of this kind alone

    encoding = "utf-8" if array else "utf-8-sig"
    texts = codecs.iterdecode(pieces, encoding, "surrogateescape")
    scan = json.JSONDecoder(strict=False).raw_decode
    text, end, commas, due = "", 0, 0, 0
    while True:
        begin = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]  # matches nothing
        commas += text.count(",", end, begin)
        closed, parsed = array and text.startswith("]", begin), None
        with suppress(ValueError, RecursionError):
            parsed = scan(text, begin)[1]
        due = 0 if closed else due
        if (closed or parsed is not None) and commas != due:
            msg = f"commas at this place of the JSON array: {commas}; expected {due}"
            raise DamageError(msg)
        if closed:
            break
        if parsed is not None:
            yield _checked(text[begin:parsed].encode("utf-8", "surrogateescape"))
            end, commas, due = parsed, 0, int(array)
            continue
        rest = [text[begin:]]
        size = len(rest[0])
        # Twice as long each time, so that the work is linear in the length of an element.
        wanted = 2 * size + 1
        while size < wanted and (fresh := next(texts, "")):
            rest.append(fresh)
            size += len(fresh)
        if len(rest) == 1 and size == 0:
            if not array:
                return
            msg = "the JSON array stops early"
            raise CutError(msg)
        if len(rest) == 1 or size > LONGEST_LINE:
            # Not JSON: the error comes from the parser of the line.
            yield rest[0].encode("utf-8", "surrogateescape")
            return
        text, end = "".join(rest), 0
    if text[begin + 1 :].strip() or any(piece.strip() for piece in texts):
        msg = "other text follows the JSON array"
        raise DamageError(msg)


def _checked(line: bytes) -> bytes:
    """Return a line; raise DamageError if it is too large."""
    if fault := line_fault(line):
        raise DamageError(fault)
    return line


def _split(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of the byte strings `pieces`, newlines included."""
    begun: list[bytes] = []
    length = 0
    # An empty line after the last one ends it.
    for line in chain(chain.from_iterable(map(BytesIO, pieces)), [b""]):
        if not begun and len(line) < CHUNK_BYTES and line.endswith(b"\n"):  # as most do
            yield line
            continue
        begun.append(line)
        length += len(line)
        if not line or line.endswith(b"\n") or length > LONGEST_LINE:
            if joined := _checked(b"".join(begun)):
                yield joined
            begun, length = [], 0


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be read: {unreadable_reason(path, error)}")
