"""Parsing and formatting of sizes, counts and times."""

from __future__ import annotations

from decimal import Decimal
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import InputError
from kvcore.units import (
    BINARY,
    DECIMAL,
    INT64_LIMIT,
    format_bytes,
    format_number,
    format_seconds,
    parse_bytes,
    parse_seconds,
    parse_whole,
    parse_window,
    picoseconds,
    window_text,
)

count = partial(parse_whole, least=1)
decimal = partial(format_bytes, units=DECIMAL)
step = partial(picoseconds, what="step")

CONVERSIONS = [
    # A size is a number and a unit of any case; a fraction of a byte is dropped.
    (parse_bytes, {"0": 0, "4096B": 4096, "7B": 7, "40GiB": 40 * 2**30, "40GB": 40 * 10**9}),
    (parse_bytes, {"1.5 MiB": 3 * 2**19, ".5kb": 500, " 2 tib ": 2 * 2**40}),
    (parse_bytes, {"0.1GiB": 107374182}),
    # A count may have a power of ten or a unit, and is parsed exactly.
    (count, {"1": 1, "8192": 8192, "8k": 8000, "8Ki": 8192, "1.5M": 1_500_000}),
    (count, {"1e5": 100_000, " 1.5E3 ": 1500, str(INT64_LIMIT - 1): INT64_LIMIT - 1}),
    # Seconds are converted to ns exactly, even where a float could not hold the ns.
    (parse_seconds, {"1.5": 1_500_000_000, "0": 0, "90": 90 * 10**9, "1e-3": 1_000_000}),
    (parse_seconds, {" 2E2 ": 200 * 10**9, ".000000001": 1, "120s": 120 * 10**9}),
    (parse_seconds, {"9007199.254740993": 9_007_199_254_740_993}),
    (parse_seconds, {"1.5 ms": 1_500_000, "7us": 7_000, "8NS": 8}),
    # They are converted to the nearest whole number of picoseconds.
    (step, {0: 0, 1: 10**12, 0.005: 5 * 10**9, 2e-5: 2 * 10**7, 1.2e-8: 12_000, 2.5e-12: 2}),
    # A size is written with three digits and the largest unit not above it.
    (format_bytes, {0: "0 B", 999: "999 B", 131072: "128 KiB", 2**30: "1 GiB"}),
    (format_bytes, {40 * 2**30: "40 GiB", 2**50: "1,024 TiB"}),
    (decimal, {0: "0 B", 999: "999 B", 131072: "131 KB", 2**30: "1.07 GB"}),
    (decimal, {40 * 2**30: "42.9 GB", 2**50: "1,126 TB"}),
    # A duration is written with a unit that leaves a digit before the point.
    (format_seconds, {1.5: "1.5 s", 0.0312: "31.2 ms", 7.06e-6: "7.06 us", 2e-9: "2 ns"}),
    (format_seconds, {816: "816 s"}),
    # A number is written with three digits, or all before the point unless it is huge.
    (format_number, {12345.6: "12,346", 1.0: "1", 8.03: "8.03", 12.88: "12.9"}),
    (format_number, {-1e300: "-1e+300"}),
]


@pytest.mark.parametrize(
    ("convert", "given", "expected"),
    [(convert, *row) for convert, rows in CONVERSIONS for row in rows.items()],
)
def test_a_value_is_converted(convert, given, expected):
    """A size, a count, a time or a number is read, or written, as the table says."""
    assert convert(given) == expected


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "40 Gi", "40G", "40", "-1GiB", "1e9", "4O96", "1,000", "nan", "1..5GB", "٤GB"],
)
def test_text_that_is_no_size_is_refused(text):
    """Text that is not a number and a known unit raises InputError with the units."""
    with pytest.raises(InputError, match="expected a number followed by B, KiB, MiB, GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("40", "such as 40GiB; the unit is missing"),
        ("1,5GiB", "such as 40GiB; the decimal mark is a point, as in 1.5GiB"),
        ("40G", "such as 40GiB"),
        ("9" * 5000 + "B", "such as 40GiB"),
    ],
)
def test_the_error_of_a_size_has_a_hint(text, hint):
    """The error of a size hints at a missing unit or at a decimal comma."""
    with pytest.raises(InputError) as caught:
        parse_bytes(text)
    assert str(caught.value).endswith(hint)


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (
            ["", "0.5", "1e-5", "x", "1_000", "9" * 5000],
            "whole number, such as 8192, 8k or 1e5",
        ),
        (["0", "-1"], "out of range: it must be at least 1"),
        ([str(INT64_LIMIT), "9" * 400], "out of range: it must be of less than 64 bits"),
    ],
)
def test_text_that_is_no_count_is_refused(texts, reason):
    """Text that is no number, fractions, and counts below 1 or above 63 bits are refused."""
    for text in texts:
        with pytest.raises(InputError, match=reason):
            count(text)


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("60:120", (60, 120)),
        (" 0.5 : 1e3 ", (0.5, 1000)),
        (":9", (0, 9)),
        ("60:", (60, None)),
        ("0:1234567890.123456789", (0, 1234567890.123456789)),
    ],
)
def test_windows_are_read(text, window):
    """A window is two times in seconds, either of which may be omitted."""
    start, end = parse_window(text)
    assert (start / 10**9, end and end / 10**9) == window
    assert parse_window(window_text((start, end))) == (start, end)


@pytest.mark.parametrize(
    ("text", "reason"),
    [(text, f"window '{text}': expected START:END in seconds") for text in ("", ":", "60")]
    + [
        ("1:2:3", "window '1:2:3': expected START:END in seconds"),
        ("2:1", "window '2:1': nothing lies in it; END comes after START"),
        ("1:1", "window '1:1': nothing lies in it; END comes after START"),
        ("a:b", "time 'a': expected a number of seconds"),
        ("-1:2", "time '-1': expected a number of seconds"),
    ],
)
def test_text_that_is_no_window_is_refused(text, reason):
    """An empty, reversed or malformed window raises InputError."""
    with pytest.raises(InputError, match=reason):
        parse_window(text)


def test_a_size_of_2_pow_63_bytes_is_refused():
    """A size of 2^63 bytes or more raises InputError."""
    assert parse_bytes(f"{2**63 - 1}B") == 2**63 - 1
    with pytest.raises(InputError, match="below 2\\^63 bytes"):
        parse_bytes("8388608TiB")


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (
            ["", "soon", "-1", "1x", "1m", "nan", "inf", "1e9999", "1/3", "1_0"],
            "expected a number of seconds",
        ),
        (["1e-10"], "'1e-10': finer than a nanosecond"),
        (["1e10"], "too large"),
    ],
)
def test_text_that_is_no_time_is_refused(texts, reason):
    """Text that is no number of seconds, or no time of the clock, raises InputError."""
    for text in texts:
        with pytest.raises(InputError, match=reason):
            parse_seconds(text)


@given(st.integers(0, 2**63 - 1))
def test_written_nanoseconds_are_read_back(nanoseconds):
    """Seconds with nine decimals are parsed to the ns they were written from."""
    seconds, rest = divmod(nanoseconds, 10**9)
    assert parse_seconds(f"{seconds}.{rest:09}") == nanoseconds


@given(st.sampled_from([*BINARY, *DECIMAL]), st.integers(1, 999))
def test_sizes_of_whole_units_are_read_back(unit, number):
    """A whole number of one unit is the same after formatting and parsing."""
    units = BINARY if unit in BINARY else DECIMAL
    size = number * units[unit]
    assert parse_bytes(format_bytes(size, units)) == size


@pytest.mark.parametrize(
    "seconds",
    [-1e-9, float("nan"), float("inf"), 1e7, None, "0.1", [0.1], (1,), 1j, Decimal("NaN")],
)
def test_an_invalid_time_of_a_step_is_refused(seconds):
    """An invalid time of a step raises InputError with the caller's name and the bounds."""
    with pytest.raises(InputError) as caught:
        picoseconds(seconds, "linear: step")
    assert str(caught.value) == (
        f"linear: step={seconds!r} must be a number of seconds, from 0 and below 9,223,372"
    )
