"""Which token ids a request has: those of its text, or such as its block keys stand for."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import attrs

from kvcore.cache.layout import ACCOUNTINGS
from kvcore.cache.pool import MOST_BLOCKS
from kvcore.errors import InputError
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.request import KEY_BYTES, SLO, Request, TextRequest
from kvcore.units import INT64_LIMIT


def told_keys(request: Request) -> dict[str, list[int | str]]:
    """Return the field of FINISH for keys that only the run could tell; nothing if none."""
    if isinstance(request, TextRequest) and request.output_keys:
        return {"output_keys": key_fields(request.output_keys, request.id)}
    return {}


OPTIONAL = {
    "salt": "salt",
    "tenant": "tenant",
    "priority": "priority",
    "slo": "slo",
    "predicted": "predicted_output_tokens",
    "session": "session",
    "after": "after",
    "think": "think_time",
    "retention": "retention",
    "output_keys": "output_keys",
}
"""The fields of REQUEST that are left out at their default, and the attributes they hold."""


DEFAULTS = tuple(getattr(attrs.fields(Request), name).default for name in OPTIONAL.values())


_optional = attrgetter(*OPTIONAL.values())


def request_fields(request: Request) -> dict[str, Any]:
    """Return the fields of REQUEST, those at their default left out. O(keys) in C.

    Raises:
        InputError: a key that a trace cannot hold (see `key_fields`).
    """
    fields: dict[str, Any] = {
        "id": request.id,
        "prompt": request.prompt_tokens,
        "output": request.output_tokens,
        "keys": key_fields(request.keys, request.id),
        "key_tokens": request.key_tokens,
    }
    values = _optional(request)
    if values != DEFAULTS:
        fields.update(_given(request, values))
    return fields


def slo_field(slo: SLO) -> dict[str, int]:
    """Return what is expected, in ns; what is not is left out."""
    return {name: ns for name in EXPECTATIONS if (ns := getattr(slo, name)) is not None}


def key_fields(keys: Iterable[Any], request: int | str) -> list[int | str]:
    """Return block keys as JSON has them: ints, or 32 hex digits for 16 bytes.

    Raises:
        InputError: a key is neither an int from 0 to 2**63 - 1, nor 16 bytes, nor a string
            of 32 hex digits.
    """
    keys = list(keys)
    try:
        numbers = array("q", keys).tolist()
    except (TypeError, OverflowError):
        pass
    else:
        if not numbers or min(numbers) >= 0:
            return numbers
    return [_key_field(key, place, request) for place, key in enumerate(keys)]


def plain(value: Any) -> Any:
    """Return `value` as JSON that equal runs have equal: for options in the header.

    Infinities and NaN become strings; a path is its text, a model or a device an object of
    its fields, any other object the name of its class, since its `repr` may hold an address.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, SLO):
        value = slo_field(value)
    if isinstance(value, (ModelSpec, DeviceSpec)):
        value = attrs.asdict(value)
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _given(request: Request, values: tuple[Any, ...]) -> dict[str, Any]:
    """Return the optional fields of REQUEST that are not at their default."""
    pairs = zip(OPTIONAL, values, DEFAULTS, strict=True)
    given = {name: value for name, value, default in pairs if value not in (default, [])}
    if "slo" in given:
        given["slo"] = slo_field(given["slo"])
    if "retention" in given:
        given["retention"] = [
            [hint.start, hint.end, hint.priority, hint.duration] for hint in request.retention
        ]
    if "output_keys" in given:
        given["output_keys"] = key_fields(request.output_keys, request.id)
    return given


def _key_field(key: Any, place: int, request: int | str) -> int | str:
    if isinstance(key, bytes) and len(key) == KEY_BYTES:
        return key.hex()
    if is_key(key):
        return key  # type: ignore[no-any-return]
    msg = (
        f"request {request!r} has the block key {key!r} (place {place}); a trace holds ints "
        "from 0 to 2**63 - 1, 16 bytes, and strings of 32 hex digits"
    )
    raise InputError(msg)


Ids: TypeAlias = "array[int]"


Runs: TypeAlias = list[tuple[int, int]]


MOST_IDS = 2**31


_ascending: Ids = array("i")


def encode_runs(ids: Ids) -> Runs:
    """Return distinct `ids` as runs: 9, 8, 7, 3 is `[(9, -3), (3, 1)]`.

    From left to right every run is as long as it can be, so equal ids have equal runs.
    Costs O(ids), in C where they form a single run.
    """
    count = len(ids)
    if count < 2:  # noqa: PLR2004  (a run of one is the most frequent by far)
        return [(ids[0], 1)] if count else []
    first = last = ids[0]
    end = ids[-1]
    if end - first == count - 1 and ids == _from_to(first, end):
        return [(first, count)]
    if first - end == count - 1 and ids == _from_to(end, first)[::-1]:
        return [(first, -count)]
    runs: Runs = []
    add = runs.append
    step = 0
    for block in ids[1:]:
        delta = block - last
        if delta != step:
            if step:
                add((first, last - first + step))
                first = block
                step = 0
            elif delta == 1 or delta == -1:  # noqa: PLR1714  (hot)
                step = delta
            else:
                add((first, 1))
                first = block
        last = block
    add((first, last - first + step or 1))
    return runs


def decode_runs(runs: Sequence[Sequence[int]], limit: int = MOST_IDS) -> Ids:
    """Return the ids that `runs` stand for, each at least 0 and below `limit`.

    Raises:
        ValueError: a run is empty or leaves the range, or could have been longer.
    """
    ids: Ids = array("i")
    end = step = -1
    for first, count in runs:
        if not count or count == -1:
            msg = f"run [{first}, {count}]: a single block is [{first}, 1], and none is no run"
            raise ValueError(msg)
        gap = first - end
        if ids and (gap == step if step else abs(gap) == 1):
            msg = f"the run before [{first}, {count}] could be longer: runs are maximal"
            raise ValueError(msg)
        way = 1 if count > 0 else -1
        end = first + count - way
        if not (0 <= first < limit and 0 <= end < limit):
            msg = f"run [{first}, {count}] leaves the block ids, which are 0 to {limit - 1}"
            raise ValueError(msg)
        step = way if count != 1 else 0
        ids.extend(range(first, first + count, way))
    return ids


def _from_to(first: int, last: int) -> Ids:
    """Return the ids `first` to `last`: a slice of all ids, ten times faster than a range."""
    if last >= len(_ascending):
        _ascending.extend(range(len(_ascending), 2 * last + 1))
    return _ascending[first : last + 1]


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
        return 0 <= value < INT64_LIMIT
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


SLO_KIND = Kind(f"an object of any of {', '.join(EXPECTATIONS)}, in ns from 1 on", _is_slo)


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
            "count": _word(*ACCOUNTINGS),
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
            "slo": SLO_KIND,
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
            "slo": SLO_KIND,
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
