"""Every format of KV events, told apart by its bytes; read, and written as it was."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import orjson

from kvcore.errors import InputError, PluginError, TraceError
from kvcore.kv_events import dynamo as router
from kvcore.kv_events import mooncake as store
from kvcore.kv_events import tensorrt_llm as polled
from kvcore.kv_events import vllm as engine
from kvcore.kv_events.fields import WrongError, shown
from kvcore.kv_events.model import Batch

FORMATS = {"msgpack": engine, "mooncake": store, "trtllm": polled, "dynamo": router}
"""By name: the module that reads (`read_batch`) and writes (`write_batch`) its values."""


PACKED = ("msgpack", "mooncake")


MOST_BYTES = 1 << 26


NO_MSGSPEC = "KV events in msgpack need the package msgspec: pip install 'kvcore[events]'"


def decode(payload: bytes) -> Batch:
    """Read a payload: a batch in msgpack, or one event in JSON. O(payload).

    Events that cannot be read are kept as `Unread`, with their place and the reason.
    Payloads above 64 MiB are refused, and values kept without being understood may hold
    16 levels: neither memory nor the stack can be made to overflow.

    Raises:
        TraceError: it is no batch of any format; says why, with the place.
        PluginError: msgspec is not installed.
    """
    if len(payload) > MOST_BYTES:
        msg = f"payload: {len(payload):,} bytes; more than {MOST_BYTES:,} are not read"
        raise TraceError(msg)
    packed = payload[:1] in _CONTAINERS
    try:
        value = _unpack(payload) if packed else _parse(payload)
        return read_value(value, _format(value, packed=packed))
    except WrongError as error:
        msg = f"payload: {error}"
        raise TraceError(msg) from error


def encode(batch: Batch) -> bytes:
    """Write a batch in its format: a decoded one as it was, byte for byte in msgpack.

    Raises:
        InputError: the format cannot say what the batch holds.
        PluginError: msgspec is not installed.
    """
    try:
        value = write_value(batch)
        return _msgpack().encode(value) if batch.format in PACKED else orjson.dumps(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        msg = f"the batch cannot be written as {batch.format}: {error}"
        raise InputError(msg) from error


def read_value(value: Any, format: str) -> Batch:  # noqa: A002 - its name in a Batch
    """Read a batch from what a payload unpacks to.

    Raises:
        WrongError: it is none.
    """
    batch: Batch = _module(format).read_batch(value)
    return batch


def write_value(batch: Batch) -> Any:
    """Return what a batch's payload unpacks to.

    Raises:
        InputError: its format cannot say what it holds.
    """
    return _module(batch.format).write_batch(batch)


def _module(name: str) -> ModuleType:
    if name not in FORMATS:
        msg = f"no format of KV events is called {name!r}; there are: {', '.join(FORMATS)}"
        raise InputError(msg)
    return FORMATS[name]


def _format(value: Any, *, packed: bool) -> str:
    if packed:
        return "mooncake" if store.is_ours(value) else "msgpack"
    for name in ("trtllm", "dynamo"):
        if FORMATS[name].is_ours(value):
            return name
    msg = f"must be an event with event_id and data, or worker_id and event: {shown(value)}"
    raise WrongError(msg)


def _parse(payload: bytes) -> Any:
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        msg = f"neither a msgpack array or map nor JSON: it begins {shown(payload)}"
        raise WrongError(msg) from error


def _unpack(payload: bytes) -> Any:
    msgpack = _msgpack()
    try:
        return msgpack.decode(payload)
    except (ValueError, RecursionError) as error:
        msg = f"no msgpack: {error}"
        raise WrongError(msg) from error


def _msgpack() -> ModuleType:
    try:
        from msgspec import msgpack  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise PluginError(NO_MSGSPEC) from error
    return msgpack


_CONTAINERS = {bytes([first]) for first in (*range(0x80, 0xA0), *range(0xDC, 0xE0))}
"""First bytes of arrays and maps in msgpack; JSON begins with none of them."""
