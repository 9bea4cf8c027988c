"""What a line of a trace may say: every event, its fields, and what each may hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs

from kvcore.cache.geometry import COUNTINGS
from kvcore.cache.pool import MOST_BLOCKS
from kvcore.keys import KEY_BYTES
from kvcore.units import LIMIT

SCHEMA = 1
"""The schema this version writes, and the only one it reads."""

MODES = ("untimed", "model", "wall")
MISSES = ("absent", "partial", "expired", "no keys")
COMMITS = ("new", "grown", "same", "shared")
FREES = ("close", "duplicate", "rollback")
EVICTIONS = ("capacity", "expired")
FORGETTING = ("retention",)
SCOPES = ("cache", "sequence")
PREEMPTIONS = ("pause", "recompute")
EXPECTATIONS = ("ttft", "tpot", "deadline")

SHOWN = 60

Test: TypeAlias = Callable[[Any], bool]


@attrs.frozen
class Kind:
    """What a field may hold: words for it, and a test of a value read from JSON."""

    says: str
    test: Test

    def refuse(self, value: object) -> str:
        """Say that `value` is not of this kind."""
        return f"must be {self.says}, not {_shown(value)}"


def _with_common(fields: Mapping[str, Kind]) -> dict[str, Kind]:
    return {**COMMON, **fields}


@attrs.frozen
class Event:
    """The fields one kind of line must have, those of every line included, and may have."""

    required: Mapping[str, Kind] = attrs.field(converter=_with_common)
    optional: Mapping[str, Kind] = attrs.field(factory=dict)

    def fault(self, line: dict[str, Any]) -> str | None:
        """Return what is wrong with the fields of `line`; None if nothing is."""
        for field, kind in self.required.items():
            if field not in line:
                return f"has no field {field!r}"
            if not kind.test(line[field]):
                return f"field {field!r} {kind.refuse(line[field])}"
        if len(line) == len(self.required):
            return None
        for field in [field for field in line if field not in self.required]:
            if field not in self.optional:
                return f"has an unknown field {field!r}"
            if not self.optional[field].test(line[field]):
                return f"field {field!r} {self.optional[field].refuse(line[field])}"
        return None


@attrs.frozen
class Scoped(Event):
    """An event whose fields depend on its scope: those here are of the scope `cache`."""

    sequence: Event = attrs.field(kw_only=True)

    def fault(self, line: dict[str, Any]) -> str | None:
        """Return what is wrong with the fields of `line`, by its scope."""
        if line.get("scope") == "sequence":
            return self.sequence.fault(line)
        return super().fault(line)


def fault(line: Any) -> str | None:
    """Return what is wrong with a line of a trace, read from JSON; None if nothing is.

    Costs about 1 µs: each of its fields is tested once.
    """
    if type(line) is not dict:
        return f"a line must be a JSON object, not {_shown(line)}"
    name = line.get("event")
    if type(name) is not str or name not in EVENTS:
        return f"unknown event {_shown(name)}; there are: {', '.join(EVENTS)}"
    reason = EVENTS[name].fault(line)
    return None if reason is None else f"{name} {reason}"


def is_key(value: object) -> bool:
    """Say whether `value` is a block key in JSON: an int below 2**63, or 32 hex digits."""
    if type(value) is int:
        return 0 <= value < LIMIT
    if type(value) is not str or len(value) != 2 * KEY_BYTES:
        return False
    try:
        return len(bytes.fromhex(value)) == KEY_BYTES
    except ValueError:
        return False


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_keys(value: Any) -> bool:
    return type(value) is list and all(map(is_key, value))


def _is_runs(value: Any) -> bool:
    if type(value) is not list:
        return False
    try:
        for first, count in value:
            if type(first) is not int or type(count) is not int:
                return False
    except (TypeError, ValueError):
        return False
    return True


def _is_retention(value: Any) -> bool:
    return type(value) is list and all(map(_is_hint, value))


def _is_hint(value: Any) -> bool:
    try:
        start, end, priority, duration = value
    except (TypeError, ValueError):
        return False
    return (
        _is_count(start)
        and (end is None or _is_count(end))
        and _is_count(priority)
        and (duration is None or _is_count(duration))
    )


def _is_plugin(value: Any) -> bool:
    return (
        type(value) is dict
        and value.keys() == {"name", "options"}
        and type(value["name"]) is str
        and type(value["options"]) is dict
    )


def _is_source(value: Any) -> bool:
    return (
        type(value) is dict
        and value.keys() == {"name", "digest", "options"}
        and type(value["name"]) is str
        and type(value["digest"]) is str
        and type(value["options"]) is dict
    )


def _is_slo(value: Any) -> bool:
    return (
        type(value) is dict
        and all(name in EXPECTATIONS for name in value)
        and all(map(SIZE.test, value.values()))
    )


def _typed(says: str, *types: type) -> Kind:
    return Kind(says, lambda value: type(value) in types)


def _word(*words: str) -> Kind:
    allowed = frozenset(words)
    says = f"one of {', '.join(words)}" if len(words) > 1 else words[0]
    return Kind(says, lambda value: type(value) is str and value in allowed)


COUNT = Kind("an integer from 0 on", _is_count)
SIZE = Kind("an integer from 1 on", lambda value: type(value) is int and value > 0)
POOL = Kind(
    "an integer from 1 to 2**31 - 1",
    lambda value: type(value) is int and 0 < value <= MOST_BLOCKS,
)
INTEGER = _typed("an integer", int)
NUMBER = Kind(
    "a number above 0", lambda value: type(value) in (int, float) and 0 < value < math.inf
)
TEXT = _typed("a string", str)
TRUE = Kind("true", lambda value: value is True)
ANY = Kind("any JSON", lambda _: True)
OBJECT = _typed("an object", dict)
REQUEST_ID = _typed("an integer or a string", int, str)
KEYS = Kind("a list of integers from 0 to 2**63 - 1 and strings of 32 hex digits", _is_keys)
RUNS = Kind("a list of runs [first, count]", _is_runs)
RETENTION = Kind("a list of [start, end or null, priority, ns or null]", _is_retention)
SLO = Kind(f"an object of any of {', '.join(EXPECTATIONS)}, in ns from 1 on", _is_slo)
PLUGINS = Kind(
    "an object of kinds, each with name and options",
    lambda value: type(value) is dict and all(map(_is_plugin, value.values())),
)
WORKLOAD = Kind(
    "null or an object with name, digest and options",
    lambda value: value is None or _is_source(value),
)
COUNTS = Kind(
    "an object of event counts",
    lambda value: type(value) is dict and all(map(_is_count, value.values())),
)

COMMON: dict[str, Kind] = {"n": COUNT, "t": COUNT, "event": TEXT}

EVENTS: dict[str, Event] = {
    "HEADER": Event(
        {
            "schema": INTEGER,
            "kvcore": TEXT,
            "mode": _word(*MODES),
            "count": _word(*COUNTINGS),
            "block_size": SIZE,
            "key_tokens": SIZE,
            "blocks": POOL,
            "plugins": PLUGINS,
            "workload": WORKLOAD,
            "seed": _typed("an integer or null", int, type(None)),
        },
        {
            "model": ANY,
            "device": ANY,
            "recompute": ANY,
            "executor": TEXT,
            "batching": OBJECT,
            "latency": OBJECT,
            "rate_scale": NUMBER,
            "slo": SLO,
        },
    ),
    "REQUEST": Event(
        {
            "id": REQUEST_ID,
            "prompt": COUNT,
            "output": COUNT,
            "keys": KEYS,
            "key_tokens": SIZE,
        },
        {
            "salt": TEXT,
            "tenant": TEXT,
            "priority": INTEGER,
            "slo": SLO,
            "predicted": COUNT,
            "retention": RETENTION,
            "session": TEXT,
            "after": REQUEST_ID,
            "think": COUNT,
            "output_keys": KEYS,
        },
    ),
    "HIT": Event(
        {"request": REQUEST_ID, "seq": COUNT, "blocks": SIZE, "span": COUNT}, {"again": TRUE}
    ),
    "MISS": Event(
        {"request": REQUEST_ID, "seq": COUNT, "block": COUNT, "why": _word(*MISSES)},
        {"again": TRUE},
    ),
    "SPLIT": Event({"span": COUNT, "upper": COUNT, "at": SIZE}),
    "JOIN": Event({"span": COUNT, "upper": COUNT}),
    "ALLOC": Event({"seq": COUNT, "first": COUNT, "runs": RUNS}),
    "COMMIT": Event(
        {"seq": COUNT, "span": COUNT, "first": COUNT, "blocks": SIZE, "how": _word(*COMMITS)}
    ),
    "EVICT": Scoped(
        {
            "span": COUNT,
            "runs": RUNS,
            "by": TEXT,
            "for": REQUEST_ID,
            "age": COUNT,
            "hits": COUNT,
            "reason": _word(*EVICTIONS),
            "scope": _word(*SCOPES),
        },
        sequence=Event(
            {
                "seq": COUNT,
                "first": COUNT,
                "blocks": SIZE,
                "runs": RUNS,
                "by": TEXT,
                "reason": _word(*FORGETTING),
                "scope": _word(*SCOPES),
            }
        ),
    ),
    "FREE": Event(
        {"seq": COUNT, "runs": RUNS, "reason": _word(*FREES)},
        {"first": COUNT, "forgotten": RUNS},
    ),
    "FORK": Event({"seq": COUNT, "child": COUNT}),
    "COPY": Event({"seq": COUNT, "block": COUNT, "from": COUNT, "to": COUNT}),
    "FIRST_TOKEN": Event({"request": REQUEST_ID, "seq": COUNT}),
    "PREEMPT": Event(
        {"request": REQUEST_ID, "seq": COUNT, "how": _word(*PREEMPTIONS)}, {"for": REQUEST_ID}
    ),
    "RESUME": Event({"request": REQUEST_ID, "seq": COUNT}),
    "KEYS": Event({"request": REQUEST_ID, "keys": KEYS}),
    "FINISH": Event(
        {"request": REQUEST_ID, "seq": COUNT, "output": COUNT}, {"output_keys": KEYS}
    ),
    "REJECT": Event({"request": REQUEST_ID, "why": TEXT}),
    "END": Event({"lines": COUNT, "events": COUNTS, "digest": TEXT}),
}
