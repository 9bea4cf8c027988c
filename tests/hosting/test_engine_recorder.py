"""Recorded traces of an engine: their lines, wrong calls, and files that cannot be written."""

import logging
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from random import Random

import attrs
import orjson
import pytest
from helpers.requests import keyed
from helpers.toy_engine import ToyEngine, random_request

from kvcore import read_events
from kvcore.errors import InputError, TraceError
from kvcore.plugins import resolve
from kvcore_hosting import EngineRecorder
from kvcore_hosting import recorder as recorder_module
from kvcore_plugins.traces.digest import EvictionDigest
from kvcore_plugins.workload import Jsonl
from kvcore_plugins.workload.recorded import TraceWorkload
from kvcore_replay.check.trace import check_trace
from kvcore_replay.export import MooncakeRows
from kvcore_replay.recorded_run import recorded_run
from kvcore_replay.what_if import whatif

SECOND = 1_000_000_000


def make(path, *, blocks=8, policy="lru", **options):
    """Return the recorder of an engine with blocks of 4 tokens."""
    return EngineRecorder(
        path,
        blocks=blocks,
        block_size=4,
        eviction=resolve("eviction", policy),
        engine="toy 1.0",
        **options,
    )


def ask(name, keys, *, output=5, tail=1):
    """Return a request of full blocks, and `tail` tokens more."""
    return keyed(name, keys, more=tail, output_tokens=output)


def serve(recorder, name, keys, now, *, hit=0, evicted=(), close=True):
    """Record a request that is admitted, computes its prompt and ends with one token."""
    recorder.request(ask(name, keys), now)
    blocks = len(keys) + 1 - hit
    recorder.opened(name, hit=hit, blocks=blocks, evicted=evicted, now=now)
    recorder.committed(name, blocks=len(keys), now=now)
    if close:
        recorder.closed(name, now, output=1)


def finish(recorder, path):
    """Close a recording without disagreements, and return its lines and its report."""
    recorder.close()
    assert recorder.failure is None
    assert not recorder.disagreements
    report = check_trace(path)
    assert report.evictions == recorder.evictions.as_dict()
    return [event.as_dict() for event in read_events(path)], report


def lines_of(lines, *names):
    """Return the lines of the named events."""
    return [line for line in lines if line["event"] in names]


@pytest.fixture
def path(tmp_path):
    """Return the path of the recording."""
    return tmp_path / "engine.jsonl"


def test_the_header_names_the_engine_and_its_policy(path):
    """The header has the engine and its plugins; times count from the first one."""
    recorder = make(path, policy="slru:protected=0.5")
    serve(recorder, "a", [1, 2], 5 * SECOND)
    lines, _ = finish(recorder, path)
    header = lines[0]
    assert (header["mode"], header["engine"], header["blocks"]) == ("wall", "toy 1.0", 8)
    assert header["plugins"]["eviction"]["name"] == "slru"
    assert header["plugins"]["eviction"]["options"]["protected"] == 0.5
    assert header["plugins"]["prefix"] == {"name": "hashed", "options": {"spans": "block"}}
    assert {line["t"] for line in lines} == {0}


def test_each_decision_of_an_engine_is_a_line(path):
    """Each decision of an engine is a line, in the order of a kvcore run."""
    recorder = make(path)
    serve(recorder, "a", [1, 2], 0)
    serve(recorder, "b", [1, 2, 3], 10, hit=2)
    lines, report = finish(recorder, path)
    assert [line["event"] for line in lines[1:-1]] == [
        *("REQUEST", "MISS", "ALLOC", "COMMIT", "COMMIT", "FIRST_TOKEN", "FINISH", "FREE"),
        *("REQUEST", "HIT", "MISS", "ALLOC", "COMMIT", "FIRST_TOKEN", "FINISH", "FREE"),
    ]
    assert (report.finished, report.hit["hit_blocks"]) == (2, 2)


def test_readers_take_an_answer_as_long_as_it_became(path):
    """An answer that ended before the tokens asked for is run again as long as it became."""
    recorder = make(path)
    serve(recorder, "a", [1, 2], 0)
    recorder.request(ask("b", [1, 2, 3], output=1_000), SECOND)
    recorder.opened("b", hit=2, blocks=4, now=SECOND)
    recorder.closed("b", 2 * SECOND, output=3)
    finish(recorder, path)
    for workload in (TraceWorkload(path), Jsonl(path=path)):
        assert [request.output_tokens for request in workload] == [1, 3]
    mooncake = MooncakeRows(path)
    for _ in range(2):  # its counts are those of the last time
        rows = [orjson.loads(row)["output_length"] for row in mooncake]
    assert mooncake.rows == len(rows)
    summary = recorded_run(path)
    assert rows == [1, 3]
    assert (summary.simulated_s, summary.throughput_tokens_s) == (2, 2)


def test_blocks_are_evicted_in_the_order_of_the_engine(path):
    """Blocks are evicted in the order of the engine, whatever its policy would evict."""
    recorder = make(path)
    serve(recorder, "a", [1, 2], 0)
    serve(recorder, "b", [7, 8], 1)
    serve(recorder, "c", [5], 2, evicted=[8, 2, 1])
    lines, report = finish(recorder, path)
    left = lines_of(lines, "EVICT")
    assert [(line["for"], line["reason"], line["by"]) for line in left] == [
        ("c", "capacity", "lru")
    ] * 3
    expected = EvictionDigest()
    for key in (8, 2, 1):
        expected.add(key)
    assert report.evictions == expected.as_dict()


def test_a_duplicate_leaves_with_its_last_block(path):
    """A key with two blocks leaves the cache with the eviction of the second."""
    recorder = make(path)
    for name in "ab":
        recorder.request(ask(name, [1, 2]), 0)
        recorder.opened(name, hit=0, blocks=3, now=0)
    for name in "ab":
        recorder.committed(name, blocks=2, now=1)
        recorder.closed(name, 2, output=1)
    serve(recorder, "c", [5], 3, evicted=[2, 1])
    serve(recorder, "d", [1, 2], 4, hit=2)
    serve(recorder, "e", [6], 5, evicted=[2, 1])
    lines, _ = finish(recorder, path)
    assert [line["for"] for line in lines_of(lines, "EVICT")] == ["e", "e"]


def test_without_duplicates_a_key_leaves_at_its_first_eviction(path):
    """With `duplicates=False` a key leaves the cache with its first eviction."""
    recorder = make(path, duplicates=False)
    for name in "ab":
        recorder.request(ask(name, [1]), 0)
        recorder.opened(name, hit=0, blocks=2, now=0)
    for name in "ab":
        recorder.committed(name, blocks=1, now=1)
        recorder.closed(name, 2, output=1)
    serve(recorder, "c", [5], 3, evicted=[1])
    lines, _ = finish(recorder, path)
    assert len(lines_of(lines, "EVICT")) == 1


def test_a_block_that_is_lost_in_use_leaves_afterwards(path):
    """A block that is lost while in use leaves the trace when it is released."""
    recorder = make(path)
    serve(recorder, "a", [1, 2], 0, close=False)
    recorder.dropped(1, 1)
    serve(recorder, "b", [1], 2)  # computes it again
    recorder.dropped(2, 3)
    recorder.closed("a", 4, output=1)
    lines, report = finish(recorder, path)
    assert [(line["t"], line["reason"]) for line in lines_of(lines, "EVICT")] == [(4, "gone")]
    assert report.pool["cached"] == 1


def test_blocks_of_a_cleared_cache_leave_as_gone(path):
    """When an engine clears its cache, unused blocks leave at once and others when released.

    Their reason is `gone`.
    """
    recorder = make(path)
    serve(recorder, "a", [1, 2], 0)
    serve(recorder, "b", [7], 1, close=False)
    recorder.cleared(2)
    recorder.closed("b", 3, output=1)
    lines, report = finish(recorder, path)
    assert [(line["t"], line["reason"]) for line in lines_of(lines, "EVICT")] == [
        *[(2, "gone")] * 2,
        (3, "gone"),
    ]
    assert report.pool["cached"] == 0


def test_a_preempted_request_finds_its_output_again(path):
    """A preempted request hits the blocks that it generated.

    Their keys are in the trace and in the requests read from it.
    """
    recorder = make(path)
    recorder.request(ask("a", [1], output=20), 0)
    recorder.opened("a", hit=0, blocks=2, now=1)
    recorder.committed("a", blocks=1, now=2)
    recorder.answered("a", 3)
    recorder.extended("a", blocks=1, now=4)
    recorder.committed("a", blocks=2, now=5, keys=[77])
    recorder.closed("a", 6)
    recorder.opened("a", hit=2, blocks=1, now=7)
    recorder.closed("a", 8, output=6)
    lines, report = finish(recorder, path)
    assert lines_of(lines, "KEYS")[0]["keys"] == [77]
    assert report.hit["self_hit_blocks"] == 2
    assert report.preemptions["recompute"] == 1
    for workload in (TraceWorkload(path), Jsonl(path)):
        (request,) = workload
        assert request.output_keys == [77]


def test_requests_end_in_any_state(path):
    """A request may end while it waits, in its prompt, or preempted, with or without output."""
    recorder = make(path)
    recorder.request(ask("waits", [1]), 0)
    recorder.closed("waits", 1, output=0)
    for name in ("halfway", "preempted", "answered"):
        recorder.request(ask(name, [1, 2, 3]), 2)
        recorder.opened(name, hit=0, blocks=4 if name == "answered" else 1, now=3)
    recorder.answered("answered", 4)
    recorder.closed("halfway", 5, output=0)
    for name in ("preempted", "answered"):
        recorder.closed(name, 6)
        recorder.closed(name, 7, output=1 if name == "answered" else 0)
    _, report = finish(recorder, path)
    assert (report.finished, report.rejected) == (3, 1)


def test_a_repeated_request_id_gets_a_number(path):
    """A request whose id was used before gets an id with a number."""
    recorder = make(path)
    serve(recorder, "a", [1], 0)
    serve(recorder, "a", [1], 1, hit=1)
    lines, _ = finish(recorder, path)
    assert [line["id"] for line in lines_of(lines, "REQUEST")] == ["a", "a#2"]


def test_a_recording_without_end_takes_bounded_memory(path, monkeypatch):
    """Of ended requests the first ids are kept: later ones get a number, and none is twice."""
    monkeypatch.setattr(recorder_module, "MOST_NAMES", 2)
    recorder = make(path)
    for now, name in enumerate("abcabc"):
        serve(recorder, name, [1], now, hit=int(now > 0))
    assert not recorder._requests
    assert not recorder._trace._seen
    assert not recorder._cache._admitted
    assert len(recorder._names) == 2
    lines, _ = finish(recorder, path)
    names = [line["id"] for line in lines_of(lines, "REQUEST")]
    assert names == ["a", "b", "c#2", "a#3", "b#4", "c#5"]


def test_ends_of_one_long_prompt_take_little_memory(path):
    """An end of a prompt of 2,000 blocks takes less than 50 kB; its keys are 114 kB."""
    recorder, ends = make(path, blocks=3_000), 10
    prompt = [b"%016d" % index for index in range(1_999)]

    def end(index):
        keys = [*(bytes(bytearray(key)) for key in prompt), b"end%013d" % index]
        # So long after the one before that its lines are flushed.
        serve(recorder, f"r{index}", keys, 9 * SECOND * index, hit=1_999 * (index > 0))

    end(0)
    tracemalloc.start()
    try:
        for index in range(1, ends + 1):
            end(index)
        assert tracemalloc.get_traced_memory()[0] < 50_000 * ends
    finally:
        tracemalloc.stop()
    finish(recorder, path)


def test_a_long_answer_takes_memory_with_its_length(path):
    """Generated blocks share the keys of their path: 1,000 take less than 2 MB, not 5."""
    recorder, blocks = make(path, blocks=2_000), 1_000
    recorder.request(ask("a", [b"%016d" % 0], output=4 * blocks), 0)
    recorder.opened("a", hit=0, blocks=2, now=0)
    tracemalloc.start()
    try:
        for index in range(1, blocks):
            recorder.extended("a", blocks=1, now=index)
            recorder.committed("a", blocks=index + 1, keys=[b"%016d" % index], now=index)
        assert tracemalloc.get_traced_memory()[0] < 2_000_000
    finally:
        tracemalloc.stop()
    recorder.closed("a", blocks, output=4 * blocks)
    finish(recorder, path)


def test_a_recording_is_a_workload_of_its_requests(path):
    """The workload of a recording has its requests, ordered by arrival."""
    recorder = make(path)
    for now, name in enumerate("ab"):
        serve(recorder, name, [1, 2], now * SECOND, hit=2 * now)
    finish(recorder, path)
    first, second = TraceWorkload(path)
    assert (first.arrival, second.arrival) == (0, SECOND)
    assert first == attrs.evolve(ask("a", [1, 2], output=1), arrival=0)


def serial(path, policy, *, blocks=24):
    """Record an engine that serves random requests one after the other; return it."""
    engine, draw = ToyEngine(path, policy, blocks), Random(5)
    for now in range(150):
        request = random_request(draw, now)
        # A prompt of whole blocks would compute its last one again, and leave a duplicate.
        tokens = request.prompt_tokens + (request.prompt_tokens % 4 == 0)
        request = attrs.evolve(request, prompt_tokens=tokens)
        engine.arrive(request, now)
        assert engine.open(request, now)
        engine.compute(now, now)
        engine.generate(now, draw.randint(1, 6), now)
        if draw.random() < 0.3 and (tokens + engine.jobs[now].output) % 4:
            job = engine.close(now, now, preempted=True)
            generated = tuple(job.keys[len(request.keys) :])
            assert engine.open(request, now, job.output, generated)
            engine.compute(now, now)
        engine.close(now, now)
    engine.recorder.close()
    return engine


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_what_if_repeats_the_evictions_of_the_engine(path, tmp_path, policy):
    """A what-if without changes repeats the evictions of the engine.

    With another policy it repeats those of an engine with that policy.
    """
    engine = serial(path, policy)
    again = tmp_path / "again.jsonl"
    same = whatif(path, export=again)
    assert not same.changes
    assert same.recorded.hit == same.rerun.hit
    assert check_trace(again).evictions == engine.digest.as_dict()
    other = serial(tmp_path / "other.jsonl", "lfu")
    changed = whatif(path, eviction="lfu", export=again)
    assert changed.changes
    assert check_trace(again).evictions == other.digest.as_dict()


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("prefix", ["radix", "hashed", "radix:evict=leaf"])
def test_a_what_if_of_an_engine_may_have_another_index_or_block_size(path, size, prefix):
    """With another index or size of blocks the same tokens are in use, and answers hit too."""
    recorder = make(path)
    serve(recorder, "a", [1, 2], 0, close=False)
    for key in (3, 4):
        recorder.extended("a", blocks=1, now=1)
        recorder.committed("a", blocks=key, now=1, keys=[key])
    recorder.closed("a", 2, output=8)
    serve(recorder, "b", [1, 2, 3, 4, 5], 3, hit=4)
    recorder.close()
    again = path.with_suffix(".again")
    assert (
        whatif(path, prefix=prefix, block_size=size, export=again).rerun.hit["hit_tokens"] == 16
    )
    assert check_trace(again).complete


def test_a_what_if_with_few_blocks_or_replicas_is_refused(path):
    """A what-if with too few blocks, or with replicas, is refused for an engine's recording."""
    serial(path, "lru")
    with pytest.raises(InputError, match=r"the engine had more in use .* give more blocks"):
        whatif(path, blocks=4)
    with pytest.raises(InputError, match="the recording of one engine"):
        whatif(path, replicas=2)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("evicted", lambda r: serve(r, "b", [9], 1, evicted=[55])),
        ("evicted", lambda r: serve(r, "b", [9], 1, evicted=[1])),
        ("hit", lambda r: serve(r, "b", [7, 8], 1, hit=1)),
        ("lost", lambda r: r.dropped(55, 1)),
        ("request", lambda r: r.opened("x", hit=0, blocks=1, now=1)),
        ("request", lambda r: r.extended("x", blocks=1, now=1)),
        ("request", lambda r: r.closed("x", 1)),
        ("room", lambda r: serve(r, "b", [4, 5, 6, 7, 8], 1)),
    ],
)
def test_a_disagreement_is_counted_and_logged_once(path, caplog, kind, wrong):
    """A disagreement with the engine is counted and logged once, and the trace is valid."""
    recorder = make(path)
    serve(recorder, "a", [1, 2, 3], 0)
    wrong(recorder)
    wrong(recorder)
    recorder.close()
    assert recorder.disagreements[kind]
    assert recorder.failure is None
    assert check_trace(path).complete
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the engine and its recording disagree" in record.getMessage()


def test_a_request_without_room_is_not_admitted_in_the_trace(path, caplog):
    """A request for which the trace has no blocks is rejected there; the recording goes on."""
    recorder = make(path, blocks=4)
    serve(recorder, "a", [1, 2], 0, close=False)
    serve(recorder, "b", [7], 1, evicted=[2])
    recorder.extended("a", blocks=2, now=2)
    recorder.closed("a", 3, output=1)
    serve(recorder, "c", [8], 4)
    recorder.close()
    assert recorder.failure is None
    assert recorder.disagreements == {"evicted": 1, "room": 2, "request": 1}
    assert len(caplog.records) == 1
    report = check_trace(path)
    assert (report.complete, report.finished, report.rejected) == (True, 2, 1)
    lines = [event.as_dict() for event in read_events(path)]
    (refused,) = lines_of(lines, "REJECT")
    assert refused["why"] == "the trace had no room for it"


def test_blocks_that_leave_for_room_are_in_the_digest(path):
    """The digest has the blocks that leave where the engine has room and the trace has none."""
    recorder = make(path, blocks=4)
    serve(recorder, "a", [1, 2], 0)
    serve(recorder, "b", [5, 6], 1)
    recorder.close()
    assert recorder.disagreements == {"room": 1}
    assert recorder.evictions.blocks == 1
    assert check_trace(path).evictions == recorder.evictions.as_dict()


def test_a_block_that_expires_in_use_leaves_as_expired(path):
    """A block that expires while in use leaves when it is released, for that reason."""
    recorder = make(path, policy="ttl:ttl=1")
    serve(recorder, "a", [1], 0, close=False)
    recorder.dropped(1, 1, "expired")
    recorder.closed("a", 2, output=1)
    lines, _ = finish(recorder, path)
    assert [(line["t"], line["reason"]) for line in lines_of(lines, "EVICT")] == [
        (2, "expired")
    ]


def test_blocks_evicted_in_use_leave_together_the_deepest_first(path):
    """Blocks that were evicted in use, the first before those below it, leave when released."""
    recorder = make(path)
    serve(recorder, "a", [1, 2, 3], 0, close=False)
    serve(recorder, "b", [9], 1, evicted=[1, 2, 3])
    recorder.closed("a", 2, output=1)
    recorder.close()
    report = check_trace(path)
    lines = [event.as_dict() for event in read_events(path)]
    assert [(line["t"], line["reason"]) for line in lines_of(lines, "EVICT")] == [
        (2, "gone")
    ] * 3
    assert (report.complete, report.pool["cached"]) == (True, 1)


def test_a_block_evicted_before_those_below_it_leaves_with_them(path):
    """A block that is evicted before the one below it leaves as soon as that one has left."""
    recorder = make(path)
    serve(recorder, "a", [1, 2], 0)
    serve(recorder, "b", [9], 1, evicted=[1, 2], close=False)
    recorder.closed("b", 5, output=1)
    recorder.close()
    lines = [event.as_dict() for event in read_events(path)]
    assert [(line["t"], line["reason"]) for line in lines_of(lines, "EVICT")] == [
        (1, "capacity"),
        (1, "gone"),
    ]
    assert check_trace(path).complete


def test_a_request_that_ends_preempted_has_its_output(path):
    """A request that ends while it is preempted has generated what it had before."""
    recorder = make(path)
    serve(recorder, "a", [1, 2], 0, close=False)
    recorder.answered("a", 1)
    recorder.closed("a", 2)
    recorder.closed("a", 3, output=3)
    lines, _ = finish(recorder, path)
    assert [line["output"] for line in lines_of(lines, "FINISH")] == [3]


@pytest.mark.parametrize("folder", ["missing", "/dev/null"])
def test_an_unwritable_path_is_logged_once(tmp_path, caplog, folder):
    """A path that cannot be written is logged once and raises nothing."""
    recorder = make(tmp_path / folder / "engine.jsonl")
    serve(recorder, "a", [1], 0)
    recorder.close()
    (record,) = caplog.records
    assert "the recording ends here: cannot write" in record.getMessage()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_recording(caplog):
    """The first write that fails ends the recording; nothing raises."""
    recorder = make("/dev/full")
    for now in range(20):
        serve(recorder, now, [now], now * 10 * SECOND, evicted=[now - 4] if now > 3 else ())
    recorder.close()
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_killed_engine_leaves_a_part_file(tmp_path, suffix):
    """A killed engine leaves all but its last seconds in `.part`, compressed or not."""
    path = tmp_path / f"engine.jsonl{suffix}"
    recorder = make(path)
    serve(recorder, "a", [1], 0)
    serve(recorder, "b", [1], 6 * SECOND, hit=1)
    recorder.request(ask("c", [1]), 12 * SECOND)
    recorder._trace._sink.hexdigest()  # waits for the thread that writes
    report = check_trace(f"{path}.part")
    assert (report.complete, report.finished) == (False, 2)
    recorder.close()
    assert check_trace(path).complete


def test_a_recording_is_closed_at_exit(tmp_path):
    """A process that exits without closing its recording leaves a complete trace."""
    program = (
        "from kvcore import Request; from kvcore_hosting import EngineRecorder\n"
        "from kvcore_plugins.eviction import LRU\n"
        "r = EngineRecorder('e.jsonl', blocks=4, block_size=4, eviction=LRU(), engine='toy')\n"
        "r.request(Request(id=1, prompt_tokens=4, keys=[1], key_tokens=4), 0)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert check_trace(tmp_path / "e.jsonl").complete


def test_a_forked_child_leaves_the_file_alone(path, monkeypatch):
    """The exit of a forked child does not end the recording of its parent."""
    recorder = make(path)
    serve(recorder, "a", [1], 0)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    recorder._at_exit()
    assert not path.exists()
    monkeypatch.undo()
    finish(recorder, path)


def test_gone_blocks_need_an_engine_in_the_header(path):
    """EVICT with the reason `gone` is an error in a trace whose header names no engine."""
    recorder = make(path)
    serve(recorder, "a", [1], 0)
    recorder.dropped(1, 1)
    lines, _ = finish(recorder, path)
    del lines[0]["engine"]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines[:-1]))
    with pytest.raises(TraceError, match="only an engine loses blocks, and HEADER names none"):
        check_trace(path)


def test_a_digest_identifies_blocks_by_their_keys():
    """In a digest an int key equals its 16 bytes and its 32 hex digits.

    Names of generated blocks are left out.
    """
    digests = [EvictionDigest() for _ in range(3)]
    for digest, key in zip(
        digests, (258, (258).to_bytes(16, "big"), f"{258:032x}"), strict=True
    ):
        digest.add(key)
        digest.add(("generated", "a", 3))
    assert len({digest.hexdigest for digest in digests}) == 1
    assert [digest.blocks for digest in digests] == [1, 1, 1]
    joined = EvictionDigest.joined(digests)
    assert joined.blocks == 3
    assert joined.hexdigest != digests[0].hexdigest


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "a#2"},
        {"id": "\ud800"},
        {"session": "\ud800"},
        {"salt": "\ud800"},
        {"tool": "\ud800"},
        {"priority": 1 << 63},
        {"priority": -(1 << 64)},
    ],
)
def test_what_a_client_chooses_ends_no_recording(path, fields):
    """A request with names or a priority that no trace can hold is recorded, and later ones."""
    recorder = make(path, blocks=16)
    request = attrs.evolve(ask("first", [1]), **fields)
    recorder.request(request, 0)
    recorder.opened(request.id, hit=0, blocks=2, now=0)
    for now, keys in enumerate(([2], [3], [4]), 1):
        serve(recorder, "a", keys, now)
    recorder.closed(request.id, 9, output=1)
    lines, report = finish(recorder, path)
    names = [line["id"] for line in lines_of(lines, "REQUEST")]
    assert (report.finished, len(set(names))) == (4, 4)
    assert names[1:] == ["a", "a#2", "a#3"]


def test_keys_that_collide_in_two_paths_end_no_recording(path):
    """A block is looked up in its own path, where a client has made its key come twice."""
    recorder = make(path, blocks=32)
    serve(recorder, "shared", [1, 2], 1)
    serve(recorder, "collides", [1, 2, 1], 2)
    serve(recorder, "shares", [1, 2, 4], 3)
    serve(recorder, "long", range(10, 40), 4, evicted=[4, 1, 2, 1])
    recorder.close()
    assert recorder.failure is None
    ended = lines_of([line.as_dict() for line in read_events(path)], "FINISH")
    assert len(ended) == 4


def test_salts_tenants_and_sessions_cannot_be_read_in_a_recording(path):
    """Names that identify are hashes: equal ones are equal, and no two recordings have them."""
    written = []
    for file in (path, path.with_name("other.jsonl")):
        recorder = make(file)
        for name in ("a", "b"):
            secret = {"salt": "of-a-tenant", "tenant": "of-a-tenant", "session": "eve@x.org"}
            recorder.request(attrs.evolve(ask(name, [1]), **secret), 0)
        recorder.close()
        data = file.read_bytes()
        assert b"of-a-tenant" not in data
        assert b"eve@x.org" not in data
        first, second = lines_of([line.as_dict() for line in read_events(file)], "REQUEST")
        hidden = [first[field] for field in ("salt", "tenant", "session")]
        assert hidden == [second[field] for field in ("salt", "tenant", "session")]
        written += hidden
    assert len(set(written)) == 6
