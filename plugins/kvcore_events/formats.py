"""Payloads of KV events: recognised by their bytes, decoded in every format, and encoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any

import msgspec
import orjson

from kvcore.errors import InputError, TraceError
from kvcore.untrusted import PAYLOAD_BYTES, PAYLOAD_LEVELS, PAYLOAD_OBJECTS, parse_json
from kvcore_events import dynamo, mooncake, tensorrt_llm, vllm
from kvcore_events.model import DecodeError, EventBatch, UnparsedEvent, brief

__all__ = ["FORMATS", "decode", "encode"]

READERS = {
    "msgpack": vllm.read_batch,
    "mooncake": mooncake.read_batch,
    "trtllm": tensorrt_llm.read_batch,
    "dynamo": dynamo.read_batch,
}
WRITERS = {"msgpack": vllm.write_batch, "dynamo": dynamo.write_batch}
FORMATS = tuple(READERS)
"""Names of the wire formats that `decode` reads."""

_PACKED = ("msgpack", "mooncake")
# First bytes of arrays and maps in msgpack; JSON begins with none of them.
_CONTAINERS = frozenset((*range(0x80, 0xA0), *range(0xDC, 0xE0)))
# First bytes of strings, bytes, arrays and maps in msgpack.
_OBJECTS = bytes((*range(0x80, 0xC0), 0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB, *range(0xDC, 0xE0)))
_PLAIN = {type(None), bool, int, str, bytes}
_SCALARS = _PLAIN | {float}


def decode(payload: bytes) -> EventBatch:
    """Return the batch of a payload: a batch in msgpack, or a single event in JSON. O(payload).

    Events that cannot be parsed are kept as UnparsedEvent. Payloads above 64 MiB, nested deeper
    than 24 levels, or with so many small values that they would fill the memory, are refused.

    Raises:
        TraceError: it is no batch of any format; with the field and the reason.
    """
    try:
        value, format_ = unpack(payload)
        return read_value(value, format_)
    except DecodeError as error:
        msg = f"payload: {error}"
        raise TraceError(msg) from error


def encode(batch: EventBatch, *, check: bool = True) -> bytes:
    """Return the payload of a batch; that of a decoded batch has its original values.

    Args:
        batch: what is encoded.
        check: whether to read again what is written, which takes ten times as long: events of
            one's own cache need no check.

    Raises:
        InputError: the format cannot express what the batch holds.
    """
    value, packed = write_value(batch, check=check), batch.format in _PACKED
    with _written_as(batch.format):
        return msgspec.msgpack.encode(value) if packed else orjson.dumps(value)


def unpack(payload: bytes) -> tuple[Any, str]:
    """Return the value of a payload, and the name of its format.

    Raises:
        DecodeError: it is too large, neither msgpack nor JSON, or of no format.
    """
    if len(payload) > PAYLOAD_BYTES:
        msg = f"{len(payload):,} bytes; more than {PAYLOAD_BYTES:,} are not read"
        raise DecodeError(msg)
    packed = bool(payload) and payload[0] in _CONTAINERS
    limit = PAYLOAD_OBJECTS
    if len(payload) > limit and _most_objects(payload, packed=packed) > limit:
        msg = f"too many values; more than {limit:,} texts, lists and maps are not read"
        raise DecodeError(msg)
    if packed:
        try:
            value = msgspec.msgpack.decode(payload)
        except (ValueError, RecursionError) as error:
            msg = f"no msgpack: {error}"
            raise DecodeError(msg) from error
        return value, "mooncake" if mooncake.matches(value) else "msgpack"
    try:
        value = parse_json(payload)
    except orjson.JSONDecodeError as error:
        msg = f"neither a msgpack array or map nor JSON: it begins {brief(payload)}"
        raise DecodeError(msg) from error
    name = json_format(value)
    if name is None:
        msg = f"must be an event with event_id and data, or worker_id and event: {brief(value)}"
        raise DecodeError(msg)
    return value, name


def json_format(value: Any) -> str | None:
    """Return the name of the format of an event in JSON; None: it is of no format."""
    if tensorrt_llm.matches(value):
        return "trtllm"
    return "dynamo" if dynamo.matches(value) else None


def read_value(value: Any, format: str) -> EventBatch:  # noqa: A002 - its name in a batch
    """Return the batch of the value that a payload of a format unpacks to.

    Raises:
        DecodeError: it is no batch, or has values other than bytes that JSON cannot hold.
        InputError: there is no such format.
    """
    read = READERS[_known(format)]
    if type(value) not in _PLAIN and (fault := _fault(value)):
        msg = f"value{fault[0]} {fault[1]}"
        raise DecodeError(msg)
    return read(value).keep_raw(value)


def write_value(batch: EventBatch, *, check: bool = True) -> Any:
    """Return the value that the payload of a batch unpacks to.

    Args:
        batch: what is written.
        check: whether it is read again.

    Raises:
        InputError: the format cannot express what the batch holds, or is only read.
    """
    name = _known(batch.format)
    if batch.raw is not None:
        return batch.raw
    if name not in WRITERS:
        msg = (
            f"kvcore reads the format {name!r} but does not write it: only a decoded batch can "
            f"be written, as it was; give another format: {', '.join(WRITERS)}"
        )
        raise InputError(msg)
    with _written_as(name):
        value = WRITERS[name](batch)
        if not check:
            return value
        # Plain lists, as a reader has them: what it would refuse must not be written.
        value = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        for event, found in zip(batch.events, read_value(value, name).events, strict=True):
            if isinstance(found, UnparsedEvent) and not isinstance(event, UnparsedEvent):
                raise DecodeError(found.reason)
    return value


@contextmanager
def _written_as(name: str) -> Iterator[None]:
    """Raise an InputError for an error of writing a batch in a format."""
    try:
        yield
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        msg = f"the batch cannot be written as {name}: {error}"
        raise InputError(msg) from error


def _known(name: str) -> str:
    if name not in READERS:
        msg = f"no format of KV events is called {name!r}; there are: {', '.join(FORMATS)}"
        raise InputError(msg)
    return name


def _most_objects(payload: bytes, *, packed: bool) -> int:
    """Return a bound of the strings, lists and maps in a payload, without decoding it."""
    if packed:
        return len(payload) - len(payload.translate(None, _OBJECTS))
    return payload.count(b'"') // 2 + payload.count(b"[") + payload.count(b"{")


def _fault(value: Any, depth: int = 0) -> tuple[str, str] | None:
    """Return where `value` has a value other than bytes that JSON cannot hold, and why."""
    if type(value) is float:
        return None if isfinite(value) else ("", f"must be a finite number, not {value}")
    if depth > PAYLOAD_LEVELS:
        return "", f"is nested more than {PAYLOAD_LEVELS} levels deep"
    parts = _parts(value)
    if isinstance(parts, str):
        return "", parts
    for place, item in parts:
        if type(item) not in _PLAIN and (fault := _fault(item, depth + 1)):
            return f"{place}{fault[0]}", fault[1]
    return None


def _parts(value: Any) -> Iterable[tuple[str, Any]] | str:
    """Return what a map or a list holds, with its places; a text: why it is neither."""
    if type(value) is dict:
        for name in value:
            if type(name) is not str:
                shown = brief(name) if type(name) in _SCALARS else type(name).__name__
                return f"must have texts as names, not {shown}"
        return ((f".{name}", item) for name, item in value.items())
    if type(value) is not list:
        # Not its text, which may have a memory address.
        return f"must be plain data, not {type(value).__name__}"
    if set(map(type, value)) <= _PLAIN:
        return ()
    return ((f"[{index}]", item) for index, item in enumerate(value))
