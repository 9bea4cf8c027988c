"""The msgpack batches of vLLM, SGLang and TensorRT-LLM: `[ts, events, dp_rank]`.

An event is a map with a `type` tag, or, from older releases, an array that begins with the
tag. vLLM: `vllm/distributed/kv_events.py`; SGLang: `srt/disaggregation/kv_events.py`;
TensorRT-LLM: `_torch/pyexecutor/kv_cache_events.py`. The order of an array is that of the
dynamo-kv-router's `zmq_wire` notes.
"""

from __future__ import annotations

from typing import Any

from kvcore.errors import InputError
from kvcore.events.fields import (
    COUNT,
    HASH,
    HASHES,
    INTEGER,
    LIST,
    OPTIONAL_LISTS,
    SIZE,
    TEXT,
    TIME,
    TOKENS,
    Field,
    Table,
    WrongError,
    kept,
    read,
    shown,
    table,
    unsayable,
    written,
    wrong,
)
from kvcore.events.model import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    Unread,
    Wire,
)

STORED = table(
    Field("block_hashes", HASHES, "hashes", required=True),
    Field("parent_block_hash", HASH, "parent"),
    Field("token_ids", TOKENS, "tokens", required=True),
    Field("block_size", SIZE, "block_size", required=True),
    Field("lora_id", INTEGER, "lora_id"),
    Field("medium", TEXT, "medium"),
    Field("lora_name", TEXT, "lora_name"),
    Field("extra_keys", OPTIONAL_LISTS, "extra_keys"),
    Field("group_idx", COUNT, "group"),
    Field("kv_cache_spec_kind", TEXT),
    Field("kv_cache_spec_sliding_window", COUNT),
    Field("locality", TEXT),
    Field("ownership", TEXT),
    Field("session_id", TEXT),
    Field("cache_salt", TEXT),
    Field("lookahead_token_ids", LIST),
    Field("mm_keys", LIST),
    Field("block_mm_infos", LIST),
)
REMOVED = table(
    Field("block_hashes", HASHES, "hashes", required=True),
    Field("medium", TEXT, "medium"),
    Field("group_idx", COUNT, "group"),
    Field("kv_cache_spec_kind", TEXT),
    Field("kv_cache_spec_sliding_window", COUNT),
    Field("locality", TEXT),
    Field("ownership", TEXT),
)
CLEARED: Table = {}

ALWAYS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
    *("lora_id", "medium", "lora_name"),
)
PREFIX = (*ALWAYS, "extra_keys")
TAIL = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")

KNOWN: dict[str, tuple[type[Any], Table, tuple[str, ...]]] = {
    "BlockStored": (BlockStored, STORED, ALWAYS),
    "BlockRemoved": (BlockRemoved, REMOVED, ("block_hashes", "medium")),
    "AllBlocksCleared": (AllBlocksCleared, CLEARED, ()),
}
"""By tag: the class, its fields, and those that vLLM writes even if they are null."""

TAGS = {cls: tag for tag, (cls, _, _) in KNOWN.items()}
BATCH = ("[ts, events, dp_rank]", 2, 3)


def read_batch(value: Any) -> Batch:
    """Read a batch. Its events that cannot be read are `Unread`.

    Raises:
        WrongError: it is no batch.
    """
    ts, events, rank, rest = split_batch(value)
    return Batch(
        ts=ts,
        events=tuple(_guarded(event, f"events[{place}]") for place, event in enumerate(events)),
        dp_rank=rank,
        more=rest,
        items=len(value),
    )


def write_batch(batch: Batch) -> list[Any]:
    """Return the batch as it is packed.

    Raises:
        InputError: it holds an event that this format has no word for, or no time.
    """
    return join_batch(batch, [_write(event) for event in batch.events])


def split_batch(value: Any) -> tuple[float, list[Any], int | None, dict[str, Any]]:
    """Take a batch apart: time, events, rank, and items beyond these by `#` and place.

    Raises:
        WrongError: it is none.
    """
    says, least, most = BATCH
    if type(value) is not list or len(value) < least:
        where = "batch"
        raise wrong(where, f"must be {says}, not {shown(value)}")
    TIME.check(value[0], "batch.ts")
    LIST.check(value[1], "batch.events")
    rank = value[2] if len(value) >= most else None
    if rank is not None:
        COUNT.check(rank, "batch.dp_rank")
    rest = {
        f"#{place}": kept(item, f"batch[{place}]")
        for place, item in enumerate(value[most:], most)
    }
    return value[0], value[1], rank, rest


def join_batch(batch: Batch, events: list[Any]) -> list[Any]:
    """Return the array of a batch with so written events."""
    if batch.ts is None:
        msg = "a batch without a time cannot be written: this format begins with one"
        raise InputError(msg)
    items = [batch.ts, events, batch.dp_rank, *batch.more.values()]
    short = batch.items == BATCH[1] and items[2:] == [None]
    return items[: BATCH[1]] if short else items


def _guarded(value: Any, place: str) -> Event:
    try:
        return _read(value, place)
    except WrongError as error:
        return Unread(kept(value, place), str(error))


def _read(value: Any, place: str) -> Event:
    array = type(value) is list
    if array:
        tag, fields = (value[0] if value else None), _by_name(value)
    elif type(value) is dict:
        fields = {name: item for name, item in value.items() if name != "type"}
        tag = value.get("type")
    else:
        raise wrong(place, f"must be a map or an array, not {shown(value)}")
    if type(tag) is not str or tag not in KNOWN:
        where = f"{place}.type"
        raise wrong(where, f"must be one of {', '.join(KNOWN)}, not {shown(tag)}")
    cls, known, _ = KNOWN[tag]
    attributes, more = read(fields, known, place)
    event: Event = cls(**attributes, more=more, wire=Wire(array, tuple(fields)))
    return event


def _by_name(value: list[Any]) -> dict[str, Any]:
    """Return the items of an array by the names that its layout gives them."""
    tail = value[len(PREFIX) + 1 :]
    layout: tuple[str, ...] = ()
    if value[:1] == ["BlockStored"]:
        # Dynamo's layout has a slot before the group that vLLM's has not.
        slot = () if _begins_with_group(tail) else ("block_mm_infos",)
        layout = (*PREFIX, *slot, *TAIL)
    elif value[:1] == ["BlockRemoved"]:
        layout = ("block_hashes", "medium", *TAIL)
    names = [*layout, *(f"#{place}" for place in range(len(layout) + 1, len(value)))]
    return dict(zip(names, value[1:], strict=False))


def _begins_with_group(tail: list[Any]) -> bool:
    """Say whether the first item is a group, or the null of one that a kind follows."""
    first, second = (*tail, None, None)[:2]
    return type(first) is int or (first is None and type(second) is str)


def _write(event: Event) -> Any:
    if isinstance(event, Unread):
        return event.value
    tag = TAGS.get(type(event))
    if tag is None:
        raise unsayable(event, "the events of vLLM")
    _, known, default = KNOWN[tag]
    fields = written(event, known, default)
    wire = getattr(event, "wire", None)
    if wire is None or not wire.array:
        return {"type": tag, **fields}
    if len(fields) > len(wire.names):
        others = ", ".join(list(fields)[len(wire.names) :])
        msg = f"{tag} as an array has no place for {others}: evolve it with wire=None"
        raise InputError(msg)
    return [tag, *fields.values()]
