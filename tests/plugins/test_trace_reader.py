"""Reading traces: streams, damaged files, and files that are cut."""

import gzip

import orjson
import pytest
import zstandard
from helpers.traces import CACHE, lines, record, seal

from kvcore import InputError, Request, Trace, TraceError, read_events


@pytest.fixture
def trace(tmp_path):
    """Return the path of a recorded trace of 49 lines."""
    return record(tmp_path / "trace.jsonl")


def edited(path, number, **fields):
    """Change fields of line `number` (from 1), and leave the other lines as they are."""
    text = path.read_bytes().splitlines(keepends=True)
    text[number - 1] = orjson.dumps(orjson.loads(text[number - 1]) | fields) + b"\n"
    path.write_bytes(b"".join(text))
    return path


def test_a_reader_is_complete_after_end(trace):
    """The reader is `complete` only after END, and then has no `cut_reason`."""
    reader = read_events(trace)
    assert not reader.complete
    assert len(list(reader)) == reader.line == 49
    assert reader.complete
    assert reader.cut_reason is None


def test_events_are_returned_while_the_file_is_read(trace):
    """The first event is returned before the rest of the file is read."""
    whole = trace.read_bytes()
    trace.write_bytes(whole + b"no JSON\n" * 100_000)
    assert next(iter(read_events(trace))).event == "HEADER"


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_compression_is_recognised_by_content(trace, pack):
    """A compressed file is read whatever its name, even if it has several streams."""
    whole = trace.read_bytes()
    before = lines(trace)
    trace.write_bytes(pack(whole[:1000]) + pack(whole[1000:]))
    assert lines(trace) == before


@pytest.mark.parametrize(
    ("pack", "name"), [(gzip.compress, "gzip"), (zstandard.compress, "zstd")]
)
def test_a_damaged_stream_is_refused(trace, pack, name):
    """A damaged compressed stream raises TraceError with the file and the line."""
    packed = bytearray(pack(trace.read_bytes()))
    packed[len(packed) // 2] ^= 0xFF
    trace.write_bytes(bytes(packed))
    with pytest.raises(TraceError, match=rf"trace.jsonl:\d+: the {name} stream is damaged"):
        lines(trace)


def test_a_missing_file_is_refused(tmp_path):
    """A missing file or a directory raises InputError with its path and the reason."""
    with pytest.raises(InputError, match=r"cannot read the trace .*nowhere: No such file"):
        lines(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"Is a directory"):
        lines(tmp_path)


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    """A file that is no trace raises TraceError that suggests `kvcore simulate`."""
    path = tmp_path / "other.jsonl"
    for text in ('{"timestamp": 0}\n', "TIMESTAMP,ContextTokens\n"):
        path.write_text(text)
        with pytest.raises(
            TraceError, match=r"other.jsonl:1: not a kvcore trace: .*`kvcore simulate FILE`"
        ):
            lines(path)


def test_an_unknown_schema_is_refused_with_both_numbers(trace):
    """A later schema is refused with both numbers, before unknown fields are checked."""
    edited(trace, 1, schema=3, colour="blue")
    with pytest.raises(
        TraceError, match=r":1: schema 3; this version of kvcore reads schemas 1 to 2"
    ):
        lines(trace)


@pytest.mark.parametrize(
    ("number", "fields", "reason"),
    [
        (5, {"event": "COMIT"}, "unknown event 'COMIT'; there are: HEADER, "),
        (5, {"span": "1"}, "COMMIT field 'span' must be an integer from 0 on, not '1'"),
        (5, {"n": 5}, "this line has n = 5; 4 lines stand before it"),
        (8, {"t": 2}, "time goes back, from 4 to 2 ns"),
        (
            8,
            {"t": 2**63},
            "REQUEST field 't' must be an integer from 0 on, of 64 bits",
        ),
        (5, {"event": "HEADER", **CACHE}, "HEADER"),
        (49, {"lines": 47}, "END has lines 47; the lines before it make 48"),
        (49, {"events": {}}, "END has events {}; the lines before it make {'HEADER': 1, "),
        (49, {"digest": "00"}, "END has digest '00'; the lines before it make '"),
        (49, {"t": 24}, "END is at 24 ns; the line before it at 23"),
        (49, {"note": 1}, "END has an unknown field 'note'"),
    ],
)
def test_an_invalid_line_is_refused_with_its_number(trace, number, fields, reason):
    """A line that is invalid by itself raises TraceError with file, line and reason."""
    with pytest.raises(TraceError) as caught:
        lines(edited(trace, number, **fields))
    assert str(caught.value).startswith(f"{trace}:{number}: {reason}")


def test_a_change_that_fits_the_schema_is_found_by_the_digest(trace):
    """A line changed into another valid line raises TraceError at END."""
    with pytest.raises(TraceError, match=r":49: END has digest"):
        lines(edited(trace, 2, prompt=14))


def test_another_spelling_of_end_is_refused(trace):
    """An END line, which no digest covers, is refused in any other spelling."""
    whole = trace.read_bytes()
    trace.write_bytes(whole.replace(b'{"n":48,', b'{"n": 48,'))
    with pytest.raises(TraceError, match=r":49: END is not written as kvcore writes it"):
        lines(trace)


@pytest.mark.parametrize("more", [b"\n", b"{}\n", b"{"])
def test_a_line_after_end_is_refused(trace, more):
    """Any line after END raises TraceError, also an empty or an incomplete one."""
    trace.write_bytes(trace.read_bytes() + more)
    with pytest.raises(TraceError, match=r":50: a line follows END"):
        lines(trace)


def test_invalid_json_in_a_whole_line_is_refused(trace):
    """Invalid JSON in a line with a newline raises TraceError: no cut file has it."""
    text = trace.read_bytes().splitlines(keepends=True)
    text[6] = text[6][:20] + b"\n"
    trace.write_bytes(b"".join(text))
    with pytest.raises(TraceError, match=r":7: not JSON: .*, at column 2\d"):
        lines(trace)


def test_a_second_header_is_refused(trace):
    """A second HEADER raises TraceError, even if its number is right."""
    events = lines(trace)
    seal(trace, [events[0], events[0], *events[1:]])
    with pytest.raises(TraceError, match=r":2: HEADER stands in line 1 only"):
        lines(trace)


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (0, "the file is empty, without END"),
        (100, "the file ends inside line 1"),
        (-1, "the file ends before the newline of line 49"),
        (-2, "the file ends inside line 49"),
    ],
)
def test_a_cut_file_is_read_up_to_the_cut(trace, size, reason):
    """A cut file is read up to the cut without an error; `cut_reason` says where that is."""
    trace.write_bytes(trace.read_bytes()[:size])
    reader = read_events(trace)
    list(reader)
    assert (reader.complete, reader.cut_reason) == (False, reason)


def test_a_cut_between_lines_is_found(trace):
    """A file without END that ends with a whole line is cut after that line."""
    whole = trace.read_bytes()
    trace.write_bytes(whole[: whole.index(b'{"n":7,')])
    reader = read_events(trace)
    assert len(list(reader)) == 7
    assert reader.cut_reason == "the file ends after line 7, without END"


def test_a_compressed_file_with_a_cut_end_is_read_whole(tmp_path):
    """If only the end of a compressed stream is missing, all lines are read.

    The reader is then not complete.
    """
    path = record(tmp_path / "trace.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-1])
    reader = read_events(path)
    assert len(list(reader)) == 49
    assert (reader.complete, reader.cut_reason) == (False, "the gzip stream stops early")


def test_long_lines_are_read_whole(tmp_path):
    """A line may be longer than the read buffer."""
    keys = list(range(300_000))
    path = tmp_path / "trace.jsonl"
    with Trace(path) as trace:
        trace.begin(**CACHE)
        trace.request(Request(id=1, prompt_tokens=4, keys=keys, key_tokens=4), 0)
    assert lines(path)[1]["keys"] == keys
