"""Reading workloads: lines of any compression, which format a file has, what it promises."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Generator, Hashable, Iterable, Iterator
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import orjson

from kvcore.errors import InputError
from kvcore.files import CHUNK_BYTES, CutError, DamageError, decoded, part_of, refusal
from kvcore.request import Key, Request
from kvcore.workloads.base import Workload


def lines(path: Path) -> Generator[tuple[int, bytes], None, None]:
    """Yield the lines of a file that are not blank, with their numbers from 1.

    Plain, gzip and zstd files are told apart by their first bytes; a UTF-8 byte order mark
    is skipped. Memory: one line and a buffer.

    Raises:
        InputError: the file cannot be read, has no line, or its compressed data is damaged
            or cut off; names the line from which on nothing could be read.
    """
    number, empty = 0, True
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_split(decoded(file)), 1):
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


def recognise(path: Path, candidates: Iterable[type[Workload]]) -> Workload:
    """Return the workload that reads `path`, of the one class that knows its first line.

    Raises:
        InputError: the file cannot be read, or no class or several recognise it.
    """
    with closing(lines(path)) as source:
        first_line = next(source)[1]
    readers = [cls for cls in candidates if _reads_files(cls)]
    found = sorted((cls for cls in readers if cls.recognises(first_line)), key=_name)
    if len(found) == 1:
        return found[0].from_file(path)
    if found:
        names = " and ".join(map(_name, found))
        msg = (
            f"{path}: {names} all recognise it; say which, as in '{found[0].name}:path={path}'"
        )
        raise InputError(msg)
    names = ", ".join(sorted(map(_name, readers))) or "none"
    msg = f"{path}: no known workload format: {_looks(first_line)}; formats: {names}"
    raise InputError(msg)


def checked(workload: Workload) -> Iterator[Request]:
    """Yield the requests of `workload` as they come, checking what it promises of them.

    Memory grows with the distinct keys and ids; cost is one dict look-up a key.

    Raises:
        InputError: an arrival before the one before it, an id for the second time, or a
            prompt key after another parent than before.
    """
    root = object()
    parents: dict[Key, Hashable] = {}
    ids: set[int | str] = set()
    now = 0
    for request in workload:
        where = f"workload {workload.name}: request {request.id!r}"
        if request.arrival < now:
            msg = (
                f"{where}: arrives at {request.arrival} ns, after one that arrives at {now} ns"
            )
            raise InputError(msg)
        if request.id in ids:
            msg = f"{where}: an earlier request has the same id"
            raise InputError(msg)
        now = request.arrival
        ids.add(request.id)
        parent: Hashable = root
        for key in request.keys:
            known = parents.setdefault(key, parent)
            if known != parent:
                here, there = (
                    "at the start" if place is root else f"after key {_shown(place)}"
                    for place in (parent, known)
                )
                msg = (
                    f"{where}: key {_shown(key)} stands {here}, in an earlier request {there}: "
                    "equal keys must mean equal prefixes"
                )
                raise InputError(msg)
            parent = key
        yield request


def spare(workload: Workload, path: str | os.PathLike[str]) -> None:
    """Refuse to write `path` if that would overwrite a file that `workload` reads.

    Raises:
        InputError: an option of the workload is this file, or that it is written to first.
    """
    target = Path(path)
    for source in workload.options().values():
        if isinstance(source, Path) and any(
            _same(source, written) for written in (target, part_of(target))
        ):
            msg = f"cannot write {path}: the requests come from {source}; name another file"
            raise InputError(msg)


def _looks(first_line: bytes) -> str:
    """Say how a line begins that no format knows, and whether it failed to be JSON."""
    text = first_line[:60].decode(errors="replace").rstrip()
    begins = f"its first line begins {text!r}"
    if not text.startswith("{"):
        return begins
    try:
        orjson.loads(first_line)
    except orjson.JSONDecodeError as error:
        return f"{begins} and is not JSON: {error.msg} (column {error.colno})"
    return begins


def _shown(key: Hashable) -> str:
    return key.hex() if isinstance(key, bytes) else repr(key)


def _split(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of `pieces`, newlines included, wherever the pieces end."""
    begun: list[bytes] = []
    for piece in pieces:
        for line in BytesIO(piece):
            begun.append(line)
            if line.endswith(b"\n"):
                yield b"".join(begun)
                begun.clear()
    if begun:
        yield b"".join(begun)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be read: {refusal(path, error)}")


def _reads_files(cls: type[Workload]) -> bool:
    return any("recognises" in vars(base) for base in cls.__mro__ if base is not Workload)


def _name(cls: type[Workload]) -> str:
    return cls.name
