"""Dynamo's router events: JSON lines, each one event of one worker.

`dynamo._core.RadixTree.dump_tree_as_events()` writes and `apply_event()` reads them. A stored
block has its engine's chained hash and a hash of its own tokens (XXH3-64 over little-endian
u32), and no token ids; an event has a number, and no time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from kvcore.errors import InputError
from kvcore_events.model import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Count,
    DecodeError,
    Event,
    EventBatch,
    UnparsedEvent,
    brief,
    other_fields,
    parse,
    read_or_keep,
    unsupported,
)


class _Event(msgspec.Struct):
    event_id: Count
    data: Any = None
    dp_rank: Count | None = None


class _Line(msgspec.Struct):
    worker_id: Count
    event: _Event
    storage_tier: str | None = None


class _Block(msgspec.Struct):
    block_hash: int
    tokens_hash: int


class _Stored(msgspec.Struct):
    blocks: list[_Block]
    parent_hash: int | None = None
    start_position: Count | None = None


class _Removed(msgspec.Struct):
    block_hashes: tuple[int, ...]


def matches(value: Any) -> bool:
    """Return True if a JSON value is a line of this format."""
    return type(value) is dict and "worker_id" in value and "event" in value


def read_batch(value: Any) -> EventBatch:
    """Return the batch of one event; with an UnparsedEvent, if only its `data` is wrong.

    Raises:
        DecodeError: it is no router event.
    """
    line = parse(value, _Line, "line")
    read = partial(_read, tier=line.storage_tier)
    event = read_or_keep(read, line.event.data, "line.event.data")
    more = {name: item for name, item in value.items() if name not in ("worker_id", "event")}
    if others := other_fields(value["event"], _Event):
        more["event"] = others
    return EventBatch(
        ts=None,
        events=(event,),
        dp_rank=line.event.dp_rank,
        format="dynamo",
        seq=line.event.event_id,
        source=line.worker_id,
        more=more,
    )


def write_batch(batch: EventBatch) -> dict[str, Any]:
    """Return the line as a JSON value.

    Raises:
        InputError: it is not a single event with worker and number, or not one of Dynamo's.
    """
    if batch.seq is None or batch.source is None or len(batch.events) != 1:
        msg = "Dynamo writes one event a line, with worker (`source`) and number (`seq`)"
        raise InputError(msg)
    (written,), more = batch.events, dict(batch.more)
    event = {"event_id": batch.seq, "data": _write(written)}
    if batch.dp_rank is not None:
        event["dp_rank"] = batch.dp_rank
    event |= more.pop("event", {})
    tier = more.get("storage_tier")
    if isinstance(written, BlockStored | BlockRemoved) and written.medium != tier:
        more["storage_tier"] = written.medium
    return {"worker_id": batch.source, **more, "event": event}


def _read(data: Any, field: str, tier: str | None) -> Event:
    match data:
        case "cleared":
            return AllBlocksCleared()
        case {"stored": stored, **rest} if not rest:
            return _stored(stored, tier, f"{field}.stored")
        case {"removed": removed, **rest} if not rest:
            event = parse(removed, _Removed, f"{field}.removed")
            more = other_fields(removed, _Removed)
            return BlockRemoved(hashes=event.block_hashes, medium=tier, more=more)
    msg = f"{field} must be 'cleared' or a map of stored or removed, not {brief(data)}"
    raise DecodeError(msg)


def _stored(value: Any, tier: str | None, field: str) -> BlockStored:
    event = parse(value, _Stored, field)
    more = other_fields(value, _Stored)
    if event.start_position is not None:
        more["start_position"] = event.start_position
    others = [other_fields(block, _Block) for block in value["blocks"]]
    if any(others):
        more["blocks"] = others
    return BlockStored(
        hashes=tuple(block.block_hash for block in event.blocks),
        contents=tuple(block.tokens_hash for block in event.blocks),
        parent=event.parent_hash,
        medium=tier,
        more=more,
    )


def _write(event: Event) -> Any:
    match event:
        case UnparsedEvent():
            return event.value
        case AllBlocksCleared():
            return "cleared"
        case BlockRemoved(group=None):
            return {"removed": {"block_hashes": event.hashes, **event.more}}
        case BlockStored(
            contents=contents, group=None, lora_id=None, lora_name=None, extra_keys=None
        ) if contents is not None:
            more = dict(event.more)
            start, others = more.pop("start_position", None), more.pop("blocks", None)
            if not len(contents) == len(event.hashes) == len(others or contents):
                msg = (
                    f"{len(event.hashes)} hashes of blocks, and {len(contents)} contents: "
                    "Dynamo's router events have a hash of its tokens for each block"
                )
                raise InputError(msg)
            blocks = [
                {"block_hash": value, "tokens_hash": content, **other}
                for value, content, other in zip(
                    event.hashes, contents, others or [{}] * len(contents), strict=True
                )
            ]
            stored = {"parent_hash": event.parent, "start_position": start, "blocks": blocks}
            return {"stored": {**stored, **more}}
    raise unsupported(event, "Dynamo's router events")
