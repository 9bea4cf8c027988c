"""Any value that msgpack can hold, as JSON, and back: what a recording's lines are made of."""

from __future__ import annotations

import math
from typing import Any

MARK = "$"


def to_json(value: Any) -> Any:
    """Return `value` for JSON: bytes as `{"$bytes": hex}`, infinities as `{"$float": text}`.

    Names that begin with `$` get another one. What was a NaN comes back as one.
    """
    match value:
        case bytes():
            return {"$bytes": value.hex()}
        case float() if not math.isfinite(value):
            return {"$float": str(value)}
        case dict():
            return {_escaped(name): to_json(item) for name, item in value.items()}
        case list() | tuple():
            return [to_json(item) for item in value]
    return value


def from_json(value: Any) -> Any:
    """Return what `to_json` was given; lists where that had tuples.

    Raises:
        ValueError: a name begins with `$`, and is none of those above.
    """
    match value:
        case {"$bytes": str() as text} if len(value) == 1:
            return bytes.fromhex(text)
        case {"$float": str() as text} if len(value) == 1:
            return float(text)
        case dict():
            return {_unescaped(name): from_json(item) for name, item in value.items()}
        case list():
            return [from_json(item) for item in value]
    return value


def _escaped(name: str) -> str:
    return MARK + name if name.startswith(MARK) else name


def _unescaped(name: str) -> str:
    if not name.startswith(MARK):
        return name
    if not name.startswith(2 * MARK):
        msg = f"the name {name!r} is none that a recording has"
        raise ValueError(msg)
    return name[1:]
