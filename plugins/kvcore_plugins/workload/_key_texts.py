"""Lists of keys that continue one another: only their new keys are parsed.

The turns of a session send the same prompt again, a little longer each time: of a hundred keys
in a file some four are new. So a line is decoded with its lists of keys as text, and only the
part of a text after its common beginning with the text before it is parsed.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import orjson

from kvcore_plugins.workload.rows import Row, parse_row

_Entry = TypedDict(
    "_Entry",
    {
        "t": Any,
        "type": Any,
        "in": Any,
        "out": Any,
        "hash_ids": msgspec.Raw,
        "api_time": Any,
        "think_time": Any,
        "stop": Any,
        "requests": "list[_Entry]",
    },
    total=False,
)


class _Session(TypedDict, total=False):
    id: Any
    block_size: Any
    hash_id_scope: Any
    requests: list[_Entry]


_session = msgspec.json.Decoder(_Session)


def parse_session(path: Path, number: int, line: bytes) -> Row:
    """Return line `number` of `path`, with lists of keys as text unless the line is wrong.

    Raises:
        InputError: the line is no JSON object.
    """
    try:
        return Row(path, number, dict(_session.decode(line)))
    except (msgspec.MsgspecError, RecursionError):
        return parse_row(path, number, line)  # its fields are checked one by one


class KeyTexts:
    """Reads the key lists of one agent, in the order of its turns.

    Args:
        key_tokens: number of tokens of a key.
        below: number above all keys.
        namespace: bits that are set in all keys.
    """

    def __init__(self, key_tokens: int, below: int, namespace: int) -> None:
        """Start with no keys."""
        self._key_tokens = key_tokens
        self._below = below
        self._namespace = namespace
        self._decode = msgspec.json.Decoder(
            list[Annotated[int, msgspec.Meta(ge=0, lt=below)]]
        ).decode
        # The list read last, with a comma in place of its closing bracket, and its path; b""
        # if it has no keys.
        self._text = b""
        self._path = array("q")

    def read(self, row: Row, name: str, prompt: int) -> tuple[array[int], int]:
        """Return the path that begins with the keys of a prompt, and the number of keys.

        The path may become longer until the last list is read. O(characters) at the speed of
        memory, and 50 ns a key that does not continue the list before.

        Raises:
            InputError: as `Row.prompt_keys` does.
        """
        raw = row.fields.get(name)
        if type(raw) is msgspec.Raw:
            try:
                count = self._read(bytes(raw))
            except msgspec.MsgspecError:
                count = -1
            if count >= 0 and (count - 1) * self._key_tokens < prompt:
                return self._path, count
            row.fields[name] = orjson.loads(bytes(raw))
        keys = row.prompt_keys(name, prompt, self._key_tokens, self._below)
        self._text = b""
        return array("q", [self._namespace | key for key in keys]), len(keys)

    def _read(self, text: bytes) -> int:
        """Store the keys of `text` in `_path`; return their number.

        Raises:
            MsgspecError: `text` is no list of numbers in range.
        """
        body, known, shared = text[:-1] + b",", self._text, len(self._text)
        if known.startswith(body):
            return body.count(b",")
        if not body.startswith(known):
            # The first key that differs may begin with the same digits.
            shared = known.rfind(b",", 0, _common(body, known)) + 1
            self._path = self._path[: known.count(b",", 0, shared)]
        if not shared:
            shared, self._path = 1, array("q")
        new = self._decode(b"[" + text[shared:])
        namespace = self._namespace
        self._path.extend([namespace | key for key in new] if namespace else new)
        self._text = body if self._path else b""
        return len(self._path)


def _common(first: bytes, other: bytes) -> int:
    """Return the length of the common beginning. O(bytes), in some 15 comparisons of memory."""
    low, high = 0, min(len(first), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
