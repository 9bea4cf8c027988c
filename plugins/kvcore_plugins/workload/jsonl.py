"""kvcore's own format: the REQUEST lines of a trace, or a file of them written by hand."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from functools import partial
from types import NoneType
from typing import Any, ClassVar

import attrs

from kvcore import SLO, InputError, Request
from kvcore.files import CutError
from kvcore.request import NO_HINTS, Hints, Retention, chain_keys
from kvcore.trace import SCHEMA
from kvcore.trace.fields import slo_of
from kvcore.units import INT64_LIMIT
from kvcore.workloads import lines
from kvcore_plugins.workload.file_workload import FileWorkload
from kvcore_plugins.workload.rows import Row, parse_row
from kvcore_plugins.workload.turns import Turns

SLO_TIMES = {"ttft", "tpot", "deadline"}


@attrs.define(eq=False)
class Jsonl(FileWorkload):
    """The requests of a kvcore trace, to be run again under other policies.

    Lines of most other events are skipped. A header is optional; without one the file has
    REQUEST lines alone, sorted by `t`. Fields that are not those of a request are ignored. A
    file with a header and without END is cut: requests before the cut are read, with a note.

    Attributes:
        path: path of the file.
        chain: whether `keys` are hashes of each block alone, to be chained here.
        turns: whether requests without a session follow those that they continue, as rows of
            `chat` do; else each comes at its time.
    """

    name: ClassVar[str] = "jsonl"
    later_options = ("turns",)
    line_fields = (("event", "schema"), ("event", "id", "prompt"))

    chain: bool = False
    turns: bool = False
    _cut_after: int | None = attrs.field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[Request]:
        """Yield a request for each REQUEST line. Memory: one line, and the recorded keys.

        Where later lines have keys of generated blocks, or say how long an answer became, as
        those of a run on texts and of an engine, these are read first.
        """
        return Turns().link(self._lines()) if self.turns else self._lines()

    def _lines(self) -> Iterator[Request]:
        """Yield the requests at the times of their lines."""
        recorded, generated = self._texts()
        earliest, key_tokens = 0, None
        for row in self._requests():
            expected = f"{earliest} or later (sorted rows)"
            arrival = earliest = row.in_order("t", row.natural("t"), earliest, expected)
            request = _request(row, arrival)
            if request.id in recorded:
                request.output_keys = recorded[request.id]
            request.output_tokens = generated.get(request.id, request.output_tokens)
            key_tokens = key_tokens or request.key_tokens
            if request.key_tokens != key_tokens:
                raise row.error(field="key_tokens", expected=f"{key_tokens}, as before")
            if self.chain:
                full = request.keys[: request.prompt_tokens // key_tokens]
                chained = chain_keys([*full, *request.output_keys])
                request.keys = chain_keys(request.keys)
                request.output_keys = chained[len(full) :]
            yield request

    @property
    def key_tokens(self) -> int:
        """Tokens a key stands for, read from the first request."""
        with closing(self._requests()) as requests:
            return next(requests).natural("key_tokens", 1)

    @property
    def served_model(self) -> str | None:
        """The model of a trace's header."""
        with closing(self._rows()) as found:
            fields = next(found).fields
        match fields:
            case {"model": {"name": str(name)}}:
                return name
        return None

    @property
    def served_router(self) -> tuple[str, Any] | None:
        """Name and options of the router in the header of a proxy's trace."""
        with closing(self._rows()) as found:
            fields = next(found).fields
        plugins = fields.get("plugins") if fields.get("mode") == "wall" else None
        match plugins:
            case {"router": {"name": str(name), "options": {**options}}}:
                return name, options
        return None

    @property
    def digest(self) -> str:
        """The digest of the file's bytes, and of `chain` if it is set."""
        names = ("chain", "turns")
        return self._file_digest(self.path, **{n: True for n in names if getattr(self, n)})

    @property
    def notes(self) -> list[str]:
        """The last line that was read of a trace that is cut."""
        if self._cut_after is None:
            return []
        return [f"the trace is cut: it is read up to line {self._cut_after:,}"]

    def _texts(self) -> tuple[dict[int | str, list[Any]], dict[int | str, int]]:
        """Return the keys of generated blocks, and the tokens of answers, by request.

        Each KEYS has further ones, also of an answer that its client has left, whose FINISH
        has none; FINISH says how long an answer became.
        """
        keys: dict[int | str, list[Any]] = {}
        lengths: dict[int | str, int] = {}
        with closing(self._rows()) as rows:
            header = next(rows).fields
            told = (header.get(name) for name in ("executor", "mode", "engine"))
            if not generates_texts(*told):
                return keys, lengths
            for row in rows:
                kind = row.fields.get("event")
                if kind == "KEYS":
                    known = keys.setdefault(row.identifier("request"), [])
                    known.extend(row.keys("keys", digests=True))
                elif kind == "FINISH":
                    lengths[row.identifier("request")] = row.natural("output")
        return keys, lengths

    def _requests(self) -> Generator[Row, None, None]:
        empty = True
        for row in self._rows():
            event = row.text("event")
            if event == "REQUEST":
                empty = False
                yield row
            elif event == "HEADER" and not 0 < row.natural("schema") <= SCHEMA:
                raise row.error(field="schema", expected=f"one from 1 to {SCHEMA}")
        if empty:
            msg = f"{self.path}: no REQUEST line: there is nothing to run"
            raise InputError(msg)

    def _rows(self) -> Generator[Row, None, None]:
        """Yield the lines, up to the cut of a trace that a killed process has left."""
        traced = ended = False
        last = 0
        try:
            for line_number, line in lines(self.path):
                try:
                    row = parse_row(self.path, line_number, line)
                except InputError:
                    if traced and not line.endswith(b"\n"):
                        break
                    raise
                event = row.fields.get("event")
                traced = traced or event == "HEADER"
                ended = event == "END"
                last = line_number
                yield row
        except InputError as error:
            if not (traced and isinstance(error.__cause__, CutError)):
                raise
        self._cut_after = last if traced and not ended else None


def generates_texts(executor: object, mode: object, engine: object) -> bool:
    """Return True if outputs in the trace with these fields of HEADER may end before asked.

    A simulated run generates all that a workload asks for, within the limits of its options.
    """
    return executor == "run" or mode == "wall" or bool(engine)


def _request(row: Row, arrival: int) -> Request:
    prompt = row.natural("prompt")
    key_tokens = row.natural("key_tokens", 1)
    return Request(
        id=row.identifier("id"),
        arrival=arrival,
        prompt_tokens=prompt,
        output_tokens=row.natural("output"),
        keys=row.prompt_keys("keys", prompt, key_tokens, digests=True),
        key_tokens=key_tokens,
        salt=row.optional(row.text, "salt", None),
        tenant=row.optional(row.text, "tenant", None),
        priority=row.optional(partial(row.natural, least=-INT64_LIMIT), "priority", 0),
        slo=row.optional(partial(_slo, row), "slo", None),
        predicted_output_tokens=row.optional(row.natural, "predicted", None),
        retention=row.optional(partial(_retention, row), "retention", ()),
        session=row.optional(row.text, "session", None),
        after=row.optional(row.identifier, "after", None),
        think_time=row.optional(row.natural, "think", 0),
        tool=row.optional(row.text, "tool", None),
        hints=row.optional(partial(_hints, row), "hints", NO_HINTS),
        output_keys=row.optional(partial(row.keys, digests=True), "output_keys", ()),
    )


def _slo(row: Row, name: str) -> SLO:
    times = row.fields[name]
    if type(times) is dict and times.keys() <= SLO_TIMES:
        with suppress(InputError):
            return slo_of(times)
    raise row.error(field=name, expected="an object of ttft, tpot, deadline in ns above 0")


def _hints(row: Row, name: str) -> Hints:
    hints = row.fields[name]
    with suppress(InputError, TypeError):
        return Hints(**hints)
    expected = "an object of share (true, false or tokens), pin, prefetch (ns from 1 on)"
    raise row.error(
        field=name, expected=f"{expected}, demote (true or false; no pin beside it)"
    )


def _retention(row: Row, name: str) -> tuple[Retention, ...]:
    hints = row.fields[name]
    if type(hints) is not list:
        raise row.error(field=name, expected="a list of retention hints")
    return tuple(_hint(row, f"{name}[{index}]", hint) for index, hint in enumerate(hints))


def _hint(row: Row, name: str, hint: Any) -> Retention:
    try:
        start, end, priority, duration = hint
        integers = {type(value) for value in hint} <= {int, NoneType}
        if integers and 0 <= start <= (start if end is None else end) and (duration or 0) >= 0:
            return Retention(start, end, priority, duration)
    except (TypeError, ValueError, InputError):
        pass
    expected = "[start, end or null, priority from 1 to 100, duration in ns or null]"
    raise row.error(field=name, expected=expected, got=hint)
