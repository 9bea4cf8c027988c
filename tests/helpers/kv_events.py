"""KV events for tests: batches as engines send them, and hypothesis strategies."""

import msgspec
import orjson
from hypothesis import strategies as st

from kvcore_events.formats import encode
from kvcore_events.model import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    BlockUpdated,
    EventBatch,
    Page,
    PagesStored,
    PoolCreated,
)
from kvcore_events.recording import RecordingWriter

# Captured from vLLM 0.33, with a salt in the first block.
VLLM = [
    1.5,
    [
        {
            "type": "BlockStored",
            "block_hashes": [12555718149727645726, 6316901218105635996, 4611920248672570002],
            "parent_block_hash": None,
            "token_ids": list(range(12)),
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["s1"], None, None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        },
        {
            "type": "BlockRemoved",
            "block_hashes": [4611920248672570002],
            "medium": "GPU",
            "group_idx": 0,
        },
    ],
    0,
]
TRTLLM = (
    b'{"event_id":7,"data":{"type":"stored","parent_hash":null,"blocks":[{"type":"stored_block",'
    b'"block_hash":5,"tokens":[{"type":"unique_token","token_id":1,"token_extra_id":0}],'
    b'"cache_level":0,"priority":35}]},"window_size":4096}'
)
DYNAMO = (
    b'{"worker_id":3,"storage_tier":"device","residency_domain":"worker","event":{"event_id":4,'
    b'"data":{"stored":{"parent_hash":null,"start_position":0,"blocks":[{"block_hash":5,'
    b'"tokens_hash":6,"mm_extra_info":null}]}},"dp_rank":0}}'
)
MOONCAKE = [
    1780000000123,
    [
        {
            "event_id": 1,
            "timestamp": 1780000000123,
            "event_type": "stored",
            "type": "BlockStored",
            "model_name": None,
            "block_size": None,
            "additional_salt": None,
            "lora_name": None,
            "tenant_id": "default",
            "backend_id": "b0",
            "medium": "CPU",
            "dp_rank": 0,
            "group_id": None,
            "object_key": "model@0/abc",
            "seq_hashes": [],
            "block_hashes": [],
            "base_block_idx": None,
            "parent_hash": None,
            "token_ids": None,
            "parent_block_hash": None,
        }
    ],
    0,
]

pack = msgspec.msgpack.encode
PAYLOADS = {
    "map": pack(VLLM),
    "batch as a map": pack({"ts": 1.5, "events": VLLM[1], "data_parallel_rank": 0}),
    "array": pack([2, [["BlockStored", [-3, 4], b"p" * 32, [[1, 2], "x"], 1, None, "CPU"]]]),
    "mooncake": pack(MOONCAKE),
    "trtllm": TRTLLM,
    "dynamo": DYNAMO,
}


def stored(*hashes, parent=None, size=1, **fields):
    """Return a stored run of blocks; each has its hash as all of its `size` tokens."""
    tokens = tuple(value for value in hashes for _ in range(size))
    return BlockStored(hashes=hashes, parent=parent, tokens=tokens, block_size=size, **fields)


def removed(*hashes, **fields):
    """Return a removal of blocks."""
    return BlockRemoved(hashes=hashes, **fields)


def batch(*events, ts=0.0, **fields):
    """Return a batch in vLLM's format."""
    return EventBatch(ts, events, **fields)


def record(path, *batches, **about):
    """Write batches, numbered from 0, to a recording."""
    with RecordingWriter(path, **about) as recording:
        for seq, each in enumerate(batches):
            recording.batch(each, seq)
    return path


def wire_payload(batch):
    """Return a batch as bytes, in formats that kvcore cannot write too."""
    match batch.format:
        case "trtllm":
            return orjson.dumps(_polled(batch))
        case "mooncake":
            events = [_object(event) for event in batch.events]
            return pack([batch.ts, events, batch.dp_rank])
    return encode(batch)


def _polled(batch):
    [event] = batch.events
    value = {"event_id": batch.seq, "data": _polled_data(event)}
    if event.group is not None:
        value["window_size"] = event.group
    return value if batch.dp_rank is None else value | {"attention_dp_rank": batch.dp_rank}


def _polled_data(event):
    match event:
        case PoolCreated():
            return {"type": "created", "num_blocks_per_cache_level": event.levels}
        case BlockRemoved():
            return {"type": "removed", "block_hashes": event.hashes}
        case BlockUpdated():
            changes = {"cache_level": event.level, "priority": event.priority}
            return {"type": "updated", "block_hash": event.hash} | {
                name: pair
                and {"type": "event_diff", "new_value": pair[1], "old_value": pair[0]}
                for name, pair in changes.items()
            }
    blocks = [
        {
            "type": "stored_block",
            "block_hash": page.hash,
            "tokens": [
                {"type": "unique_token", "token_id": token, "token_extra_id": extra}
                for token, extra in page.tokens
            ],
            "cache_level": page.level,
            "priority": page.priority,
            **page.more,
        }
        for page in event.pages
    ]
    return {"type": "stored", "parent_hash": event.parent, "blocks": blocks, **event.more}


def _object(event):
    if isinstance(event, AllBlocksCleared):
        return {"event_type": "cleared", **event.more}
    [*hashes] = event.hashes
    named = isinstance(hashes[0], str)
    fields = {"object_key": hashes[0], "seq_hashes": []} if named else {"seq_hashes": hashes}
    fields |= {"medium": event.medium, **event.more}
    if isinstance(event, BlockRemoved):
        return {"event_type": "removed", **fields}
    return {"event_type": "stored", "parent_hash": event.parent, **fields}


counts = st.integers(0, 2**64 - 1)
integers = st.integers(-(2**63), 2**64 - 1)
times = st.floats(allow_nan=False, allow_infinity=False, min_value=-(2**62), max_value=2**62)
texts = st.text(max_size=5)
extras = st.dictionaries(
    st.text("abc", min_size=1, max_size=3).map("$x_{}".format),
    st.recursive(
        st.none() | st.booleans() | integers | texts | st.binary(max_size=3) | times,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
        max_leaves=4,
    ),
    max_size=2,
)
hashes = integers | st.binary(min_size=32, max_size=32)
runs = st.lists(hashes, max_size=4).map(tuple)
tokens = st.lists(counts | texts | st.tuples(counts, counts), max_size=8).map(tuple)
maybe = st.none()


def engine_events(more=extras):
    """Return a strategy for the events of vLLM, SGLang and TensorRT-LLM's stream."""
    known = st.fixed_dictionaries(
        {},
        optional={
            "kv_cache_spec_kind": texts,
            "kv_cache_spec_sliding_window": counts,
            "session_id": texts,
            "cache_salt": texts,
            "locality": texts,
            "mm_keys": st.lists(st.lists(extras, max_size=1), max_size=2),
        },
    )
    keys = st.lists(maybe | st.lists(texts | counts, max_size=2).map(tuple), max_size=3)
    return st.one_of(
        st.builds(
            BlockStored,
            hashes=runs,
            parent=maybe | hashes,
            tokens=tokens,
            block_size=st.integers(1, 2**32),
            medium=maybe | texts,
            lora_id=maybe | integers,
            lora_name=maybe | texts,
            extra_keys=maybe | keys.map(tuple),
            group=maybe | counts,
            more=st.builds(lambda one, two: one | two, known, more),
        ),
        st.builds(
            BlockRemoved, hashes=runs, medium=maybe | texts, group=maybe | counts, more=more
        ),
        st.builds(AllBlocksCleared, more=more),
    )


@st.composite
def wire_arrays(draw):
    """Draw an event as older engines pack it, cut anywhere after the required fields."""
    group, kind, window = draw(maybe | counts), draw(maybe | texts), draw(maybe | counts)
    tail = [draw(maybe | st.lists(texts, max_size=1)), group, kind, window]
    if draw(st.booleans()) and group is not None:
        tail = [group, kind, window]
    sizes, adapters = st.integers(1, 2**32), maybe | integers
    prefix = [draw(runs), draw(maybe | hashes), draw(tokens), draw(sizes), draw(adapters)]
    prefix += [draw(maybe | texts), draw(maybe | texts), draw(maybe | st.lists(maybe))]
    stored = ["BlockStored", *prefix, *tail, draw(texts)]
    removed = ["BlockRemoved", draw(runs), draw(maybe | texts), group, kind, window]
    whole, least = draw(st.sampled_from([(stored, 5), (removed, 2), (["AllBlocksCleared"], 1)]))
    return whole[: draw(st.integers(least, len(whole)))]


def batches():
    """Return a strategy for batches of any format."""
    page = st.builds(
        Page,
        hash=integers,
        tokens=st.lists(st.tuples(counts, counts), max_size=3).map(tuple),
        level=counts,
        priority=integers,
        more=extras_of_json,
    )
    pair = maybe | st.tuples(integers, integers)
    group = maybe | counts
    polled = st.one_of(
        st.builds(
            PagesStored,
            pages=st.lists(page, max_size=3).map(tuple),
            parent=maybe | integers,
            group=group,
            more=extras_of_json,
        ),
        st.builds(PoolCreated, levels=st.lists(counts, max_size=3).map(tuple), group=group),
        st.builds(BlockUpdated, hash=integers, level=pair, priority=pair, group=group),
        st.builds(BlockRemoved, hashes=st.lists(integers, max_size=3).map(tuple), group=group),
    )
    ranks = maybe | counts
    return st.one_of(
        st.builds(
            EventBatch,
            ts=times | st.integers(0, 2**40),
            events=st.lists(engine_events(), max_size=3).map(tuple),
            dp_rank=ranks,
        ),
        st.builds(
            EventBatch,
            ts=maybe,
            events=st.tuples(polled),
            dp_rank=ranks,
            format=st.just("trtllm"),
            seq=counts,
        ),
        routed(),
        stored_objects(),
    )


extras_of_json = st.dictionaries(
    st.text("abc", min_size=1, max_size=3).map("x_{}".format),
    st.none() | st.booleans() | integers | texts | st.lists(texts, max_size=2),
    max_size=2,
)


@st.composite
def routed(draw):
    """Draw a router event of Dynamo."""
    tier = draw(st.sampled_from(["device", "host_pinned", "disk"]))
    values = tuple(draw(st.lists(integers, max_size=3)))
    stored_run = BlockStored(
        hashes=values,
        contents=tuple(draw(integers) for _ in values),
        parent=draw(maybe | integers),
        medium=tier,
        more={"blocks": [{"mm_extra_info": None}] * len(values)} if values else {},
    )
    gone = BlockRemoved(hashes=tuple(abs(value) for value in values), medium=tier)
    event = draw(st.sampled_from([stored_run, gone, AllBlocksCleared()]))
    around = {"storage_tier": tier, "residency_domain": "worker"} | draw(extras_of_json)
    return EventBatch(
        ts=None,
        events=(event,),
        dp_rank=draw(maybe | counts),
        format="dynamo",
        seq=draw(counts),
        source=draw(counts),
        more=around,
    )


@st.composite
def stored_objects(draw):
    """Draw a batch of the Mooncake store."""
    name = draw(texts)
    medium = draw(maybe | texts)
    values = draw(st.lists(integers, min_size=1, max_size=3).map(tuple) | st.just((name,)))
    ids = {"event_id": draw(counts), "tenant_id": draw(texts)}
    objects = [
        BlockStored(hashes=values, medium=medium, parent=draw(maybe | integers), more=ids),
        BlockRemoved(hashes=values, medium=medium, more=ids),
        AllBlocksCleared(more=ids),
    ]
    events = tuple(draw(st.lists(st.sampled_from(objects), min_size=1, max_size=3)))
    ms = draw(st.integers(0, 2**42))
    return EventBatch(ms, events, draw(maybe | counts), format="mooncake")
