"""TensorRT-LLM's polled events: one JSON object each, with a number and no time.

`LLM.get_kv_cache_events()` returns them; `KVCacheEventSerializer` in `tensorrt_llm/_utils.py`
writes them. They are read, not written.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from kvcore_events.model import (
    BlockRemoved,
    BlockUpdated,
    Count,
    Event,
    EventBatch,
    Page,
    PagesStored,
    PoolCreated,
    UnparsedEvent,
    other_fields,
    parse,
    parse_tagged,
    read_or_keep,
)


class _Event(msgspec.Struct):
    event_id: Count
    data: Any = None
    window_size: Count | None = None
    attention_dp_rank: Count | None = None


_NAMES = {
    "hash": "block_hash",
    "hashes": "block_hashes",
    "level": "cache_level",
    "levels": "num_blocks_per_cache_level",
    "pages": "blocks",
    "parent": "parent_hash",
}
"""Names of fields in this format, by attribute of an event, where they differ."""


class _Created(msgspec.Struct, rename=_NAMES, tag="created", tag_field="type"):
    levels: tuple[Count, ...]


class _Token(msgspec.Struct):
    token_id: Count
    token_extra_id: Count


class _Page(msgspec.Struct, rename=_NAMES):
    hash: int
    tokens: list[_Token]
    level: Count
    priority: int
    type: str | None = None


class _Stored(msgspec.Struct, rename=_NAMES, tag="stored", tag_field="type"):
    pages: list[_Page]
    parent: int | None = None


class _Removed(msgspec.Struct, rename=_NAMES, tag="removed", tag_field="type"):
    hashes: tuple[int, ...]


class _Change(msgspec.Struct):
    old_value: int
    new_value: int


class _Updated(msgspec.Struct, rename=_NAMES, tag="updated", tag_field="type"):
    hash: int
    level: _Change | None = None
    priority: _Change | None = None


_CLASSES: dict[type[msgspec.Struct], type[Any]] = {
    _Created: PoolCreated,
    _Stored: PagesStored,
    _Removed: BlockRemoved,
    _Updated: BlockUpdated,
}


def matches(value: Any) -> bool:
    """Return True if a JSON value is an event of this format."""
    return type(value) is dict and "event_id" in value and "data" in value


def read_batch(value: Any) -> EventBatch:
    """Return the batch of one event; with an UnparsedEvent, if only its `data` is wrong.

    Raises:
        DecodeError: it is no event.
    """
    around = parse(value, _Event, "event")
    more = other_fields(value, _Event)
    event = read_or_keep(partial(_read, group=around.window_size), around.data, "event.data")
    if isinstance(event, UnparsedEvent) and around.window_size is not None:
        more["window_size"] = around.window_size
    return EventBatch(
        ts=None,
        events=(event,),
        dp_rank=around.attention_dp_rank,
        format="trtllm",
        seq=around.event_id,
        more=more,
    )


def _read(data: Any, field: str, group: int | None) -> Event:
    parsed = parse_tagged(data, tuple(_CLASSES), field)
    fields = msgspec.structs.asdict(parsed)
    if isinstance(parsed, _Stored):
        fields["pages"] = tuple(map(_page, parsed.pages, data["blocks"]))
    elif isinstance(parsed, _Updated):
        for name, change in fields.items():
            if isinstance(change, _Change):
                fields[name] = msgspec.structs.astuple(change)
    more = other_fields(data, type(parsed))
    event: Event = _CLASSES[type(parsed)](**fields, group=group, more=more)
    return event


def _page(page: _Page, raw: dict[str, Any]) -> Page:
    fields = msgspec.structs.asdict(page)
    del fields["type"]
    fields["tokens"] = tuple(map(msgspec.structs.astuple, page.tokens))
    return Page(**fields, more=other_fields(raw, _Page))
