"""The trace of the proxy: which requests it has, in which order, and what waits for others."""

from datetime import UTC, datetime, timedelta
from re import findall

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Request, read_events
from kvcore.errors import InputError
from kvcore.serving.router import Replica
from kvcore_lab.report.prometheus import FIRST_TOKEN
from kvcore_online import traffic
from kvcore_online.traffic import Flight, Metrics, TrafficLog
from kvcore_plugins.traces.keyed import KeyedNames

KEYS = 4
"""Keys of each request, which count towards `MOST_HELD` beside `REQUEST_KEYS`."""


def flown(number, **fields):
    """Return the flight of a request of 9 tokens, which was sent to replica 1."""
    keys = [f"{number:02}{index}".encode() * 4 for index in range(KEYS)]
    request = Request(
        id=number, arrival=10 * number, prompt_tokens=9, keys=keys, key_tokens=2, session="s"
    )
    flight = Flight(request, [(10 * number + 1, 1, 6)], output=number)
    for name, value in fields.items():
        setattr(flight, name, value)
    return flight


def make_log(path, unlogged=None):
    """Return a log of two replicas."""
    replicas = [Replica(index, 8, 2, 4) for index in range(2)]
    key = path.with_name("key")
    key.write_bytes(b"k" * 32)
    names = KeyedNames.from_file(key)
    router = {"name": "round-robin", "options": {}}
    return TrafficLog(path, router, {"view": "index"}, replicas, 2, names, unlogged)


def lines(path):
    """Return (event, id of its request) of the lines of a trace between HEADER and END."""
    read = list(read_events(path))
    assert (read[0].event, read[-1].event) == ("HEADER", "END")
    return [
        (line.event, line.id if line.event == "REQUEST" else line.request)
        for line in read[1:-1]
    ]


@given(st.permutations(range(7)), st.sets(st.integers(0, 6)), st.integers(0, 4))
def test_requests_are_written_in_order_of_arrival(tmp_path_factory, ends, wrong, held):
    """Each request is written once those before it have ended, or too many wait for them.

    Those that their server refused as invalid are left out; those that no server took are
    refused in the trace as well.
    """
    path = tmp_path_factory.mktemp("traffic") / "day.jsonl"
    flights = [flown(number, wrong=number in wrong) for number in range(7)]
    outputs, open_, waiting = {}, list(range(7)), set()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(traffic, "MOST_HELD", held * (traffic.REQUEST_KEYS + KEYS))
        log = make_log(path)
        for flight in flights:
            log.begin(flight)
        for turn, number in enumerate(ends):
            flights[number].output = 100 + turn
            if number in wrong and number in open_:
                open_.remove(number)
            elif number in open_:
                waiting.add(number)
            log.end(flights[number])
            while open_ and (open_[0] in waiting or len(waiting) > held):
                outputs[open_[0]] = flights[open_[0]].output
                waiting.discard(open_.pop(0))
        assert not log._flights
        assert log._held == 0
        log.close(flights[-1].routes[-1][0])
    expected = [
        line
        for number in range(7)
        if number not in wrong
        for line in (("REQUEST", number), ("ROUTE", number))
    ]
    assert lines(path) == expected
    written = {line.id: line.output for line in read_events(path) if line.event == "REQUEST"}
    assert written == {number: outputs[number] for number in written}


def test_at_most_a_million_keys_wait_for_an_open_request(tmp_path, monkeypatch):
    """With 600,000 keys each, one request waits for an older one, and a second does not."""
    monkeypatch.setattr(traffic, "REQUEST_KEYS", 600_000)
    log = make_log(tmp_path / "day.jsonl")
    flights = [flown(number) for number in range(3)]
    waiting = []
    for flight in flights:
        log.begin(flight)
    for flight in flights[1:]:
        log.end(flight)
        waiting.append(list(log._flights))
    assert waiting == [[0, 1, 2], []]
    log.close(1_000)


def test_a_log_never_replaces_an_earlier_trace(tmp_path):
    """Files of whole and of killed runs stay as they are: the log goes to the next piece."""
    path = tmp_path / "day.jsonl"
    for name in ("day.jsonl", "day-000001.jsonl.part", "day-000002.jsonl"):
        (tmp_path / name).write_text(name)
    log = make_log(path)
    flight = flown(1)
    log.begin(flight)
    log.end(flight)
    log.close(50)
    found = {file.name: file.read_text() for file in tmp_path.glob("day*")}
    assert lines(tmp_path / "day-000003.jsonl") == [("REQUEST", 1), ("ROUTE", 1)]
    del found["day-000003.jsonl"]
    assert found == {name: name for name in found}
    assert len(found) == 3


def test_rotation_loses_no_request(tmp_path):
    """The next file begins with what has not ended; its times and its date are its own."""
    log = make_log(tmp_path / "day.jsonl")
    flights = [flown(number) for number in range(4)]
    for flight in flights:
        log.begin(flight)
    log.end(flights[0])
    log.end(flights[2])
    log.rotate(35)
    log.rotate(35)  # has nothing to close
    for flight in flights:
        log.end(flight)
    log.rotate(60)
    log.close(70)
    second, first = sorted(tmp_path.glob("day*.jsonl"))
    assert second.name == "day-000001.jsonl"
    assert lines(first) == [("REQUEST", 0), ("ROUTE", 0)]
    assert [line.id for line in read_events(second) if line.event == "REQUEST"] == [1, 2, 3]
    assert [line.t for line in read_events(second)][1:-1] == [0, 1, 10, 11, 20, 21]
    began = [next(iter(read_events(file))).routing["began"] for file in (first, second)]
    ages = [datetime.now(UTC) - datetime.fromisoformat(date) for date in began]
    assert timedelta(minutes=1) > ages[0] >= timedelta(0)
    assert ages[0] >= ages[1]


def test_a_request_has_its_routes_and_counted_lengths(tmp_path):
    """Lengths are those that the server counted, and hits are at most the keys' tokens.

    One that was sent to servers in vain is rejected after that.
    """
    path = tmp_path / "day.jsonl"
    log = make_log(path)
    counted = flown(1, prompt=5, routes=[(11, 0, 99), (12, 1, 2)])
    refused = flown(2, refused="no server", routes=[], output=3)
    left = flown(3, refused="status 500", routes=[(31, 0, 0), (32, 1, 0)])
    for flight in (counted, refused, left):
        log.begin(flight)
        log.end(flight)
    log.close(50)
    request, first, second, other, rejected, *last = list(read_events(path))[1:-1]
    assert (request.prompt, request.output, len(request.keys)) == (5, 1, 2)
    assert [(line.t, line.replica, line.tokens) for line in (first, second)] == [
        (11, 0, 4),
        (12, 1, 2),
    ]
    assert (other.prompt, other.output, len(other.keys)) == (9, 3, KEYS)
    assert (rejected.event, rejected.t) == ("REJECT", 20)
    assert [(line.event, line.t) for line in last] == [
        ("REQUEST", 30),
        ("ROUTE", 31),
        ("ROUTE", 32),
        ("REJECT", 32),
    ]
    assert request.session == other.session != "s"


def prompt_of(length, name):
    """Return the request of a prompt with `length` tokens, in blocks of 2."""
    keys = [f"{name}{index:07}".encode() for index in range(length // 2)]
    return Request(id=0, prompt_tokens=length, keys=keys, key_tokens=2)


def written(path, *flights):
    """Return what a trace has of flights: id, lengths and keys of each request."""
    log = make_log(path)
    for flight in flights:
        log.begin(flight)
        log.end(flight)
    log.close(1_000)
    return [
        (line.id, line.prompt, line.output, tuple(line.keys))
        for line in read_events(path)
        if line.event == "REQUEST"
    ]


@given(st.integers(1, 9), st.integers(0, 40))
def test_answers_to_one_prompt_are_requests(tmp_path_factory, choices, output):
    """Each answer has the prompt, its route, its own id, and an even share of the output."""
    path = tmp_path_factory.mktemp("traffic") / "day.jsonl"
    flight = flown(1, prompt=8, output=output, choices=choices)
    found = written(path, flight, flown(10))
    assert lines(path) == [
        *((event, 1 + turn) for event in ("REQUEST", "ROUTE") for turn in range(choices)),
        ("REQUEST", 10),
        ("ROUTE", 10),
    ]
    outputs = [output for _, _, output, _ in found[:-1]]
    assert (sum(outputs), max(outputs) - min(outputs) <= 1) == (output, True)
    assert {(prompt, keys) for _, prompt, _, keys in found[:-1]} == {(8, found[0][3])}


def test_prompts_of_a_call_are_requests(tmp_path):
    """Each answer to each prompt has the keys of that; its length is a share of the count."""
    parts = [prompt_of(6, "a"), prompt_of(3, "b")]
    flight = flown(1, prompt=18, output=7, parts=parts, choices=2)
    found = written(tmp_path / "day.jsonl", flight)
    assert [(name, prompt, output) for name, prompt, output, _ in found] == [
        (1, 12, 1),
        (2, 12, 2),
        (3, 6, 2),
        (4, 6, 2),
    ]
    assert found[0][3] == found[1][3] != found[2][3] == found[3][3]
    assert [len(keys) for *_, keys in found] == [3, 3, 1, 1]


def test_a_prompt_of_a_call_has_a_token_at_least(tmp_path):
    """A server that has counted fewer tokens than prompts leaves none of them empty."""
    flight = flown(1, prompt=1, parts=[prompt_of(6, "a"), prompt_of(3, "b")])
    found = written(tmp_path / "day.jsonl", flight)
    assert [prompt for _, prompt, *_ in found] == [1, 1]


def test_answers_have_no_more_keys_than_one(tmp_path, monkeypatch):
    """The keys of all answers to a prompt are at most those that one may have."""
    monkeypatch.setattr(traffic, "MOST_KEYS", 2 * KEYS - 1)
    found = written(tmp_path / "day.jsonl", flown(1, choices=2))
    assert [len(keys) for *_, keys in found] == [KEYS - 1] * 2


def test_an_unfinished_log_has_all_lines_that_do_not_wait(tmp_path):
    """After a sync the file has each request that has ended before the first open one."""
    log = make_log(tmp_path / "day.jsonl")
    flights = [flown(number) for number in range(3)]
    for flight in flights:
        log.begin(flight)
    log.end(flights[0])
    log.end(flights[2])
    log.sync(1_000)
    log.file._sink._wait()
    (part,) = tmp_path.glob("*.part")
    assert [line.event for line in read_events(part)] == ["HEADER", "REQUEST", "ROUTE"]
    log.close(1_000)
    assert [name for event, name in lines(tmp_path / "day.jsonl") if event == "REQUEST"] == [
        0,
        1,
        2,
    ]


def test_a_request_that_cannot_be_written_is_told_and_left_out(tmp_path):
    """The error of a request that the trace cannot hold is passed on; the others are in it."""
    errors = []
    log = make_log(tmp_path / "day.jsonl", errors.append)
    wrong = Flight(Request(id="\ud800", prompt_tokens=1, key_tokens=2))
    for flight in (wrong, flown(0, output=-1), flown(1)):
        log.begin(flight)
        log.end(flight)
    log.close(50)
    assert [type(error) for error in errors] == [InputError] * 2
    assert lines(tmp_path / "day.jsonl") == [("REQUEST", 1), ("ROUTE", 1)]


def test_lines_that_wait_for_the_file_are_bounded(tmp_path, monkeypatch):
    """Lines are written as requests end, not only when the log is synchronised.

    Those of one request, which has tried 20 servers, are more than are buffered.
    """
    monkeypatch.setattr("kvcore_cluster.trace._LINES", 10)
    log = make_log(tmp_path / "day.jsonl")
    for number in range(50):
        log.begin(flown(number, routes=[(10 * number + 1, 1, 6)] * (1 if number else 20)))
        log.end(log._flights[number])
        assert len(log._trace._lines) < 60
    log.close(1_000)


def test_first_bytes_are_counted_in_the_buckets_of_first_tokens():
    """The time to the first byte has vLLM's bounds, so that histograms of both can be added."""
    metrics = Metrics()
    metrics.first_byte.labels("a").observe(1.0)
    bounds = findall(r'first_byte_seconds_bucket{le="([\d.]+)"', metrics.text().decode())
    assert [*map(float, bounds)] == [*FIRST_TOKEN]
