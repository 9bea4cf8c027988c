"""Requests read back from the lines of a trace."""

import attrs
import orjson
import pytest
from helpers.schedulers import scheduler_of
from helpers.serving import Even, ask
from helpers.traces import lines, seal, write
from helpers.traces import serve as serve_by_hand

from kvcore import SLO, InputError, KVCache, Request, Trace, TraceError
from kvcore.request import Hints, Retention, text_request
from kvcore.serving import Batching, simulate
from kvcore.trace.events import decode
from kvcore.trace.fields import request_fields
from kvcore.workloads.files import file_digest
from kvcore_lab.comparison import compare_policies
from kvcore_plugins.eviction import LRU
from kvcore_plugins.traces.reader import read_request
from kvcore_plugins.workload import Jsonl, Recording, Zipf
from kvcore_plugins.workload.recorded import TraceWorkload

FULL = Request(
    id="full",
    arrival=3,
    prompt_tokens=48,
    output_tokens=5,
    keys=[b"\x0b" * 16, 7, "AB" * 16],
    key_tokens=16,
    salt="blue",
    tenant="acme",
    priority=-1,
    slo=SLO(ttft_ns=5),
    predicted_output_tokens=4,
    retention=(Retention(0, None, 90, 10**9), Retention(16, 32, 1)),
    session="s",
    after=4,
    think_time=9,
    tool="grep",
    hints=Hints(share=0, pin=7, prefetch=8),
    output_keys=[b"\x0c" * 16],
)


@pytest.mark.parametrize(
    "request_",
    [
        FULL,
        attrs.evolve(FULL, slo=SLO(), keys=[1, 2], id=7, hints=Hints(demote=True, share=5)),
        Request(id=0, prompt_tokens=0, key_tokens=1, keys=[]),
    ],
)
def test_a_request_read_from_its_line_equals_the_original(request_):
    """A request read from its line equals the original in every field."""
    line = {"n": 1, "t": request_.arrival, "event": "REQUEST", **request_fields(request_)}
    event = decode(orjson.dumps(line))
    assert read_request(event) == request_
    assert read_request(event, 99) == attrs.evolve(request_, arrival=99)


def recorded(path, requests, **options):
    """Record a simulation of `requests` whose workload is called `mine`."""
    source = {"name": "mine", "digest": "d1ce", "options": {"x": 2}}
    with Trace(path, workload=source) as trace:
        simulate(
            requests,
            cache=KVCache(100, 4, eviction=LRU(), trace=trace),
            scheduler=scheduler_of("fcfs"),
            latency=Even(),
            batching=Batching(watermark=0),
            **options,
        )
    return path


def turns():
    """Return a session of two requests."""
    return [ask("a", 0, session="s"), ask("b", 1, session="s", after="a", think_time=100)]


def test_a_trace_has_the_recorded_workload(tmp_path):
    """Name, digest, options and key size are those of the workload in the header."""
    workload = TraceWorkload(recorded(tmp_path / "trace.jsonl.gz", [ask("a", 3)]))
    assert (workload.name, workload.digest, workload.options()) == ("mine", "d1ce", {"x": 2})
    assert workload.key_tokens == 4
    assert [request.id for request in workload] == ["a"]


def test_a_trace_without_a_workload_is_named_trace(tmp_path):
    """Without a workload in the header the name is "trace" and the digest the file's."""
    path = write(tmp_path / "trace.jsonl", ask("a", 0, key_tokens=4))
    workload = TraceWorkload(path)
    assert (workload.name, workload.options()) == ("trace", {})
    assert workload.digest == file_digest(path)


@pytest.mark.parametrize("scale", [1, 0.3, 1e-3, 3, 1.7])
def test_requests_run_again_at_one_rate_arrive_at_the_same_times(tmp_path, scale):
    """Requests recorded at any rate arrive at the same times when run again at that rate."""
    arrivals = [0, 1, 2, 7, 1000, 123_456_789]
    requests = [ask(index, at) for index, at in enumerate(arrivals)]
    path = recorded(tmp_path / "trace.jsonl", requests, rate_scale=scale)
    found = [request.arrival for request in TraceWorkload(path)]
    again = recorded(tmp_path / "again.jsonl", TraceWorkload(path), rate_scale=scale)
    assert lines(again)[:-1] == lines(path)[:-1]
    lost = [at - back for at, back in zip(arrivals, found, strict=True)]
    assert min(lost) >= 0
    assert max(lost) < max(scale, 1)


@pytest.mark.parametrize(
    ("requests", "scale", "same"),
    [
        ([ask("a", 3), ask("b", 9)], 1.0, True),
        ([ask("a", 3), ask("b", 9)], 0.5, True),
        ([ask("a", 3), ask("b", 9)], 2.0, False),
        (turns(), 1.0, False),
    ],
)
def test_the_digest_of_inexact_requests_is_that_of_the_file(tmp_path, requests, scale, same):
    """The digest is the workload's only if the requests are restored exactly.

    Otherwise, with rounded times or sessions, it is the file's.
    """
    path = recorded(tmp_path / "trace.jsonl", requests, rate_scale=scale)
    assert TraceWorkload(path).restores == same
    assert Recording(path).digest == ("d1ce" if same else file_digest(path))


def test_a_comparison_of_a_recording_has_the_hits_of_its_workload(tmp_path):
    """A comparison of a recording has the hits and the digest of the recorded workload."""
    source, path = Zipf(requests=120, prefixes=9), tmp_path / "trace.jsonl.zst"
    first = compare_policies(source, "lru", 200, trace=path)
    second = compare_policies(Recording(path), "lru", 200)
    assert second.infinite == first.infinite
    assert second.rows[0].hit_blocks == first.rows[0].hit_blocks
    assert second.workload.digest == source.digest


def test_requests_of_a_run_have_the_recorded_keys(tmp_path):
    """Requests from a run on tensors have the recorded keys of generated blocks."""
    path = tmp_path / "trace.jsonl"
    text = text_request("a", range(5), output=9, block_size=4, publish=True)
    key = text.keys[0].hex()
    fields = request_fields(text)
    write(
        path,
        ("REQUEST", fields),
        ("KEYS", {"request": "a", "keys": [key]}),
        ("KEYS", {"request": "a", "keys": [9]}),
    )
    assert not next(iter(TraceWorkload(path))).output_keys
    events = lines(path)
    events[0]["executor"] = "run"
    seal(path, events)
    assert next(iter(TraceWorkload(path))).output_keys == [text.keys[0], 9]


def test_a_cut_trace_raises_an_error_at_the_cut(tmp_path):
    """A cut trace yields the requests before the cut, then raises TraceError."""
    path = recorded(tmp_path / "trace.jsonl", [ask("a", 3)])
    path.write_bytes(path.read_bytes()[:-10])
    requests = iter(TraceWorkload(path))
    assert next(requests).id == "a"
    with pytest.raises(TraceError, match=r"trace\.jsonl: incomplete: the file ends inside"):
        next(requests)


def test_an_impossible_request_is_refused_with_its_line(tmp_path):
    """An invalid retention hint raises TraceError with the file and the line."""
    path = write(tmp_path / "trace.jsonl", ask("a", 0, key_tokens=4))
    events = lines(path)
    events[1]["retention"] = [[8, 4, 35, None]]
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: REQUEST: .*8 to 4: no tokens"):
        list(TraceWorkload(seal(path, events)))


def test_other_and_missing_files_are_refused(tmp_path):
    """A file without HEADER, an empty file and a missing file raise different errors."""
    path = tmp_path / "requests.csv"
    path.write_text("TIMESTAMP,ContextTokens\n")
    with pytest.raises(TraceError, match="its first line is no HEADER"):
        TraceWorkload(path).key_tokens  # noqa: B018
    path.write_text("")
    with pytest.raises(TraceError, match="the file is empty"):
        TraceWorkload(path).key_tokens  # noqa: B018
    with pytest.raises(InputError, match="No such file"):
        TraceWorkload(tmp_path / "nowhere").key_tokens  # noqa: B018


def test_requests_are_read_from_a_handmade_trace(tmp_path):
    """Requests are read from any trace, whatever program has recorded it."""
    path = serve_by_hand(tmp_path / "trace.jsonl")
    assert [request.id for request in TraceWorkload(path)] == [
        "long",
        "huge",
        "short",
        "silent",
    ]


@pytest.mark.parametrize("output_keys", [{"output_keys": [7, 9]}, {}])
def test_both_readers_of_a_trace_have_the_same_texts(tmp_path, output_keys):
    """The blocks of a text are those of KEYS; FINISH has none if its client has left."""
    path = tmp_path / "trace.jsonl"
    text = text_request("a", range(4), output=99, block_size=4, publish=True)
    write(
        path,
        ("REQUEST", request_fields(text)),
        ("KEYS", {"request": "a", "keys": [7]}),
        ("KEYS", {"request": "a", "keys": [9]}),
        ("FINISH", {"request": "a", "seq": 0, "output": 9, **output_keys}),
    )
    events = lines(path)
    events[0]["executor"] = "run"
    seal(path, events)
    for workload in (TraceWorkload(path), Jsonl(path)):
        (request,) = workload
        assert (request.output_keys, request.output_tokens) == ([7, 9], 9)
