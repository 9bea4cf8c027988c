"""The trace reader: streams events, checks every line, and reads a cut file up to the cut."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeAlias, cast

import attrs
import orjson

from kvcore.errors import InputError, TraceError
from kvcore.files import CutError, DamageError, decoded, refusal
from kvcore.request import KEY_BYTES, SLO, Key, Request, Retention
from kvcore.trace.events import SCHEMA, fault
from kvcore.trace.writer import DIGEST_BYTES
from kvcore.units import INT64_LIMIT
from kvcore.workloads import Workload
from kvcore.workloads.files import file_digest

Line: TypeAlias = dict[str, Any]


NO_TRACE = (
    "not a kvcore trace: its first line is no HEADER; `kvcore compare FILE` runs workloads"
)


def read_events(file: str | os.PathLike[str]) -> TraceReader:
    """Return the reader of a trace: iterate it for its events, HEADER and END included."""
    return TraceReader(file)


class TraceReader:
    """Reads a trace once, line by line; `.gz` and `.zst` are recognised by their first bytes.

    Iterating yields each line as a dict, checked: its event and fields, its number, that
    time does not go back, and at END the counts and the digest. A file without END is
    *incomplete*: all events before the cut are yielded, then iteration just ends.

    Attributes:
        file: the path, as given.
        line: the file's line number, from 1, of the event yielded last.
        complete: whether END was reached, and nothing is missing or follows.
        cut_reason: where and how an incomplete file ends, once iteration is over.

    Raises:
        InputError: the file cannot be opened.
        TraceError: a line is damaged; the message has file, line number and reason.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        """Take the path; it is opened when iteration starts."""
        self.file = Path(file)
        self.line = 0
        self.complete = False
        self.cut_reason: str | None = None
        self._time = 0
        self._ended = False
        self._events: dict[str, int] = {}
        self._digest = blake2b(digest_size=DIGEST_BYTES)

    def __iter__(self) -> Iterator[Line]:
        """Yield the events."""
        try:
            file = self.file.open("rb")
        except OSError as error:
            msg = f"cannot read the trace {self.file}: {refusal(self.file, error)}"
            raise InputError(msg) from error
        with file:
            yield from self._lines(decoded(file))

    def fail(self, reason: str) -> NoReturn:
        """Raise TraceError for the line read last."""
        msg = f"{self.file}:{self.line}: {reason}"
        raise TraceError(msg)

    def _lines(self, pieces: Iterable[bytes]) -> Iterator[Line]:
        rest, cut = b"", None
        try:
            for piece in pieces:
                block, newline, tail = piece.rpartition(b"\n")
                if newline:
                    yield from self._block(rest + block)
                    rest = tail
                else:
                    rest += tail
        except CutError as error:
            cut = str(error)
        except DamageError as error:
            self.line += 1
            self.fail(str(error))
        yield from self._tail(rest)
        self.cut_reason = self.cut_reason or cut
        self.complete = self.cut_reason is None

    def _block(self, block: bytes) -> Iterator[Line]:
        """Yield the lines of `block`, which lacks only its last newline."""
        for raw in block.split(b"\n"):
            line = self._checked(raw)
            if line["event"] == "END":
                self._digest.update(block[: block.find(raw)])
                self._check_end(line, raw)
            yield line
        self._digest.update(block)
        self._digest.update(b"\n")

    def _tail(self, rest: bytes) -> Iterator[Line]:
        """Yield what stands after the last newline if it is a whole line; note the cut."""
        if not rest:
            if not self._ended:
                where = f"ends after line {self.line}" if self.line else "is empty"
                self.cut_reason = f"the file {where}, without END"
            return
        try:
            if not self._ended:
                orjson.loads(rest)
        except orjson.JSONDecodeError:
            self.cut_reason = f"the file ends inside line {self.line + 1}"
            return
        line = self._checked(rest)
        if line["event"] == "END":
            self._check_end(line, rest)
        self.cut_reason = f"the file ends before the newline of line {self.line}"
        yield line

    def _checked(self, raw: bytes) -> Line:
        """Return the next line, after every check that needs no more than the lines so far."""
        n = self.line
        self.line = n + 1
        if self._ended:
            self.fail("a line follows END")
        try:
            line = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            damage = f"not JSON: {error.msg}, at column {error.colno}"
            self.fail(damage if n else f"{NO_TRACE} ({damage})")
        if not n:
            self._check_header(line)
        reason = fault(line)
        if reason is not None:
            self.fail(reason)
        event = line["event"]
        if n and event == "HEADER":
            self.fail("HEADER stands in line 1 only")
        if line["n"] != n:
            self.fail(f"this line has n = {line['n']}; {n} lines stand before it")
        if line["t"] < self._time:
            self.fail(f"time goes back, from {self._time} to {line['t']} ns")
        if line["t"] >= INT64_LIMIT:
            self.fail(f"time goes to {line['t']} ns; it ends before 2^63 ns (292 years)")
        if event == "END" and line["t"] > self._time:
            self.fail(f"END is at {line['t']} ns; the line before it at {self._time}")
        self._time = line["t"]
        self._events[event] = self._events.get(event, 0) + 1
        return line  # type: ignore[no-any-return]

    def _check_header(self, line: Any) -> None:
        if type(line) is not dict or line.get("event") != "HEADER":
            self.fail(NO_TRACE)
        if line.get("schema", SCHEMA) != SCHEMA:
            self.fail(
                f"schema {line['schema']!r}; this version of kvcore reads schema {SCHEMA}"
            )

    def _check_end(self, line: Line, raw: bytes) -> None:
        """Check END, which no digest covers: there is one way to write it."""
        self._ended = True
        end = {name: line[name] for name in ("n", "t", "event")} | {
            "lines": line["n"],
            "events": {name: count for name, count in self._events.items() if name != "END"},
            "digest": self._digest.hexdigest(),
        }
        for field, value in end.items():
            if line[field] != value:
                self.fail(
                    f"END has {field} {line[field]!r}; the lines before it make {value!r}"
                )
        if raw != orjson.dumps(end):
            self.fail("END is not written as kvcore writes it")


_SAME = {
    "id": "id",
    "prompt": "prompt_tokens",
    "output": "output_tokens",
    "key_tokens": "key_tokens",
}


_AS_WRITTEN = {
    "salt": "salt",
    "tenant": "tenant",
    "priority": "priority",
    "predicted": "predicted_output_tokens",
    "session": "session",
    "after": "after",
    "think": "think_time",
}


_DIGITS = 2 * KEY_BYTES


def read_request(line: Line, arrival: int | None = None) -> Request:
    """Return the request of a REQUEST line; written again, it is that line. O(keys).

    It arrives at `arrival` (ns), or at the time of the line.

    Raises:
        InputError: a field with a value that no request has.
    """
    fields: dict[str, Any] = {name: line[field] for field, name in _SAME.items()}
    fields |= {name: line[field] for field, name in _AS_WRITTEN.items() if field in line}
    if "slo" in line:
        fields["slo"] = SLO(**line["slo"])
    if "retention" in line:
        fields["retention"] = tuple(Retention(*hint) for hint in line["retention"])
    if "output_keys" in line:
        fields["output_keys"] = read_keys(line["output_keys"])
    return Request(
        arrival=line["t"] if arrival is None else arrival,
        keys=read_keys(line["keys"]),
        **fields,
    )


def read_keys(written: list[Any]) -> list[Key]:
    """Return block keys from JSON: ints, and the 16 bytes that 32 lower-case digits are.

    Other digits stay text, so that every key is written again as it was.
    """
    if all(type(key) is int for key in written):
        return written
    return [_key(key) for key in written]


@attrs.define(slots=False, eq=False)
class TraceWorkload(Workload):
    """The requests of a trace, as the workload of which it is a recording.

    Its name, digest, options and key size are those of the recorded workload; without one
    it is `trace`, with the digest of the file. Requests come in the order in which they
    arrived. Those of an open loop arrive as the workload had them, whatever the rate at
    which they were run: at that rate they arrive when they did (a trace that was run faster
    than real time has lost up to `rate_scale` ns of each). One that came after another
    arrives when it did.

    Attributes:
        file: the trace; a kvcore trace of any mode.

    Raises:
        InputError: the file cannot be read.
        TraceError: while reading: a line is damaged, or the file is cut.
    """

    _unnamed: ClassVar[str] = "trace"

    file: Path = attrs.field(converter=Path)

    def __iter__(self) -> Iterator[Request]:
        """Yield a request a REQUEST line. Holds one at a time, and keys that FINISH tells."""
        scale = self._scale
        told = self.told
        for reader, line in self._lines():
            if line["event"] != "REQUEST":
                continue
            # Rounded up, as running it rounds down.
            arrival = -(-line["t"] * scale.numerator // scale.denominator)
            try:
                request = read_request(line, arrival)
            except InputError as error:
                reader.fail(f"REQUEST: {error}")
            if request.id in told:
                request.output_keys = told[request.id]
            yield request

    @cached_property
    def header(self) -> Line:
        """The first line.

        Raises:
            InputError, TraceError: there is none.
        """
        reader = TraceReader(self.file)
        for line in reader:
            return line
        msg = f"{self.file}: {reader.cut_reason}"
        raise TraceError(msg)

    @cached_property
    def told(self) -> dict[int | str, list[Key]]:
        """Keys of generated blocks that only the run could tell, by request, in order.

        Of a run on texts; others have none, and are not read for it.
        """
        told: dict[int | str, list[Key]] = {}
        if self.header.get("executor") == "run":
            for _, line in self._lines():
                if line["event"] == "KEYS":
                    told.setdefault(line["request"], []).extend(read_keys(line["keys"]))
        return told

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the recorded workload."""
        return self._source["name"] if self._source else self._unnamed

    @property
    def digest(self) -> str:
        """The digest of the recorded workload."""
        return self._source["digest"] if self._source else file_digest(self.file)

    @property
    def key_tokens(self) -> int:
        """Tokens a key stands for."""
        tokens: int = self.header["key_tokens"]
        return tokens

    @property
    def restores(self) -> bool:
        """Whether the requests are exactly those of the recorded workload. Reads the file.

        They are not where requests were sent after others under a clock, where a run on
        texts told keys, or where the rate rounded the times.
        """
        if not self._source or self._scale > 1 or self.told:
            return False
        timed = self.header["mode"] != "untimed"
        return not any("after" in line for _, line in self._lines() if timed)

    def options(self) -> dict[str, Any]:
        """Return the options of the recorded workload."""
        return dict(self._source["options"]) if self._source else {}

    @property
    def _source(self) -> dict[str, Any] | None:
        source: dict[str, Any] | None = self.header["workload"]
        return source

    @property
    def _scale(self) -> Fraction:
        return Fraction(str(self.header.get("rate_scale", 1)))

    def _lines(self) -> Iterator[tuple[TraceReader, Line]]:
        """Yield the lines with their reader, and see that the end is there."""
        reader = TraceReader(self.file)
        for line in reader:
            yield reader, line
        if not reader.complete:
            msg = f"{self.file}: incomplete: {reader.cut_reason}"
            raise TraceError(msg)


def _key(written: Any) -> Key:
    if type(written) is str and len(written) == _DIGITS and written == written.lower():
        return bytes.fromhex(written)
    return cast("Key", written)
