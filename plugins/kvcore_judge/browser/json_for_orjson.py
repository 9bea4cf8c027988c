"""A stand-in for `orjson` by the standard library, for a Python that it has no wheel for.

In the browser this file is the module `orjson`, with the names that kvcore uses. Its bytes are
equal, so that digests are; but keys that are no text are written as text, not refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json import JSONDecodeError
from math import isfinite
from typing import Any, NoReturn

__all__ = ["Fragment", "JSONDecodeError", "JSONEncodeError", "dumps", "loads"]

OPT_INDENT_2, OPT_SORT_KEYS, OPT_APPEND_NEWLINE = 1, 2, 4

JSONEncodeError = TypeError

_ODD = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?e[+-]\d+|NaN|-?Infinity|-?\d{19,}')
"""Texts, which may look like anything, and the numbers that `orjson` writes otherwise."""

_MAY_BE_ODD = re.compile(r"\de[+-]\d|NaN|Infinity|\d{19}")

_MAY_BE_HALF = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")

_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
"""The integers that `orjson` writes."""


def dumps(
    value: Any, /, default: Callable[[Any], Any] | None = None, option: int | None = None
) -> bytes:
    """Return a value as JSON.

    Raises:
        TypeError: it has no JSON: an object without `default`, or an integer beyond 64 bits.
    """
    flags = option or 0
    pretty = bool(flags & OPT_INDENT_2)
    try:
        text = json.dumps(
            value,
            ensure_ascii=False,
            indent=2 if pretty else None,
            separators=(",", ": " if pretty else ":"),
            sort_keys=bool(flags & OPT_SORT_KEYS),
            default=default,
        )
        if _MAY_BE_ODD.search(text):
            text = _ODD.sub(_as_orjson, text)
        data = text.encode()
    except (ValueError, RecursionError) as error:  # a circle, or half a surrogate pair
        raise TypeError(str(error)) from error
    return data + b"\n" if flags & OPT_APPEND_NEWLINE else data


def _as_orjson(match: re.Match[str]) -> str:
    """Return a text as it is, and a number as `orjson` writes it."""
    text = match[0]
    if text.startswith('"'):
        return text
    if text in ("NaN", "Infinity", "-Infinity"):
        return "null"
    digits, _, exponent = text.partition("e")
    if not exponent:
        if not _LEAST <= int(text) <= _MOST and "." not in text:
            msg = "Integer exceeds 64-bit range"
            raise TypeError(msg)
        return text
    if int(exponent) != -5:  # noqa: PLR2004 - from there on `orjson` writes no exponent
        return f"{digits}e{int(exponent):+d}"
    sign, digits_left = ("-", digits[1:]) if digits.startswith("-") else ("", digits)
    return f"{sign}0.0000{digits_left.replace('.', '')}"


def loads(data: bytes | bytearray | memoryview | str, /) -> Any:
    """Return the value of a JSON text.

    Raises:
        JSONDecodeError: it is no JSON, or not in UTF-8; or has a number beyond those of floats,
            or half a surrogate pair.
    """
    try:
        text = data if isinstance(data, str) else bytes(data).decode()
        value = json.loads(
            text, parse_constant=_refuse, parse_int=_integer, parse_float=_finite
        )
        if _MAY_BE_HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise JSONDecodeError(str(error), "", 0) from error
    except RecursionError as error:
        msg = "too deep"
        raise JSONDecodeError(msg, "", 0) from error
    return value


def Fragment(contents: bytes | str, /) -> Any:  # noqa: N802 - the name that `orjson` has
    """Return a JSON text as a value, which `dumps` writes as that text."""
    return loads(contents)


def _refuse(constant: str) -> NoReturn:
    msg = f"{constant:.80} is no JSON"
    raise JSONDecodeError(msg, constant, 0)


def _integer(text: str) -> int | float:
    """Return an integer; beyond 64 bits the nearest float, as `orjson` does."""
    value = int(text) if len(text) < len(str(_MOST)) + 2 else _finite(text)
    return value if _LEAST <= value <= _MOST else float(text)


def _finite(text: str) -> float:
    """Return a float, unless it is infinite: `orjson` reads none."""
    value = float(text)
    return value if isfinite(value) else _refuse(text)
