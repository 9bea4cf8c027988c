"""The values of a trace in JSON: block ids, keys, requests, options."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

import attrs
from orjson import dumps

from kvcore import distributions
from kvcore.cache.pool import Ids
from kvcore.errors import InputError
from kvcore.models.codec import Codec
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.native import library
from kvcore.request import KEY_BYTES, SLO, Request
from kvcore.units import INT64_LIMIT
from kvcore.untrusted import MOST_RUN_BLOCKS

SCHEMA = 2
"""The schema this version writes; it reads all before it too."""

CLOCKS = ("untimed", "model", "wall")
"""The values of `mode` in HEADER: no clock, that of a latency model, that of the wall."""

EXPECTATIONS = ("ttft", "tpot", "deadline")


# A field of a request is written by `request_fields` in this module, has its type in
# `kvcore.trace.events.Request`, and is read by `kvcore_plugins.traces.reader.read_request`.
OPTIONAL = {
    "salt": "salt",
    "tenant": "tenant",
    "priority": "priority",
    "slo": "slo",
    "predicted": "predicted_output_tokens",
    "session": "session",
    "after": "after",
    "think": "think_time",
    "tool": "tool",
    "retention": "retention",
    "hints": "hints",
    "output_keys": "output_keys",
}
"""The fields of REQUEST that are left out at their default, and the attributes of a request."""

_DEFAULTS = tuple(getattr(attrs.fields(Request), name).default for name in OPTIONAL.values())

_optional_values = attrgetter(*OPTIONAL.values())


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
    values = _optional_values(request)
    if values != _DEFAULTS:
        fields.update(_given(request, values))
    return fields


def slo_field(slo: SLO) -> dict[str, int]:
    """Return the times of `slo` in ns, by name, without those that are None."""
    times = ((name, getattr(slo, f"{name}_ns")) for name in EXPECTATIONS)
    return {name: ns for name, ns in times if ns is not None}


def slo_of(times: Mapping[Any, Any]) -> SLO:
    """Return the SLO of times in ns, by name, as `slo_field` returns them."""
    return SLO(**{f"{name}_ns": ns for name, ns in times.items()})


def key_fields(keys: Iterable[Any], request: int | str) -> list[int | str]:
    """Return block keys for JSON: ints, or 32 hex digits in place of 16 bytes.

    Raises:
        InputError: a key is neither an int from 0 to 2**63 - 1, nor 16 bytes, nor a string
            of 32 hex digits.
    """
    keys = list(keys)
    if {*map(type, keys)} == {bytes} and {*map(len, keys)} == {KEY_BYTES}:
        return list(map(bytes.hex, keys))
    try:
        numbers = array("q", keys).tolist()
    except (TypeError, OverflowError):
        pass
    else:
        if not numbers or min(numbers) >= 0:
            return numbers
    return [_key_field(key, index, request) for index, key in enumerate(keys)]


def plain(value: Any) -> Any:
    """Return `value` as JSON for the header, equal in equal runs.

    Infinities and NaN become strings; a path or a codec is its text, a model or a device an
    object of its fields, any other object the name of its class, since its `repr` may hold
    an address.
    """
    if isinstance(value, Codec):
        value = str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, SLO):
        value = slo_field(value)
    if isinstance(value, ModelSpec):
        value = value.as_dict()
    if isinstance(value, DeviceSpec):
        value = attrs.asdict(value)
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, os.PathLike):
        # The text of a `Path` may be another name than where it is: that of standard input.
        name = str(value) if isinstance(value, Path) else os.fspath(value)
        return os.fsencode(name).decode(errors="backslashreplace")  # not all are UTF-8
    return getattr(value, "__qualname__", type(value).__qualname__)


def version() -> str:
    """Return the version of kvcore that a header names."""
    return distributions.version("kvcore") or "not installed"


def _given(request: Request, values: tuple[Any, ...]) -> dict[str, Any]:
    """Return the optional fields of REQUEST that are not at their default."""
    pairs = zip(OPTIONAL, values, _DEFAULTS, strict=True)
    fields = {name: value for name, value, default in pairs if value not in (default, [])}
    if "slo" in fields:
        fields["slo"] = slo_field(fields["slo"])
    if "retention" in fields:
        fields["retention"] = [
            [hint.start, hint.end, hint.priority, hint.duration] for hint in request.retention
        ]
    if "hints" in fields:
        fields["hints"] = attrs.asdict(
            request.hints, filter=lambda hint, value: value != hint.default
        )
    if "output_keys" in fields:
        fields["output_keys"] = key_fields(request.output_keys, request.id)
    return fields


def _key_field(key: Any, index: int, request: int | str) -> int | str:
    if isinstance(key, bytes) and len(key) == KEY_BYTES:
        return key.hex()
    if _is_key(key):
        return key  # type: ignore[no-any-return]
    msg = (
        f"request {request!r} has the block key {key!r} (place {index}); a trace holds ints "
        "from 0 to 2**63 - 1, 16 bytes, and strings of 32 hex digits"
    )
    raise InputError(msg)


Runs: TypeAlias = list[tuple[int, int]]


_ID_LIMIT = 2**31

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


def render_all_runs(arrays: Iterable[Ids]) -> Iterable[bytes]:
    """Yield the runs of each of `arrays`, those of `encode_runs`, as JSON.

    Costs 100 ns a block, by the core in C 1 ns a block and 10 ns a run.
    """
    native = library()
    if native is not None:
        return map(native.render_runs, arrays)
    return map(dumps, map(encode_runs, arrays))


def decode_runs(runs: Sequence[Sequence[int]], limit: int = _ID_LIMIT) -> Ids:
    """Return the ids that `runs` stand for, each at least 0 and below `limit`.

    Raises:
        ValueError: a run is empty or leaves the range, or could have been longer; or the
            runs stand for more than 2^22 blocks.
    """
    ids: Ids = array("i")
    end = step = -1
    for first, count in runs:
        gap = first - end
        if (gap == step if step else gap == 1 or gap == -1) and ids:  # noqa: PLR1714  (hot)
            msg = f"the run before [{first}, {count}] could be longer: runs are maximal"
            raise ValueError(msg)
        if count == 1 and 0 <= first < limit:
            # A line has at most 2^20 values, so these need no limit.
            end, step = first, 0
            ids.append(first)
            continue
        if not count or count == -1:
            msg = f"run [{first}, {count}]: a single block is [{first}, 1], and none is no run"
            raise ValueError(msg)
        step = 1 if count > 0 else -1
        end = first + count - step
        if not (0 <= first < limit and 0 <= end < limit):
            msg = f"run [{first}, {count}] leaves the block ids, which are 0 to {limit - 1}"
            raise ValueError(msg)
        if len(ids) + abs(count) > MOST_RUN_BLOCKS:
            msg = f"the runs are more than {MOST_RUN_BLOCKS:,} blocks, which is the most"
            raise ValueError(msg)
        ids.extend(range(first, first + count, step))
    return ids


def _from_to(first: int, last: int) -> Ids:
    """Return the ids `first` to `last`: a slice of all ids, ten times faster than a range."""
    if last >= len(_ascending):
        _ascending.extend(range(len(_ascending), 2 * last + 1))
    return _ascending[first : last + 1]


def _is_key(value: object) -> bool:
    """Return True if `value` is a block key in JSON: an int below 2**63, or 32 hex digits."""
    if type(value) is int:
        return 0 <= value < INT64_LIMIT
    if type(value) is not str or len(value) != 2 * KEY_BYTES:
        return False
    try:
        return len(bytes.fromhex(value)) == KEY_BYTES
    except ValueError:
        return False
