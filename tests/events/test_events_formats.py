"""Formats of KV events: what each engine publishes is decoded and encoded to equal bytes."""

import math
import re

import attrs
import msgspec
import pytest
from helpers.kv_events import (
    DYNAMO,
    MOONCAKE,
    PAYLOADS,
    TRTLLM,
    VLLM,
    batch,
    pack,
    removed,
    stored,
)

from kvcore import InputError, TraceError
from kvcore_events.block_tracker import BlockTracker
from kvcore_events.formats import decode, encode
from kvcore_events.model import AllBlocksCleared, BlockStored, PagesStored, UnparsedEvent
from kvcore_events.recording import RecordingWriter


def read(*events):
    """Return the events of a decoded batch."""
    return decode(pack([1.0, list(events)])).events


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_cannot_hold_are_refused(number):
    """A number that is none in JSON, wherever it stands, would be another one when recorded."""
    for value in (
        [number, []],
        [1.0, [["Foo", number]]],
        [1.0, [["Foo", {"a": [0.5, number]}]]],
    ):
        with pytest.raises(TraceError, match=rf"must be a finite number, not {number}$"):
            decode(pack(value))
    assert decode(pack([1.0, [["Foo", 0.5]]])).raw == [1.0, [["Foo", 0.5]]]


def test_millions_of_tiny_values_are_refused():
    """A payload with too many values is refused before it takes a hundred times its size."""
    many = (8 << 20) + 1
    events = (1 << 18) + 1
    with pytest.raises(TraceError, match=r"batch\.events: 262,145; more than 262,144 are not"):
        decode(b"\x92\x00\xdd" + events.to_bytes(4) + b"\x90" * events)
    for payload in (b"\x92\x00\xdd" + many.to_bytes(4) + b"\x90" * many, b"[" * many):
        with pytest.raises(TraceError, match=r"too many values; more than 8,388,608 texts"):
            decode(payload)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (
            "\x1b]0;x\x07",
            msgspec.msgpack.Ext(5, b""),
            r"\\x1b\]0;x\\x07 must be plain .* not Ext$",
        ),
        ("x" * 1000, msgspec.msgpack.Ext(5, b""), r"x{100,}\.\.\.$"),
    ],
)
def test_reasons_are_safe_to_print(field, value, reason):
    """Names out of a payload are escaped and shortened in the reason of an error."""
    with pytest.raises(TraceError, match=reason) as error:
        decode(pack([1.0, [{"type": "AllBlocksCleared", field: value}]]))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400


def test_vllm_events_have_their_fields_as_attributes():
    """Events captured from vLLM have their fields in the attributes of that meaning."""
    found = decode(pack(VLLM))
    run, gone = found.events
    assert (found.ts, found.dp_rank, found.time) == (1.5, 0, 1_500_000_000)
    assert run.hashes == (12555718149727645726, 6316901218105635996, 4611920248672570002)
    assert (run.parent, run.block_size, run.medium, run.group) == (None, 4, "GPU", 0)
    assert run.extra_keys == (("s1",), None, None)
    assert run.more == {"kv_cache_spec_kind": "full_attention"}
    assert gone.hashes == (4611920248672570002,)


@pytest.mark.parametrize("name", PAYLOADS)
def test_payloads_are_encoded_to_the_same_bytes(name):
    """Payloads of engines are encoded as the bytes from which they were decoded."""
    assert encode(decode(PAYLOADS[name])) == PAYLOADS[name]


@pytest.mark.parametrize(
    "value",
    [
        {"events": [], "ts": 1.5},
        {"ts": 1, "events": [["AllBlocksCleared"]], "data_parallel_rank": None, "x": [b"x"]},
        [1.5, [{"block_hashes": [1], "type": "BlockRemoved"}], None],
    ],
    ids=["no rank", "unknown item", "type last"],
)
def test_the_order_of_names_is_kept(value):
    """Items of a batch and fields of an event are encoded in their former order."""
    assert encode(decode(pack(value))) == pack(value)


def test_arrays_are_read_by_place():
    """Fields of an event that is an array are read by their place.

    Hashes may be signed, a parent bytes, and tokens pairs or texts.
    """
    [run] = decode(PAYLOADS["array"]).events
    assert (run.hashes, run.parent) == ((-3, 4), b"p" * 32)
    assert (run.tokens, run.medium) == (((1, 2), "x"), "CPU")


def test_the_group_is_read_from_both_array_layouts():
    """The group is read from vLLM's arrays and from Dynamo's, which have a slot before it."""
    start = ["BlockStored", [1], None, [7], 1, None, "GPU", None, None]
    vllm, dynamo, kind = read([*start, 3, "mla"], [*start, None, 3, "mla"], [*start, None, "m"])
    assert (vllm.group, vllm.more) == (3, {"kv_cache_spec_kind": "mla"})
    assert (dynamo.group, dynamo.more) == (3, {"kv_cache_spec_kind": "mla"})
    assert (kind.group, kind.more) == (None, {"kv_cache_spec_kind": "m"})


def test_trtllm_blocks_have_levels():
    """An event of TensorRT-LLM has a number and a window, its blocks a level and a priority."""
    found = decode(TRTLLM)
    [run] = found.events
    assert isinstance(run, PagesStored)
    assert (found.format, found.seq, found.ts, run.group) == ("trtllm", 7, None, 4096)
    assert [(b.hash, b.content, b.medium) for b in run.blocks()] == [(5, ((1, 0),), "LEVEL_0")]


def test_dynamo_hashes_are_equal_when_stored_and_removed():
    """Dynamo's signed hashes are equal in its stored and removed events."""
    block = b'{"block_hash":-4,"tokens_hash":5}'
    lines = [
        b'{"worker_id":1,"event":{"event_id":1,"data":{"stored":{"blocks":[%s]}}}}' % block,
        b'{"worker_id":1,"event":{"event_id":2,"data":{"removed":{"block_hashes":[-4]}}}}',
    ]
    tracker = BlockTracker()
    for line in lines:
        tracker.apply(decode(line))
    assert (tracker.stored, tracker.removed, tracker.anomalies["unread"]) == (1, 1, 0)


def test_dynamo_events_have_worker_number_tier_and_token_hashes():
    """An event of Dynamo has worker, number and tier; its blocks hash their tokens."""
    found = decode(DYNAMO)
    [run] = found.events
    assert (found.format, found.source, found.seq, found.dp_rank) == ("dynamo", 3, 4, 0)
    assert (run.hashes, run.contents, run.tokens, run.medium) == ((5,), (6,), None, "device")


def test_dynamo_events_keep_what_they_have():
    """Fields that are not known here, and a changed tier, are written again."""
    line = (
        b'{"worker_id":1,"storage_tier":"device","event":{"event_id":3,'
        b'"data":{"removed":{"block_hashes":[1]}},"extra":"E"}}'
    )
    found = decode(line)
    assert decode(encode(found)) == found
    assert b'"extra":"E"' in encode(found)
    moved = attrs.evolve(found, events=(attrs.evolve(found.events[0], medium="host_pinned"),))
    assert decode(encode(moved)).events[0].medium == "host_pinned"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"contents": (3,)}, "2 hashes of blocks, and 1 contents"),
        ({"contents": (3, 4), "lora_name": "a"}, "cannot be expressed in Dynamo"),
        ({"contents": (3, 4), "extra_keys": ((), ())}, "cannot be expressed in Dynamo"),
    ],
)
def test_what_dynamo_cannot_have_is_refused(fields, reason):
    """Blocks without a content each, or of an adapter, are no router event."""
    event = BlockStored(hashes=(1, 2), **fields)
    with pytest.raises(InputError, match=reason):
        encode(batch(event, format="dynamo", seq=0, source=0))


def test_mooncake_has_milliseconds_and_object_keys():
    """Mooncake's times are in milliseconds, and its blocks have the keys of objects."""
    found = decode(pack(MOONCAKE))
    assert (found.format, found.time) == ("mooncake", 1780000000123 * 10**6)
    assert found.events[0].hashes == ("model@0/abc",)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (7, r"events\[1\] must be a map, not 7"),
        ({"block_hashes": [1]}, r"events\[1\]\.type must be one of BlockStored, .*, not None"),
        (["Moved"], r"events\[1\]\.type must be one of .*, not 'Moved'"),
        (["BlockRemoved"], r"events\[1\]: object missing required field `block_hashes`"),
        (
            ["BlockRemoved", [1, "x"]],
            r"events\[1\]\.block_hashes\[1\]: expected `int \| bytes`, got `str`",
        ),
        (["BlockRemoved", [True]], r"block_hashes\[0\]: expected `int \| bytes`, got `bool`"),
        (["BlockRemoved", [b"x" * 65]], r"block_hashes\[0\]: expected `bytes` of length <= 64"),
        (["BlockStored", [1], None, [5, -1], 1], r"token_ids\[1\]: expected token ids from 0"),
        (["BlockStored", [1], None, [[1, -1]], 1], r"token_ids\[0\]: expected token ids"),
        (["BlockStored", [1], None, [[1, 2, 3]], 1], r"token_ids\[0\]: .* of length 2, got 3"),
        (["BlockStored", [1], None, [1], 0], r"block_size: expected `int` >= 1"),
        (
            ["BlockStored", [1], None, [1], 1, None, 5],
            r"medium: expected `str \| null`, got `int`",
        ),
    ],
)
def test_an_invalid_event_is_kept_with_its_place(event, reason):
    """An invalid event is an UnparsedEvent with its place; the other events are read.

    The batch is encoded as it was.
    """
    good = {"type": "AllBlocksCleared"}
    payload = pack([1.0, [good, event, good]])
    found = decode(payload)
    kinds = [isinstance(event, UnparsedEvent) for event in found.events]
    assert kinds == [False, True, False]
    assert re.search(reason, found.events[1].reason)
    assert encode(found) == payload


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (pack([1.0]), r"payload: batch must be \[ts, events, dp_rank\], not \[1\.0\]"),
        (pack(["x", []]), "batch.ts: expected `int . float`, got `str`"),
        (pack([float("nan"), []]), r"value\[0\] must be a finite number, not nan"),
        (pack([1.0, {}]), "batch.events: expected `array`, got `object`"),
        (pack([1.0, [], "r"]), "batch.data_parallel_rank: expected `int . null`, got `str`"),
        (pack({"ts": 1.0}), "batch: object missing required field `events`"),
        (pack([1.0, [{"type": "AllBlocksCleared", "x": {1: 2}}]]), "texts as names, not 1"),
        (pack([1.0, [{"type": "AllBlocksCleared", 1: 2}]]), "texts as names, not 1"),
        (pack({"ts": 1.0, "events": [], 3: 4}), "texts as names, not 3"),
        (pack([1.0, []])[:-1], "no msgpack: "),
        (pack(5), "neither a msgpack array or map nor JSON"),
        (b"hello", "neither a msgpack array or map nor JSON: it begins b'hello'"),
        (b'{"a":1}', "must be an event with event_id and data, or worker_id and event"),
        (b'{"event_id":-1,"data":{}}', "event.event_id: expected `int` >= 0"),
        (b'{"worker_id":1,"event":3}', "line.event: expected `object`, got `int`"),
    ],
)
def test_a_payload_that_is_no_batch_is_refused(payload, reason):
    """A payload that is not a batch raises TraceError with the place and the reason."""
    with pytest.raises(TraceError, match=reason):
        decode(payload)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"type":"moved"}', "type must be one of created, stored, removed, updated"),
        (
            b'{"type":"stored","blocks":[{"block_hash":1}]}',
            r"data\.blocks\[0\]: object missing required field `tokens`",
        ),
        (
            b'{"type":"updated","block_hash":1,"priority":{"new_value":1}}',
            "priority: object missing required field `old_value`",
        ),
    ],
)
def test_an_invalid_polled_event_has_number_and_place(data, reason):
    """An invalid event of TensorRT-LLM has its number, and the place of the fault."""
    payload = b'{"event_id":9,"data":' + data + b',"window_size":5}'
    found = decode(payload)
    assert found.seq == 9
    assert re.search(reason, found.events[0].reason)
    assert decode(encode(found)) == found


def test_events_that_a_format_cannot_express_are_refused():
    """Encoding raises InputError with the events or the fields that a format cannot express."""
    with pytest.raises(
        InputError, match="PagesStored cannot be expressed in the events of vLLM"
    ):
        encode(batch(PagesStored(pages=())))
    with pytest.raises(InputError, match="one event a line"):
        encode(batch(stored(1), format="dynamo"))
    with pytest.raises(InputError, match="reads the format 'trtllm' but does not write it"):
        encode(batch(stored(1), format="trtllm"))
    with pytest.raises(
        InputError, match="BlockStored cannot be expressed in Dynamo's router events"
    ):
        encode(batch(stored(1), format="dynamo", seq=0, source=0))
    with pytest.raises(
        InputError, match="no format of KV events is called 'x'; there are: msg"
    ):
        encode(batch(format="x"))


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (batch(BlockStored(hashes=(1,))), "token_ids: expected `array`, got `null`"),
        (batch(BlockStored(hashes=(1,), tokens=(-1,), block_size=1)), "token ids from 0 on"),
        (batch(removed("name")), "expected `int | bytes`, got `str`"),
        (batch(removed(2**70)), "ints"),
        (batch(AllBlocksCleared(more={"x": math.nan})), "finite number, not nan"),
        (batch(ts=math.inf), "finite number, not inf"),
        (batch(dp_rank=-1), "expected `int` >= 0"),
        (batch(more={3: 1}), "texts as names, not 3"),
        (batch(removed(b"h"), format="dynamo", seq=0, source=0), "expected `int`, got `bytes`"),
        (batch(removed(1), format="dynamo", seq=0, source=0, more={"event": 5}), "iterable"),
    ],
)
def test_what_a_reader_would_refuse_is_not_written(tmp_path, broken, reason):
    """A batch that could not be read again is refused as a payload and in a recording."""
    with pytest.raises(InputError, match=f"cannot be written as .*{re.escape(reason)}"):
        encode(broken)
    with RecordingWriter(tmp_path / "r.jsonl") as recording:
        with pytest.raises(InputError, match="cannot be written as"):
            recording.batch(broken)
        assert recording.lines == {"RECORDING": 1}


@pytest.mark.parametrize("name", ["map", "batch as a map", "array", "dynamo"])
def test_a_changed_batch_is_encoded_in_the_current_format(name):
    """A changed copy of a decoded batch is encoded from its events in the current format."""
    found = decode(PAYLOADS[name])
    copy = attrs.evolve(found, dp_rank=7)
    assert (copy.raw, copy.dp_rank) == (None, 7)
    assert attrs.evolve(decode(encode(copy)), dp_rank=found.dp_rank) == found


def test_tokens_that_do_not_divide_evenly_give_no_contents():
    """Blocks have contents only if the tokens divide evenly among them."""
    whole = stored(1, 2, size=2)
    assert [block.content for block in whole.blocks()] == [(1, 1), (2, 2)]
    ragged = BlockStored(hashes=(1, 2), tokens=(1, 2, 3), block_size=2)
    assert [block.content for block in ragged.blocks()] == [None, None]
    assert [block.parent for block in ragged.blocks()] == [None, 1]
