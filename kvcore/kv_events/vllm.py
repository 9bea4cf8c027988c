"""The msgpack batches of vLLM, SGLang and TensorRT-LLM: `[ts, events, dp_rank]`, or a map.

Newer vLLM names the items: `ts`, `events`, `data_parallel_rank`. An event is a map with a
`type` tag, or, from older releases, an array that begins with the tag. vLLM:
`vllm/distributed/kv_events.py`; SGLang: `srt/disaggregation/kv_events.py`; TensorRT-LLM:
`_torch/pyexecutor/kv_cache_events.py`. The order of an array is that of the
dynamo-kv-router's `zmq_wire` notes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcore.errors import InputError
from kvcore.kv_events.fields import (
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
from kvcore.kv_events.model import (
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


BATCH = table(
    Field("ts", TIME, "ts", required=True),
    Field("events", LIST, "events", required=True),
    Field("data_parallel_rank", COUNT, "dp_rank"),
)
"""The items of a batch: those of an array in this order."""


LEAST = 2


def read_batch(value: Any) -> Batch:
    """Read a batch. Its events that cannot be read are `Unread`.

    Raises:
        WrongError: it is no batch.
    """
    return opened(value, _read)


def write_batch(batch: Batch) -> list[Any] | dict[str, Any]:
    """Return the batch as it is packed.

    Raises:
        InputError: it holds an event that this format has no word for, or no time.
    """
    return closed(batch, [_write(event) for event in batch.events])


def opened(value: Any, read_event: Callable[[Any, str], Event]) -> Batch:
    """Read a batch, array or map, whose events are read by `read_event`.

    What that refuses with a WrongError becomes `Unread`. Items of an array beyond the rank
    are in `more` by `#` and their place.

    Raises:
        WrongError: it is no batch, or an event that cannot be read cannot be kept either.
    """
    fields, array = value, type(value) is list
    if array and len(value) >= LEAST:
        others = (f"#{place}" for place in range(len(BATCH), len(value)))
        fields = dict(zip((*BATCH, *others), value, strict=False))
    elif type(value) is not dict:
        where = "batch"
        raise wrong(where, f"must be [ts, events, dp_rank], not {shown(value)}")
    attributes, more = read(fields, BATCH, "batch")
    events = []
    for number, event in enumerate(fields["events"]):
        place = f"events[{number}]"
        try:
            events.append(read_event(event, place))
        except WrongError as error:
            events.append(Unread(kept(event, place), str(error)))
    attributes["events"] = tuple(events)
    return Batch(**attributes, more=more, wire=Wire(array, tuple(fields)))


def closed(batch: Batch, events: list[Any]) -> list[Any] | dict[str, Any]:
    """Return the array or the map of a batch with so written events.

    Raises:
        InputError: it has no time.
    """
    if batch.ts is None:
        msg = "a batch without a time cannot be written: this format begins with one"
        raise InputError(msg)
    fields = written(batch, BATCH, BATCH) | {"events": events}
    array = batch.wire is None or batch.wire.array
    return list(fields.values()) if array else fields


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
    event: Event = cls(
        **attributes, more=more, wire=Wire(array, tuple(fields if array else value))
    )
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
    wire = getattr(event, "wire", None)
    if wire is None or not wire.array:
        return written(event, known, ("type", *default)) | {"type": tag}
    fields = written(event, known, default)
    if len(fields) > len(wire.names):
        others = ", ".join(list(fields)[len(wire.names) :])
        msg = f"{tag} as an array has no place for {others}: evolve it with wire=None"
        raise InputError(msg)
    return [tag, *fields.values()]
