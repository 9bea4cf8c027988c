"""Requests that the core in C makes of plain rows are those that Python makes of them."""

import json
import random

import attrs
import pytest

from kvcore import InputError, native
from kvcore_plugins.workload import azure, mooncake

pytestmark = pytest.mark.skipif(native.library() is None, reason="the core in C is not built")

PLAIN = [
    b'{"timestamp": %d, "input_length": 40, "output_length": 3, "hash_ids": [1, 2, 3]}\n'
    % (n * 10)
    for n in range(100)
]
JSON_PIECES = [
    *(b'"timestamp"', b'"input_length"', b'"hash_ids"', b'"output_length"', b'"x"', b'"'),
    *(b"{", b"}", b"[", b"]", b",", b":", b" ", b"\t", b"\r\n", b"\0", b"\xff", b"\\u0031"),
    *(b"0", b"01", b"-1", b"1.0", b"1e3", b"null", b"true", b"9223372036854775807"),
    *(b"999999999999999999", b"1000000000000000000", b"18446744073709551615", b"[[]]", b"[]"),
]
CSV_PIECES = [
    *(b"2023-11-16 18:15:46.6805900", b"2024-02-29 00:00:00", b"2023-02-29 00:00:00"),
    *(b"2100-02-29 00:00:00", b"1969-12-31 23:59:59", b"2199-12-31 23:59:59.9", b"2023-11-16"),
    *(b"2023-11-16T18:15:46", b"2023-13-01 00:00:00", b"2023-11-16 24:00:00", b"+1", b"-1"),
    *(b"2023-11-16 18:15:46.1234567891", b"2023-11-16 18:15:46+01:00", b"0", b"007", b"1"),
    *(b",", b" ", b"\t", b"\0", b"\xff", b".", b":", b"-", b"1234567890123456789", b""),
]


def read(kind, module, reader, path, monkeypatch):
    """Return the requests, or the error, of a file: as the core reads it, and as Python."""
    results = []
    for by_core in (True, False):
        with monkeypatch.context() as patch:
            if not by_core:
                patch.setattr(module, reader, lambda *_: None)
            workload = kind(path=path)
            requests = []
            try:
                requests.extend(workload)
            except InputError as error:
                requests.append(str(error))
            results.append((requests, list(workload.notes)))
    return results


def mutated(line, pieces, rng):
    """Return a line in which some bytes are replaced by pieces of such lines."""
    for _ in range(rng.randrange(3)):
        begin = rng.randrange(len(line))
        end = begin + rng.randrange(4)
        line = line[:begin] + rng.choice(pieces) + line[end:]
    return line.replace(b"\n", b"") + b"\n"


@pytest.mark.parametrize("seed", range(60))
def test_lines_of_json_are_read_alike(seed, tmp_path, monkeypatch):
    """A changed line is the same request, or the same error, by the core and in Python."""
    rng = random.Random(seed)
    path = tmp_path / "trace.jsonl"
    for index in range(8):
        keys = [rng.randrange(10**18) for _ in range(rng.randrange(5))]
        fields = {
            "timestamp": 1000 + index,
            "input_length": rng.randrange(1, 2049),
            "output_length": rng.randrange(9),
            "hash_ids": keys,
        }
        names = rng.sample(sorted(fields), 4)
        line = json.dumps({name: fields[name] for name in names}).encode()
        path.write_bytes(b"".join([*PLAIN, mutated(line, JSON_PIECES, rng), PLAIN[-1]]))
        by_core, in_python = read(mooncake.Mooncake, mooncake, "json_reader", path, monkeypatch)
        assert by_core == in_python


@pytest.mark.parametrize("seed", range(60))
def test_rows_of_csv_are_read_alike(seed, tmp_path, monkeypatch):
    """A changed row is the same request, or the same error, by the core and in Python."""
    rng = random.Random(seed)
    path = tmp_path / "trace.csv"
    columns = rng.sample(["TIMESTAMP", "ContextTokens", "GeneratedTokens"], 3)
    for index in range(8):
        cells = {
            "TIMESTAMP": f"2023-11-16 18:15:{index:02}.{rng.randrange(10**7):07}",
            "ContextTokens": str(rng.randrange(1, 9999)),
            "GeneratedTokens": str(rng.randrange(999)),
        }
        line = ",".join(cells[name] for name in columns).encode()
        rows = [",".join(columns).encode() + b"\n", line + b"\n"]
        path.write_bytes(b"".join([*rows, mutated(line, CSV_PIECES, rng), line]))
        by_core, in_python = read(azure.Azure, azure, "csv_reader", path, monkeypatch)
        assert by_core == in_python


def test_a_row_that_is_too_late_is_named(tmp_path, monkeypatch):
    """The error of a row that the core read, late by more than a window, names its line."""
    path = tmp_path / "trace.jsonl"
    later = [line.replace(b'"timestamp": ', b'"timestamp": 1') for line in PLAIN[10:]] * 8
    later.sort(key=lambda line: json.loads(line)["timestamp"])
    path.write_bytes(b"".join([*PLAIN, *later, PLAIN[0]]))
    by_core, in_python = read(mooncake.Mooncake, mooncake, "json_reader", path, monkeypatch)
    assert by_core == in_python
    assert f"{path}:{len(PLAIN) + len(later) + 1}:" in by_core[0][-1]


def test_plain_rows_are_read_by_the_core(tmp_path, monkeypatch):
    """Of a plain file Python parses the first rows alone."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(PLAIN * 3))
    parsed = []

    def counted(*args):
        parsed.append(args)
        return parse_row(*args)

    parse_row = mooncake.parse_row
    workload = mooncake.Mooncake(path=path)
    monkeypatch.setattr(mooncake, "parse_row", counted)
    requests = list(workload)
    assert len(parsed) == len(PLAIN)
    assert requests[-1] == attrs.evolve(requests[-1])
