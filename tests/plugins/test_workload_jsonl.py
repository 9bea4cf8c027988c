"""The workload `jsonl`: requests in the format of kvcore's own traces."""

import zlib
from pathlib import Path

import orjson
import pytest

from kvcore import simulate
from kvcore.errors import InputError
from kvcore.request import SLO, Retention
from kvcore.workloads import checked
from kvcore_plugins.workload import Jsonl

DATA = Path(__file__).parents[1] / "data"
HEADER = {"event": "HEADER", "schema": 1}
REQUEST = {"event": "REQUEST", "id": 1, "t": 5, "prompt": 32, "output": 8, "keys": [1, 2]}
REQUEST |= {"key_tokens": 16}


def write(path, *rows):
    """Write `rows` to `path`, one a line."""
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def test_every_field_is_read():
    """All fields that a REQUEST line can have are in the request."""
    request = list(Jsonl(DATA / "requests.jsonl"))[1]
    assert request.id == "chat/0"
    assert (request.arrival, request.prompt_tokens, request.output_tokens) == (5, 32, 8)
    assert (request.salt, request.tenant, request.priority) == ("blue", "acme", -2)
    assert request.retention == (Retention(0, 16, 90), Retention(16, None, 10, 5 * 10**9))
    assert request.output_keys == [9]


def test_slo_and_predicted_length_are_read(tmp_path):
    """An SLO and a predicted length are in the request."""
    row = REQUEST | {"slo": {"ttft": 5, "deadline": 9}, "predicted": 3}
    (request,) = Jsonl(write(tmp_path / "t.jsonl", row))
    assert (request.slo, request.predicted_output_tokens) == (SLO(ttft_ns=5, deadline_ns=9), 3)


def test_absent_fields_have_their_defaults(tmp_path):
    """A line without optional fields makes a request with their defaults."""
    (request,) = Jsonl(write(tmp_path / "t.jsonl", REQUEST))
    assert (request.salt, request.tenant, request.session, request.after) == (None,) * 4
    assert (request.priority, request.think_time) == (0, 0)
    assert (request.retention, request.output_keys) == ((), ())


def test_hexadecimal_keys_become_bytes(tmp_path):
    """A key of 32 hex digits of any case is read as 16 bytes."""
    row = REQUEST | {"keys": ["AB" * 16, 7]}
    (request,) = Jsonl(write(tmp_path / "t.jsonl", row))
    assert request.keys == [b"\xab" * 16, 7]


def test_key_tokens_come_from_the_first_request(tmp_path):
    """`key_tokens` is known before the workload is iterated."""
    assert Jsonl(write(tmp_path / "t.jsonl", HEADER, REQUEST)).key_tokens == 16


def test_unknown_schema_names_both_numbers(tmp_path):
    """A trace of another schema is refused with both numbers."""
    path = write(tmp_path / "t.jsonl", HEADER | {"schema": 3}, REQUEST)
    with pytest.raises(
        InputError, match=r"t\.jsonl:1: field 'schema': expected one from 1 to 2, got 3"
    ):
        list(Jsonl(path))


def test_trace_without_requests_is_refused(tmp_path):
    """A trace with no REQUEST line raises InputError."""
    with pytest.raises(InputError, match="no REQUEST line"):
        list(Jsonl(write(tmp_path / "t.jsonl", HEADER)))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"event": 3}, "field 'event': expected a text, got 3"),
        ({"id": 1.5}, "field 'id': expected an integer or a text, got 1.5"),
        ({"t": 4}, "field 't': expected 5 or later .*, got 4"),
        ({"prompt": -1}, "field 'prompt': expected a whole number from 0"),
        ({"output": -1}, "field 'output': expected a whole number from 0"),
        ({"keys": ["abc"]}, r"field 'keys\[0\]': expected .* or 32 hexadecimal digits"),
        ({"keys": [1, 2, 3]}, "field 'keys': expected at most 2 keys"),
        ({"key_tokens": 0}, "field 'key_tokens': expected a whole number from 1"),
        ({"key_tokens": 32, "keys": [1]}, "field 'key_tokens': expected 16, as before, got 32"),
        ({"salt": 3}, "field 'salt': expected a text"),
        ({"priority": "high"}, "field 'priority': expected a whole number"),
        ({"slo": {"ttft": 0}}, "field 'slo': expected an object of ttft, tpot, deadline"),
        ({"slo": {"tbt": 5}}, "field 'slo': expected an object of ttft, tpot, deadline"),
        ({"predicted": -1}, "field 'predicted': expected a whole number"),
        ({"retention": 3}, "field 'retention': expected a list"),
        ({"retention": [3]}, r"field 'retention\[0\]': expected \[start, end"),
        (
            {"retention": [[0, 1, 101, None]]},
            r"field 'retention\[0\]': .* got \[0,1,101,null\]",
        ),
        ({"retention": [[4, 1, 50, None]]}, r"field 'retention\[0\]': expected \[start, end"),
        ({"retention": [[0, 1, 50, -1]]}, r"field 'retention\[0\]': expected \[start, end"),
        ({"retention": [[0, 1, None, 1]]}, r"field 'retention\[0\]': expected \[start, end"),
        ({"retention": [[0, 1, 5.0, 1]]}, r"field 'retention\[0\]': expected \[start, end"),
        ({"hints": {"pin": 0}}, "field 'hints': expected an object of share"),
        ({"hints": {"keep": 1}}, "field 'hints': expected an object of share"),
        ({"hints": [1]}, "field 'hints': expected an object of share"),
        ({"tool": 1}, "field 'tool': expected a text"),
        ({"after": []}, "field 'after': expected an integer or a text"),
        ({"think": -1}, "field 'think': expected a whole number from 0"),
        ({"output_keys": [-1]}, r"field 'output_keys\[0\]': expected an integer"),
    ],
)
def test_bad_field_is_named(tmp_path, change, complaint):
    """A bad field raises InputError with file, line, field and value."""
    path = write(tmp_path / "t.jsonl", REQUEST, REQUEST | {"id": 2} | change)
    with pytest.raises(InputError, match=rf"t\.jsonl:2: {complaint}"):
        list(Jsonl(path))


@pytest.mark.parametrize("form", ["plain", "gzip"])
@pytest.mark.parametrize("cut", [0, 9])
def test_a_trace_that_is_cut_inside_a_line_is_read_up_to_it(tmp_path, form, cut):
    """Requests before the cut are read, and a note names the last line, of each form."""
    path = write(tmp_path / "t.jsonl", HEADER, REQUEST, REQUEST | {"id": 2}, {"event": "END"})
    *whole, last = path.read_bytes().splitlines(keepends=True)
    data = b"".join(whole) + last[:cut]
    if form == "gzip":
        flushed = zlib.compressobj(wbits=31)
        data = flushed.compress(data) + flushed.flush(zlib.Z_SYNC_FLUSH)
    path.write_bytes(data)
    workload = Jsonl(path)
    assert [request.id for request in workload] == [1, 2]
    assert workload.notes == ["the trace is cut: it is read up to line 3"]


def test_a_whole_trace_has_no_note(tmp_path):
    """A trace with END and a file without a header are whole, and have no note."""
    for rows in ((HEADER, REQUEST, {"event": "END"}), (REQUEST,)):
        workload = Jsonl(write(tmp_path / "t.jsonl", *rows))
        assert [request.id for request in workload] == [1]
        assert workload.notes == []


def test_a_damaged_line_within_a_trace_is_an_error(tmp_path):
    """A whole line that is not JSON, or one of a file without a header, raises InputError."""
    path = write(tmp_path / "t.jsonl", HEADER, REQUEST)
    path.write_bytes(path.read_bytes() + b'{"event":\n')
    with pytest.raises(InputError, match=r"t.jsonl:3: not JSON"):
        list(Jsonl(path))
    path = write(tmp_path / "t.jsonl", REQUEST)
    path.write_bytes(path.read_bytes() + b'{"event":')
    with pytest.raises(InputError, match=r"t.jsonl:2: not JSON"):
        list(Jsonl(path))


def test_hashes_are_chained_into_the_output(tmp_path):
    """With `chain` the hashes of single blocks are chained, from the prompt into the output."""
    first = REQUEST | {"output_keys": [3]}
    then = REQUEST | {"id": 2, "prompt": 64, "keys": [1, 2, 3, 1]}
    path = write(tmp_path / "t.jsonl", first, then)
    one, two = checked(Jsonl(path, chain=True))
    assert [*one.keys, *one.output_keys] == two.keys[:3]
    write(path, first | {"prompt": 64})
    with pytest.raises(InputError, match="has output keys, but only 2 of 4 keys"):
        simulate(Jsonl(path, chain=True))
    assert Jsonl(path, chain=True).digest != Jsonl(path).digest
