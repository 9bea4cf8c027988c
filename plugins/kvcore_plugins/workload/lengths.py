"""Tables of arrival times and lengths, with columns of any names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

import attrs
from attrs.validators import ge, in_
from attrs.validators import optional as if_given

from kvcore import InputError, Request
from kvcore.request import block_keys
from kvcore.units import INT64_LIMIT
from kvcore.workloads import json_fields
from kvcore_plugins.workload._messages import token_ids
from kvcore_plugins.workload._sessions import SessionChain, Turn
from kvcore_plugins.workload._tables import (
    COLUMNAR,
    Table,
    flat,
    has_failed,
    has_texts,
    normal,
    read_table,
    requests_of,
    table_header,
)
from kvcore_plugins.workload.file_workload import TimedFile
from kvcore_plugins.workload.left_out import models_note, most_named, no_model
from kvcore_plugins.workload.rows import Names, Pending, Row, merged, parse_row, time_order
from kvcore_plugins.workload.times import (
    ENDS,
    HEAD,
    UNITS,
    Clock,
    Timed,
    TimeOrder,
    by_time,
    find_times,
    finest,
    name_and_unit,
)
from kvcore_plugins.workload.usage import UNKNOWN_PROMPTS, reported_note

USUAL = {
    "input": "prompttokens inputlen inputlens inputlength inputtokens inputtoks "
    "inputtokencount inputsequencelength numinputtokens promptlen promptlength "
    "prompttokencount numprompttokens numprefilltokens "
    "requesttokens newtokens newinputtokens numnewtokens "
    "appendedtokens intokens isl prompt input",
    "output": "completiontokens outputlen outputlens outputlength outputtokens outputtoks "
    "outputsequencelength outputtokencount numoutputtokens completionlen completionlength "
    "completiontokencount generatedtokens numgeneratedtokens numdecodetokens responselen "
    "responselength responsetokens outtokens osl completion output",
    "session": "xcorrelationid session sessionid conversation conversationid chatid dialogid "
    "threadid",
    "tenant": "tenant tenantid client clientid user userid",
    "prefix": "prefixlen prefixlength prefixtokens prefixtokencount numprefixtokens prefixkv "
    "prefix historylen historylength historytokens",
    "turn": "turn turnidx turnindex turnid turnnumber round roundidx roundindex roundid "
    "roundnumber",
    "wait": "toolwaitafter waitafter toolwait toolduration tooltime wait waittime thinktime "
    "think delay pause",
    "cached": "cachedtokens cachedprompttokens cachedinputtokens numcachedtokens "
    "promptcachehittokens prompttokensfromcache cachedcontenttokencount",
    "model": "model modelname modelid requestmodel",
    "tokens": "inputtokids inputtokenids prompttokenids",
    "generated": "outputtokids outputtokenids completiontokenids",
}
"""Usual names of columns, in lower case, without signs, the most usual one first."""

_NAMED = ("input", "output", "session", "tenant", "prefix", "turn", "wait", "cached", "model")
_CLOSED = ("prefix", "turn", "wait")
_UNREAD = {"prefix", "cached", "cache", "salt", "wait", "round", "turn", "reasoning", "lora"}
_LENGTHS = re.compile("tok|len|ctx|context|prompt|gen|compl|in|out", re.IGNORECASE)
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_COUNT = re.compile(r"(\d{1,18})(?:\.0*)?", re.ASCII)
# Thousands in some languages.
_GROUPED = re.compile(r"[1-9]\d{0,2}\.000", re.ASCII)
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?")
_LETTERS = re.compile(r"[^\W\d]")
_TURN_BITS = 44
ASSUMPTIONS = {
    "session": "the prompt and the answer before it in its session",
    "cached": "as many tokens of earlier ones as {!r} has",
}
"""What a prompt of which the length alone is known may begin with, by the column for it."""
_FAULTS = (
    "failed requests left out",
    "rows without lengths left out, such as spans of tools",
    "requests that generated nothing left out, as failed ones",
)


@attrs.define(eq=False)
class Lengths(TimedFile):
    """Arrival times and lengths in a table, CSV, TSV or rows of JSON.

    The first line names the columns; columns with usual names are used, in any case and
    spelling: `Request tokens`, `input_length`. Options give other names. ServeGen, BurstGPT
    and most logs have this form. So have the results of `vllm bench serve --save-result
    --save-detailed` (a JSON object of columns), of AIPerf, GuideLLM and inference-perf, spans
    of OpenTelemetry, the output of OpenAI's batches, and LLMServingSim's workloads. Requests
    that failed are left out, and counted in `notes`.

    Such a table has the lengths of prompts, and not their tokens: requests have no keys and
    never hit, unless `assume` says what they share. Two kinds of tables have more. Where each
    row of a session says how many tokens of the context before it goes on with (`prefix_len`),
    these share their blocks, and the prompt is this prefix and the input. Where rows have the
    ids of their tokens, keys are hashes of these.

    In a session whose rows are numbered (`round_idx`, `turn`), or have a wait or a prefix, each
    request is sent after the answer to the one before: a closed loop.

    A time is a number, or a date and time of ISO 8601 (UTC without a time zone). Of several
    times the finest is taken. Rows are sorted by time. Arrivals count from the first one; the
    id of a request is its row, from 0. A table without times needs `rate`, unless it has
    sessions, which then begin at once.

    Source: of the usual names: Xiang et al., ServeGen, 2025; Wang et al., BurstGPT, KDD'25;
    Agrawal et al., Vidur, MLSys'24; vLLM, `vllm/benchmarks/serve.py`; AIPerf, `docs/tutorials`;
    GuideLLM; inference-perf, `docs/reports.md`; LLMServingSim; TraceLab, `replay`.

    Attributes:
        path: path of the file.
        time, input, output: the columns of arrivals, prompt and output lengths.
        session, tenant: the columns of the session and the tenant of a request. In columns that
            are found, not named, names are replaced by numbers.
        prefix, turn, wait: the columns of the tokens that go before the input, of the number of
            a request in its session, and of the wait before or after it.
        failed: whether requests that generated tokens before they failed are read.
        cached: the column of the tokens of a prompt that were in the cache of the server.
        model: the column of the model of a request.
        only_model: the model whose rows alone are read; None: those of all models are.
        assume: what prompts begin with where their lengths alone are known: `session`, with the
            prompt and the answer before them in their session, as far as they are long enough;
            `cached`, with as many tokens of earlier prompts as were cached; `session+cached`,
            with the longer of the two; None: nothing is known to be shared. Requests of a
            session are then sent after the answer to the one before.
        key_tokens: tokens a key would stand for; the block size of a cache that serves it.
        strict: whether a row that would be left out, or a column that changes the meaning and
            is not read, is an error.
        unit, tz, rate, seed: of times, as every `TimedFile` has them.
    """

    name: ClassVar[str] = "lengths"
    later_options = (
        *_CLOSED,
        "strict",
        "tz",
        "cached",
        "assume",
        "model",
        "only_model",
        "failed",
    )
    # Of vLLM's results, and of tables in any spelling.
    line_fields = (COLUMNAR, ("time", "input", "output"))

    time: str | None = None
    input: str | None = None
    output: str | None = None
    session: str | None = None
    tenant: str | None = None
    key_tokens: int = attrs.field(default=16, validator=ge(1))
    prefix: str | None = attrs.field(default=None, kw_only=True)
    turn: str | None = attrs.field(default=None, kw_only=True)
    wait: str | None = attrs.field(default=None, kw_only=True)
    strict: bool = attrs.field(default=False, kw_only=True)
    failed: bool = attrs.field(default=False, kw_only=True)
    cached: str | None = attrs.field(default=None, kw_only=True)
    model: str | None = attrs.field(default=None, kw_only=True)
    only_model: str | None = attrs.field(default=None, kw_only=True)
    assume: str | None = attrs.field(
        default=None,
        validator=if_given(in_((*ASSUMPTIONS, "+".join(ASSUMPTIONS)))),
        kw_only=True,
    )
    _reading: _Reading | None = attrs.field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[Request]:
        """Yield one request for each row.

        Keeps a few rows in memory, and an entry for each session and tenant; all rows of a
        JSON object, and of sessions without times.
        """
        table = read_table(self.path)
        self._reading = reading = _Reading(self, table)
        if reading.closed:
            yield from merged(map(reading.pending, reading.sorted()))
            return
        columns, key_tokens = reading.columns, self.key_tokens
        input_column, generated = columns["input"], columns["output"]
        first = None
        for time, serial, row in reading.sorted():
            first = time if first is None else first
            prompt, output = _tokens(row, input_column, 1), _tokens(row, generated, 0)
            reading.cached_tokens(row, prompt)
            keys, output_keys = reading.token_keys(row, prompt, output)
            session, tenant = reading.names(row)
            yield Request(
                id=serial,
                arrival=reading.arrival(time, first, row),
                prompt_tokens=prompt,
                output_tokens=output,
                keys=keys,
                output_keys=output_keys,
                key_tokens=key_tokens,
                session=session,
                tenant=tenant,
            )

    @property
    def notes(self) -> list[str]:
        """Assumptions about the rows that were read last, and numbers of rows left out."""
        return [] if self._reading is None else self._reading.notes()

    @property
    def served_model(self) -> str | None:
        """The model that most of the first rows name."""
        return most_named(_Reading(self, read_table(self.path)).models_in_head())

    @property
    def reported_hit_ratio(self) -> float | None:
        """The share of the prompt tokens read last that was cached; None: no row has any."""
        return None if self._reading is None else self._reading.reported_hit_ratio()

    @classmethod
    def recognises(cls, first_line: bytes) -> bool:
        """Return True if the line has usual names of columns of both lengths."""
        if names := json_fields(first_line):
            if names >= set(COLUMNAR):
                return True
            requests = requests_of(parse_row(Path(), 1, first_line).fields)
            request = flat(next(requests, {}))
            if has_texts(request):
                return False
            failed_by_aiperf = {"metadata.request_start_ns", "metrics", "error"}
            return cls._has_lengths(request) or failed_by_aiperf <= {*request, *names}
        header = table_header(first_line)
        return all(_usual(role, header) for role in ("input", "output"))

    @classmethod
    def suggestion(cls, head: Sequence[bytes]) -> str:
        """Return the options that name the columns of a table, as good as can be guessed."""
        line = head[0]
        if json_fields(line):
            row = flat(parse_row(Path(), 1, line).fields)
            cells = {} if has_texts(row) else {name: str(cell) for name, cell in row.items()}
        else:
            header, first = table_header(line), table_header(head[1]) if len(head) > 1 else []
            known = dict.fromkeys(header, "") | dict(zip(header, first, strict=False))
            cells = {name: cell for name, cell in known.items() if _LETTERS.match(name)}
        names = list(cells)
        dates = [name for name, cell in cells.items() if _DATE.match(cell)]
        numbers = [name for name, cell in cells.items() if _NUMBER.fullmatch(cell)]
        others = [name for name in numbers if not _LENGTHS.search(name)]
        times = chain(find_times(tuple(names)), dates, others)
        chosen = {role: _usual(role, names) for role in ("input", "output")}
        chosen = {"time": next(times, None), **chosen}
        numbers.sort(key=lambda name: name in others)
        rest = iter([name for name in numbers if name not in chosen.values()])
        named = {role: name or next(rest, None) for role, name in chosen.items()}
        if not (named["input"] and named["output"]):
            return ""
        return ",".join(f"{role}={name}" for role, name in named.items() if name)

    @staticmethod
    def _has_lengths(request: Mapping[str, Any]) -> bool:
        """Return True if a flat row has numbers under usual names of both lengths."""
        numbers = [name for name, value in request.items() if type(value) in (int, float, str)]
        columns = [_usual(role, numbers) for role in ("input", "output")]
        return all(name and _COUNT.fullmatch(str(request[name])) for name in columns)

    def columns(
        self, table: Table, time: str | None, *, closed: bool = False
    ) -> dict[str, str]:
        """Return the name of the column of each role that the table has.

        Args:
            table: the table.
            time: the column of the times that was found.
            closed: whether rows of a session wait for one another, and begin at once without
                times.

        Raises:
            InputError: a column is missing or of no use, or there are two of its name.
        """
        header, columns = table.names, {}
        for role in ("time", *USUAL):
            named = getattr(self, role) if role in ("time", *_NAMED) else None
            if role in _CLOSED and not closed:
                if named is not None:
                    msg = (
                        f"{self.path}:{table.line}: {role}={named} needs a session: "
                        f"session=COLUMN names it. There are: {', '.join(header)}"
                    )
                    raise InputError(msg)
                continue
            column = (
                (time if role == "time" else _found(role, header)) if named is None else named
            )
            if column is not None and header.count(column) > 1:
                msg = (
                    f"{self.path}:{table.line}: {header.count(column)} columns are called "
                    f"{column!r}"
                )
                raise InputError(msg)
            needed = role in ("input", "output") or (
                role == "time" and self.rate is None and not closed
            )
            if column in header:
                columns[role] = column
            elif named is not None or needed:
                wanted = f"called {named!r}" if named else f"that looks like {role!r}"
                msg = (
                    f"{self.path}:{table.line}: no column {wanted}; name it by the option "
                    f"{role}=COLUMN"
                    + (", or give rate=REQUESTS_PER_SECOND" if role == "time" else "")
                    + f". There are: {', '.join(header)}"
                )
                raise InputError(msg)
        return columns


class _Reading:
    """The rows of one iteration: their columns, their times, and what is to be noted.

    Args:
        options: the workload.
        table: its file.
    """

    def __init__(self, options: Lengths, table: Table) -> None:
        self._options = options
        self._table = table
        names = table.names
        unit = options.unit or (
            "s" if names and not table.flat and COLUMNAR[0] in names else None
        )
        # Of fields in objects a wait alone, unless it is named, may be that of anything.
        found = _CLOSED if table.flat else ("prefix", "turn")
        session = options.session or _found("session", names)
        self._assumed = options.assume.split("+") if options.assume else []
        self.closed = bool(self._assumed) or (
            session is not None
            and (
                any(getattr(options, role) for role in _CLOSED)
                or any(_usual(role, names) for role in found)
            )
        )
        usual = find_times(tuple(names))
        candidates = usual if options.time is None else [options.time]
        base = options.columns(table, next(iter(candidates), None), closed=self.closed)
        self._failures = table.failures
        used = dict.fromkeys([*candidates, *usual, *base.values(), *self._failures])
        rows = table.rows([*dict.fromkeys([*base.values(), *used])])
        head = list(islice(rows, HEAD))
        if not head:
            msg = f"{options.path}: no rows after the header"
            raise InputError(msg)
        clock = finest(candidates, [row.fields for row in head], unit, usual)
        if clock is not None:
            base["time"] = clock.name
        self.columns = base
        self._head, self._rows = head, chain(head, rows)
        self._clock = self._time_clock(clock or Clock(base.get("time", ""), unit))
        self._order: TimeOrder | None = None
        ends = find_times(tuple(names), ENDS)
        # A name without a unit has that of the arrivals.
        assumed = _unit_of(self._clock.name) or self._clock.assumed
        self._end = Clock(ends[0], unit, assumed) if ends and self.closed else None
        for timed in filter(None, (self._clock, self._end)):
            timed.zone = options.zone
        # In a table in which requests generate, one that did not generate has failed.
        self._zeros = any(not _is_zero(row.fields.get(base["output"])) for row in head)
        self._added = self.closed and "prefix" in base and self._is_added(head)
        input_name = normal(base["input"])
        # A turn of AIPerf's traces without ids is sent with all that its session said before.
        turns = (
            table.objects
            and input_name == "inputlength"
            and normal(base.get("wait", "")) == "delay"
        )
        self._grows = (
            self.closed
            and "prefix" not in base
            and (turns or input_name.startswith(("new", "append")))
        )
        self._wait_factor = UNITS["ms"] if turns else None
        self._knows = "prefix" in base or "tokens" in base or self._grows
        self._check_assumed()
        self._names = Names(options.session), Names(options.tenant)
        self._chain = SessionChain(options.key_tokens)
        self._repeating = self._shorter = self._prompts = self._cached = 0
        self._ran = self._ran_tokens = 0
        self._first: int | None = None
        self._left_out, self._models = Counter[str](), Counter[str]()
        self._unread = self._unread_columns()

    def _unread_columns(self) -> str:
        """Return the note on columns that may change a row, and are not read; empty: none do.

        Raises:
            InputError: there are some, and reading is strict.
        """
        options, table, read = self._options, self._table, self.columns.values()
        names = [name for name in table.names if name not in read and _UNREAD & _words(name)]
        if not (table.flat and names):
            return ""
        unread = (
            f"columns that are not read, and may change what a row means: {', '.join(names)}"
        )
        if options.strict:
            msg = f"{options.path}: {unread}; strict=true refuses them"
            raise InputError(msg)
        return unread

    def models_in_head(self) -> list[str]:
        """Return the models of the first rows that name one that is read."""
        chosen = self._options.only_model
        return [
            name for name in map(self._model, self._head) if name and chosen in (None, name)
        ]

    def sorted(self) -> Iterator[Timed[Row]]:
        """Yield the rows of requests by time, with their serial numbers."""
        timed, when = self._timed(), self.columns.get("time")
        if self._table.in_memory or (self.closed and when is None):
            timed = iter(sorted(timed, key=by_time))
        if when is not None:
            self._order = time_order(self._clock)
            timed = self._order.sort(timed)
        return timed

    def names(self, row: Row) -> tuple[str | None, str | None]:
        """Return the session and the tenant of a row, as requests have them."""
        sessions, tenants = self._names
        columns = self.columns
        return (
            sessions.of(_label(row, columns.get("session"))),
            tenants.of(_label(row, columns.get("tenant"))),
        )

    def arrival(self, time: int, first: int, row: Row) -> int:
        """Return the time since the first one."""
        if time - first >= INT64_LIMIT and "time" in self.columns:
            expected = "a time less than 292 years after the first"
            raise row.error(field=self.columns["time"], expected=expected)
        return time - first

    def pending(self, timed: Timed[Row]) -> tuple[int, Callable[[], list[Pending]]]:
        """Return the time of a row of a session since the first one, and its request alone."""
        time, rank, row = timed
        first = self._first = time if self._first is None else self._first
        columns, fields = self.columns, row.fields
        label, tenant = self.names(row)
        input_tokens, output = (
            _tokens(row, columns["input"], 1),
            _tokens(row, columns["output"], 0),
        )
        shared = None
        if "prefix" in columns:
            shared = _tokens(row, columns["prefix"], 0)
        elif self._grows:
            shared = self._chain.session(label).context
        prompt = input_tokens + (shared or 0) if self._added or self._grows else input_tokens
        opening, cached = None, self.cached_tokens(row, prompt)
        if self._assumed:
            shared = self._shared(label, prompt, cached)
            opening = cached if "cached" in self._assumed else None
        end = None if self._end is None else self._end.read(fields.get(self._end.name))
        wait = self._wait(row)
        after = "wait" in columns and bool({"after", "tool"} & _words(columns["wait"]))
        keys, generated = self.token_keys(row, prompt, output)
        turn = Turn(
            serial=rank & ((1 << _TURN_BITS) - 1),
            time=self.arrival(time, first, row),
            end=None if end is None else end - first,
            before=None if after else wait,
            after=wait if after else None,
            prompt=prompt,
            output=output,
            shared=None if shared is None else min(shared, prompt),
            opening=opening,
            keys=keys,
            generated=generated,
        )
        pending = self._chain.build(turn, label, tenant)
        return turn.time, [pending].copy

    def cached_tokens(self, row: Row, prompt: int) -> int:
        """Return the tokens of a prompt that were cached, 0 where none are told; count both."""
        name = self.columns.get("cached")
        if name is None or row.fields.get(name) in (None, ""):
            return 0
        cached = min(_tokens(row, name, 0), prompt)
        self._prompts, self._cached = self._prompts + prompt, self._cached + cached
        return cached

    def reported_hit_ratio(self) -> float | None:
        """Return the share of the prompt tokens that was cached; None: none was."""
        return self._cached / self._prompts if self._cached else None

    def _shared(self, label: str | None, prompt: int, cached: int) -> int:
        """Return the tokens of a prompt that are assumed to be those before in its session."""
        session, shared = self._chain.session(label), 0
        if "session" in self._assumed and session.last is not None:
            shared = session.quoted(prompt)
            self._repeating += shared > 0
            self._shorter += not shared
        return max(shared, cached) if "cached" in self._assumed else shared

    def _check_assumed(self) -> None:
        """Raise InputError if a table tells what prompts share, or not what is assumed by."""
        options, columns = self._options, self.columns
        if self._assumed and self._knows:
            told = columns.get("prefix") or columns.get("tokens") or columns["input"]
            msg = f"{options.path}: {told!r} tells what prompts share: leave out assume="
            raise InputError(msg)
        for role in self._assumed:
            if role not in columns:
                msg = (
                    f"{options.path}:{self._table.line}: assume={options.assume} needs a "
                    f"column of {role}: {role}=COLUMN names it. There are: "
                    f"{', '.join(self._table.names)}"
                )
                raise InputError(msg)

    def token_keys(
        self, row: Row, prompt: int, output: int
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the keys of a row with token ids: of its prompt, and of what follows.

        Of a prompt with fewer ids than tokens, the rest and what follows it are unknown.
        """
        name = self.columns.get("tokens", "")
        ids = row.fields.get(name)
        if type(ids) is not list or not ids:
            return (), ()
        after = self.columns.get("generated", "")
        more = row.fields.get(after) or []
        for column, value in ((name, ids), (after, more)):
            if value and (type(value) is not list or token_ids([value]) is None):
                raise row.error(field=column, expected="a list of token ids")
        size = self._options.key_tokens
        full, last, known = prompt // size, (prompt + output) // size, len(ids) // size
        if len(ids) > prompt:
            expected = f"at most {prompt} token ids, those of the prompt"
            raise row.error(field=name, expected=expected, got=len(ids))
        keys = block_keys([*ids, *more], size)
        return keys[:known], keys[full:last] if len(ids) == prompt else ()

    def notes(self) -> list[str]:
        """Return what was assumed of the rows so far, and how many were left out."""
        left_out = self._left_out
        notes = [f"{what}: {left_out[what]}" for what in _FAULTS if left_out[what]]
        if self._ran and self._options.failed:
            notes.insert(
                0, f"failed requests that generated tokens, and are read: {self._ran:,}"
            )
        elif self._ran:
            ran = f"{self._ran:,} of which generated {self._ran_tokens:,} tokens"
            notes[0] += f" ({ran}: failed=true reads what was generated)"
        columns = self.columns
        if self._order is not None:
            notes += self._order.notes(self._clock)
        elif self.closed and self._options.rate is None:
            notes.append(
                "the table has no times: all sessions begin at once; rate= spreads them"
            )
        if self._added:
            notes.append(f"prompts are {columns['prefix']!r} and {columns['input']!r} together")
        elif self._grows:
            notes.append(f"prompts are the context of their session and {columns['input']!r}")
        if not self._knows:
            notes.append(self._sharing())
        if (ratio := self.reported_hit_ratio()) is not None:
            notes.append(reported_note(ratio))
        notes += models_note(self._models, self._options.only_model, "only_model")
        if self._unread:
            notes.append(self._unread)
        return notes

    def _sharing(self) -> str:
        """Return the note on what prompts share of which the lengths alone are known."""
        columns = self.columns
        roles = self._assumed or [role for role in ASSUMPTIONS if role in columns]
        what = f"assume={'+'.join(roles)}"
        begins = " or ".join(ASSUMPTIONS[role].format(columns[role]) for role in roles)
        if not self._assumed:
            hint = f"; {what} lets a prompt begin with {begins}" if roles else ""
            return UNKNOWN_PROMPTS + hint
        counts = sent = ""
        if "session" in roles:
            counts = (
                f" ({self._repeating:,} do, {self._shorter:,} are shorter than the one before)"
            )
        if "session" in columns:
            sent = "; it is sent after the answer before it in its session"
        return f"{what}: a prompt begins with {begins}{counts}{sent}"

    def _timed(self) -> Iterator[Timed[Row]]:
        columns, options, clock = self.columns, self._options, self._clock
        when = columns.get("time")
        times = partial(self._drawn_by_session, options.drawn_arrivals(), {})
        drawn = options.drawn_arrivals()
        for serial, row in enumerate(self._rows):
            if not serial and when is not None:
                options.refuse_rate(row, when)
            if (model := self._model(row)) is not None:
                self._models[model] += 1
            if options.only_model not in (None, model):
                continue
            fault = self._fault(row)
            if fault == _FAULTS[0] and (generated := self._generated(row)):
                self._ran += 1
                self._ran_tokens += generated
                fault = None if options.failed else fault
            if fault is not None:
                if options.strict:
                    expected = "an answer (strict=true)"
                    raise row.error(field=columns["output"], expected=expected)
                self._left_out[fault] += 1
                continue
            if when is not None:
                time = row.time(when, clock)
            else:
                time = times(row) if self.closed else next(drawn)
            yield time, self._turn(row) << _TURN_BITS | serial, row
        chosen = options.only_model
        if chosen is not None and chosen not in self._models:
            raise no_model(options.path, chosen, self._models)

    def _model(self, row: Row) -> str | None:
        """Return the model that a row names."""
        return _label(row, self.columns.get("model"))

    def _turn(self, row: Row) -> int:
        """Return the number of a row in its session; 0 where rows have none."""
        name = self.columns.get("turn")
        return 0 if name is None or row.fields.get(name) is None else _tokens(row, name, 0)

    def _fault(self, row: Row) -> str | None:
        """Return why a row is left out, as a note says it; None: it is a request."""
        failed, empty, idle = _FAULTS
        if self._failures and has_failed(row, self._failures):
            return failed
        fields, columns = row.fields, self.columns
        output = fields.get(columns["output"])
        if self._table.objects and (output is None or fields.get(columns["input"]) is None):
            return empty
        return idle if self._zeros and _is_zero(output) else None

    def _generated(self, row: Row) -> int:
        """Return the tokens that a request generated before it failed; 0: none are told."""
        with suppress(InputError):
            if _tokens(row, self.columns["input"], 1):
                return _tokens(row, self.columns["output"], 0)
        return 0

    def _drawn_by_session(
        self, drawn: Iterator[int], starts: dict[str | None, int], row: Row
    ) -> int:
        """Return the start of the session of a row without a time: drawn, or 0."""
        if self._options.rate is None:
            return 0
        label = _label(row, self.columns.get("session"))
        if label is None or label not in starts:
            starts[label] = next(drawn)
        return starts[label]

    def _time_clock(self, clock: Clock) -> Clock:
        """Return the clock of the arrivals, whose unit may be that of waits."""
        wait = self.columns.get("wait")
        wait_unit = None if wait is None else _unit_of(wait)
        if self.closed and wait_unit is not None:
            clock.assumed, clock.reason = wait_unit, f"as {wait!r} is"
        return clock

    def _wait(self, row: Row) -> int | None:
        """Return the wait of a row in ns: in the unit of its name, or else that of times."""
        wait = self.columns.get("wait")
        value = None if wait is None else row.fields.get(wait)
        if wait is None or value in (None, ""):
            return None
        factor = name_and_unit(wait)[1] or self._wait_factor or self._clock.factor
        with suppress(ValueError):  # a date
            read = -1.0 if Clock(wait, "ns").read(value) is None else float(value)
            if 0 <= read * factor < INT64_LIMIT:
                return round(read * factor)
        raise row.error(field=wait, expected="a time to wait, 0 or more")

    def _is_added(self, head: Sequence[Row]) -> bool:
        """Return True if the prefix of a row is not part of its input.

        It is if an input is never shorter than its prefix, and no prefix is longer than the
        input and output before it.
        """
        columns, when, clock = self.columns, self.columns.get("time"), copy(self._clock)
        before: dict[str | None, tuple[int, int]] = {}
        told = False
        rows = [row for row in head if self._fault(row) is None]
        rows.sort(key=self._turn)
        if when is not None:
            rows.sort(key=lambda row: clock.time_of(row.fields) or 0)
        for row in rows:
            label = _label(row, columns.get("session"))
            prefix, input_tokens = (
                _tokens(row, columns["prefix"], 0),
                _tokens(row, columns["input"], 0),
            )
            earlier, total = before.get(label, (0, 0)) if label else (0, 0)
            if prefix > input_tokens or (total and prefix > total):
                return True
            told = told or earlier > 0
            before[label] = prefix, input_tokens + _tokens(row, columns["output"], 0)
        return not told


def _unit_of(name: str) -> str | None:
    """Return the unit in the name of a column; None: it has none that can be given."""
    factor = name_and_unit(name)[1]
    return next((unit for unit, size in UNITS.items() if size == factor), None)


def _usual(role: str, header: Iterable[str]) -> str | None:
    """Return the column of a header with the most usual name of a role; None: there is none.

    Of equally usual ones that with the fewest parts, in alphabetical order.
    """
    known = USUAL[role].split()
    named = {
        name: name_and_unit(name)[0] if role == "wait" else normal(name) for name in header
    }
    matching = [name for name, base in named.items() if base in known]
    return min(
        matching,
        key=lambda name: (known.index(named[name]), name.count("."), name),
        default=None,
    )


def _found(role: str, header: Sequence[str]) -> str | None:
    """Return the column of a role; rounds of one `id` are a session."""
    usual = _usual(role, header)
    if (
        role == "session"
        and usual is None
        and (_usual("turn", header) or _usual("prefix", header))
    ):
        return next((name for name in header if normal(name) == "id"), None)
    return usual


def _words(name: str) -> set[str]:
    return {word.lower() for word in _WORDS.findall(name)}


def _is_zero(value: Any) -> bool:
    return value == 0 or (type(value) is str and value.strip("0.") == "" != value)


def _tokens(row: Row, name: str, least: int) -> int:
    value = row.fields.get(name)
    if type(value) is int and least <= value < INT64_LIMIT:
        return value
    match = _COUNT.fullmatch(str(value)) if type(value) in (str, float) else None
    if match is None or int(match[1]) < least:
        raise row.error(field=name, expected=f"a whole number of tokens, at least {least}")
    if _GROUPED.fullmatch(str(value)):
        one, thousands = match[1], f"{match[1]}000"
        raise row.error(field=name, expected=f"{one} or {one}.0, or {thousands} if it is that")
    return int(match[1])


def _label(row: Row, name: str | None) -> str | None:
    if name is None:
        return None
    value = row.fields.get(name)
    return str(value) if value or value == 0 else None
