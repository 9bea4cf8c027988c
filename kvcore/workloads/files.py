"""Files of requests: their lines, whatever the compression, and their digests."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Generator, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import orjson

from kvcore.errors import InputError
from kvcore.files import (
    CHUNK_BYTES,
    LONGEST_LINE,
    CutError,
    DamageError,
    decompressed,
    line_fault,
    unreadable_reason,
)

EXPANSION = 100
"""Bytes that a compressed byte of a workload may expand to, past the first 16 MiB."""


def lines(path: Path) -> Generator[tuple[int, bytes], None, None]:
    """Yield the lines of a file that are not blank, with their numbers from 1.

    Plain, gzip and zstd files are told apart by their first bytes; a UTF-8 byte order mark
    is skipped. Memory: one line and a buffer.

    Raises:
        InputError: the file cannot be read, has no line, one that is too large, or its
            compressed data is damaged or cut off; names the line from which on nothing
            could be read.
    """
    number, empty = 0, True
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_split(decompressed(file, EXPANSION)), 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)  # noqa: PLW2901
                if line and not line.isspace():
                    empty = False
                    yield number, line
    except (CutError, DamageError) as error:
        msg = f"{path}:{number + 1}: {error}"
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
    state = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                state.update(chunk)
    except OSError as error:
        raise _unreadable(path, error) from error
    if options:
        state.update(orjson.dumps(options, option=orjson.OPT_SORT_KEYS))
    return state.hexdigest()


def _split(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of the byte strings `pieces`, newlines included.

    Raises:
        DamageError: a line is too large.
    """
    begun: list[bytes] = []
    length = 0
    for piece in pieces:
        for line in BytesIO(piece):
            begun.append(line)
            length += len(line)
            if line.endswith(b"\n") or length > LONGEST_LINE:
                whole = b"".join(begun)
                if fault := line_fault(whole):
                    raise DamageError(fault)
                yield whole
                begun, length = [], 0
    whole = b"".join(begun)
    if fault := line_fault(whole):
        raise DamageError(fault)
    if whole:
        yield whole


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be read: {unreadable_reason(path, error)}")
