"""Limits of traces: files of a few kB that would take gigabytes of memory, or hours."""

import gzip
import tracemalloc
from io import BytesIO

import pytest
import zstandard
from helpers.traces import lines, record, seal, write

from kvcore import InputError, TraceError, read_events
from kvcore.files import DamageError, decompressed
from kvcore.trace.fields import decode_runs
from kvcore.untrusted import LONGEST_LINE, MOST_RUN_BLOCKS, MOST_VALUES
from kvcore.workloads.files import lines as workload_lines
from kvcore_events.recording import RecordingReader
from kvcore_plugins.traces.sealed import SealedReader
from kvcore_replay.check.trace import check_trace
from kvcore_replay.misses.explain import explain
from kvcore_replay.state.residency import rebuild_residency

MIB = 1 << 20
ZEROS = b"0" * MIB
PACK = {
    "gzip": lambda data, count: gzip.compress(data * count, 1),
    "zstd": lambda data, count: zstandard.compress(data * count, 1),
}


@pytest.fixture
def peak():
    """Return a function that reads a file to its error.

    It returns the text of the error and the peak of the memory that Python allocated.
    """

    def read(reader):
        tracemalloc.start()
        try:
            with pytest.raises((TraceError, InputError)) as caught:
                for _ in reader:
                    pass
            return str(caught.value), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return read


@pytest.fixture
def header(tmp_path):
    """Return the first line of a trace, with its newline."""
    return write(tmp_path / "header.jsonl").read_bytes().splitlines(keepends=True)[0]


@pytest.mark.parametrize("kind", PACK)
def test_a_stream_that_expands_too_far_is_refused(kind):
    """A compressed stream that expands beyond the given factor raises DamageError."""
    with pytest.raises(DamageError, match=f"the {kind} stream expands to more than 24 times"):
        for _ in decompressed(BytesIO(PACK[kind](ZEROS, 64)), 24):
            pass


def test_the_expansion_of_traces_and_recordings_is_limited(tmp_path, monkeypatch):
    """Readers of traces and recordings limit the expansion, and name the file and the line."""
    for reader in (SealedReader, RecordingReader):
        monkeypatch.setattr(reader, "expansion", 1)
    monkeypatch.setattr("kvcore.files.EXPANDED_BYTES", 0)
    path = tmp_path / "trace.jsonl.gz"
    record(path)
    for reader in (read_events, RecordingReader):
        with pytest.raises(TraceError, match=r":1: the gzip stream expands .* decompress it"):
            list(reader(path))


def test_a_recording_has_no_more_lines_than_its_size_allows(tmp_path, monkeypatch):
    """A recording with more lines than its compressed size allows is refused."""
    monkeypatch.setattr("kvcore_events.recording.FREE_LINES", 10)
    path = tmp_path / "recording.jsonl.gz"
    line = b'{"kind":"SKIPPED"}\n'
    head = b'{"n":0,"kind":"RECORDING","schema":1,"format":"msgpack"}\n'
    path.write_bytes(gzip.compress(head + line * 1_000, mtime=0))
    monkeypatch.setattr(RecordingReader, "_item", lambda *_: None)
    most = 10 + path.stat().st_size // 4
    with pytest.raises(TraceError, match=rf":{most + 1}: .* at most {most} lines"):
        list(RecordingReader(path))


def test_decompressed_pieces_are_small():
    """Decompressed bytes come in pieces of at most 64 KiB, however dense the stream is."""
    for pack in PACK.values():
        packed = pack(ZEROS, 64)
        tracemalloc.start()
        assert max(map(len, decompressed(BytesIO(packed)))) <= 1 << 16
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 40 * MIB


@pytest.mark.parametrize("reader", [read_events, RecordingReader, workload_lines])
def test_the_length_of_a_line_is_limited(tmp_path, reader, peak):
    """A line longer than 16 MiB is refused with its file and line, and not kept in memory."""
    path = tmp_path / "long"
    path.write_bytes(ZEROS * 20)
    error, most = peak(reader(path))
    assert (
        f"{path}:1: the line is longer than {LONGEST_LINE:,} bytes, which is the most" in error
    )
    assert most < 48 * MIB


def test_the_number_of_values_of_a_line_is_limited(tmp_path, header, peak):
    """A line with too many values is refused before it is parsed into memory."""
    path = tmp_path / "dense"
    keys = b"1," * MOST_VALUES + b"1"
    line = b'{"n":1,"t":0,"event":"REQUEST","id":1,"prompt":0,"output":0,"keys":[%s]}\n' % keys
    path.write_bytes(header + line)
    error, most = peak(read_events(path))
    assert f"{path}:2: the line has 1,048,584 values; 1,048,576 is the most" in error
    assert most < 16 * MIB


def test_the_length_of_a_header_is_limited(tmp_path, header):
    """A HEADER longer than 1 MiB is refused."""
    path = tmp_path / "header"
    path.write_bytes(header.replace(b'"seed"', b'"model":"%s","seed"' % (b"x" * MIB)))
    with pytest.raises(TraceError, match=":1: HEADER is longer than 1,048,576 bytes"):
        lines(path)


def test_a_header_nested_too_deep_is_refused(tmp_path, header):
    """JSON nested too deep to be written again is refused when it is read."""
    path = tmp_path / "deep"
    deep = b"[" * 900 + b"]" * 900
    path.write_bytes(header.replace(b"}\n", b',"model":%s}\n' % deep))
    with pytest.raises(TraceError, match=r":1: .*nested more than 254 levels deep"):
        lines(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"n":4,', b'"n":3,"n":4,'),
        (b'"event":"COMMIT"', b'"event":"FREE","event":"COMMIT"'),
        (b'"seq":1,', b'"seq": 1,'),
        (b'"seq":1,', b'"seq":-0,"seq":1,'),
        (b'"first"', b'"f\\u0069rst"'),
        (b"}\n", b"}\r\n"),
        (b'"again":true', b'"again":false,"again":true'),
        (b'"blocks":8,', b'"blocks":7,"blocks":8,'),
    ],
)
def test_other_spellings_of_a_line_are_refused(tmp_path, old, new):
    """Repeated names, blanks, CRLF and longer spellings are refused in every line.

    JSON parsers differ in how they read them.
    """
    path = record(tmp_path / "trace.jsonl")
    text = path.read_bytes().splitlines(keepends=True)
    at = next(n for n, line in enumerate(text) if old in line and (n > 3 or b"HEADER" in line))
    text[at] = text[at].replace(old, new, 1)
    path.write_bytes(b"".join(text))
    with pytest.raises(
        TraceError, match=rf":{at + 1}: the line is not written as kvcore writes"
    ):
        lines(path)


def test_a_recording_with_a_repeated_name_is_refused(tmp_path):
    """A recording with a repeated name in a line is refused."""
    path = tmp_path / "recording.jsonl"
    path.write_bytes(b'{"n":0,"kind":"RECORDING","schema":2,"schema":1,"format":"msgpack"}\n')
    with pytest.raises(TraceError, match=":1: the line is not written as kvcore writes"):
        list(RecordingReader(path))


def test_runs_are_counted_before_they_are_expanded():
    """Runs of more blocks than a line may have are refused before they are expanded."""
    for runs in ([(0, 2**31 - 1)], [(5, 5), (2**30, -MOST_RUN_BLOCKS)]):
        with pytest.raises(ValueError, match="more than 4,194,304 blocks, which is the most"):
            decode_runs(runs)


def begun(tmp_path, *more):
    """Write a trace of a huge pool, in which a huge request has been admitted; seal it."""
    header = lines(write(tmp_path / "begun.jsonl", blocks=2**31 - 1))[0]
    asked = {"id": "a", "prompt": 2**40, "output": 1, "keys": [], "key_tokens": 4}
    admitted = {"request": "a", "seq": 1, "block": 0, "why": "no keys"}
    some = [{"t": 0, "event": "REQUEST", **asked}, {"t": 0, "event": "MISS", **admitted}]
    events = [{"n": 0, "t": 0, **event} for event in (*some, *more)]
    return seal(tmp_path / "trace.jsonl", [header, *events])


def test_the_blocks_in_use_of_a_trace_are_limited(tmp_path, monkeypatch):
    """The blocks in use of a trace are limited, over all of its lines."""
    monkeypatch.setattr("kvcore_replay.state.cache.MOST_BLOCKS", 20)
    more = [{"event": "ALLOC", "seq": 1, "first": at, "runs": [[at, 10]]} for at in (0, 10, 20)]
    with pytest.raises(TraceError, match=":6: ALLOC: more than 20 blocks are in use"):
        check_trace(begun(tmp_path, *more))


def test_the_blocks_that_lines_name_are_limited(tmp_path, monkeypatch):
    """The blocks that all lines of a trace name are limited, repetitions included."""
    monkeypatch.setattr("kvcore_replay.state.cache.WORK", 1000)
    monkeypatch.setattr("kvcore_replay.state.cache.WORK_OF_LINE", 1)
    more = [
        {"event": "ALLOC", "seq": 1, "first": 0, "runs": [[0, 300]]},
        {"event": "FREE", "seq": 1, "runs": [[299, -300]], "reason": "rollback"},
    ] * 9
    for read in (check_trace, explain):
        with pytest.raises(TraceError, match=r"lines name [0-9,]+ blocks and spans: too many"):
            read(begun(tmp_path, *more))


def test_a_compaction_counts_its_whole_block_table_as_work(tmp_path, monkeypatch):
    """A COMPACT counts as work for the whole block table, however short its line is."""
    monkeypatch.setattr("kvcore_replay.state.cache.WORK", 1000)
    monkeypatch.setattr("kvcore_replay.state.cache.WORK_OF_LINE", 1)
    alloc = {"event": "ALLOC", "seq": 1, "first": 0, "runs": [[0, 300]]}
    stay = {"event": "COMPACT", "seq": 1, "tokens": 1, "held": 2, "runs": []}
    with pytest.raises(TraceError, match=r"lines name [0-9,]+ blocks and spans: too many"):
        explain(begun(tmp_path, alloc, *[stay] * 99))


def test_generated_blocks_get_no_names_before_they_are_there(tmp_path):
    """A COMMIT of generated blocks that its sequence does not have is refused at once."""
    names = {"event": "COMMIT", "seq": 1, "span": 1, "first": 0, "blocks": 2**50, "how": "new"}
    for read in (check_trace, explain, rebuild_residency):
        with pytest.raises(TraceError, match=r"sequence 1 (are 0 to|has) 0"):
            read(begun(tmp_path, names | {"generated": True}))


def test_the_blocks_of_open_forks_are_limited(tmp_path):
    """The blocks that open forks share are limited."""
    more = [{"event": "ALLOC", "seq": 1, "first": 0, "runs": [[0, 1 << 16]]}]
    more += [{"event": "FORK", "seq": 1, "child": child} for child in range(2, 9)]
    for read in (check_trace, explain):
        with pytest.raises(TraceError, match=":8: FORK: open forks share more than 262,144"):
            read(begun(tmp_path, *more))


def test_a_copy_to_a_block_outside_the_pool_is_refused(tmp_path):
    """A COPY to a block id outside the pool is refused, even beyond 32 bits."""
    more = [
        {"event": "ALLOC", "seq": 1, "first": 0, "runs": [[0, 1]]},
        {"event": "FORK", "seq": 1, "child": 2},
        {"event": "COPY", "seq": 1, "block": 0, "from": 0, "to": 2**40},
    ]
    with pytest.raises(TraceError, match=r":6: COPY: run .* leaves the block ids"):
        check_trace(begun(tmp_path, *more))
