"""The workload `mooncake`: the published trace of Mooncake, and files in its format."""

import orjson
import pytest

from kvcore.errors import InputError
from kvcore_plugins.workload import Mooncake

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


def test_row_becomes_a_request(tmp_path):
    """Milliseconds become nanoseconds, and the number of the row is the id."""
    first, second = Mooncake(write(tmp_path / "t.jsonl", ROW | {"timestamp": 0}, ROW))
    assert (first.id, second.id) == (0, 1)
    assert second.arrival == 27_482_000_000
    assert (second.prompt_tokens, second.output_tokens) == (700, 52)
    assert (second.keys, second.key_tokens) == ([46, 47], 512)


def test_requests_before_a_bad_row_are_yielded(tmp_path):
    """The requests before a bad row are yielded."""
    workload = iter(Mooncake(write(tmp_path / "t.jsonl", ROW, ROW | {"hash_ids": None})))
    assert next(workload).id == 0
    with pytest.raises(InputError, match=r"t\.jsonl:2: field 'hash_ids'"):
        next(workload)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"timestamp": -1}, "field 'timestamp': expected a whole number from 0 to"),
        ({"timestamp": 27_481}, "field 'timestamp': expected 27482 or later .*, got 27481"),
        ({"timestamp": 2**62}, "field 'timestamp': expected a whole number"),
        ({"timestamp": 1.5}, "field 'timestamp': expected a whole number from 0 to"),
        ({"input_length": True}, "field 'input_length': expected a whole number from 1"),
        ({"input_length": 0}, "field 'input_length': expected a whole number from 1"),
        ({"output_length": "52"}, "field 'output_length': expected .*, got \"52\""),
        ({"hash_ids": {"46": 47}}, "field 'hash_ids': expected a list of integers, got {"),
        ({"hash_ids": [46, "x"]}, r"field 'hash_ids\[1\]': expected an integer .*, got \"x\""),
        ({"hash_ids": [None]}, r"field 'hash_ids\[0\]': expected an integer .*, got null"),
        ({"hash_ids": [True]}, r"field 'hash_ids\[0\]': expected an integer .*, got true"),
        ({"hash_ids": [2**63]}, r"field 'hash_ids\[0\]': expected an integer"),
        ({"hash_ids": [-1]}, r"field 'hash_ids\[0\]': expected an integer"),
        ({"hash_ids": [1, 2, 3]}, "field 'hash_ids': expected at most 2 keys .*, got 3"),
    ],
)
def test_bad_field_is_named(tmp_path, change, complaint):
    """A bad field raises InputError with file, line, field and value."""
    path = write(tmp_path / "t.jsonl", ROW, ROW | change)
    with pytest.raises(InputError, match=rf"t\.jsonl:2: {complaint}"):
        list(Mooncake(path))


def test_missing_field_is_named(tmp_path):
    """A missing field raises InputError that names it."""
    path = write(tmp_path / "t.jsonl", {"timestamp": 0})
    with pytest.raises(
        InputError, match=r"'input_length': .*, got nothing: the field is missing"
    ):
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


def test_size_is_known_for_the_bundled_trace_only(tmp_path):
    """`size` is known for the bundled trace, and None for a file."""
    assert Mooncake().size == 12_031
    assert Mooncake(tmp_path / "t.jsonl").size is None


def test_the_digest_is_that_of_the_bytes(tmp_path):
    """The digest depends on the bytes of the file, not on its name."""
    one, same = write(tmp_path / "1.jsonl", ROW), write(tmp_path / "2.jsonl", ROW)
    other = write(tmp_path / "3.jsonl", ROW | {"output_length": 53})
    assert Mooncake(one).digest == Mooncake(same).digest != Mooncake(other).digest


def test_keys_may_stand_for_other_numbers_of_tokens(tmp_path):
    """The file does not tell; with 512, the requests and their digest are what they were."""
    path = write(tmp_path / "t.jsonl", ROW | {"input_length": 32})
    (request,) = Mooncake(path, key_tokens=16)
    assert (request.keys, request.key_tokens) == ([46, 47], 16)
    assert Mooncake(path, key_tokens=16).digest != Mooncake(path).digest
    assert "key_tokens" not in Mooncake(path).options()
    with pytest.raises(InputError, match="512 a key; the option key_tokens says how many"):
        list(Mooncake(path))
