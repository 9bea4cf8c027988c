"""The workload `mooncake`: the published trace of Mooncake, and files in its format."""

from copy import copy

import orjson
import pytest

from kvcore.errors import InputError
from kvcore.request import chain_keys
from kvcore.workloads import checked, recognise
from kvcore_plugins.workload import Chat, Lengths, Mooncake

ROW = {"timestamp": 27_482, "input_length": 700, "output_length": 52, "hash_ids": [46, 47]}


def write(path, *rows):
    """Write `rows` to `path`, one a line."""
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def test_bundled_trace_is_the_published_one():
    """The bundled trace has the published numbers of requests, keys and timestamps."""
    requests, keys, distinct, arrivals = 0, 0, set(), set()
    for request in Mooncake():
        requests += 1
        keys += len(request.keys)
        distinct.update(request.keys)
        arrivals.add(request.arrival)
    assert (requests, keys, len(distinct), len(arrivals)) == (12_031, 288_500, 182_790, 1_180)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"timestamp": "soon"}, "field 'timestamp': expected a number, or a time"),
        ({"timestamp": 2**62}, "field 'timestamp': expected a number, or a time"),
        ({"timestamp": None}, "field 'timestamp': expected a number, or a time .*, got null"),
        ({"input_length": True}, "field 'input_length': expected a whole number from 1"),
        ({"input_length": 0}, "field 'input_length': expected a whole number from 1"),
        ({"output_length": "52"}, "field 'output_length': expected .*, got \"52\""),
        ({"hash_ids": {"46": 47}}, "field 'hash_ids': expected a list of integers, got {"),
        (
            {"hash_ids": [46, "x"]},
            r"field 'hash_ids\[1\]': expected an integer .* 1 to 128 hexa.* digits, got \"x\"",
        ),
        ({"hash_ids": [None]}, r"field 'hash_ids\[0\]': expected an integer .*, got null"),
        ({"hash_ids": [True]}, r"field 'hash_ids\[0\]': expected an integer .*, got true"),
        ({"hash_ids": [1.5]}, r"field 'hash_ids\[0\]': expected an integer"),
        ({"hash_ids": [-1]}, r"field 'hash_ids\[0\]': expected an integer"),
        ({"hash_ids": [1, 2, 3]}, "field 'hash_ids': expected at most 2 keys .*, got 3"),
    ],
)
def test_bad_field_is_named(tmp_path, change, complaint):
    """A bad field raises InputError with file, line, field and value."""
    path = write(tmp_path / "t.jsonl", ROW, ROW | change)
    with pytest.raises(InputError, match=rf"t\.jsonl:2: {complaint}"):
        list(Mooncake(path))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"[1, 2]", r"t\.jsonl:1: expected a JSON object, got \[1,2\]"),
        (b'{"timestamp": ', r"t\.jsonl:1: not JSON: .* \(column \d+\)"),
    ],
)
def test_a_line_that_is_no_object_is_refused(tmp_path, line, complaint):
    """A line that is not a JSON object raises InputError with file and line."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(line)
    with pytest.raises(InputError, match=complaint):
        list(Mooncake(path))


def test_long_values_are_shortened_in_errors(tmp_path):
    """An error about a long value shortens the value."""
    path = write(tmp_path / "t.jsonl", ROW | {"output_length": "7" * 10_000})
    with pytest.raises(InputError) as caught:
        list(Mooncake(path))
    assert len(str(caught.value)) < 300 + len(str(path))


def test_keys_may_stand_for_other_numbers_of_tokens(tmp_path):
    """The option says how many; with 512, the requests and their digest are what they were."""
    path = write(tmp_path / "t.jsonl", ROW | {"input_length": 32})
    (request,) = Mooncake(path, key_tokens=16)
    assert (request.keys, request.key_tokens) == ([46, 47], 16)
    assert Mooncake(path, key_tokens=16).digest != Mooncake(path).digest
    assert "key_tokens" not in Mooncake(path).options()
    with pytest.raises(InputError, match="512 a key; the option key_tokens says how many"):
        list(Mooncake(path, key_tokens=512))


@pytest.mark.parametrize(
    ("rows", "tokens"),
    [
        ([(700, 2)], 512),
        ([(32, 2)], 16),
        ([(3_000, 3), (1_025, 2)], 1_024),
        ([(48, 3), (40, 3), (83, 6)], 16),
        ([(100, 6), (35, 2), (16, 1)], 16),
        ([(100, 1), (513, 3)], 256),
        ([(96, 4), (100, 5)], 24),
    ],
)
def test_the_tokens_of_a_key_fit_the_rows(tmp_path, rows, tokens):
    """The first rows tell them: of blocks, a last partial one included, or of full blocks."""
    lines = [ROW | {"input_length": length, "hash_ids": [*range(n)]} for length, n in rows]
    workload = Mooncake(write(tmp_path / "t.jsonl", *lines))
    assert {request.key_tokens for request in workload} == {tokens}
    note = f"a key stands for {tokens} tokens, as the first rows have it"
    assert (note in workload.notes) is (tokens != 512)


def test_too_few_ids_are_noted(tmp_path):
    """Prompts whose ids cover less than their full blocks are counted in a note."""
    rows = [ROW, ROW | {"input_length": 5_000, "hash_ids": [46]}]
    workload = Mooncake(write(tmp_path / "t.jsonl", *rows))
    assert len(list(workload)) == 2
    assert "prompts with too few ids, whose rest is never shared: 1" in workload.notes


@pytest.mark.parametrize(
    "ids", [[2**63, 5], [-7, 2**64 - 1], ["9f3c01d2", "0x00aa11bb22cc33dd"]]
)
def test_ids_may_have_64_bits(tmp_path, ids):
    """Ids beyond 63 bits and texts are keys: equal ones are equal, others are not."""
    rows = [ROW | {"hash_ids": ids}, ROW | {"hash_ids": ids[:1]}, ROW | {"hash_ids": [1, 2]}]
    first, second, third = Mooncake(write(tmp_path / "t.jsonl", *rows))
    assert first.keys[:1] == second.keys
    assert not set(first.keys) & set(third.keys)
    assert len(set(first.keys)) == 2


@pytest.mark.parametrize("digits", [1, 4, 8, 16, 32, 64, 128])
def test_hexadecimal_ids_are_numbers_that_traces_hold(tmp_path, digits):
    """Texts of one number are one key of 16 bytes, whatever their case and their zeros."""
    ids = [f"{'a' * digits}", f"0x{'A' * digits}", f"{'a' * digits:0>128}", "b" * digits]
    path = write(tmp_path / "t.jsonl", *(ROW | {"hash_ids": [name]} for name in ids))
    same, with_prefix, with_zeros, other = (request.keys for request in Mooncake(path))
    assert same == with_prefix == with_zeros != other
    assert {len(key) for key in (*same, *other)} == {16}


BAILIAN = [
    {"chat_id": 5, "parent_chat_id": -1, "timestamp": 10.5, "input_length": 40, "turn": 1},
    {"chat_id": 6, "parent_chat_id": -1, "timestamp": 11.0, "input_length": 33, "turn": 1},
    {"chat_id": 9, "parent_chat_id": 5, "timestamp": 40.25, "input_length": 70, "turn": 2},
    {"chat_id": 11, "parent_chat_id": 9, "timestamp": 60.25, "input_length": 72, "turn": 3},
]
IDS = [[1, 2, 3], [2, 2, 4], [1, 2, 3, 5, 6], [1, 2, 3, 5, 7]]
BAILIAN = [
    row | {"output_length": 8, "type": "text", "hash_ids": ids}
    for row, ids in zip(BAILIAN, IDS, strict=True)
]


def test_traces_of_bailian_are_read(tmp_path):
    """Times are seconds, keys are chained from ids of single blocks, turns follow another."""
    path = write(tmp_path / "t.jsonl", *BAILIAN)
    workload = recognise(path, [Mooncake, Lengths, Chat])
    requests = list(checked(workload))
    assert [request.arrival for request in requests] == [
        0,
        5 * 10**8,
        29_750 * 10**6,
        49_750 * 10**6,
    ]
    assert [request.keys for request in requests] == [chain_keys(ids) for ids in IDS]
    assert [request.key_tokens for request in requests] == [16] * 4
    assert [request.session for request in requests] == ["1", "2", "1", "1"]
    assert [request.after for request in requests] == [None, None, 0, 2]
    assert [request.think_time for request in requests[2:]] == [29_750 * 10**6, 20 * 10**9]
    assert any("chained" in note for note in workload.notes)


def test_times_with_fractions_are_seconds(tmp_path):
    """Times with fractions are read as seconds, with a note, unless a unit is given."""
    rows = [ROW | {"timestamp": time} for time in (1_234_500, 1_234_500.5)]
    path = write(tmp_path / "t.jsonl", *rows)
    workload = Mooncake(path)
    assert [request.arrival for request in workload] == [0, 5 * 10**8]
    assert workload.notes == [
        "times in 'timestamp' are read as s, since some have a fraction: unit= says otherwise"
    ]
    workload = Mooncake(path, unit="ms")
    assert [request.arrival for request in workload] == [0, 5 * 10**5]
    assert workload.notes == []


@pytest.mark.parametrize("write_time", [float, str, lambda time: str(float(time))])
@pytest.mark.parametrize(
    ("times", "arrivals"),
    [
        ([0, 1.5, 3.25], [0, 1_500 * 10**6, 3_250 * 10**6]),
        ([0, 1_000, 2_000], [0, 10**9, 2 * 10**9]),
    ],
)
def test_the_unit_follows_from_the_values_of_times(tmp_path, times, arrivals, write_time):
    """Numbers and texts of equal value have one unit; a whole number with a point is whole."""
    numbers, others = (
        Mooncake(write(tmp_path / name, *(ROW | {"timestamp": each(time)} for time in times)))
        for name, each in (("numbers.jsonl", lambda time: time), ("others.jsonl", write_time))
    )
    assert [request.arrival for request in others] == arrivals
    assert [request.arrival for request in numbers] == arrivals
    assert others.notes == numbers.notes


def test_whole_times_of_bailian_are_seconds(tmp_path):
    """The unit of Qwen-Bailian's traces is known, whether or not times have a fraction."""
    rows = [row | {"timestamp": float(round(row["timestamp"]))} for row in BAILIAN]
    arrivals = [request.arrival for request in Mooncake(write(tmp_path / "t.jsonl", *rows))]
    assert arrivals == [0, 10**9, 30 * 10**9, 50 * 10**9]


@pytest.mark.parametrize("last", [200.5, "200.5"])
def test_a_fraction_behind_the_first_rows_is_noted(tmp_path, last):
    """Where the first hundred times are whole, a later fraction is noted, no unit."""
    rows = [ROW | {"timestamp": time} for time in (*range(200), last)]
    workload = Mooncake(write(tmp_path / "t.jsonl", *rows))
    assert [request.arrival for request in workload][-1] == 200_500_000
    (note,) = (note for note in workload.notes if "fraction" in note)
    assert "read as ms, since the first 100 are whole, but later ones have a fraction" in note


def test_sessions_of_aiperf_are_closed_loops(tmp_path):
    """A turn follows the one before it in its session, after its delay in ms."""
    rows = [
        {"session_id": "a", "timestamp": 100, "input_length": 600, "hash_ids": [1, 2]},
        {"session_id": "b", "timestamp": 200, "input_length": 600, "hash_ids": [1, 3]},
        {"session_id": "a", "delay": 1_500, "input_length": 1_100, "hash_ids": [1, 2, 4]},
        {"session_id": "b", "delay": 20, "input_length": 1_100, "hash_ids": [1, 3, 5]},
    ]
    rows = [row | {"output_length": 9} for row in rows]
    workload = recognise(write(tmp_path / "t.jsonl", *rows), [Mooncake, Lengths, Chat])
    requests = {request.id: request for request in checked(workload)}
    assert [(requests[n].session, requests[n].after) for n in range(4)] == [
        ("1", None), ("2", None), ("1", 0), ("2", 1),
    ]  # fmt: skip
    assert [requests[n].think_time for n in range(4)] == [0, 0, 1_500 * 10**6, 20 * 10**6]
    assert [requests[n].arrival // 10**6 for n in range(4)] == [0, 100, 1_500, 120]


def test_agents_of_dynamo_wait_for_requests(tmp_path):
    """A request that waits for others is sent after the last of them and its waits.

    One that waits for a single other may name it without a list.
    """
    rows = [
        {"request_id": "p", "session_id": "x", "timestamp": 0, "wait_for": []},
        {"request_id": "q", "session_id": "y", "timestamp": 5, "wait_for": "p", "delay": 1},
        {"request_id": "r", "session_id": "x", "timestamp": 9, "wait_for": ["q", "p"],
         "delay": 2, "tool_wait_ms": 30.5},
    ]  # fmt: skip
    rows = [row | {"input_length": 9, "output_length": 9, "hash_ids": [1]} for row in rows]
    first, second, third = Mooncake(write(tmp_path / "t.jsonl", *rows))
    assert (first.after, second.after, third.after) == (None, 0, 1)
    assert (second.think_time, third.think_time) == (10**6, 32_500_000)


def test_a_row_that_waits_by_name_has_turns_after_it(tmp_path):
    """With `turns` a row continues the longest one before it, which may follow by its name."""
    keys = [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    rows = [
        ROW | {"request_id": f"r{len(ids)}", "input_length": 512 * len(ids), "hash_ids": ids}
        for ids in keys
    ]
    rows[1]["wait_for"] = "r2"
    first, second, third = Mooncake(write(tmp_path / "t.jsonl", *rows), turns=True)
    assert (first.after, second.after, third.after) == (None, first.id, second.id)


def test_a_row_that_waits_for_none_is_noted(tmp_path):
    """A note counts the rows whose `wait_for` names no row before them."""
    waits = [[], "b", ["a", "c"], "z"]
    rows = (ROW | {"request_id": "abcd"[n], "wait_for": wait} for n, wait in enumerate(waits))
    workload = Mooncake(write(tmp_path / "t.jsonl", *rows))
    assert [request.after for request in workload] == [None, None, 0, None]
    assert workload.notes[-1].endswith("names none before them, each sent at its time: 2")


def test_sessions_behind_the_first_rows_are_noted(tmp_path):
    """Rows of sessions after a hundred without any are single requests, with a note."""
    rows = [ROW] * 100 + [ROW | {"session_id": "a"}] * 2
    workload = Mooncake(write(tmp_path / "t.jsonl", *rows))
    assert {request.after for request in workload} == {None}
    assert workload.notes[-1].endswith("none of the first 100 is of one: 2")


def test_a_session_and_a_request_may_have_one_name(tmp_path):
    """The first request of a session follows none, whatever requests are called."""
    rows = [ROW | {"session_id": n, "request_id": n + 1} for n in range(3)]
    assert {request.after for request in Mooncake(write(tmp_path / "t.jsonl", *rows))} == {None}


def test_a_late_row_of_bailian_without_a_parent_begins_a_chat(tmp_path):
    """A row that has no `parent_chat_id`, as those before it have, is the first of its chat."""
    rows = [ROW | {"chat_id": n, "parent_chat_id": -1} for n in range(120)]
    *_, last = Mooncake(write(tmp_path / "t.jsonl", *rows, ROW | {"chat_id": 900}))
    assert (last.id, last.session, last.after) == (120, "121", None)


@pytest.mark.parametrize(
    "change",
    [
        {"session_id": []},
        {"session_id": 1, "request_id": {}},
        {"session_id": 1, "wait_for": [{}]},
        {"chat_id": [], "parent_chat_id": -1},
    ],
)
def test_names_of_sessions_are_no_objects(tmp_path, change):
    """A name of a session or a request that is a list or an object raises InputError."""
    with pytest.raises(InputError, match=r"t\.jsonl:1: field '\w+': expected an integer or a"):
        list(Mooncake(write(tmp_path / "t.jsonl", ROW | change)))


def dynamo(start, end, hashes, *, session="run", model="m", **change):
    """Return an event of Dynamo's request trace."""
    replay = {"trace_block_size": 64, "input_length": 64 * len(hashes)}
    request = {
        "request_id": f"r{start}", "model": model, "output_tokens": 16,
        "request_received_ms": start, "total_time_ms": end - start,
        "replay": replay | {"input_sequence_hashes": hashes},
    }  # fmt: skip
    event = {
        "schema": "dynamo.request.trace.v1", "event_type": "request_end",
        "event_time_unix_ms": end, "agent_context": {"session_id": session},
    }  # fmt: skip
    return event | {"request": request | change}


EPOCH = 1_777_312_800_000


@pytest.mark.parametrize("wrapped", [False, True])
def test_request_traces_of_dynamo_are_read(tmp_path, wrapped):
    """Events of requests become requests by their start, those of tools are skipped."""
    events = [
        dynamo(EPOCH, EPOCH + 500, [2**63 + 5, 7]),
        {"schema": "dynamo.request.trace.v1", "event_type": "tool_end",
         "event_time_unix_ms": EPOCH + 800, "tool": {"tool_call_id": "c"}},
        dynamo(EPOCH + 100, EPOCH + 900, [2**63 + 5, 8], session="other", model="n"),
        dynamo(EPOCH + 800, EPOCH + 1_000, [2**63 + 5, 7, 9]),
        dynamo(EPOCH + 900, EPOCH + 950, [1], replay=None),
    ]  # fmt: skip
    if wrapped:
        events = [{"timestamp": n, "event": event} for n, event in enumerate(events)]
    workload = recognise(write(tmp_path / "t.jsonl", *events), [Mooncake, Lengths, Chat])
    first, second, third = checked(workload)
    assert [r.arrival // 10**6 for r in (first, second, third)] == [0, 100, 800]
    assert [r.prompt_tokens for r in (first, second, third)] == [128, 128, 192]
    assert (first.key_tokens, first.output_tokens, first.salt) == (64, 16, "m")
    assert first.keys == third.keys[:2]
    assert second.keys[0] != first.keys[0]  # of another model
    assert (third.after, third.think_time) == (first.id, 300 * 10**6)
    assert "requests without lengths left out: 1" in workload.notes


def test_null_fields_of_dynamo_are_as_missing_ones(tmp_path):
    """The session and the lengths of an event stand elsewhere where one field is null."""
    null = {"input_length": None, "input_sequence_hashes": None, "trace_block_size": 64}
    event = dynamo(EPOCH, EPOCH + 500, [], replay=null, input_tokens=9, output_tokens=None)
    event["agent_context"]["trajectory_id"] = None
    (request,) = Mooncake(write(tmp_path / "t.jsonl", event))
    assert (request.session, request.prompt_tokens, request.output_tokens) == ("1", 9, 0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"agent_context": "x"}, "'agent_context': expected an object, got"),
        ({"request": {"replay": "x"}}, "'replay': expected an object, got"),
        ({"request": {}, "event_time_unix_ms": "x"}, "'event_time_unix_ms': expected a num"),
        ({"request": {"total_time_ms": "4"}}, "'total_time_ms': expected a number of milli"),
    ],
)
def test_bad_events_of_dynamo_are_named(tmp_path, change, complaint):
    """A part of an event that is not what it should be raises InputError that names it."""
    event = dynamo(EPOCH, EPOCH + 500, [1]) | change
    with pytest.raises(InputError, match=rf"t\.jsonl:1: field {complaint}"):
        list(Mooncake(write(tmp_path / "t.jsonl", event)))


@pytest.mark.parametrize("key_tokens", [0, 16, 512, 2_048])
def test_a_copy_reads_what_its_original_reads(tmp_path, key_tokens):
    """A copy, and a workload of the same options, have requests, digest and notes."""
    path = write(tmp_path / "t.jsonl", ROW | {"input_length": 2_000, "hash_ids": [1]})
    workload = Mooncake(path, key_tokens=key_tokens)
    requests = list(workload)
    for twin in (copy(workload), Mooncake(**workload.options())):
        assert list(twin) == requests
        assert (twin.digest, twin.notes) == (workload.digest, workload.notes)


def test_another_size_of_keys_than_the_file_tells_is_another_workload(tmp_path):
    """512 tokens a key, where the rows say something else, are told by digest and options."""
    path = write(tmp_path / "t.jsonl", ROW | {"input_length": 2_000, "hash_ids": [1]})
    assert Mooncake(path, key_tokens=512).digest != Mooncake(path).digest
    assert Mooncake(path, key_tokens=512).options()["key_tokens"] == 512
