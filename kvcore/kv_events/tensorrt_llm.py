"""TensorRT-LLM's polled events: one JSON object each, with a number and no time.

`LLM.get_kv_cache_events()` returns them; `KVCacheEventSerializer` in `tensorrt_llm/_utils.py`
writes them. They are read, not written.
"""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from kvcore.kv_events.model import (
    BlockRemoved,
    BlockUpdated,
    Count,
    DecodeError,
    Event,
    EventBatch,
    Page,
    PagesStored,
    PoolCreated,
    UnparsedEvent,
    other_fields,
    parse,
)


class _Event(msgspec.Struct, kw_only=True):
    event_id: Count
    data: Any = None
    window_size: Count | None = None
    attention_dp_rank: Count | None = None


class _Created(msgspec.Struct, tag="created", tag_field="type"):
    num_blocks_per_cache_level: tuple[Count, ...]


class _Token(msgspec.Struct):
    token_id: Count
    token_extra_id: Count


class _Page(msgspec.Struct, tag="stored_block", tag_field="type"):
    block_hash: int
    tokens: list[_Token]
    cache_level: Count
    priority: int


class _Stored(msgspec.Struct, kw_only=True, tag="stored", tag_field="type"):
    parent_hash: int | None = None
    blocks: list[_Page]


class _Removed(msgspec.Struct, tag="removed", tag_field="type"):
    block_hashes: tuple[int, ...]


class _Change(msgspec.Struct):
    new_value: int
    old_value: int


class _Updated(msgspec.Struct, tag="updated", tag_field="type"):
    block_hash: int
    cache_level: _Change | None = None
    priority: _Change | None = None


_DATA: Any = _Created | _Stored | _Removed | _Updated


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
    event: Event
    try:
        event = attrs.evolve(_read(around.data, "event.data"), group=around.window_size)
    except DecodeError as error:
        event = UnparsedEvent(around.data, str(error))
        if around.window_size is not None:
            more["window_size"] = around.window_size
    return EventBatch(
        ts=None,
        events=(event,),
        dp_rank=around.attention_dp_rank,
        format="trtllm",
        seq=around.event_id,
        more=more,
    )


def _read(data: Any, field: str) -> PoolCreated | PagesStored | BlockRemoved | BlockUpdated:
    event = parse(data, _DATA, field)
    more = other_fields(data, type(event))
    match event:
        case _Created():
            return PoolCreated(levels=event.num_blocks_per_cache_level, more=more)
        case _Stored():
            pages = zip(event.blocks, data["blocks"], strict=True)
            return PagesStored(
                pages=tuple(_page(page, raw) for page, raw in pages),
                parent=event.parent_hash,
                more=more,
            )
        case _Removed():
            return BlockRemoved(hashes=event.block_hashes, more=more)
    level, priority = _pair(event.cache_level), _pair(event.priority)
    return BlockUpdated(hash=event.block_hash, level=level, priority=priority, more=more)


def _page(page: _Page, raw: dict[str, Any]) -> Page:
    return Page(
        hash=page.block_hash,
        tokens=tuple((token.token_id, token.token_extra_id) for token in page.tokens),
        level=page.cache_level,
        priority=page.priority,
        more=other_fields(raw, _Page),
    )


def _pair(change: _Change | None) -> tuple[int, int] | None:
    return None if change is None else (change.old_value, change.new_value)
