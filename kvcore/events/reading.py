"""Reading recordings, and files of JSON events as engines and routers write them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import attrs
import orjson

from kvcore.compression import CutError, DamageError, decoded
from kvcore.errors import InputError, TraceError
from kvcore.events import polled, router
from kvcore.events.codecs import FORMATS, MOST_BYTES, read_value
from kvcore.events.fields import WrongError
from kvcore.events.model import Batch
from kvcore.events.plain import from_json
from kvcore.events.recording import SCHEMA
from kvcore.files import refusal
from kvcore.trace.sink import DIGEST_BYTES

NO_RECORDING = (
    "no recording of KV events: its first line is neither RECORDING, nor an event of "
    "TensorRT-LLM or Dynamo"
)


@attrs.frozen
class Received:
    """A batch of a recording, with what the transport knew of it."""

    batch: Batch
    seq: int | None
    publisher: int | None


@attrs.frozen
class Lost:
    """A gap: `count` batches from number `first` on."""

    publisher: int | None
    first: int
    count: int
    why: str | None


@attrs.frozen
class Restarted:
    """A publisher began anew."""

    publisher: int | None


@attrs.frozen
class Skipped:
    """A message was no batch."""

    publisher: int | None
    why: str


Item: TypeAlias = Received | Lost | Restarted | Skipped

LINES: dict[str, dict[str, tuple[type[Any], ...]]] = {
    "BATCH": {"value": (list, dict)},
    "GAP": {"first": (int,), "count": (int,)},
    "RESTART": {},
    "GARBAGE": {"why": (str,)},
    "END": {"lines": (dict,), "digest": (str,)},
}
"""By kind of line: the fields that it must have, and their types."""

COMMON = {"publisher": (int,), "seq": (int,), "format": (str,), "why": (str,)}
"""Fields that a line may have."""


def is_recording(path: str | os.PathLike[str]) -> bool:
    """Say whether a file begins as a recording, or as events in JSON do.

    What can be read only once, such as a pipe, is left unread, and said to be none.
    """
    head = bytearray()
    try:
        if not Path(path).is_file():
            return False
        with Path(path).open("rb") as file:
            for piece in decoded(file):
                head += piece
                if b"\n" in piece or len(head) > MOST_BYTES:
                    break
    except (OSError, ValueError, CutError, DamageError):
        return False
    try:
        line = orjson.loads(head.partition(b"\n")[0])
    except orjson.JSONDecodeError:
        return False
    return _format(line) is not None


class RecordingReader:
    """Reads a recording once, line by line; `.gz` and `.zst` by their first bytes.

    Iterating yields batches, gaps, restarts and what was skipped, in their order. A file
    without END is *incomplete*: all before the cut is yielded, then iteration just ends.
    A file of events in JSON has no END and needs none.

    Attributes:
        file: the path, as given.
        line: the line number, from 1, of what was yielded last.
        header: RECORDING, once the first line is read; of other files only the format.
        complete, cut_reason: whether nothing is missing; where and how the file ends, if so.

    Raises:
        InputError: the file cannot be opened.
        TraceError: it is no recording, or a line is damaged: file, line number, reason.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        """Take the path; it is opened when iteration starts."""
        self.file = Path(file)
        self.line = 0
        self.header: dict[str, Any] = {}
        self.complete = False
        self.cut_reason: str | None = None
        self._kinds: dict[str, int] = {}
        self._digest = blake2b(digest_size=DIGEST_BYTES)

    def __iter__(self) -> Iterator[Item]:
        """Yield the items."""
        for raw in self._raw_lines():
            line = self._parsed(raw)
            item = self._header(line) if self.line == 1 else self._item(line)
            self._digest.update(raw + b"\n")
            if item is not None:
                yield item
        if self.cut_reason is None and self._sealed and "END" not in self._kinds:
            self.cut_reason = f"the file ends after line {self.line}, without END"
        if not self.header:
            self.cut_reason = self.cut_reason or "the file is empty"
        self.complete = self.cut_reason is None

    @property
    def _sealed(self) -> bool:
        return "schema" in self.header

    def fail(self, reason: str) -> NoReturn:
        """Raise TraceError for the line read last."""
        msg = f"{self.file}:{self.line}: {reason}"
        raise TraceError(msg)

    def _raw_lines(self) -> Iterator[bytes]:
        """Yield whole lines; note where the file is cut."""
        rest, cut = b"", None
        try:
            with self.file.open("rb") as file:
                for piece in decoded(file):
                    *whole, rest = (rest + piece).split(b"\n")
                    for raw in whole:
                        self.line += 1
                        yield raw
        except CutError as error:
            cut = str(error)
        except DamageError as error:
            self.line += 1
            self.fail(str(error))
        except OSError as error:
            msg = f"cannot read the recording {self.file}: {refusal(self.file, error)}"
            raise InputError(msg) from error
        if rest and not self._sealed and _is_json(rest):
            self.line += 1
            yield rest
        elif rest:
            cut = f"the file ends inside line {self.line + 1}"
        self.cut_reason = cut

    def _parsed(self, raw: bytes) -> dict[str, Any]:
        try:
            line = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            what = f"not JSON: {error.msg}, at column {error.colno}"
            self.fail(what if self.header else f"{NO_RECORDING} ({what})")
        if type(line) is not dict:
            self.fail("a line must be a JSON object" if self.header else NO_RECORDING)
        return line

    def _header(self, line: dict[str, Any]) -> Item | None:
        name = _format(line)
        if name is None:
            self.fail(NO_RECORDING)
        if line.get("kind") != "RECORDING":
            self.header = {"format": name}
            return self._item(line)
        if line.get("schema") != SCHEMA:
            self.fail(f"schema {line.get('schema')!r}; this version reads schema {SCHEMA}")
        if name not in FORMATS:
            self.fail(f"format {name!r} is not known; there are: {', '.join(FORMATS)}")
        self.header = line
        self._kinds["RECORDING"] = 1
        return None

    def _item(self, line: dict[str, Any]) -> Item | None:
        if not self._sealed:
            return Received(self._batch(line, self.header["format"]), None, None)
        kind = self._checked(line)
        publisher, why = line.get("publisher"), line.get("why")
        match kind:
            case "BATCH":
                name = line.get("format", self.header["format"])
                return Received(self._batch(line["value"], name), line.get("seq"), publisher)
            case "GAP":
                return Lost(publisher, line["first"], line["count"], why)
            case "RESTART":
                return Restarted(publisher)
            case "GARBAGE":
                return Skipped(publisher, line["why"])
        self._check_end(line)
        return None

    def _checked(self, line: dict[str, Any]) -> str:
        """Return the kind of a line, after every check of its fields and number."""
        kind = line.get("kind")
        if type(kind) is not str or kind not in LINES:
            self.fail(f"unknown kind of line {kind!r}; there are: {', '.join(LINES)}")
        if "END" in self._kinds:
            self.fail("a line follows END")
        if line.get("n") != self.line - 1:
            self.fail(f"this line has n = {line.get('n')}; {self.line - 1} stand before it")
        required = LINES[kind]
        for name, value in line.items():
            types = required.get(name) or COMMON.get(name)
            if name in ("n", "kind"):
                continue
            negative = type(value) is int and value < 0
            if types is None or type(value) not in types or negative:
                self.fail(f"{kind} has a field {name!r} of {value!r:.60}")
        for name in required:
            if name not in line:
                self.fail(f"{kind} has no field {name!r}")
        if kind != "END":
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
        return kind

    def _batch(self, value: Any, name: str) -> Batch:
        try:
            return read_value(from_json(value) if self._sealed else value, name)
        except (WrongError, InputError, ValueError, RecursionError) as error:
            self.fail(str(error))

    def _check_end(self, line: dict[str, Any]) -> None:
        expected = {"lines": self._kinds, "digest": self._digest.hexdigest()}
        for name, value in expected.items():
            if line[name] != value:
                self.fail(f"END has {name} {line[name]!r}; the lines before it make {value!r}")
        self._kinds = {**self._kinds, "END": 1}


def _format(line: Any) -> str | None:
    """Return the format that a first line tells; None: it is no recording's."""
    if type(line) is not dict:
        return None
    if line.get("kind") == "RECORDING" and type(line.get("format")) is str:
        return str(line["format"])
    if polled.is_ours(line):
        return "trtllm"
    return "dynamo" if router.is_ours(line) else None


def _is_json(raw: bytes) -> bool:
    try:
        orjson.loads(raw)
    except orjson.JSONDecodeError:
        return False
    return True
