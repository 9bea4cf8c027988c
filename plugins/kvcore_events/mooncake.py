"""The msgpack batches of the Mooncake store: `[timestamp in ms, events, dp_rank]`.

`mooncake-store/src/kv_event/kv_event_publisher.cpp` writes them. An event names the object that
is stored (`object_key`); its lists of hashes may be empty. The format is read, not written.
"""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from kvcore_events.model import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Size,
    Token,
    WireHash,
    check_tokens,
    other_fields,
    parse_tagged,
)
from kvcore_events.vllm import read_events

_NAMES = {
    "hashes": "seq_hashes",
    "contents": "block_hashes",
    "parent": "parent_hash",
    "tokens": "token_ids",
}
"""Names of fields in this format, by attribute of an event, where they differ."""


class _Stored(msgspec.Struct, rename=_NAMES, tag="stored", tag_field="event_type"):
    hashes: tuple[WireHash, ...]
    contents: tuple[int, ...] | None = None
    parent: WireHash | None = None
    tokens: tuple[Token, ...] | None = None
    block_size: Size | None = None
    lora_name: str | None = None
    medium: str | None = None
    object_key: str | None = None


class _Removed(msgspec.Struct, rename=_NAMES, tag="removed", tag_field="event_type"):
    hashes: tuple[WireHash, ...]
    medium: str | None = None
    object_key: str | None = None


class _Cleared(msgspec.Struct, tag="cleared", tag_field="event_type"):
    pass


_EVENTS = (_Stored, _Removed, _Cleared)


def matches(value: Any) -> bool:
    """Return True if a batch has the store's events: maps with an `event_type`."""
    match value:
        case [_, [{"event_type": _}, *_], *_]:
            return True
    return False


def read_batch(value: Any) -> EventBatch:
    """Return the batch of an unpacked payload; events that cannot be read as UnparsedEvent.

    Raises:
        DecodeError: it is no batch.
    """
    return attrs.evolve(read_events(value, _read), format="mooncake")


def _read(value: Any, field: str) -> Event:
    parsed = parse_tagged(value, _EVENTS, field)
    more = other_fields(value, type(parsed))
    if isinstance(parsed, _Cleared):
        return AllBlocksCleared(more=more)
    fields = msgspec.structs.asdict(parsed)
    if (name := fields.pop("object_key")) is not None:
        if parsed.hashes:
            more["object_key"] = name
        else:
            fields["hashes"] = (name,)
    if isinstance(parsed, _Removed):
        return BlockRemoved(**fields, more=more)
    check_tokens(parsed.tokens or (), f"{field}.token_ids")
    return BlockStored(**fields, more=more)
