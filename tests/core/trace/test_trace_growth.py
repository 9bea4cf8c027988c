"""Schema 2: lines that stand for several of schema 1, and how readers expand them."""

import orjson
import pytest
from helpers.serving import serve, servers
from helpers.traces import CACHE, lines, schema_1
from hypothesis import given

from kvcore import KVCache, Request, Trace, TraceError, read_events

GROW = {"n": 3, "t": 5, "event": "GROW", "grown": [[5, 1, 1, 2], [9, 1, 2, 3]]}
EVICTING = GROW | {"by": "lru", "victims": [[4, 1, 2, 6]], "for": ["r"]}


def one_by_one(cache, order):
    """Allocate a token more of each sequence of `order` by `extend`, as `KVCache.grow` does."""
    for now, seq in order:
        seq.tokens = seq.blocks * cache.geometry.block_size
        cache.extend(seq, 1, now)


@given(server=servers())
def test_a_line_of_growth_stands_for_the_lines_of_extend(tmp_path_factory, server):
    """A trace in which sequences grow together is, in schema 1, that of one by one."""
    path = tmp_path_factory.mktemp("growth") / "trace.jsonl"
    path.write_bytes(server.run("fcfs").trace)
    together = schema_1(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "grow", one_by_one)
        path.write_bytes(server.run("fcfs").trace)
    assert b'"GROW"' not in path.read_bytes()
    assert together == schema_1(path)


def decoding(count=3, **options):
    """Return the lines of a trace of requests that decode together."""
    requests = [
        Request(id=n, prompt_tokens=5, output_tokens=40, key_tokens=4) for n in range(count)
    ]
    return [orjson.loads(line) for line in serve(requests, **options).trace.splitlines()]


def test_sequences_that_decode_grow_in_one_line():
    """The blocks of all sequences that decode undisturbed are one line."""
    grown = [line for line in decoding() if line["event"] == "GROW"]
    (line,) = grown
    assert {row[1] for row in line["grown"]} == {1, 2, 3}
    assert line["t"] == line["grown"][0][0]
    assert "victims" not in line


def test_a_line_of_growth_takes_the_numbers_of_its_lines():
    """The line after GROW has the number that follows those of the lines that it stands for."""
    written = decoding()
    (index,) = (index for index, line in enumerate(written) if line["event"] == "GROW")
    after = written[index + 1]["n"]
    assert after == written[index]["n"] + len(written[index]["grown"])
    assert written[-1]["lines"] == written[-1]["n"] == sum(written[-1]["events"].values())


def test_a_long_line_of_growth_ends(monkeypatch):
    """A line of growth gets no more blocks once it has many."""
    monkeypatch.setattr("kvcore.trace._logger.GROWN", 4)
    monkeypatch.setattr("kvcore.serving.decode_batch.GROWTH_BLOCKS", 4)
    sizes = [len(line["grown"]) for line in decoding() if line["event"] == "GROW"]
    assert len(sizes) > 2
    assert max(sizes) < 4 + 3


def expanded(path, *written, schema=2):
    """Return the events after HEADER of a trace of these lines, which is cut there."""
    with Trace(path) as trace:
        trace.begin(**CACHE)
    header = lines(path)[0] | {"schema": schema}
    numbered = (line | {"n": n} for n, line in enumerate([header, *written]))
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in numbered))
    return lines(path)[1:]


def test_a_line_of_growth_is_read_as_allocations(tmp_path):
    """GROW is read as an ALLOC for each block, at its time."""
    first, second = expanded(tmp_path / "t.jsonl", GROW)
    alloc = {"event": "ALLOC", "seq": 1}
    assert first == {"n": 1, "t": 5} | alloc | {"first": 1, "runs": [[2, 1]]}
    assert second == {"n": 2, "t": 9} | alloc | {"first": 2, "runs": [[3, 1]]}


def test_the_last_blocks_of_a_line_of_growth_are_evicted_before(tmp_path):
    """The last blocks of GROW are read as an EVICT and an ALLOC each."""
    free, evict, alloc = expanded(tmp_path / "t.jsonl", EVICTING)
    assert (free["event"], alloc["event"]) == ("ALLOC", "ALLOC")
    assert evict == {
        "n": 2, "t": 9, "event": "EVICT", "span": 4, "runs": [[3, 1]], "by": "lru", "for": "r",
        "age": 3, "hits": 2, "reason": "capacity", "scope": "cache",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (GROW | {"grown": [[9, 1, 1, 2], [5, 1, 2, 3]]}, "time goes back, from 9 to 5 ns"),
        (GROW | {"grown": []}, "GROW field 'grown' must be a list of"),
        (EVICTING | {"for": ["r", "s"]}, "2 requests evict 1 of 2 blocks"),
        (EVICTING | {"victims": [[4, 3, 2, 6]], "for": ["r"] * 3}, "3 requests evict 3 of 2"),
        (EVICTING | {"victims": [[4, 1, 2, 10]]}, "span 4 leaves at 9 ns, before its last"),
    ],
)
def test_a_line_of_growth_that_cannot_be_is_refused(tmp_path, line, reason):
    """A GROW whose times go back, or whose victims do not fit, raises TraceError."""
    with pytest.raises(TraceError, match=reason):
        expanded(tmp_path / "t.jsonl", line)


def test_schema_1_has_no_line_of_growth(tmp_path):
    """A trace of schema 1 with a GROW is refused."""
    with pytest.raises(TraceError, match=r":2: GROW: there is none in schema 1"):
        expanded(tmp_path / "t.jsonl", GROW, schema=1)


def test_evicted_blocks_stand_once_in_a_trace(tmp_path):
    """An ALLOC leaves out the blocks that the EVICT before it names, and readers add them."""
    path = tmp_path / "t.jsonl"
    with Trace(path) as trace:
        cache = KVCache(4, 4, trace=trace)
        for name, prompt in (("a", 12), ("b", 16)):
            keys = [f"{name}{n}".encode().ljust(16) for n in range(prompt // 4)]
            seq = cache.open(Request(id=name, prompt_tokens=prompt, keys=keys, key_tokens=4))
            cache.commit(seq, prompt)
            cache.close(seq)
    written = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    _, alloc = (line for line in written if line["event"] == "ALLOC")
    assert (alloc["runs"], alloc["evicted"]) == ([[3, 1]], 3)
    _, read = (event for event in read_events(path) if event.event == "ALLOC")
    assert read.as_dict() == {
        key: value for key, value in alloc.items() if key != "evicted"
    } | {"runs": [(3, -4)]}


@pytest.mark.parametrize("change", [{"evicted": 2}, {"evicted": 9}])
def test_evicted_blocks_are_those_of_the_lines_before(tmp_path, change):
    """An ALLOC that leaves out more or fewer blocks than were evicted is refused."""
    evict = {
        "n": 1, "t": 0, "event": "EVICT", "span": 1, "runs": [[3, 1]], "by": "lru", "for": 1,
        "age": 0, "hits": 0, "reason": "capacity", "scope": "cache",
    }  # fmt: skip
    alloc = {"n": 2, "t": 0, "event": "ALLOC", "seq": 1, "first": 0, "runs": []}
    with pytest.raises(TraceError, match=r":3: ALLOC: . evicted blocks; 1 in the lines before"):
        expanded(tmp_path / "t.jsonl", evict, alloc | change)


def test_a_trace_of_schema_1_is_read(tmp_path):
    """A trace of schema 1 has the same events as the same run in schema 2."""
    path, old = tmp_path / "new.jsonl", tmp_path / "old.jsonl"
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in decoding(blocks=40)))
    old.write_bytes(schema_1(path))
    assert lines(old)[1:-1] == lines(path)[1:-1]
    assert lines(old)[0]["schema"] == 1
