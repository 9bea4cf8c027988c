"""How Python values become the fields of trace lines."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import attrs

from kvcore.errors import InputError
from kvcore.keys import KEY_BYTES
from kvcore.model import DeviceSpec, ModelSpec
from kvcore.request import SLO, Request
from kvcore.trace.schema import EXPECTATIONS, is_key

OPTIONAL = (
    *("salt", "tenant", "priority", "slo", "predicted"),
    *("session", "after", "think", "retention", "output_keys"),
)
DEFAULTS = tuple(getattr(attrs.fields(Request), name).default for name in OPTIONAL)

_optional = attrgetter(*OPTIONAL)


def request_fields(request: Request) -> dict[str, Any]:
    """Return the fields of REQUEST, those at their default left out. O(keys) in C.

    Raises:
        InputError: a key that a trace cannot hold (see `key_fields`).
    """
    fields: dict[str, Any] = {
        "id": request.id,
        "prompt": request.prompt,
        "output": request.output,
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
