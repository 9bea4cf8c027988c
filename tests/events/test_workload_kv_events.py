"""The workload `kv-events`: requests rebuilt from the KV events of an engine."""

import re

import msgspec
import orjson
import pytest
from helpers.kv_events import DYNAMO, batch, record, removed, stored, wire_payload

from kvcore import InputError
from kvcore.request import block_keys
from kvcore.workloads import checked, recognise
from kvcore_events.block_tracker import check_recording
from kvcore_events.formats import decode
from kvcore_events.model import EventBatch, Page, PagesStored
from kvcore_events.recording import RecordingWriter
from kvcore_events.workload import KvEvents
from kvcore_plugins.workload import Jsonl, Mooncake

SECOND = 10**9


@pytest.fixture
def full(tmp_path):
    """Return a function that reads batches as a recording in full-report mode."""

    def read(*batches, **options):
        path = record(tmp_path / "r.jsonl", *batches)
        return list(checked(KvEvents(path, lookups="full", **options)))

    return read


@pytest.fixture
def joined(tmp_path):
    """Return a function that reads the rows of a log, joined to batches at 10 s and 20 s."""

    def read(*rows):
        path = record(tmp_path / "r.jsonl", batch(stored(1, size=4), ts=10.0), batch(ts=20.0))
        log = tmp_path / "log.jsonl"
        log.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        return list(KvEvents(path, requests=log))

    return read


def test_a_root_run_is_a_request(full):
    """A stored run without a parent is a request, at the time of its batch."""
    one, two = full(batch(stored(1, 2, size=4), ts=5.0), batch(stored(1, 2, 3, size=4), ts=7.5))
    assert (one.arrival, one.prompt_tokens, one.keys, one.key_tokens) == (0, 8, [0, 1], 4)
    assert (two.arrival, two.prompt_tokens, two.keys) == (5 * SECOND // 2, 12, [0, 1, 2])


def test_a_later_run_extends_the_request_that_ends_at_its_parent(full):
    """A later run extends a request that ends at its parent.

    Each of several equal requests gets one run.
    """
    one, two = full(
        batch(stored(1, 2)),
        batch(stored(1, 2)),
        batch(stored(3, parent=2), stored(4, parent=2)),
        batch(stored(5, parent=3)),
    )
    assert two.keys == [0, 1, 2, 4]
    assert one.keys == [0, 1, 3]


def test_a_log_outside_the_recording_is_refused(joined):
    """A log with no line within the recording is refused, with the times of both."""
    rows = [{"id": n, "time": 3610.0 + n, "tokens": [1]} for n in range(3)]
    with pytest.raises(InputError, match=r"all 3 lines of .*log\.jsonl lie outside") as caught:
        joined(*rows)
    message = str(caught.value)
    assert "goes from 3610.000 s (1970-01-01 01:00:10 UTC) to 3612.000 s" in message
    assert "the recording from 10.000 s (1970-01-01 00:00:10 UTC) to 20.000 s" in message
    assert "another clock or time zone?" in message


def test_a_recording_beyond_all_dates_is_told_in_seconds(tmp_path):
    """A log that does not fit a recording whose times are no dates is refused in seconds."""
    path = record(tmp_path / "r.jsonl", batch(stored(1, size=4), ts=1e14))
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"id":1,"time":1,"tokens":[1]}\n')
    with pytest.raises(InputError, match=r"the recording from 99999999999999.984 s to"):
        list(KvEvents(path, requests=log))


def test_lines_outside_the_recording_are_counted(tmp_path):
    """Lines of a log outside the recording are counted in a note after each reading."""
    path = record(tmp_path / "r.jsonl", batch(stored(1, size=4), ts=10.0), batch(ts=20.0))
    log = tmp_path / "log.jsonl"
    rows = [b'{"id":%d,"time":%d,"tokens":[1]}\n' % (n, n) for n in (9, 10, 11, 25)]
    log.write_bytes(b"".join(rows))
    workload = KvEvents(path, requests=log)
    assert workload.notes == ()
    assert len(list(workload)) == 2
    assert len(list(workload)) == 2
    (note,) = workload.notes
    assert note.startswith(f"2 of the 4 lines of {log} lie outside the time of {path}")
    log.write_bytes(b"".join(rows[1:3]))
    workload = KvEvents(path, requests=log)
    assert len(list(workload)) == 2
    assert workload.notes == ()


def test_removals_are_no_requests(full):
    """Removed blocks make no requests."""
    assert len(full(batch(stored(1)), batch(removed(1)))) == 1


def test_incremental_reports_are_refused(full):
    """A run below a block in the middle of a request raises InputError.

    It shows that the engine does not report all lookups.
    """
    with pytest.raises(
        InputError, match="continues block 1, at which no request's report ends"
    ):
        full(batch(stored(1, 2)), batch(stored(3, parent=1)))


@pytest.mark.parametrize("numbers", [(0, 2), (None, None)])
@pytest.mark.parametrize("publisher", [0, None])
@pytest.mark.parametrize("what", ["gap", "restart"])
def test_a_run_after_a_gap_is_no_incremental_report(tmp_path, what, publisher, numbers):
    """After a gap or a restart a run below a block in the middle of a request is ignored.

    A request goes on after a gap, and not after a restart. Either may be of any publisher.
    """
    path = tmp_path / "r.jsonl"
    with RecordingWriter(path) as recording:
        recording.batch(batch(stored(1, 2)), numbers[0], 0)
        recording.gap(1, 1, publisher) if what == "gap" else recording.restart(publisher)
        recording.batch(batch(stored(3, parent=1), stored(4, parent=2)), numbers[1], 0)
    [only] = KvEvents(path, lookups="full")
    assert only.keys == ([0, 1, 2] if what == "gap" else [0, 1])


def test_lost_batches_are_counted_in_a_note(tmp_path):
    """Batches lost in recorded gaps are counted after a reading, and so are the gaps."""
    path = tmp_path / "r.jsonl"
    with RecordingWriter(path) as recording:
        recording.batch(batch(stored(1)), 0, 0)
        recording.gap(1, 2_000, 0)
        recording.batch(batch(stored(2)), 2_001, 0)
        recording.gap(2_002, 1, 0)
        recording.batch(batch(stored(3)), 2_003, 0)
    workload = KvEvents(path, lookups="full")
    assert workload.notes == ()
    for _ in range(2):
        assert len(list(workload)) == 3
        assert workload.key_tokens
        assert workload.notes == (
            "lost batches: 2,001 (gaps: 2); requests in them are missing",
        )


@pytest.mark.parametrize("publisher", [0, None])
def test_numbers_that_are_left_out_are_lost_batches(tmp_path, publisher):
    """A batch whose number is too high shows lost batches, as in a check of the recording.

    One that comes again is left out.
    """
    path = tmp_path / "r.jsonl"
    with RecordingWriter(path) as recording:
        for number in (5, 6, 9, 6, 10):
            recording.batch(EventBatch(0.0, (stored(number),), 0), number, publisher)
        recording.gap(11, 3, publisher)
        recording.batch(EventBatch(0.0, (stored(14, parent=2),), 0), 14, publisher)
        recording.restart(publisher)
        recording.batch(EventBatch(0.0, (stored(2),), 0), 2, publisher)
        recording.gap(3, 1, publisher)
        for number, time in ((6, 5.0), (1, 9.0)):
            recording.batch(EventBatch(time, (stored(number),), 0), number, publisher)
    workload = KvEvents(path, lookups="full")
    assert [request.keys for request in workload] == [[0], [1], [2], [3], [4], [1], [5]]
    lost, runs = workload.notes
    assert lost.startswith("lost batches: 11 (gaps: 6)")
    found = check_recording(path)
    assert (found.missing, len(found.gaps), found.restarts, found.replayed) == (11, 6, 2, 1)
    assert found.blocks["forgotten"] == 5 + 2
    assert runs.endswith("before the recording or in what is missing: 1")


@pytest.mark.parametrize("lost", ["the beginning", "a gap", "a restart"])
def test_runs_that_are_left_out_are_counted_in_a_note(tmp_path, lost):
    """Runs whose request began before the recording, in a gap or a restart are counted."""
    path = tmp_path / "r.jsonl"
    with RecordingWriter(path) as recording:
        recording.batch(batch(stored(1, 2)), 0, 0)
        if lost == "a gap":
            recording.gap(1, 1, 0)
        if lost == "a restart":
            recording.restart(0)
        last = 2 if lost == "a restart" else 6  # what a restart has ended does not go on
        recording.batch(batch(stored(8, parent=7), stored(9, parent=last)), 2, 0)
    workload = KvEvents(path, lookups="full")
    assert len(list(workload)) == 1
    assert workload.notes[-1] == (
        "runs of blocks left out, whose request began before the recording or in what is "
        "missing: 2"
    )


def test_what_cannot_be_read_is_counted_in_a_note(tmp_path):
    """Messages that were no batch, and events that cannot be read, are counted."""
    path = tmp_path / "r.jsonl"
    with RecordingWriter(path) as recording:
        recording.batch(decode(msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}]])), 0, 0)
        recording.invalid_message("it is a picture", 0)
        recording.batch(batch(stored(1)), 1, 0)
    workload = KvEvents(path, lookups="full")
    assert len(list(workload)) == 1
    assert workload.notes == (
        "messages left out, which were no batch: 1",
        "events left out, which cannot be read: 1",
    )


@pytest.mark.parametrize("by_log", [False, True])
def test_a_recording_that_is_cut_has_a_note(tmp_path, by_log):
    """Where a recording is cut is told after each reading, also of one joined to a log."""
    path = record(tmp_path / "r.jsonl", batch(stored(1, size=4), ts=1.0), batch(ts=2.0))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    log = tmp_path / "log.jsonl"
    log.write_text('{"id":1,"time":1.5,"tokens":[1]}\n')
    workload = KvEvents(path, requests=log) if by_log else KvEvents(path, lookups="full")
    for _ in range(2):
        assert len(list(workload)) == 1
        [note] = workload.notes
        assert note.startswith(
            "the recording is cut, and read up to there: the file ends after"
        )


def test_a_whole_recording_has_no_notes(tmp_path):
    """A recording that lacks nothing has no notes."""
    path = record(tmp_path / "r.jsonl", batch(stored(1)), batch(stored(2, parent=1)))
    workload = KvEvents(path, lookups="full")
    assert len(list(workload)) == 1
    assert workload.notes == ()


def test_times_too_far_apart_are_refused(full):
    """A time that does not fit into an arrival raises InputError with its line."""
    with pytest.raises(
        InputError, match=r"r\.jsonl:3: this batch makes the recording one of 11\d* s, which"
    ):
        full(batch(stored(1), ts=1.0), batch(stored(2), ts=2.0**60))


def test_block_sizes_must_agree(full):
    """Blocks of another size in the same group raise InputError."""
    with pytest.raises(InputError, match="blocks of 2 tokens, before of 4: choose a 'group'"):
        full(batch(stored(1, size=4), stored(2, size=2)))


def test_an_earlier_batch_has_the_arrival_of_the_batch_before(full):
    """A batch with an earlier time than the batch before has the arrival of that batch."""
    arrivals = [r.arrival for r in full(batch(stored(1), ts=2.0), batch(stored(2), ts=1.0))]
    assert arrivals == [0, 0]


@pytest.mark.parametrize("named", [True, False])
def test_requests_of_ranks_are_in_order_of_time(tmp_path, named):
    """Requests arrive at their times also if a recording has one rank after another."""
    path = tmp_path / "r.jsonl"
    with RecordingWriter(path) as writer:
        for rank, times in ((0, (2.0, 4.0, 3.0)), (1, (1.0, 3.5, 2.5))):
            for number, ts in enumerate(times):
                sent = EventBatch(ts, (stored(10 * rank + number),), rank)
                writer.batch(sent, number, rank if named else None)
    requests = list(checked(KvEvents(path, lookups="full")))
    assert [request.arrival / SECOND for request in requests] == [0, 1, 2.5, 2.5, 3, 3]
    assert [request.keys for request in requests] == [[3], [0], [4], [5], [1], [2]]
    assert [request.id for request in requests] == [*range(6)]


def test_a_run_extends_only_requests_of_its_rank(full):
    """A run extends only a request of its own rank."""
    one, two, three = full(
        EventBatch(0.0, (stored(1),), 0),
        EventBatch(0.0, (stored(1),), 1),
        EventBatch(0.0, (stored(2, parent=1), stored(3)), 0),
    )
    assert (one.keys, two.keys, three.keys) == ([0, 1], [0], [2])


def test_formats_without_a_block_size_need_the_option(tmp_path):
    """The option `block_size` is required if no event has the block size."""
    path = tmp_path / "r.jsonl"
    path.write_bytes(DYNAMO + b"\n")
    with pytest.raises(InputError, match="how many tokens a block has: give 'block_size'"):
        list(KvEvents(path, lookups="full"))
    [only] = KvEvents(path, lookups="full", block_size=32)
    assert (only.prompt_tokens, only.keys, only.arrival) == (32, [0], 0)


def test_a_log_of_tokens_has_the_keys_of_its_tokens(joined):
    """A logged request has the keys of its tokens, in blocks of the recording's size."""
    [only] = joined({"id": "a", "time": 12.5, "tokens": [*range(9)], "output": 3})
    assert (only.id, only.arrival, only.prompt_tokens, only.output_tokens) == (
        "a",
        5 * SECOND // 2,
        9,
        3,
    )
    assert only.keys == block_keys(range(9), 4)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"id": 1, "tokens": [1]}, "field 'time': expected a number of seconds"),
        ({"id": None, "time": 10, "tokens": [1]}, "field 'id': expected an integer or a text"),
        ({"id": 1, "time": 10, "tokens": []}, "field 'tokens': expected at least one token"),
        ({"id": 1, "time": 10, "tokens": [-1]}, r"field 'tokens\[0\]': expected an integer"),
        (
            {"id": 1, "time": 10, "hashes": [1]},
            "field 'prompt': expected a whole number from 1",
        ),
        ({"id": 1, "time": 10, "hashes": [1, 2], "prompt": 4}, r"at most 1 key "),
    ],
)
def test_a_bad_row_of_the_log_is_refused(joined, row, reason):
    """A bad row of the log raises InputError with line and field."""
    with pytest.raises(InputError, match=r"log\.jsonl:1: .*" + reason):
        joined(row)


def test_log_must_be_sorted(joined):
    """A row of the log with an earlier time than the row before raises InputError."""
    rows = [{"id": t, "time": t, "tokens": [1]} for t in (12, 11)]
    with pytest.raises(InputError, match=r"log\.jsonl:2: field 'time': expected no earlier"):
        joined(*rows)


def test_a_log_is_refused_with_events_without_times(tmp_path):
    """A log is refused with events of Dynamo, which have no times."""
    path = tmp_path / "r.jsonl"
    path.write_bytes(DYNAMO + b"\n")
    with pytest.raises(InputError, match="its events have no times"):
        list(KvEvents(path, requests=path, block_size=4))


def test_a_recording_needs_full_lookups_or_a_log(tmp_path):
    """A recording needs exactly one of `lookups=full` and `requests`.

    Without them the error explains both options.
    """
    path = record(tmp_path / "r.jsonl", batch(stored(1)))
    with pytest.raises(InputError, match=r"left no event.*lookups=full.*requests=LOG.*replay"):
        recognise(path, [Jsonl, KvEvents, Mooncake])
    with pytest.raises(InputError, match="exclude one another"):
        KvEvents(path, lookups="full", requests=path)
    with pytest.raises(InputError, match="'lookups' must be 'full', not 'all'"):
        KvEvents(path, lookups="all")


def test_the_digest_depends_on_files_and_options(tmp_path):
    """Workloads that differ in options or log have different digests."""
    path = record(tmp_path / "r.jsonl", batch(stored(1)))
    log = tmp_path / "log.jsonl"
    log.write_text('{"id":1,"time":0,"tokens":[1]}\n')
    workloads = [
        KvEvents(path, lookups="full"),
        KvEvents(path, lookups="full", group=1),
        KvEvents(path, requests=log),
    ]
    digests = {workload.digest for workload in workloads}
    assert len(digests) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", digest) for digest in digests)


def test_polled_events_of_tensorrt_llm_are_read(full):
    """Blocks of TensorRT-LLM make requests on the first level, and none on the host's."""

    def run(level):
        page = Page(hash=5, tokens=((1, 0),), level=level, priority=35)
        polled = EventBatch(None, (PagesStored(pages=(page,)),), format="trtllm", seq=level)
        return decode(wire_payload(polled))

    assert [r.keys for r in full(run(0), run(1), block_size=1)] == [[0]]


@pytest.mark.parametrize("options", [{}, {"group": 2}])
def test_a_group_without_blocks_is_refused(full, options):
    """A recording of other groups than the chosen one is refused, with those that it has."""
    runs = [batch(stored(number, group=group)) for number, group in enumerate((4096, 1))]
    with pytest.raises(InputError, match=r"of the 'group' \d; there are: 1, 4096"):
        full(*runs, **options)
    assert [request.keys for request in full(*runs, group=1)] == [[0]]
