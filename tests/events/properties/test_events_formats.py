"""Formats of events: payloads survive reading and writing, and damaged ones raise errors."""

import math
import random
from copy import deepcopy
from datetime import UTC, datetime

import attrs
import msgspec
import orjson
import pytest
from helpers.kv_events import PAYLOADS, batches, pack, wire_arrays, wire_payload
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import KvcoreError
from kvcore_events.block_tracker import BlockTracker
from kvcore_events.formats import WRITERS, decode, encode, write_value
from kvcore_events.model import UnparsedEvent
from kvcore_events.recording import RecordingReader, RecordingWriter, from_json, to_json

MUTATIONS = 2_000
"""Damaged payloads of each of the six kinds."""
DEEPER = 0.8
ODD = [None, True, -1, 2**64 - 1, 1.5, -0.0, "x", "", [], {}, [[1]], [None], {"type": "x"}, "$"]
ODD += [{1: 2}, -math.inf, datetime(1970, 1, 1, tzinfo=UTC)]
NAMES = ["type", "$x", "event_type", 1, None]


@given(batch=batches())
@settings(max_examples=100)
def test_an_encoded_batch_is_decoded_unchanged(batch):
    """A batch of any format is decoded from its bytes unchanged, times to the last bit."""
    assert decode(wire_payload(batch)) == batch


@given(batch=batches())
def test_decoded_bytes_are_encoded_unchanged(batch):
    """Decoding bytes and encoding them again gives the same bytes."""
    sent = wire_payload(batch)
    assert encode(decode(sent)) == sent


@given(event=wire_arrays(), rest=st.lists(st.none() | st.integers(0, 9), max_size=2))
@settings(max_examples=100)
def test_positional_arrays_are_encoded_unchanged(event, rest):
    """An event sent as a positional array of any length is encoded to the same bytes."""
    sent = pack([1.0, [event], *rest])
    batch = decode(sent)
    assert not isinstance(batch.events[0], UnparsedEvent)
    assert encode(batch) == sent
    assert batch == decode(encode(attrs.evolve(batch)))


@given(batch=batches())
def test_recorded_batches_are_read_unchanged(batch, tmp_path_factory):
    """A batch that is written to a recording is read back unchanged."""
    path = tmp_path_factory.mktemp("recording") / "r.jsonl"
    batch = decode(wire_payload(batch))
    with RecordingWriter(path) as recording:
        recording.batch(batch, seq=5, publisher=2)
    [item] = RecordingReader(path)
    assert (item.batch, item.seq, item.publisher) == (batch, 5, 2)
    assert encode(item.batch) == encode(batch)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["$bytes", "$"]), inner)
    ),
)


@given(value=json_like | st.floats(allow_nan=False))
def test_values_without_a_json_form_survive_json(value):
    """Values that msgpack has and JSON lacks are read back from JSON unchanged."""
    assert from_json(to_json(value)) == value


@pytest.mark.parametrize("name", PAYLOADS)
def test_mutated_payloads_raise_only_kvcore_errors(name):
    """Each damaged payload is decoded, or raises KvcoreError."""
    draw = random.Random(name)
    kept, refused = BlockTracker(), 0
    for _ in range(MUTATIONS):
        payload = bytearray(_odd(PAYLOADS[name], draw))
        for _ in range(draw.randint(0, 3)):
            _mutate(payload, draw)
        try:
            batch = decode(bytes(payload))
        except KvcoreError:
            refused += 1
        else:
            kept.apply(attrs.evolve(batch, seq=None))
            assert encode(decode(encode(batch))) == encode(batch)
            if batch.format in WRITERS:
                again = decode(encode(attrs.evolve(batch)))
                # The format may have been recognised by the shape of the batch alone.
                assert again.format != batch.format or repr(again) == repr(batch)
            assert orjson.loads(orjson.dumps(to_json(write_value(batch))))
    assert kept.batches + refused == MUTATIONS
    assert kept.batches > 0 < refused


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 100_000,
        b"[" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x93\x01\xdd\xff\xff\xff\xff",
        b"\x92\x01\x91\xdf\xff\xff\xff\xff",
        b"\x92\x01\x91" + b"\x91" * 200 + b"\xc0",
        pack([1.0, [{"type": "BlockRemoved", "block_hashes": [], "x": [[]]}]])[:-1],
        b"",
        b"\xc1",
    ],
    ids=["deep", "deep JSON", "long", "long events", "long map", "nested", "cut", "", "byte"],
)
def test_deep_nesting_and_false_lengths_are_refused(payload):
    """Payloads with deep nesting or false lengths raise KvcoreError."""
    with pytest.raises(KvcoreError, match=r"^payload: "):
        decode(payload)


def _odd(payload, draw):
    """Return a payload in which up to two values are of another kind."""
    packed = payload[:1] != b"{"
    value = msgspec.msgpack.decode(payload) if packed else orjson.loads(payload)
    for _ in range(draw.randint(0, 2)):
        _replace(value, draw)
    return pack(value) if packed else orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


def _replace(value, draw):
    """Put an odd value somewhere into a list or map, or into one of its members."""
    places = list(value) if isinstance(value, dict) else range(len(value))
    if not places:
        return
    place = draw.choice(places)
    inner = value[place]
    if isinstance(inner, (list, dict)) and inner and draw.random() < DEEPER:
        _replace(inner, draw)
    elif isinstance(value, dict) and draw.random() > DEEPER:
        value[deepcopy(draw.choice(NAMES))] = deepcopy(draw.choice(ODD))
    else:
        value[place] = deepcopy(draw.choice(ODD))


def _mutate(payload, draw):
    place = draw.randrange(len(payload) or 1)
    match draw.randrange(4):
        case 0 if payload:
            payload[place] = draw.randrange(256)
        case 1:
            del payload[place:]
        case 2:
            payload[place:place] = draw.randbytes(draw.randint(1, 5))
        case _:
            del payload[place : place + draw.randint(1, 5)]
