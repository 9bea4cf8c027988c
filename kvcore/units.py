"""Sizes and times: parsed from text exactly, and formatted with about three digits."""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Rational
from typing import Any, Final

from kvcore.errors import InputError, shorten

NS_PER_S: Final = 10**9
"""Nanoseconds in a second. The clock counts nanoseconds; options and files have seconds."""

PS_PER_NS: Final = 1000
"""Picoseconds in a nanosecond. Step times are counted in them: reading the K/V of a token
may take less than a nanosecond."""

PS_PER_S = NS_PER_S * PS_PER_NS
"""Picoseconds in a second."""

INT64_LIMIT: Final = 2**63
"""Bytes, nanoseconds, counts and integer keys are below this: they fit into int64."""

BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_FACTORS = {unit.lower(): factor for unit, factor in (BINARY | DECIMAL).items()}
# Bounded, since Python refuses to read thousands of digits; compiled when first used.
_NUMBER = r"(?ai)\s*([0-9]{0,999}\.?[0-9]{1,999}"
_SIZE = rf"{_NUMBER})\s*([a-z]*)\s*"
_MULTIPLES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_MULTIPLES |= {"ki": 2**10, "mi": 2**20, "gi": 2**30}
_SIGNED = _NUMBER.replace("([", "([+-]?[")
_WHOLE = rf"{_SIGNED}(?:e[+-]?[0-9]{{1,3}})?)\s*((?:[kmg]i?|[tp])?)\s*"
_SECONDS = rf"{_NUMBER}(?:e[+-]?[0-9]{{1,3}})?)\s*((?:[mun]?s)?)\s*"
_UNITS = {"": NS_PER_S, "s": NS_PER_S, "ms": 10**6, "us": 10**3, "ns": 1}


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as `40GiB`, `1.5 GB` or `4096B`; `0` needs no unit.

    `GB` is 10^9 bytes, `GiB` 2^30; case does not matter. A fraction of a byte is dropped.

    Raises:
        InputError: not a number with a known unit, or 2^63 bytes and more.
    """
    match = re.fullmatch(_SIZE, text)
    amount = Fraction(match[1]) if match else None
    unit = match[2].lower() if match else ""
    factor = _FACTORS.get("b" if amount == 0 and not unit else unit)
    if amount is None or factor is None:
        units = ", ".join(unit for unit in BINARY | DECIMAL if unit != "B")
        hint = "; the decimal mark is a point, as in 1.5GiB" if "," in text else ""
        hint = "; the unit is missing" if match and not unit else hint
        msg = f"size {text!r}: expected a number followed by B, {units}, such as 40GiB{hint}"
        raise InputError(msg)
    size = int(amount * factor)
    if size >= INT64_LIMIT:
        msg = f"size {text!r}: too large, it must be below 2^63 bytes"
        raise InputError(msg)
    return size


def parse_rate(text: str) -> int:
    """Return the bytes a second of text such as `50GB/s` or `50GB`.

    Raises:
        InputError: as for `parse_bytes`.
    """
    return parse_bytes(text.strip().removesuffix("/s"))


def as_float(number: Any) -> float:
    """Return a number as a float. attrs reads the signature of this faster than `float`'s."""
    return float(number)


# The type of an option is that of its field, unless the field's converter has another one.
del as_float.__annotations__["number"]


def parse_whole(text: str, least: int = -INT64_LIMIT) -> int:
    """Return the whole number of a text such as `8192`, `1e5`, `8k` or `-1`.

    It is from `least` to 2^63 - 1.

    `k`, `M`, `G`, `T` and `P` are powers of 1000; `Ki`, `Mi` and `Gi` powers of 1024.

    Raises:
        InputError: the text is no such number.
    """
    match = re.fullmatch(_WHOLE, text)
    amount = Fraction(match[1]) * _MULTIPLES[match[2].lower()] if match else None
    if amount is None or amount.denominator != 1:
        msg = f"expected a whole number, such as 8192, 8k or 1e5, not {shorten(text)!r}"
        raise InputError(msg)
    return check_whole(int(amount), least)


def check_whole(number: int, least: int = -INT64_LIMIT) -> int:
    """Return `number` after a check that it is from `least` to 2^63 - 1.

    Raises:
        InputError: it is not.
    """
    if number >= INT64_LIMIT or number < least:
        bound = f"at least {least}" if -INT64_LIMIT < least > number else "of less than 64 bits"
        msg = f"{shorten(str(number), 24)} is out of range: it must be {bound}"
        raise InputError(msg)
    return number


def parse_window(text: str) -> tuple[int, int | None]:
    """Return the start and end (ns) of a window such as `60:120`, in seconds.

    An empty start is 0, an empty end None.

    Raises:
        InputError: there are not two times, or the second is not after the first.
    """
    start, colon, end = text.partition(":")
    if not colon or ":" in end or not text.strip(": "):
        msg = f"window {shorten(text)!r}: expected START:END in seconds, such as 60:120 or 60:"
        raise InputError(msg)
    first = parse_seconds(start) if start.strip() else 0
    last = parse_seconds(end) if end.strip() else None
    if last is not None and last <= first:
        msg = f"window {shorten(text)!r}: nothing lies in it; END comes after START"
        raise InputError(msg)
    return first, last


def parse_seconds(text: str) -> int:
    """Return the exact nanoseconds of a time such as `90` or `1.5` (seconds), or `50ms`.

    The units are `s`, `ms`, `us` and `ns`.

    Raises:
        InputError: not a number, negative, finer than a nanosecond, or 2^63 ns and more.
    """
    match = re.fullmatch(_SECONDS, text)
    if match is None:
        msg = f"time {text!r}: expected a number of seconds, such as 90 or 1.5, or 50ms"
        raise InputError(msg)
    nanoseconds = Fraction(match[1]) * _UNITS[match[2].lower()]
    if nanoseconds.denominator != 1:
        msg = f"time {text!r}: finer than a nanosecond, which is the clock's unit"
        raise InputError(msg)
    if nanoseconds >= INT64_LIMIT:
        msg = f"time {text!r}: too large, it must be below 2^63 nanoseconds (292 years)"
        raise InputError(msg)
    return int(nanoseconds)


def seconds_text(ns: int) -> str:
    """Return nanoseconds as the text of seconds that `parse_seconds` reads, exact."""
    return f"{ns // NS_PER_S}.{ns % NS_PER_S:09}".rstrip("0").rstrip(".")


def window_text(window: tuple[int, int | None]) -> str:
    """Return the text of a window of nanoseconds, in seconds, that `parse_window` reads."""
    return ":".join("" if t is None else seconds_text(t) for t in window)


def picoseconds(seconds: float, what: str) -> int:
    """Return `seconds` in picoseconds, rounded to the nearest whole number, or the even one.

    Exact, so the result is the same on every machine. Errors call it `what`.

    Raises:
        InputError: negative, not a number, or 2^63 ps (106 days) and more.
    """
    limit = INT64_LIMIT // PS_PER_S
    if not (isinstance(seconds, Rational | float) and 0 <= seconds < limit):
        msg = f"{what}={seconds!r} must be a number of seconds, from 0 and below {limit:,}"
        raise InputError(msg)
    return round(Fraction(seconds) * PS_PER_S)


def format_bytes(size: int, units: dict[str, int] = BINARY) -> str:
    """Return a size with about three digits: `2.5 GiB`, with `DECIMAL` units `2.68 GB`."""
    reached = (unit for unit in units if units[unit] <= abs(size))
    unit = max(reached, key=units.__getitem__, default="B")
    return f"{format_number(size / units[unit])} {unit}"


def format_seconds(seconds: float, *, zeros: bool = False) -> str:
    """Return a duration with about three digits: `1.5 s`, `31.2 ms`, `7.06 us`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * factor >= 1:
            return f"{format_number(seconds * factor, zeros=zeros)} {unit}"
    return f"{format_number(seconds * 1e9, zeros=zeros)} ns"


def format_number(value: float, *, zeros: bool = False) -> str:
    """Return a number with three digits, or all digits before the point: `2.68`, `12,345`.

    From 10^15 on it has an exponent: `1.5e+20`. Only with `zeros` it may end in them: `2.60`.
    """
    if abs(value) >= 1e15:  # noqa: PLR2004
        return f"{value:.3g}"
    places = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0  # noqa: PLR2004
    text = f"{value:z,.{places}f}"
    return text if zeros or not places else text.rstrip("0").rstrip(".")


def format_dollars(usd: float) -> str:
    """Return dollars with two decimals, and less than one with four: `12.50`, `0.0312`."""
    return f"{usd:,.2f}" if usd >= 1 else f"{usd:.4f}"
