"""The msgpack batches of the Mooncake store: `[timestamp in ms, events, dp_rank]`.

`mooncake-store/src/kv_event/kv_event_publisher.cpp` writes them. An event names the object that
is stored (`object_key`); its lists of hashes are empty as long as nobody fills them. They are
read, not written.
"""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from kvcore.kv_events.model import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Hash,
    Size,
    Token,
    WireHash,
    check_tokens,
    other_fields,
    parse,
)
from kvcore.kv_events.vllm import read_events


class _Stored(msgspec.Struct, kw_only=True, tag="stored", tag_field="event_type"):
    seq_hashes: tuple[WireHash, ...]
    block_hashes: tuple[int, ...] | None = None
    parent_hash: WireHash | None = None
    token_ids: tuple[Token, ...] | None = None
    block_size: Size | None = None
    lora_name: str | None = None
    medium: str | None = None
    object_key: str | None = None


class _Removed(msgspec.Struct, kw_only=True, tag="removed", tag_field="event_type"):
    seq_hashes: tuple[WireHash, ...]
    medium: str | None = None
    object_key: str | None = None


class _Cleared(msgspec.Struct, tag="cleared", tag_field="event_type"):
    pass


_EVENTS: Any = _Stored | _Removed | _Cleared


def matches(value: Any) -> bool:
    """Return True if a batch has the store's events: maps with an `event_type`."""
    match value:
        case [_, [{"event_type": _}, *_], *_]:
            return True
    return False


def read_batch(value: Any) -> EventBatch:
    """Return the batch that a payload unpacked to; its events that are wrong as UnparsedEvent.

    Raises:
        DecodeError: it is no batch.
    """
    return attrs.evolve(read_events(value, _read), format="mooncake")


def _read(value: Any, field: str) -> Event:
    event = parse(value, _EVENTS, field)
    more = other_fields(value, type(event))
    if isinstance(event, _Cleared):
        return AllBlocksCleared(more=more)
    hashes: tuple[Hash, ...] = event.seq_hashes
    if event.object_key is not None:
        if hashes:
            more["object_key"] = event.object_key
        hashes = hashes or (event.object_key,)
    if isinstance(event, _Removed):
        return BlockRemoved(hashes=hashes, medium=event.medium, more=more)
    check_tokens(event.token_ids or (), f"{field}.token_ids")
    return BlockStored(
        hashes=hashes,
        parent=event.parent_hash,
        tokens=event.token_ids,
        block_size=event.block_size,
        contents=event.block_hashes,
        medium=event.medium,
        lora_name=event.lora_name,
        more=more,
    )
