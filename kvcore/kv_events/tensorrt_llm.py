"""TensorRT-LLM's polled events, as JSON: one event a line.

`LLM.get_kv_cache_events()` returns them, `tensorrt_llm/_utils.py` (KVCacheEventSerializer)
writes them. A batch is one event: it has a number (`event_id`) and no time.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvcore.errors import InputError
from kvcore.kv_events.fields import (
    COUNT,
    COUNTS,
    INTEGER,
    INTEGERS,
    LIST,
    TEXT,
    Field,
    Kind,
    WrongError,
    kept,
    read,
    shown,
    table,
    unsayable,
    wrong,
)
from kvcore.kv_events.model import (
    Batch,
    BlockRemoved,
    BlockUpdated,
    Event,
    Page,
    PagesStored,
    PoolCreated,
    Unread,
)

EVENT = table(
    Field("event_id", COUNT, "seq", required=True),
    Field("window_size", COUNT, "group"),
    Field("attention_dp_rank", COUNT, "dp_rank"),
)


CREATED = table(
    Field("type", TEXT), Field("num_blocks_per_cache_level", COUNTS, "levels", required=True)
)


STORED = table(
    Field("type", TEXT),
    Field("parent_hash", INTEGER, "parent"),
    Field("blocks", LIST, "pages", required=True),
)


PAGE = table(
    Field("type", TEXT),
    Field("block_hash", INTEGER, "hash", required=True),
    Field("tokens", LIST, "tokens", required=True),
    Field("cache_level", COUNT, "level", required=True),
    Field("priority", INTEGER, "priority", required=True),
)


TOKEN = table(
    Field("type", TEXT),
    Field("token_id", COUNT, "id", required=True),
    Field("token_extra_id", COUNT, "extra", required=True),
)


REMOVED = table(Field("type", TEXT), Field("block_hashes", INTEGERS, "hashes", required=True))


DIFF = table(
    Field("type", TEXT),
    Field("new_value", INTEGER, "new", required=True),
    Field("old_value", INTEGER, "old", required=True),
)


OBJECT = Kind("a map", lambda value: type(value) is dict)


UPDATED = table(
    Field("type", TEXT),
    Field("block_hash", INTEGER, "hash", required=True),
    Field("cache_level", OBJECT, "level"),
    Field("priority", OBJECT, "priority"),
)


def is_ours(value: Any) -> bool:
    """Say whether a JSON value is such an event."""
    return type(value) is dict and "event_id" in value and "data" in value


def read_batch(value: Any) -> Batch:
    """Read an event. If only its `data` cannot be read, that is `Unread`.

    Raises:
        WrongError: it is no event.
    """
    attributes, more = read(value, EVENT, "event")
    data = more.pop("data", None)
    group = attributes.pop("group", None)
    try:
        event = _read(data, "event.data")
    except WrongError as error:
        event = Unread(kept(data, "event.data"), str(error))
    if group is not None and isinstance(event, Unread):
        more["window_size"] = group
    elif group is not None:
        event = attrs.evolve(event, group=group)
    return Batch(ts=None, events=(event,), format="trtllm", more=more, **attributes)


def write_batch(batch: Batch) -> dict[str, Any]:
    """Return the event as it is written.

    Raises:
        InputError: it is not one event with a number, or one that is not known here.
    """
    if batch.seq is None or len(batch.events) != 1:
        msg = "TensorRT-LLM writes one event a line, with its number (`seq`)"
        raise InputError(msg)
    event = batch.events[0]
    fields: dict[str, Any] = {"event_id": batch.seq, "data": _write(event)}
    if (group := getattr(event, "group", None)) is not None:
        fields["window_size"] = group
    if batch.dp_rank is not None:
        fields["attention_dp_rank"] = batch.dp_rank
    return {**fields, **batch.more}


def _read(data: Any, place: str) -> Event:
    kind = data.get("type") if type(data) is dict else None
    match kind:
        case "created":
            return PoolCreated(**_attributes(data, CREATED, place))
        case "stored":
            found = _attributes(data, STORED, place)
            pages = [
                _page(page, f"{place}.blocks[{number}]")
                for number, page in enumerate(found["pages"])
            ]
            return PagesStored(**found | {"pages": tuple(pages)})
        case "removed":
            return BlockRemoved(**_attributes(data, REMOVED, place))
        case "updated":
            found = _attributes(data, UPDATED, place)
            changes = {
                name: _change(found[name], f"{place}.{wire}")
                for name, wire in (("level", "cache_level"), ("priority", "priority"))
                if name in found
            }
            return BlockUpdated(**found | changes)
    where = f"{place}.type"
    raise wrong(where, f"must be created, stored, removed or updated, not {shown(kind)}")


def _attributes(value: Any, known: dict[str, Field], place: str) -> dict[str, Any]:
    """Return what a class takes: its attributes, and `more` where there is some."""
    attributes, more = read(value, known, place)
    more.pop("type", None)
    return attributes | ({"more": more} if more else {})


def _page(value: Any, place: str) -> Page:
    found = _attributes(value, PAGE, place)
    tokens = []
    for number, token in enumerate(found["tokens"]):
        where = f"{place}.tokens[{number}]"
        parts = _attributes(token, TOKEN, where)
        if "more" in parts:
            raise wrong(where, f"has unknown fields {shown(parts['more'])}")
        tokens.append((parts["id"], parts["extra"]))
    return Page(**found | {"tokens": tuple(tokens)})


def _change(value: Any, place: str) -> tuple[int, int]:
    found = _attributes(value, DIFF, place)
    if "more" in found:
        raise wrong(place, f"has unknown fields {shown(found['more'])}")
    return found["old"], found["new"]


def _write(event: Event) -> Any:
    match event:
        case Unread():
            return event.value
        case PoolCreated():
            return {
                "type": "created",
                "num_blocks_per_cache_level": event.levels,
                **event.more,
            }
        case PagesStored():
            blocks = [_written_page(page) for page in event.pages]
            return {
                "type": "stored",
                "parent_hash": event.parent,
                "blocks": blocks,
                **event.more,
            }
        case BlockRemoved():
            return {"type": "removed", "block_hashes": event.hashes, **event.more}
        case BlockUpdated():
            changes = {"cache_level": event.level, "priority": event.priority}
            changed = {name: _written_change(pair) for name, pair in changes.items()}
            return {"type": "updated", "block_hash": event.hash, **changed, **event.more}
    raise unsayable(event, "TensorRT-LLM's polled events")


def _written_page(page: Page) -> dict[str, Any]:
    tokens = [
        {"type": "unique_token", "token_id": token, "token_extra_id": extra}
        for token, extra in page.tokens
    ]
    return {
        "type": "stored_block",
        "block_hash": page.hash,
        "tokens": tokens,
        "cache_level": page.level,
        "priority": page.priority,
        **page.more,
    }


def _written_change(pair: tuple[int, int] | None) -> dict[str, Any] | None:
    return pair and {"type": "event_diff", "new_value": pair[1], "old_value": pair[0]}
