"""Agentic coding sessions in the format of WEKA's kv-cache-tester."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import ClassVar

import attrs
from attrs.validators import ge, lt

from kvcore import Request
from kvcore.files import DATA, as_path
from kvcore.request import KeyPrefix
from kvcore.units import NS_PER_S, as_float
from kvcore.workloads import exponential, lines
from kvcore_plugins.workload.file_workload import FileWorkload
from kvcore_plugins.workload.rows import MOST_NESTED, Pending, Row, merged, too_deep

_KEY_TOKENS = 64
_KEY_BITS = 32


@attrs.define(eq=False)
class Weka(FileWorkload):
    """Sessions of coding agents, subagents included, merged into one stream.

    A line is a session: `id`, `block_size` (64), `hash_id_scope` and `requests`, each of
    `t` (s from the session's start), `in`, `out` (tokens), `hash_ids`, and where known
    `api_time` and `think_time` (s) and `stop`, why its answer ended. An entry of type
    `subagent` holds `requests` of its own, their `t` counted from its own.

    The format has no clock in common, so sessions start at random: the first at 0, the
    others after exponential gaps, in the order of the file. A key is (line << 32) | id,
    or the id itself where `hash_id_scope` is `global`. A request's id is its place, as in
    `trace_0254/1` and, for a subagent's, `trace_0254/2/0`.

    Traffic is closed-loop: a request comes `think` after its agent's last one has finished;
    a subagent's first comes after the request that its parent sent last, think time being
    the recorded time between the two. The names of tools were not recorded: `tool`
    is `subagent` where an answer stopped to start one, and `tool_use` where to call another.

    Attributes:
        path: path of the file; the default is the sessions that come with kvcore.
        stagger: mean seconds between the starts of two sessions; 0 starts all at once.
        seed: seed of the random starts.
    """

    name: ClassVar[str] = "weka"
    key_tokens: ClassVar[int] = _KEY_TOKENS
    later_options = ("path",)
    line_fields = (("id", "block_size", "requests"),)

    path: Path = attrs.field(default=DATA / "agentic_sessions.jsonl.gz", converter=as_path)
    stagger: float = attrs.field(default=60.0, converter=as_float, validator=[ge(0), lt(1e9)])
    seed: int = 0

    def __iter__(self) -> Iterator[Request]:
        """Yield one request for each turn. Keeps the running sessions in memory."""
        return merged(self._sessions())

    def _sessions(self) -> Iterator[tuple[int, Callable[[], list[Pending]]]]:
        draw = Random(self.seed).random  # noqa: S311 - a workload, not a secret
        start = 0
        ids: set[str] = set()
        for line_number, line in lines(self.path):
            yield start, partial(_session, self.path, line_number, line, start, ids)
            start += round(exponential(draw) * self.stagger * NS_PER_S)


@attrs.define(eq=False)
class _Turn:
    """A request to come, `offset` ns after its session's start; it was recorded until `end`."""

    offset: int
    end: int
    id: str
    after: str | None
    think: int
    prompt: int
    output: int
    path: array[int]
    keys: int
    tool: str | None


def _request(turn: _Turn, session: str, start: int) -> Request:
    return Request(
        id=turn.id,
        arrival=start + turn.offset,
        prompt_tokens=turn.prompt,
        output_tokens=turn.output,
        keys=KeyPrefix(turn.path, turn.keys),
        key_tokens=_KEY_TOKENS,
        session=session,
        after=turn.after,
        think_time=turn.think,
        tool=turn.tool,
    )


def _session(
    path: Path, line_number: int, line: bytes, start: int, ids: set[str]
) -> list[Pending]:
    # Imported late: every command imports this module, and msgspec takes a while.
    from kvcore_plugins.workload._key_texts import parse_session  # noqa: PLC0415

    row = parse_session(path, line_number, line)
    name = row.text("id")
    if name in ids:
        raise row.error(field="id", expected="a session that is not on an earlier line")
    ids.add(name)
    if row.natural("block_size") != _KEY_TOKENS:
        raise row.error(field="block_size", expected=f"{_KEY_TOKENS}")
    scope = row.optional(row.text, "hash_id_scope", "local")
    if scope not in {"local", "global"}:
        raise row.error(field="hash_id_scope", expected="'local' or 'global'")
    namespace = row.line << _KEY_BITS if scope == "local" else 0
    turns = sorted(_turns(row, name, 0, None, namespace), key=attrgetter("offset"))
    if not turns:
        raise row.error(field="requests", expected="at least one request")
    return [
        (start + turn.offset, partial(_request, turn, name, start)) for turn in reversed(turns)
    ]


def _turns(
    agent: Row, name: str, start: int, parent: _Turn | None, namespace: int
) -> Iterator[_Turn]:
    """Yield an agent's turns and its subagents', in the order of the file.

    `parent` is the turn that must have finished before the first of them.
    """
    from kvcore_plugins.workload._key_texts import KeyTexts  # noqa: PLC0415 - as above

    if agent.prefix.count("[") > MOST_NESTED // 2:
        raise too_deep(agent.path, agent.line)
    texts = KeyTexts(_KEY_TOKENS, 1 << _KEY_BITS, namespace)
    last, earliest = parent, 0
    for index, row in enumerate(agent.inner("requests")):
        t = row.nanoseconds("t")
        earliest = row.in_order("t", t, earliest)
        sent, turn_id = start + t, f"{name}/{index}"
        if row.fields.get("type") == "subagent":
            if last is not None and last is not parent and last.tool:
                last.tool = "subagent"
            yield from _turns(row, turn_id, sent, last, namespace)
            continue
        gap = 0 if last is None else max(0, sent - last.end)
        first = last is parent
        prompt = row.natural("in", 1)
        path, keys = texts.read(row, "hash_ids", prompt)
        last = _Turn(
            offset=sent,
            end=sent + row.optional(row.nanoseconds, "api_time", 0),
            id=turn_id,
            after=None if last is None else last.id,
            think=gap if first else row.optional(row.nanoseconds, "think_time", gap),
            prompt=prompt,
            output=row.natural("out"),
            path=path,
            keys=keys,
            tool="tool_use" if row.fields.get("stop") == "tool_use" else None,
        )
        yield last
