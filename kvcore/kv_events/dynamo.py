"""Dynamo's router events, as JSON lines: one event of one worker a line.

As `dynamo._core.RadixTree.dump_tree_as_events()` writes and `apply_event()` reads them. A
stored block has its engine's chained hash and a hash of its own tokens (XXH3-64 over
little-endian u32), no token ids; an event has a number, and no time.
"""

from __future__ import annotations

from typing import Any

from kvcore.errors import InputError
from kvcore.kv_events.fields import (
    COUNT,
    COUNTS,
    INTEGER,
    LIST,
    TEXT,
    Field,
    WrongError,
    kept,
    read,
    shown,
    table,
    unsayable,
    wrong,
)
from kvcore.kv_events.model import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    Unread,
)

LINE = table(Field("worker_id", COUNT, "source", required=True), Field("storage_tier", TEXT))


EVENT = table(
    Field("event_id", COUNT, "seq", required=True), Field("dp_rank", COUNT, "dp_rank")
)


STORED = table(
    Field("parent_hash", INTEGER, "parent"),
    Field("start_position", COUNT),
    Field("blocks", LIST, "blocks", required=True),
)


BLOCK = table(
    Field("block_hash", INTEGER, "hash", required=True),
    Field("tokens_hash", INTEGER, "content", required=True),
)


REMOVED = table(Field("block_hashes", COUNTS, "hashes", required=True))


def is_ours(value: Any) -> bool:
    """Say whether a JSON value is such a line."""
    return type(value) is dict and "worker_id" in value and "event" in value


def read_batch(value: Any) -> Batch:
    """Read a line. If only its `data` cannot be read, that is `Unread`.

    Raises:
        WrongError: it is no router event.
    """
    line, around = read(value, LINE, "line")
    inner, more = read(around.pop("event", None), EVENT, "line.event")
    data = more.pop("data", None)
    if more:
        where = "line.event"
        raise wrong(where, f"has unknown fields {shown(more)}")
    try:
        event = _read(data, around.get("storage_tier"), "line.event.data")
    except WrongError as error:
        event = Unread(kept(data, "line.event.data"), str(error))
    return Batch(ts=None, events=(event,), format="dynamo", more=around, **line, **inner)


def write_batch(batch: Batch) -> dict[str, Any]:
    """Return the line as it is written.

    Raises:
        InputError: it is not one event of a worker with a number, or one not known here.
    """
    if batch.seq is None or batch.source is None or len(batch.events) != 1:
        msg = "Dynamo writes one event a line, with worker (`source`) and number (`seq`)"
        raise InputError(msg)
    inner = {"event_id": batch.seq, "data": _write(batch.events[0])}
    if batch.dp_rank is not None:
        inner["dp_rank"] = batch.dp_rank
    return {"worker_id": batch.source, **batch.more, "event": inner}


def _read(data: Any, tier: str | None, place: str) -> Event:
    match data:
        case "cleared":
            return AllBlocksCleared()
        case {"stored": stored, **rest} if not rest:
            return _stored(stored, tier, f"{place}.stored")
        case {"removed": removed, **rest} if not rest:
            attributes, more = read(removed, REMOVED, f"{place}.removed")
            return BlockRemoved(**attributes, medium=tier, more=more)
    says = "'cleared' or a map of stored or removed"
    raise wrong(place, f"must be {says}, not {shown(data)}")


def _stored(value: Any, tier: str | None, place: str) -> BlockStored:
    attributes, more = read(value, STORED, place)
    found = [
        read(block, BLOCK, f"{place}.blocks[{number}]")
        for number, block in enumerate(attributes["blocks"])
    ]
    others = [rest for _, rest in found]
    return BlockStored(
        hashes=tuple(block["hash"] for block, _ in found),
        contents=tuple(block["content"] for block, _ in found),
        parent=attributes.get("parent"),
        medium=tier,
        more=more | ({"blocks": others} if any(others) else {}),
    )


def _write(event: Event) -> Any:
    match event:
        case Unread():
            return event.value
        case AllBlocksCleared():
            return "cleared"
        case BlockRemoved():
            return {"removed": {"block_hashes": event.hashes, **event.more}}
        case BlockStored(contents=contents) if contents is not None:
            more = dict(event.more)
            others = more.pop("blocks", None) or [{}] * len(event.hashes)
            blocks = [
                {"block_hash": value, "tokens_hash": content, **rest}
                for value, content, rest in zip(event.hashes, contents, others, strict=True)
            ]
            place = {"start_position": more.pop("start_position", None)}
            return {"stored": {"parent_hash": event.parent, **place, "blocks": blocks, **more}}
    raise unsayable(event, "Dynamo's router events")
