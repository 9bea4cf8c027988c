"""The border: values from files, clients and servers, decoded within one table of limits.

What is decoded here is plain data in bounded memory: its bytes, values and levels are counted,
its text is valid, its counts fit the arithmetic. A value that is refused raises a ValueError
that says why; who has asked for it names the file, the request or the server. SECURITY.md
prints the limits.
"""

from __future__ import annotations

import re
from math import inf
from pathlib import Path
from typing import Any

LONGEST_LINE = 1 << 24
"""Largest number of bytes in a line, which is kept in memory as a whole."""

MOST_VALUES, MOST_NAMES = 1 << 20, 1 << 17
"""Largest number of values in a line: a parsed one takes up to 64 bytes; and of names in a
document, each of which takes the interpreter 1 us: four times as long as any other value."""

TRACE_HEADER_BYTES = 1 << 20
"""Largest number of bytes of HEADER, the only line of a trace with fields of any JSON."""

JSON_LEVELS = 254
"""Most levels of lists and objects in JSON: what orjson can write again."""

TOML_BYTES = 1 << 20
TOML_LEVELS = 16
"""Largest number of bytes of a TOML file, and of levels of its tables and lists."""

EXPANDED_BYTES = 1 << 24
"""Bytes to which a compressed file of any size may expand."""

TRACE_EXPANSION = 24
RECORDING_EXPANSION = 128
WORKLOAD_EXPANSION = 64
"""Largest number of bytes that a compressed byte expands to, past `EXPANDED_BYTES`."""

FREE_LINES, BYTES_OF_LINE = 100_000, 4
"""Lines that each recording may have, and the bytes of the file for each further one."""

FREE_REQUESTS, BYTES_OF_REQUEST = 1 << 16, 16
"""Requests that each trace may have for a what-if, and the bytes of the file for each further
one: a request takes 1 kB of memory."""

MOST_RUN_BLOCKS = 1 << 22
"""Largest number of blocks of the runs of a line; each takes 4 bytes once decoded."""

MOST_BLOCKS = 1 << 24
"""Largest number of blocks of a traced pool in use at once; each takes 4 bytes."""

MOST_COPIES = 1 << 18
"""Largest number of blocks in the tables of open forks; each takes about 100 bytes."""

MOST_TIER_KEYS = 1 << 23
"""Largest number of keys of blocks in all tiers of a trace; each takes some 200 bytes."""

WORK, WORK_OF_LINE = 1 << 25, 1 << 10
"""Largest number of steps, each some 50 ns: for a whole trace, and more for each line."""

PAYLOAD_BYTES = 1 << 26
PAYLOAD_LEVELS = 24
PAYLOAD_OBJECTS = 1 << 23
PAYLOAD_EVENTS = 1 << 18
"""Limits of a payload of KV events: a text, list or map takes up to 72 bytes of memory, an
event that cannot be parsed 400, with its reason."""

MOST_HEADERS, LONGEST_HEADER = 64, 8_190
"""Limits of the headers of an HTTP request."""

MOST_TOKENS = 1 << 40
"""Largest number of tokens that a server's count of a request may be."""

LONGEST_SESSION, LONGEST_SALT = 128, 1_024
"""Largest number of characters of the name of a session, and of a salt, which `serve` keeps as
long as a block of its prompt is cached."""

LONGEST_EVENT, LONGEST_METRICS, LONGEST_TOKENS = 4 << 20, 4 << 20, 8 << 20
"""Largest number of bytes of an event in a server's stream, of its metrics that are read, and
of its answer with the token ids of a prompt."""

_LONG_LINE = 1 << 20
"""Number of bytes from which on the values of a line are counted."""

# Patterns are texts, which `re` compiles when they are first used: most runs need none.
_CONTROLS = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
    "\ufff9-\ufffb]"
)
"""C0 except tab and newline, C1, line separators, characters that change the direction, and
surrogates, which no text that is printed can have."""

# Of texts without an end, too, so that each character is looked at once.
_TOML_TEXTS = r"""(?sx)
    "{3} (?: [^"\\] | \\. | "(?!"") )*+ (?:"{3})?
    | '{3} (?: [^'] | '(?!'') )*+ (?:'{3})?
    | " (?: [^"\\\n] | \\. )*+ "?
    | ' [^'\n]*+ '?
    | \# [^\n]*+
    """
_LONG_KEY = rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{TOML_LEVELS + 1}}}"
"""Texts and comments of TOML, and a dotted key of too many parts in what is left."""

_NOT_IN_HEADERS = "[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]"
"""Control characters except tab, and bytes that are no UTF-8, as HTTP's parser gives them."""


def line_fault(line: bytes) -> str | None:
    """Return an error text if a line is too large to be parsed in bounded memory, or None."""
    if len(line) <= _LONG_LINE:
        return None
    if len(line) > LONGEST_LINE:
        return f"the line is longer than {LONGEST_LINE:,} bytes, which is the most"
    values = sum(map(line.count, (b",", b"[", b"{")))
    if values > MOST_VALUES:
        return f"the line has {values:,} values; {MOST_VALUES:,} is the most"
    return None


def parse_json(data: bytes, objects: float = inf) -> Any:
    """Return the value of a document in JSON. O(bytes) in C.

    Args:
        data: the document.
        objects: largest number of lists and objects, of which one of 3 bytes takes 230 in
            memory; with such a limit there is one of names, too.

    Raises:
        JSONDecodeError: it is not JSON, has a text that is no Unicode, has too many lists and
            objects, or names, or is nested too deeply.
    """
    import orjson  # noqa: PLC0415 - for documents alone

    brackets = data.count(b"[") + data.count(b"{")
    if brackets > objects or (objects < inf and _has_too_many_names(data)):
        msg = f"{objects:,} lists and objects, and {MOST_NAMES:,} names, are the most"
        raise orjson.JSONDecodeError(msg, "", 0)
    value = orjson.loads(data)
    # With fewer brackets it cannot be deeper: few documents are written to see whether it is.
    if brackets > JSON_LEVELS:
        try:
            orjson.dumps(value)
        except TypeError:
            msg = f"nested more than {JSON_LEVELS} levels deep"
            raise orjson.JSONDecodeError(msg, "", 0) from None
    return value


def _has_too_many_names(document: bytes) -> bool:
    """Return True if JSON has too many names, a few `":` in texts counted. O(bytes)."""
    if len(document) < 4 * MOST_NAMES or document.count(b":") <= MOST_NAMES:
        return False
    packed = document.translate(None, b" \t\r\n")
    # A quote after one backslash is in a text; after two it ends one that ends in a backslash.
    names = packed.count(b'":') - packed.count(b'\\":') + packed.count(b'\\\\":')
    return names > MOST_NAMES


def read_at_most(path: Path, most: int) -> bytes | None:
    """Return the bytes of a file; None if it has more, as a device has, which has no end."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    return data if len(data) <= most else None


def load_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not TOML, or has too many bytes or levels.
    """
    import tomllib  # noqa: PLC0415 - for files alone

    if (data := read_at_most(path, TOML_BYTES)) is None:
        msg = f"it is longer than {TOML_BYTES:,} bytes, which is the most"
        raise ValueError(msg)
    text = data.decode()
    deep = f"it is nested more than {TOML_LEVELS} levels deep, which is the most"
    # Looked for first: tomllib takes memory with the square of the parts of a dotted key.
    if re.search(_LONG_KEY, re.sub(_TOML_TEXTS, "_", text)):
        raise ValueError(deep)
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError(deep) from None
    level: list[Any] = [tables]
    for _ in range(TOML_LEVELS):
        values = (entry.values() if isinstance(entry, dict) else entry for entry in level)
        level = [
            item for entries in values for item in entries if isinstance(item, (dict, list))
        ]
    if level:
        raise ValueError(deep)
    return tables


def token_count(value: object) -> int | None:
    """Return the number of tokens that a server has counted; None if it is none."""
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None


def parse_digits(text: str) -> int | None:
    """Return the number below 10^18 that ASCII digits are; None for any other text."""
    # `int` refuses some characters that `str.isdigit` accepts, and thousands of digits.
    is_number = text.isascii() and text.isdigit() and len(text) < len(str(1 << 63))
    return int(text) if is_number else None


def media_type(header: str | None) -> str:
    """Return the media type of a Content-Type header, without its parameters. O(header).

    aiohttp reads the parameters too, by the parser of mail: 1.4 s for 8 kB of `; ; ;`.
    """
    return (header or "").partition(";")[0].strip().lower()


def header_text(value: str) -> str:
    """Return the value of a header as valid text: U+FFFD stands for what is none."""
    if value.isascii() and value.isprintable():
        return value
    return re.sub(_NOT_IN_HEADERS, "\N{REPLACEMENT CHARACTER}", value)


def fits_header(value: str) -> bool:
    """Return True if the value of a header may be sent on as it is."""
    return (value.isascii() and value.isprintable()) or not re.search(_NOT_IN_HEADERS, value)


def escaped(text: str) -> str:
    """Return `text` with control characters in visible ASCII, such as `<U+001B>`."""
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return re.sub(_CONTROLS, lambda match: f"<U+{ord(match[0]):04X}>", text)


def escaped_json(document: bytes) -> bytes:
    r"""Return an equal JSON document with control characters escaped, such as `\u009b`.

    The encoder has escaped those of ASCII except DEL.
    """
    if document.isascii() and b"\x7f" not in document:
        return document
    text = document.decode()
    # Line ends are the only control characters of a document that are not in strings.
    return re.sub(_CONTROLS, lambda match: f"\\u{ord(match[0]):04x}", text).encode()
