"""The workload `lmcache`: logged lookups of LMCache."""

import gzip

import orjson
import pytest

from kvcore.errors import InputError
from kvcore.workloads import checked, recognise
from kvcore_plugins.workload import LMCache, Mooncake

ROW = {
    "timestamp": 1711929600.25,
    "request_id": "req-a",
    "model_name": "big",
    "chunk_size": 256,
    "seq_len": 600,
    "dtypes": ["float8_e4m3fn"],
    "shapes": [[32, 256, 128]],
    "chunk_hashes": ["0xab12", "0xcd34"],
}


def write(path, *rows):
    """Write rows, each ROW with its changes."""
    path.write_bytes(b"\n".join(orjson.dumps(ROW | row) for row in rows))
    return path


def test_a_row_is_a_request(tmp_path):
    """A request has the length, chunk size and model of its row, and a key per full chunk."""
    workload = LMCache(write(tmp_path / "l.jsonl", {}))
    (request,) = workload
    assert (request.id, request.arrival) == ("req-a/1", 0)
    assert (request.prompt_tokens, request.output_tokens, request.salt) == (600, 0, "big")
    assert request.key_tokens == workload.key_tokens == 256
    assert len(request.keys) == 2


def test_arrivals_count_from_the_first_row(tmp_path):
    """Times in seconds since 1970 become nanoseconds since the first row."""
    path = write(tmp_path / "l.jsonl", {}, {"timestamp": 1711929601.5})
    assert [request.arrival for request in LMCache(path)] == [0, 1_250_000_000]


def test_equal_chunks_of_one_model_share(tmp_path):
    """Equal chunks have equal keys within one model, and different keys across models."""
    path = write(tmp_path / "l.jsonl", {}, {"chunk_hashes": ["0xAB12"]}, {"model_name": "tiny"})
    first, again, other = LMCache(path)
    assert first.keys[0] == again.keys[0]
    assert not {*first.keys} & {*other.keys}


def test_hashes_of_any_width_are_keys(tmp_path):
    """Hashes of 32 bytes, and negative hashes of Python, become keys of 16 bytes."""
    hashes = ["0x" + "ab" * 32, "-0x5"]
    (request,) = LMCache(write(tmp_path / "l.jsonl", {"chunk_hashes": hashes}))
    assert [len(key) for key in request.keys] == [16, 16]
    assert request.keys[0] != request.keys[1]


def test_rows_of_one_model_can_be_selected(tmp_path):
    """With `model`, rows of other models are skipped, whatever their chunk size."""
    path = write(tmp_path / "l.jsonl", {"model_name": "x", "chunk_size": 16}, {}, {})
    workload = LMCache(path, model="big")
    assert workload.key_tokens == 256
    assert [request.id for request in workload] == ["req-a/2", "req-a/3"]
    assert workload.digest != LMCache(path).digest


def test_several_models_are_noted(tmp_path):
    """A note counts the rows of each model, whether all or those of one are read."""
    path = write(tmp_path / "l.jsonl", {"model_name": "x"}, {}, {})
    for options, rest in ({}, "all read as"), ({"model": "x"}, "those of x alone are read"):
        workload = LMCache(path, **options)
        begun = iter(workload)
        next(begun)
        assert len([*workload]) == len([*begun]) + 1 == (1 if options else 3)
        (note,) = workload.notes
        assert note.startswith("rows are of 2 models: big (2), x (1)")
        assert rest in note


def test_a_second_lookup_of_a_request_has_another_id(tmp_path):
    """A second lookup of the same request has an id with another line number."""
    ids = [request.id for request in checked(LMCache(write(tmp_path / "l.jsonl", {}, {})))]
    assert ids == ["req-a/1", "req-a/2"]


def test_a_log_is_recognised(tmp_path):
    """A log is recognised, compressed or not; a line of Mooncake's is not."""
    path = write(tmp_path / "l.jsonl", {})
    packed = tmp_path / "l.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, packed):
        assert isinstance(recognise(file, [LMCache, Mooncake]), LMCache)
    other = b'{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}'
    assert not LMCache.recognises(other)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"timestamp": "now"}, "field 'timestamp': expected a number of seconds"),
        ({"timestamp": 1711929599.0}, "field 'timestamp': expected no time more than a second"),
        ({"request_id": 7}, "field 'request_id': expected a text"),
        ({"model_name": None}, "field 'model_name': expected a text"),
        ({"chunk_size": 0}, "field 'chunk_size': expected a whole number from 1"),
        ({"chunk_size": 16}, "field 'chunk_size': expected 256, as before; for rows of one"),
        ({"seq_len": -1}, "field 'seq_len': expected a whole number from 1"),
        ({"seq_len": 511}, "field 'chunk_hashes': expected at most 1 hashes, .*, got 2"),
        ({"chunk_hashes": "0x1"}, "field 'chunk_hashes': expected a list"),
        ({"chunk_hashes": ["0x1", "1"]}, r"field 'chunk_hashes\[1\]': expected a text such"),
        ({"chunk_hashes": [5]}, r"field 'chunk_hashes\[0\]': expected a text such .*, got 5"),
    ],
)
def test_bad_field_is_named(tmp_path, change, complaint):
    """A bad field raises InputError with file, line, field and value."""
    path = write(tmp_path / "l.jsonl", {}, change)
    with pytest.raises(InputError, match=rf"l\.jsonl:2: {complaint}"):
        list(LMCache(path))


def test_a_missing_model_is_named(tmp_path):
    """If no row is of the requested model, InputError names the model."""
    path = write(tmp_path / "l.jsonl", {})
    with pytest.raises(
        InputError, match=r"no row is of the model 'small'; there are: big \(1\)"
    ):
        list(LMCache(path, model="small"))
