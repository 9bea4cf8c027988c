"""The Mooncake trace format and its relatives, and the trace that comes with kvcore."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain as joined
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import attrs
from attrs.converters import optional
from attrs.validators import ge, in_
from attrs.validators import optional as if_given

from kvcore import InputError, Request
from kvcore.blake2 import blake2b
from kvcore.files import DATA, as_path
from kvcore.request import KEY_BYTES, chain_keys
from kvcore.units import INT64_LIMIT
from kvcore.workloads import json_fields, lines
from kvcore_plugins.workload._plain import json_reader
from kvcore_plugins.workload.from_files import FromFiles
from kvcore_plugins.workload.rows import Names, Pending, Row, merged, parse_row, time_order
from kvcore_plugins.workload.times import (
    HEAD,
    UNITS,
    Clock,
    Timed,
    TimeOrder,
    has_fraction,
    is_zone,
    zone_of,
)

BUNDLED_REQUESTS = 12_031

PUBLISHED_KEY_TOKENS = 512
"""Prompt tokens of a key in the traces that were published with Mooncake."""

_BAILIAN = ("chat_id", "parent_chat_id")
_SESSION = frozenset({"session_id", "wait_for", "parent_chat_id"})
_WAITS = ("delay", "tool_wait_ms")
_MS = UNITS["ms"]
_HINT = "; the option key_tokens says how many"
_NO_PARENT = -1
_RECOGNISED = ({"input_length", "hash_ids"}, {"event_type", "event_time_unix_ms"})
_SIZES = (PUBLISHED_KEY_TOKENS, *(1 << bits for bits in range(4, 15)))

_Name: TypeAlias = tuple[str, Any]
"""The field that names a request or a session, and its name."""


@attrs.define(eq=False)
class Mooncake(FromFiles):
    """Requests with a key for each block of the prompt.

    A line is an object of `timestamp`, `input_length`, `output_length` (tokens) and `hash_ids`.
    Relatives of the format are read as well:

    - Qwen-Bailian's traces (`chat_id`, `parent_chat_id`): times in seconds, and ids of single
      blocks of 16 tokens, which are chained here;
    - sessions of AIPerf and of Dynamo's agents (`session_id`, `wait_for`; `delay` and
      `tool_wait_ms`, in ms);
    - Dynamo's own request traces (`event_type`, `request.replay`).

    A request of a session is sent after the one before it, or that it names: a closed loop.
    Times are milliseconds; seconds if one of the first hundred has a fraction; or what their
    size tells if they count from 1970. Rows are sorted by time, and arrivals count from the
    first. The id of a request is its row, from 0, and sessions are numbered from 1. Ids of
    blocks are whole numbers of up to 64 bits, or texts of up to 128 hexadecimal digits.

    Source: Qin et al., Mooncake, FAST'25; Wang et al., KVCache cache in the wild, ATC'25;
    AIPerf, `docs/benchmark-modes/trace-replay.md`; Dynamo, `docs/agents/agent-tracing.md`.

    Attributes:
        path: the file; None is the conversation trace that comes with kvcore.
        chain: whether `hash_ids` are hashes of each block alone, to be chained here.
        key_tokens: number of prompt tokens of a key; by default that which fits the lengths
            and the numbers of ids of the first rows, 512 if it is among several.
        unit: unit of the times: s, ms, us, ns; None: as above.
        turns: whether rows without a session follow those that they continue, as rows of `chat`
            do; else each comes at its time.
        tz: the time zone of dates and times without one, such as `Europe/Berlin`; None: UTC.
    """

    name: ClassVar[str] = "mooncake"
    later_options = ("key_tokens", "unit", "turns", "tz")
    line_fields = (("timestamp", "input_length", "hash_ids"),)

    path: Path | None = attrs.field(default=None, converter=optional(as_path))
    chain: bool = False
    key_tokens: int = attrs.field(default=0, validator=ge(0))
    unit: str | None = attrs.field(default=None, validator=if_given(in_(UNITS)), kw_only=True)
    turns: bool = attrs.field(default=False, kw_only=True)
    tz: str | None = attrs.field(default=None, validator=if_given(is_zone), kw_only=True)
    found_key_tokens: bool = attrs.field(default=False, init=False, repr=False)
    _has_key_tokens: bool = attrs.field(default=False, init=False, repr=False)
    _reading: _Reading | None = attrs.field(default=None, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        """Find the tokens of a key, if they are not given."""
        given, found = self.key_tokens, PUBLISHED_KEY_TOKENS
        if given in (0, found) and self.path is not None:
            # What is wrong with the file is for its readers to say.
            with suppress(InputError):
                rows = islice(_requests(self.path, lines(self.path)), HEAD)
                found = _key_tokens(rows) or found
        self.key_tokens = given or found
        self._has_key_tokens = given not in (0, found)
        self.found_key_tokens = not given and found != PUBLISHED_KEY_TOKENS

    def __iter__(self) -> Iterator[Request]:
        """Yield one request for each row. Keeps some rows in memory; an entry a chat."""
        self._reading = reading = _Reading(self, self._file)
        requests = reading.turns() if reading.closed else reading.requests()
        if not self.turns:
            return requests
        from kvcore_plugins.workload.turns import Turns  # noqa: PLC0415 - for turns alone

        return Turns().link(requests)

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the file; the id of a request is the place of its row."""
        return _requests(self._file, lines(self._file))

    @property
    def digest(self) -> str:
        """The digest of the file's bytes, and of the options that change what is read."""
        options: dict[str, Any] = {"chain": True} if self.chain else {}
        if self._has_key_tokens:
            options["key_tokens"] = self.key_tokens
        if self.unit is not None:
            options["unit"] = self.unit
        if self.turns:
            options["turns"] = True
        if self.tz is not None:
            options["tz"] = self.tz
        return self._file_digest(self._file, **options)

    @property
    def size(self) -> int | None:
        """The number of requests, known for the trace that comes with kvcore."""
        return BUNDLED_REQUESTS if self.path is None else None

    @property
    def notes(self) -> Sequence[str]:
        """Assumptions about the rows that were read last, and numbers of rows left out."""
        return [] if self._reading is None else self._reading.notes()

    def options(self) -> dict[str, Any]:
        """Return the options, without the tokens of a key if they are those of the file."""
        options = super().options()
        if not self._has_key_tokens:
            options.pop("key_tokens", None)
        return options

    @classmethod
    def recognises(cls, first_line: bytes) -> bool:
        """Return True if the line is one of the format, or of Dynamo's traces."""
        names = json_fields(first_line)
        return names == {"timestamp", "event"} or any(names >= fields for fields in _RECOGNISED)

    @property
    def _file(self) -> Path:
        if self.path is not None:
            return self.path
        return DATA / "mooncake_conversation.jsonl.gz"


class _Reading:
    """The rows of one iteration: their times, their sessions, and what is to be noted.

    Args:
        options: the workload.
        path: its file.
    """

    def __init__(self, options: Mooncake, path: Path) -> None:
        self._path = path
        self._lines = lines(path)
        source = _requests(path, self._lines)
        head = list(islice(source, HEAD))
        self._rows: Iterable[Row | Request] = joined(head, self._rest(source))
        self._bailian = bool(head) and all(row.fields.keys() >= set(_BAILIAN) for row in head)
        self._chained = options.chain or self._bailian
        self._key_tokens, self._turns = options.key_tokens, options.turns
        self._found_key_tokens = options.found_key_tokens
        fraction = any(has_fraction(row.fields.get("timestamp")) for row in head)
        in_seconds = self._bailian or fraction
        self._clock = Clock("timestamp", options.unit, "s" if in_seconds else "ms")
        self._clock.zone = zone_of(options.tz)
        # Of the published formats the unit is known.
        self._clock.reason = (
            "" if self._bailian or not fraction else "since some have a fraction"
        )
        # Whether later times have a fraction, although milliseconds are assumed.
        self._late_fraction = False
        self._may_be_seconds = options.unit is None and not in_seconds
        self._order: TimeOrder = time_order(self._clock, self._row)
        self.closed = any(row.fields.get(name) is not None for row in head for name in _SESSION)
        self._untimed = all(row.fields.get("timestamp") is None for row in head)
        self._plain = not (self.closed or self._chained) and all(
            type(row.fields.get("timestamp")) is int and not row.prefix for row in head
        )
        # By the name of a session or of a request: its last request.
        self._sent: dict[_Name, _Sent] = {}
        self._names, self._models = Names(None), dict[str, int]()
        self._short = self._empty = self._late_turns = self._unmet = 0

    def requests(self) -> Iterator[Request]:
        """Yield the requests of rows without sessions."""
        size, chained = self._key_tokens, self._chained
        for time, serial, row in self._order.sort(self._timed()):
            if isinstance(row, Request):
                self._short += (len(row.keys) + 1) * size <= row.prompt_tokens
                row.arrival = self._arrival(time, row)
                yield row
                continue
            if not _SESSION.isdisjoint(row.fields):
                self._late_turns += any(row.fields.get(name) is not None for name in _SESSION)
            prompt = row.natural("input_length", 1)
            keys = row.prompt_keys("hash_ids", prompt, size, wide=True, hint=_HINT)
            self._short += (len(keys) + 1) * size <= prompt
            yield Request(
                id=serial,
                arrival=self._arrival(time, row),
                prompt_tokens=prompt,
                output_tokens=row.natural("output_length"),
                keys=chain_keys(keys) if chained else keys,
                key_tokens=size,
            )

    def _arrival(self, time: int, row: Row | Request) -> int:
        """Return the time since the first one."""
        arrival = time - self._order.first
        if arrival >= INT64_LIMIT:
            row = self._row(row) if isinstance(row, Request) else row
            expected = "a time less than 292 years after the first"
            raise row.error(field="timestamp", expected=expected)
        return arrival

    def _rest(self, source: Iterator[Row]) -> Iterator[Row | Request]:
        """Yield the rows after the first ones; those that the core reads as requests."""
        names = ("timestamp", "input_length", "output_length", "hash_ids")
        factor, size = self._clock.factor, self._key_tokens
        read = json_reader(names, factor, size) if self._plain else None
        if read is None:
            yield from source
            return
        for serial, (line_number, line) in enumerate(self._lines, HEAD):
            yield read(line, serial) or parse_row(self._path, line_number, line)

    def _row(self, request: Request) -> Row:
        """Return the row of a request that the core has read, for an error."""
        serial = cast("int", request.id)
        return next(islice(_requests(self._path, lines(self._path)), serial, None))

    def turns(self) -> Iterator[Request]:
        """Yield the requests of rows of sessions, each after the one before it."""
        return merged(map(self._turn, self._order.sort(self._with_lengths())))

    def notes(self) -> list[str]:
        """Return what was assumed of the rows so far."""
        notes = self._order.notes(self._clock)
        if self._late_fraction and not self._clock.guess:
            notes.append(
                f"times in 'timestamp' are read as ms, since the first {HEAD} are whole, but "
                "later ones have a fraction: unit= says otherwise"
            )
        if self._found_key_tokens:
            notes.append(
                f"a key stands for {self._key_tokens} tokens, as the first rows have it"
            )
        if self._bailian:
            notes.append("ids are of single blocks: chained, so that keys mean prefixes")
            notes.append(
                "a turn is sent after the answer before it; how long that took is not "
                "recorded, so that waits between turns include it"
            )
        if self._untimed:
            notes.append("the file has no times: all begins at once")
        if self._late_turns:
            notes.append(
                f"rows of sessions that are read as single requests, since none of the first "
                f"{HEAD} is of one: {self._late_turns}"
            )
        if self._unmet:
            sent = "what they continue may be found" if self._turns else "each sent at its time"
            notes.append(f"rows whose wait_for names none before them, {sent}: {self._unmet}")
        if self._empty:
            notes.append(f"requests without lengths left out: {self._empty}")
        if self._short:
            notes.append(f"prompts with too few ids, whose rest is never shared: {self._short}")
        return notes

    def _turn(self, timed: Timed[Row]) -> tuple[int, Callable[[], list[Pending]]]:
        """Return the time of a row since the first one, and its request alone."""
        time, serial, row = timed
        fields, first = row.fields, self._order.first
        time = arrival = self._arrival(time, row)
        session, before, names = self._place(row)
        if before is not None:
            session = before.session if self._bailian else session or before.session
            think = max(0, time - before.end)
            waits = [_wait(row, name) for name in _WAITS if fields.get(name) is not None]
            if waits:
                think = sum(waits)
                arrival = max(time, before.arrival + think)
        else:
            think = 0
        end = None if fields.get("end") is None else _wait(row, "end") - first
        sent = _Sent(serial, session, arrival, arrival if end is None else max(arrival, end))
        self._sent |= dict.fromkeys(names, sent)
        after = None if before is None else before.serial
        pending: Pending = arrival, partial(self._request, row, sent, after, think)
        return time, [pending].copy

    def _place(self, row: Row) -> tuple[str | None, _Sent | None, list[_Name]]:
        """Return the session of a row, what it follows, and names by which others follow it."""
        sent = self._sent.get
        if self._bailian:
            chat, parent = (_named(row, name, row.fields.get(name)) for name in _BAILIAN)
            root = parent in (None, _NO_PARENT)
            before = None if root else sent(("chat_id", parent))
            return f"{chat if root else parent}", before, [("chat_id", chat)]
        kinds = ("request_id", "session_id")
        own = [(kind, _named(row, kind, row.fields.get(kind))) for kind in kinds]
        session, awaited = own[1][1], row.fields.get("wait_for")
        if awaited is None:
            before = sent(own[1])
        else:
            awaited = awaited[::-1] if type(awaited) is list else [awaited]
            others = [_named(row, "wait_for", name) for name in awaited]
            found = (sent((kinds[0], name)) or sent((kinds[1], name)) for name in others)
            before = max(filter(None, found), key=attrgetter("end"), default=None)
            self._unmet += before is None and bool(others)
        names = [name for name in own if name[1] is not None]
        return None if session is None else f"{session}", before, names

    def _request(self, row: Row, sent: _Sent, after: int | None, think: int) -> Request:
        """Return the request of a row of a session."""
        prompt, size = row.natural("input_length", 1), self._key_tokens
        keys = row.prompt_keys("hash_ids", prompt, size, wide=True, hint=_HINT)
        self._short += (len(keys) + 1) * size <= prompt
        model = row.optional(row.text, "model", None)
        if model is not None and self._models.setdefault(model, len(self._models)):
            # Equal tokens of two models are two blocks.
            texts = (f"{model}\0{key!r}".encode() for key in keys)
            keys = [blake2b(text, digest_size=KEY_BYTES).digest() for text in texts]
        return Request(
            id=sent.serial,
            arrival=sent.arrival,
            prompt_tokens=prompt,
            output_tokens=row.natural("output_length"),
            keys=chain_keys(keys) if self._chained else keys,
            key_tokens=size,
            salt=model,
            session=self._names.of(sent.session),
            after=after,
            think_time=think,
        )

    def _timed(self) -> Iterator[Timed[Row | Request]]:
        clock, latest, lacks_times = self._clock, 0, self.closed or self._untimed
        read, may_be_seconds = clock.read, self._may_be_seconds
        for serial, row in enumerate(self._rows):
            if isinstance(row, Request):
                latest = row.arrival
                yield latest, serial, row
                continue
            value = row.fields.get("timestamp")
            time = read(value)
            if time is not None:
                latest = time
                if may_be_seconds and type(value) is not int and has_fraction(value):
                    self._late_fraction = True
            elif value is not None or not lacks_times:
                latest = row.time("timestamp", clock)  # an error
            # A turn without a time comes after the one before it, whatever its time.
            yield latest, serial, row

    def _with_lengths(self) -> Iterator[Timed[Row]]:
        for time, serial, row in self._timed():
            assert isinstance(row, Row)  # the core reads none of a session
            if row.fields.get("input_length") is None:
                self._empty += 1
            else:
                yield time, serial, row


class _Sent(NamedTuple):
    """A request that others may follow.

    Attributes:
        serial, session: its id, and its session.
        arrival, end: when it was sent, and when its answer was complete or else `arrival` (ns).
    """

    serial: int
    session: str | None
    arrival: int
    end: int


def _named(row: Row, field: str, name: Any) -> Any:
    """Return the name of a request or a session in a field, which is no object and no list."""
    if type(name) in (dict, list):
        raise row.error(field=field, expected="an integer or a text", got=name)
    return name


def _requests(path: Path, found: Iterator[tuple[int, bytes]]) -> Iterator[Row]:
    """Return the rows of requests, those of Dynamo's traces as rows of Mooncake's format."""
    source = (parse_row(path, line_number, line) for line_number, line in found)
    first = next(source)
    rows = joined([first], source)
    return _of_dynamo(rows) if first.fields.keys() & {"event", "event_type"} else rows


def _of_dynamo(events: Iterable[Row]) -> Iterator[Row]:
    """Yield the requests of a trace of Dynamo as rows of Mooncake's format."""
    for row in events:
        event = row.fields
        if type(event.get("event")) is dict:
            event = event["event"]
        if "event_type" not in event:
            yield row  # what it lacks is for its reader to say
            continue
        request = event.get("request")
        if event.get("event_type") != "request_end" or type(request) is not dict:
            continue
        context, replay = _object(row, event, "agent_context"), _object(row, request, "replay")
        end, start = event.get("event_time_unix_ms"), request.get("request_received_ms")
        if start is None and end is not None:
            took = _first(request.get("total_time_ms"), 0)
            for name, time in (("event_time_unix_ms", end), ("total_time_ms", took)):
                if type(time) not in (int, float):
                    raise row.error(field=name, expected="a number of milliseconds", got=time)
            start = end - took
        fields = {
            "timestamp": start,
            "end": end,
            "input_length": _first(replay.get("input_length"), request.get("input_tokens")),
            "output_length": _first(request.get("output_tokens"), 0),
            "hash_ids": _first(replay.get("input_sequence_hashes"), []),
            "key_tokens": replay.get("trace_block_size"),
            "session_id": _first(context.get("trajectory_id"), context.get("session_id")),
            "model": request.get("model"),
        }
        yield Row(row.path, row.line, fields, "request.")


def _first(value: Any, default: Any) -> Any:
    """Return a field, or `default` if it is missing or null."""
    return default if value is None else value


def _object(row: Row, fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object in an event of `row`, empty if it is missing or null."""
    value = _first(fields.get(name), {})
    if type(value) is not dict:
        raise row.error(field=name, expected="an object", got=value)
    return value


def _key_tokens(head: Iterable[Row]) -> int | None:
    """Return the tokens of a key that fit all of the first rows; None if none does.

    A key stands for each block of the prompt, the last one perhaps partial; or for each full
    block. A row of n > 1 keys and L tokens so has keys of L / n to (L - 1) / (n - 1) tokens, or
    of more than L / (n + 1) and up to L / n.
    """
    partial_last, full = (1, INT64_LIMIT), (1, INT64_LIMIT)
    for row in head:
        fields = row.fields
        recorded: Any = fields.get("key_tokens")
        if type(recorded) is int and recorded > 0:
            return recorded
        length, ids = fields.get("input_length"), fields.get("hash_ids")
        if type(length) is not int or length < 1 or type(ids) is not list or not ids:
            continue
        count = len(ids)
        longest = (length - 1) // (count - 1) if count > 1 else INT64_LIMIT
        partial_last = max(partial_last[0], -(-length // count)), min(partial_last[1], longest)
        full = max(full[0], length // (count + 1) + 1), min(full[1], length // count)
    for low, high in (partial_last, full):
        usual = next((size for size in _SIZES if low <= size <= high), None)
        if usual is not None or low == high:
            return usual or low
    return None


def _wait(row: Row, name: str) -> int:
    """Return a field in ms as ns."""
    value: Any = row.fields[name]
    if type(value) in (int, float) and 0 <= value < INT64_LIMIT // _MS:
        return round(float(value) * _MS) if type(value) is float else int(value) * _MS
    raise row.error(field=name, expected="milliseconds, 0 or more")
