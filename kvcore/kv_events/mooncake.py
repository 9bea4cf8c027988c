"""The msgpack batches of the Mooncake store: `[timestamp in ms, events, dp_rank]`.

Written by `mooncake-store/src/kv_event/kv_event_publisher.cpp`. Its events name the object
that is stored (`object_key`); the lists of hashes are empty as long as nobody fills them.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvcore.kv_events.fields import (
    ANYTHING,
    HASH,
    HASHES,
    INTEGERS,
    SIZE,
    TEXT,
    TOKENS,
    Field,
    read,
    shown,
    table,
    unsayable,
    written,
    wrong,
)
from kvcore.kv_events.model import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    Unread,
    Wire,
)
from kvcore.kv_events.vllm import closed, opened

ENVELOPE = (
    *("event_id", "timestamp", "event_type", "model_name", "block_size", "additional_salt"),
    *("lora_name", "tenant_id", "backend_id", "medium", "dp_rank"),
)


CLEARED = table(*(Field(name, ANYTHING) for name in ENVELOPE))


REMOVED = CLEARED | table(
    Field("seq_hashes", HASHES, "hashes", required=True),
    Field("medium", TEXT, "medium"),
    Field("object_key", TEXT),
    Field("group_id", ANYTHING),
    Field("base_block_idx", ANYTHING),
)


STORED = REMOVED | table(
    Field("block_hashes", INTEGERS, "contents"),
    Field("parent_hash", HASH, "parent"),
    Field("token_ids", TOKENS, "tokens"),
    Field("block_size", SIZE, "block_size"),
    Field("lora_name", TEXT, "lora_name"),
    Field("parent_block_hash", ANYTHING),
)


KNOWN: dict[str, tuple[type[Any], dict[str, Field], tuple[str, ...]]] = {
    "stored": (
        BlockStored,
        STORED,
        (*ENVELOPE, "group_id", "seq_hashes", "base_block_idx", "parent_hash", "token_ids"),
    ),
    "removed": (BlockRemoved, REMOVED, (*ENVELOPE, "group_id", "seq_hashes", "base_block_idx")),
    "cleared": (AllBlocksCleared, CLEARED, ENVELOPE),
}
"""By event type: the class, its fields, and those that are written even if they are null."""


TYPES = {cls: kind for kind, (cls, _, _) in KNOWN.items()}


def is_ours(value: Any) -> bool:
    """Say whether a batch has the store's events: maps with an `event_type`."""
    match value:
        case [_, [{"event_type": _}, *_], *_]:
            return True
    return False


def read_batch(value: Any) -> Batch:
    """Read a batch. Its events that cannot be read are `Unread`.

    Raises:
        WrongError: it is no batch.
    """
    return attrs.evolve(opened(value, _read), format="mooncake")


def write_batch(batch: Batch) -> list[Any] | dict[str, Any]:
    """Return the batch as it is packed.

    Raises:
        InputError: it holds an event that this format has no word for, or no time.
    """
    return closed(batch, [_write(event) for event in batch.events])


def _read(value: Any, place: str) -> Event:
    if type(value) is not dict:
        raise wrong(place, f"must be a map, not {shown(value)}")
    kind = value.get("event_type")
    if type(kind) is not str or kind not in KNOWN:
        where = f"{place}.event_type"
        raise wrong(where, f"must be one of {', '.join(KNOWN)}, not {shown(kind)}")
    cls, known, _ = KNOWN[kind]
    attributes, more = read(value, known, place)
    del more["event_type"]
    if attributes.get("hashes") == () and "object_key" in more:
        attributes["hashes"] = (more.pop("object_key"),)
    event: Event = cls(**attributes, more=more, wire=Wire(array=False, names=tuple(value)))
    return event


def _write(event: Event) -> Any:
    if isinstance(event, Unread):
        return event.value
    kind = TYPES.get(type(event))
    if kind is None:
        raise unsayable(event, "the events of Mooncake's store")
    _, known, default = KNOWN[kind]
    fields = written(event, known, default) | {"event_type": kind}
    match fields.get("seq_hashes"):
        case (str() as name,):
            fields |= {"object_key": name, "seq_hashes": []}
    return fields
