"""The trace reader: streams events, checks every line, and reads a cut file up to the cut."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, cast

import msgspec
import orjson
from msgspec import UNSET

from kvcore.progress import Tick, ticked, unseen
from kvcore.request import KEY_BYTES, Hints, Key, Request, Retention
from kvcore.trace import events
from kvcore.trace.events import Event, Header
from kvcore.trace.fields import OPTIONAL, SCHEMA, slo_of
from kvcore.untrusted import TRACE_HEADER_BYTES, parse_json
from kvcore_plugins.traces.expansion import Expansion
from kvcore_plugins.traces.sealed import ODD_BYTES, SealedReader
from kvcore_plugins.traces.served import served_fault


class _Builder(Protocol):
    """Builds a result from the events of a trace."""

    def take(self, event: Any, /) -> None:
        """Called with each event after HEADER, in order."""


Builder = TypeVar("Builder", bound=_Builder)

NO_TRACE = (
    "not a kvcore trace: its first line is no HEADER; `kvcore simulate FILE` runs workloads"
)

_OPTIONAL = {
    struct: [field.name for field in msgspec.structs.fields(struct) if not field.required]
    for struct in events.STRUCTS
}

_REQUIRED_NAMES: dict[type[Event], int] = {
    struct: 1 + len(struct.__struct_fields__) - len(optional)
    for struct, optional in _OPTIONAL.items()
}
"""Number of names in the line of a Struct that leaves out all optional fields."""

_UNPLACED = (Header, events.Request, events.Reject, events.Transfer, events.End)

_PLACED_NAMES: dict[type[Event], int] = {
    struct: count + (struct not in _UNPLACED) for struct, count in _REQUIRED_NAMES.items()
}
"""The same number in the trace of a cluster, where most lines have a `replica`."""


def _count_names(event: Event) -> int:
    """Return the number of names in the line of an event, names of SLO times included."""
    values = [getattr(event, name) for name in _OPTIONAL[type(event)]]
    values = [value for value in values if value is not UNSET]
    nested = sum(len(value) for value in values if type(value) is dict)
    return _REQUIRED_NAMES[type(event)] + len(values) + nested


def read_events(file: str | os.PathLike[str]) -> TraceReader:
    """Return the reader of a trace: iterate it for its events, HEADER and END included."""
    return TraceReader(file)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a trace line, as its reader accepts it."""
    structs = events.STRUCTS
    lines, parts = msgspec.json.schema_components(structs, ref_template="#/$defs/{name}")
    # msgspec has no words for the values of a Literal.
    for struct in structs:
        fields = parts[struct.__name__]["properties"]
        for name, field in events.describe_fields(struct).items():
            if "enum" in fields[name] and name != "event":
                fields[name] = {"description": field.holds, **fields[name]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A line of a kvcore trace, schema {SCHEMA}",
        "anyOf": list(lines),
        "$defs": parts,
    }


class TraceReader(SealedReader[Event]):
    """Reads a trace once, line by line; `.gz` and `.zst` are recognised by their first bytes.

    Iterating yields each line as its Struct of `kvcore.trace.events`, checked: its event and
    fields, its number, that time does not go back, and at END the counts and the digest. A
    file without END is *incomplete*: all events before the cut are yielded, then iteration
    just ends. See `SealedReader` for attributes and errors.
    """

    kind: ClassVar[str] = "trace"

    def __init__(self, file: str | os.PathLike[str]) -> None:
        """Store the path; the file is opened when iteration starts."""
        super().__init__(file)
        self._required_names = _REQUIRED_NAMES
        self._n = 0  # number of the next event
        self._time = 0
        self._expansion = Expansion()
        self._expanded: Sequence[Event] = ()  # what the line read last stands for
        self._grouped = False  # whether HEADER has cache groups
        self._counts: defaultdict[str, int] = defaultdict(int)

    def __iter__(self) -> Iterator[Event]:
        """Yield the events that the lines stand for."""
        for _ in super().__iter__():
            yield from self._expanded

    def feed(self, start: Callable[[Header], Builder], tick: Tick = unseen) -> Builder:
        """Return the builder that `start` makes from HEADER, once it has all events.

        Args:
            start: makes the builder from HEADER; it and `take` raise ValueError for a fault.
            tick: called with the number of bytes of the file that are done.

        Raises:
            TraceError: there is no HEADER, or an event contradicts what came before.
        """
        builder: Builder | None = None
        for event in ticked(self, tick):
            try:
                if builder is None:
                    builder = start(event)  # type: ignore[arg-type]  # `_parse` has seen to it
                else:
                    builder.take(event)
            except ValueError as error:
                self.fail(f"{event.event}: {error}")
        if builder is None:
            self.require_complete()
        assert builder is not None  # A complete trace has a HEADER.
        return builder

    def _parse(self, raw: bytes) -> Event:
        """Return the event of the next line, once it is checked against those before it."""
        n = self._n
        if not n:
            self._check_header(raw)
        try:
            event = events.decode(raw, grouped=self._grouped)
        except ValueError as error:
            self.fail(str(error))
        name, now = event.event, event.t
        if not n:
            self._begin(event, raw)  # type: ignore[arg-type]  # `_check_header` has seen to it
        if n and name == "HEADER":
            self.fail("HEADER stands in line 1 only")
        if event.n != n:
            self.fail(f"this line has n = {event.n}; {n} lines stand before it")
        if now < self._time:
            self.fail(f"time goes back, from {self._time} to {now} ns")
        if name == "END":
            if now > self._time:
                self.fail(f"END is at {now} ns; the line before it at {self._time}")
            self._expanded = (event,)
            self._expect_end({
                "n": n, "t": now, "event": "END", "lines": n, "events": dict(self._counts),
            })  # fmt: skip
        else:
            # With as many colons as names, none stands there twice.
            colons = raw.count(b":")
            if colons != self._required_names[type(event)] or self._odd_bytes:
                self._check_names(raw, event, colons)
            self._expand(event)
        return event

    def _begin(self, header: Header, raw: bytes) -> None:
        """Store what HEADER says of later lines; refuse other types in its free parts."""
        self._grouped = bool(header.cache_groups)
        if fault := served_fault(raw):
            self.fail(f"HEADER {fault}")

    def _expand(self, event: Event) -> None:
        """Store and count the events that a line stands for."""
        try:
            self._expanded = expanded = self._expansion.expand(event)
        except ValueError as error:
            self.fail(f"{event.event}: {error}")
        counts = self._counts
        for grown in expanded:
            counts[grown.event] += 1
        self._n += len(expanded)
        self._time = expanded[-1].t

    def _check_names(self, raw: bytes, event: Event, colons: int) -> None:
        """Refuse a line that has a name twice, or is not written as kvcore writes it."""
        plain = colons == self._required_names[type(event)]
        if not (plain or colons == _count_names(event)) or (
            self._odd_bytes and ODD_BYTES.search(raw)
        ):
            self._must_be_as_written(raw, parse_json(raw))
        if not plain:
            self._check_placed(event)

    def _check_placed(self, event: Event) -> None:
        """Refuse a replica in the trace of one server; expect one after HEADER of a cluster."""
        if event.event == "HEADER" and event.replicas:  # type: ignore[attr-defined]
            self._required_names = _PLACED_NAMES
        elif isinstance(event.replica, int) and self._required_names is not _PLACED_NAMES:
            self.fail(f"{event.event} has a field 'replica', but HEADER has no replicas")

    def _check_header(self, raw: bytes) -> None:
        """Refuse a file whose first line is not HEADER of this schema."""
        if len(raw) > TRACE_HEADER_BYTES:
            self.fail(f"HEADER is longer than {TRACE_HEADER_BYTES:,} bytes, which is the most")
        try:
            line = parse_json(raw)
        except orjson.JSONDecodeError as error:
            self.fail(f"{NO_TRACE} (not JSON: {error.msg}, at column {error.colno})")
        if type(line) is not dict or line.get("event") != "HEADER":
            self.fail(NO_TRACE)
        schema = line.get("schema", SCHEMA)
        if schema not in range(1, SCHEMA + 1):
            self.fail(f"schema {schema!r}; this version of kvcore reads schemas 1 to {SCHEMA}")
        self._must_be_as_written(raw, line)


def read_request(event: events.Request, arrival: int | None = None) -> Request:
    """Return the request of a REQUEST line, which writes the same line again. O(keys).

    It arrives at `arrival` (ns); None: at the time of the line.

    Raises:
        InputError: a field with a value that no request has.
    """
    fields: dict[str, Any] = {}
    for field, name in OPTIONAL.items():
        value = getattr(event, field)
        if value is not UNSET:
            read = _READ.get(field)
            fields[name] = value if read is None else read(value)
    return Request(
        id=event.id,
        arrival=event.t if arrival is None else arrival,
        prompt_tokens=event.prompt,
        output_tokens=event.output,
        keys=read_keys(event.keys),
        key_tokens=event.key_tokens,
        **fields,
    )


def read_keys(written: list[Any]) -> list[Key]:
    """Return block keys from JSON: ints, and 16 bytes in place of 32 lower-case hex digits.

    Text with capital digits stays text, so that every key is written again as it was.
    """
    if all(type(key) is int for key in written):
        return written
    return [_key(key) for key in written]


def _key(written: Any) -> Key:
    if type(written) is str and len(written) == 2 * KEY_BYTES and written == written.lower():
        return bytes.fromhex(written)
    return cast("Key", written)


_READ: dict[str, Callable[[Any], Any]] = {
    "slo": slo_of,
    "retention": lambda hints: tuple(Retention(*hint) for hint in hints),
    "hints": lambda hints: Hints(**hints),
    "output_keys": read_keys,
}
"""The function that reads an optional field of REQUEST, where its value has another form."""
