"""The msgpack batches of vLLM, SGLang and TensorRT-LLM's stream: `[ts, events, dp_rank]`.

Newer vLLM sends a map of `ts`, `events` and `data_parallel_rank`. An event is a map with a
`type` or, from older releases, an array that begins with it. Sources: vLLM,
`vllm/distributed/kv_events.py`; SGLang, `srt/disaggregation/kv_events.py`; TensorRT-LLM,
`_torch/pyexecutor/kv_cache_events.py`; the layout of arrays, the notes on `zmq_wire` of
dynamo-kv-router.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvcore.errors import InputError
from kvcore.untrusted import PAYLOAD_EVENTS
from kvcore_events.model import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Count,
    DecodeError,
    Event,
    EventBatch,
    Size,
    Token,
    UnparsedEvent,
    WireHash,
    brief,
    check_tokens,
    other_fields,
    parse,
    parse_tagged,
    read_or_keep,
    unsupported,
)

LARGEST_TIME = 2**63

_NAMES = {
    "hashes": "block_hashes",
    "parent": "parent_block_hash",
    "tokens": "token_ids",
    "group": "group_idx",
}
"""Names of fields in this format, by attribute of an event, where they differ."""

_OPTIONAL = ("extra_keys", "group_idx")
"""Fields that vLLM omits if they are null."""


class _Stored(msgspec.Struct, kw_only=True, rename=_NAMES, tag="BlockStored", tag_field="type"):
    hashes: tuple[WireHash, ...]
    parent: WireHash | None = None
    tokens: tuple[Token, ...]
    block_size: Size
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group: Count | None = None


class _Removed(msgspec.Struct, rename=_NAMES, tag="BlockRemoved", tag_field="type"):
    hashes: tuple[WireHash, ...]
    medium: str | None = None
    group: Count | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


_STRUCTS: dict[type[Any], type[msgspec.Struct]] = {
    BlockStored: _Stored,
    BlockRemoved: _Removed,
    AllBlocksCleared: _Cleared,
}
_CLASSES = {struct: cls for cls, struct in _STRUCTS.items()}


class _Batch(msgspec.Struct):
    ts: int | float
    events: list[Any]
    data_parallel_rank: Count | None = None


# The fields of events that are arrays, in their order. The group, which is the last one of a
# Struct, is the first one of the tail.
_TAIL = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
_STORED = _Stored.__struct_encode_fields__[:-1]
_REMOVED = (*_Removed.__struct_encode_fields__[:-1], *_TAIL)


def read_batch(value: Any) -> EventBatch:
    """Return the batch of an unpacked payload; events that cannot be read as UnparsedEvent.

    Raises:
        DecodeError: it is no batch.
    """
    return read_events(value, _read)


def read_events(value: Any, read_event: Callable[[Any, str], Event]) -> EventBatch:
    """Return the batch of an array or a map, each of its events read by `read_event`.

    Items of an array beyond the rank are in `more` by `#` and their place.

    Raises:
        DecodeError: it is no batch.
    """
    fields = value
    if type(value) is list and len(value) > 1:
        fields = _by_name(_Batch.__struct_fields__, value)
    elif type(value) is not dict:
        msg = f"batch must be [ts, events, dp_rank], not {brief(value)}"
        raise DecodeError(msg)
    batch = parse(fields, _Batch, "batch")
    if not abs(batch.ts) < LARGEST_TIME:
        msg = f"batch.ts: expected a finite number, got {batch.ts}"
        raise DecodeError(msg)
    if len(batch.events) > PAYLOAD_EVENTS:
        msg = f"batch.events: {len(batch.events):,}; more than {PAYLOAD_EVENTS:,} are not read"
        raise DecodeError(msg)
    events = tuple(
        read_or_keep(read_event, event, f"events[{index}]")
        for index, event in enumerate(batch.events)
    )
    more = other_fields(fields, _Batch)
    return EventBatch(batch.ts, events, batch.data_parallel_rank, more=more)


def write_batch(batch: EventBatch) -> list[Any] | dict[str, Any]:
    """Return the batch as vLLM packs it: an array of maps; a map, if the batch has more fields.

    Raises:
        InputError: the batch has no time, or an event that vLLM does not have.
    """
    if batch.ts is None:
        msg = "a batch without a time cannot be written: vLLM's batches begin with one"
        raise InputError(msg)
    items = (batch.ts, [_write(event) for event in batch.events], batch.dp_rank)
    if not batch.more:
        return list(items)
    return {**dict(zip(_Batch.__struct_fields__, items, strict=True)), **batch.more}


def _read(value: Any, field: str) -> Event:
    """Return the event of a map or an array; `field` is its place in the payload.

    Raises:
        DecodeError: it is none of vLLM.
    """
    named = _event_by_name(value) if type(value) is list else value
    parsed = parse_tagged(named, tuple(_CLASSES), field)
    if isinstance(parsed, _Stored):
        check_tokens(parsed.tokens, f"{field}.token_ids")
    more = other_fields(named, type(parsed))
    event: Event = _CLASSES[type(parsed)](**msgspec.structs.asdict(parsed), more=more)
    return event


def _event_by_name(value: list[Any]) -> dict[str, Any]:
    """Return the items of an event that is an array by the names that they have in a map."""
    tag, items = (value[0] if value else None), value[1:]
    names: tuple[str, ...] = ()
    if tag == "BlockStored":
        # Dynamo's layout has an item before the group, which vLLM's does not have. In vLLM's,
        # an integer is there, or the null of a group with the string of a kind after it.
        first, second = (*items[len(_STORED) :], None, None)[:2]
        vllm = type(first) is int or (first is None and type(second) is str)
        names = (*_STORED, *(() if vllm else ("block_mm_infos",)), *_TAIL)
    elif tag == "BlockRemoved":
        names = _REMOVED
    fields = _by_name(names, items, first=1)
    # A null only holds the place of an item before a later one.
    return {"type": tag} | {
        name: item for name, item in fields.items() if item is not None or name not in names
    }


def _by_name(names: tuple[str, ...], items: list[Any], first: int = 0) -> dict[str, Any]:
    """Return items by name; those beyond the names by `#` and their place, from `first` on."""
    others = (f"#{first + index}" for index in range(len(names), len(items)))
    return dict(zip((*names, *others), items, strict=False))


def _write(event: Event) -> Any:
    """Return an event as vLLM packs it, as a map.

    Raises:
        InputError: vLLM does not have such events.
    """
    if isinstance(event, UnparsedEvent):
        return event.value
    struct = _STRUCTS.get(type(event))
    if struct is None:
        raise unsupported(event, "the events of vLLM")
    values = {name: getattr(event, name) for name in struct.__struct_fields__}
    fields = msgspec.to_builtins(struct(**values), builtin_types=(bytes,))
    return {
        name: value
        for name, value in fields.items()
        if value is not None or name not in _OPTIONAL
    } | dict(event.more)
