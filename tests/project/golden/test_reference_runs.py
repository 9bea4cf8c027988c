"""Twelve small runs whose traces must not change by a byte.

Three digests of each run are known. Two are those of the trace in schema 1: `whole`, which is
in the END line and covers every byte before it, and `events`, which covers the lines between
HEADER and END. If only `whole` has changed, the header has: a version, an option, a digest of
the workload. If `events` has changed, kvcore decides differently. `written` is in the END line
of the file itself: if it alone has changed, the same decisions are written in another way.
"""

from __future__ import annotations

import gzip
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import attrs
import orjson
import pytest
from helpers.traces import schema_1

from kvcore import KVCache, Request, Trace
from kvcore_cli import main as frame
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix
from kvcore_plugins.workload import Mooncake

DATA = Path(__file__).parents[2] / "data"
SESSIONS = "weka_sessions.jsonl"
MIXED = "mixed.jsonl"
CHATS = "chats.jsonl"
BLOCK = 16


@attrs.frozen
class Golden:
    """A run whose trace must not change.

    Attributes:
        arguments: its command line.
        whole, events, written: its digests.
        shows: events, ways and reasons that the trace has.
        lacks: one that it does not have.
    """

    arguments: str
    whole: str
    events: str
    written: str
    shows: str
    lacks: str | None = None


RUNS = {
    # An untimed LRU, in `keys` accounting.
    "lru": Golden(
        "compare chats.jsonl --eviction lru --blocks 1000",
        "ba88458ef5d4a841e4bd4651f4fae74d",
        "a325ccaec3f0e0b1cfa3e315225ad06e",
        "d1f62286a4a79bf607595f51f2ae2d38",
        "capacity",
    ),
    # An untimed LFU with aging; the last block of a prompt is partial.
    "lfu": Golden(
        "compare zipf:requests=600,prefixes=20,prefix_tokens=250,suffix_tokens=60 "
        "--eviction lfu:half_life=20 --blocks 300 --block-size 16 --accounting tokens",
        "ac30cc577cc244b4c0716f2d5d136a4a",
        "4aab5874881b94258dd15293aa2f8cbb",
        "531ad700e0b5922e0a998e948b307efc",
        "capacity",
    ),
    # Zipf-popular prefixes in an ample pool, with defaults.
    "fcfs": Golden(
        "simulate zipf:requests=200,prefixes=9,prefix_tokens=300,suffix_tokens=90,rate=40",
        "9889e073849b469220b30e708c557343",
        "d96b117ba99f4faddb00426478e1244e",
        "e2c89df45aacea3df3b513fd2ca65fc0",
        "HIT",
        lacks="EVICT",
    ),
    # Bursts, with whole prompts in steps of their own and a watermark.
    "bursts": Golden(
        "simulate zipf:requests=160,prefixes=12,prefix_tokens=300,suffix_tokens=60,seed=7,"
        "arrivals=bursty,burst=20,rate=30,output_tokens=40 --steps prefill-first --no-chunked "
        "--scheduler lpm --eviction slru --blocks 160 --watermark 0.1",
        "71b112c8758e67153958c7e49d9e5490",
        "8645700be66d9c757e8f401e8df44b66",
        "0dad279e0251af047119bdbfe345e989",
        "capacity",
    ),
    # Chunked prompts, in steps of at most 128 tokens and 6 sequences.
    "srpt": Golden(
        "simulate mixed.jsonl --scheduler srpt --max-tokens 128 --max-seqs 6 --blocks 300 "
        "--rate-scale 4",
        "2c6f085ec9f098d9b831233ddb26a8f0",
        "02774f624f5d0a3bca602d207ccdb9f9",
        "fa8c5cd2d3acb8fdebb8ff784b89fbf2",
        "pause capacity",
        lacks="recompute",
    ),
    # Deadlines of requests, and a default.
    "slo": Golden(
        "simulate mixed.jsonl --scheduler slo:preemptive=true,ttft=0.5 --max-seqs 8 "
        "--blocks 200 --rate-scale 3",
        "97d06691ee96aa588c9798eea5e6404b",
        "bd4fda82c3eeb7902d1b7859f10a7aeb",
        "b57835a8b6c6076f2f4d475f09bff3e4",
        "pause",
    ),
    # A pool so small that requests are paused and recomputed.
    "preemptions": Golden(
        "simulate mixed.jsonl --scheduler srpt --eviction cost --blocks 120 --max-seqs 6 "
        "--watermark 0 --rate-scale 4",
        "7e1908a9e7991a84dca4bfccccb7ac16",
        "4fd29a66bfc46c9a0d9a6cb60f6891e7",
        "97cebf98f4018cfae918ee87db224f80",
        "pause recompute",
    ),
    # A closed loop of agents: a request arrives when the one before it is done.
    "sessions": Golden(
        "simulate weka_sessions.jsonl --blocks 9000",
        "2c4ea9f864f346e16575ed5d11d03aec",
        "100ea11a11f9c964d7087ed156400b8a",
        "7c552e2a16511357e298e733596b2e40",
        "capacity",
    ),
    # Eviction by retention hints, which expire.
    "hints": Golden(
        "simulate mixed.jsonl --eviction priority --blocks 160",
        "da44de7fff952c78221df8307a50fa24",
        "d563e247cfab5b30f376f609b40cde96",
        "eabfc2a65f99d5e15ac183df411b9efa",
        "capacity",
    ),
    # Eviction of blocks that are unused for 0.3 s, with fair scheduling.
    "expiry": Golden(
        "simulate mixed.jsonl --eviction ttl:ttl=0.3 --scheduler fair",
        "4852df79caab6bafdc57ac9c46367805",
        "d24a8fcd2cf4f305c4717adebcbe2123",
        "40896c5aa4f26d05606089b7fa0f26f3",
        "expired",
    ),
    # A tiny transformer that keeps a window, in a pool too small.
    "tensors": Golden(
        "run zipf:requests=16,prefixes=3,prefix_tokens=64,suffix_tokens=32,rate=300,"
        "output_tokens=30 --generator transformer:layers=2 --latency linear "
        "--retention window:tokens=40,sinks=8 --blocks 32 --block-size 8",
        "3604e6b196e8fa6358df31f151297235",
        "f50a429601f820f96bcbfbe6a0cdece8",
        "c568c6c30588319cfe378e20aea2bc10",
        "retention recompute",
    ),
}
FORKS = (
    "63098e176ed449797134257a5f154e38",
    "e089ef9c39a2dc0778e9118b8ee35a77",
    "b603f8606b8a880539bca27368b74d5e",
)
"""The digests of a run of forks that share blocks, in Python."""


@attrs.frozen
class Recorded:
    """The digests and the contents of a trace.

    Attributes:
        digests: `whole`, `events` and `written`.
        counts: lines by event.
        ways: how sequences were preempted, and the reasons of evictions.
    """

    digests: tuple[str, str, str]
    counts: dict[str, int]
    ways: set[str]


def digest(data):
    """Return the digest that seals a trace, as hex digits."""
    return blake2b(data, digest_size=16).hexdigest()


def read(path):
    """Read a trace, and check the digest in its END line."""
    written = orjson.loads(path.read_bytes().splitlines()[-1])["digest"]
    header, *events, end = schema_1(path).splitlines(keepends=True)
    body = b"".join(events)
    end = orjson.loads(end)
    assert end["digest"] == digest(header + body)
    lines = list(map(orjson.loads, events))
    ways = {line[field] for line in lines for field in ("how", "reason") if field in line}
    return Recorded((end["digest"], digest(body), written), end["events"], ways)


def write_mixed(path):
    """Write 150 requests that differ in all fields that schedulers and policies use.

    The numbers come from a linear congruential generator, because they must be the same on
    every machine and in every version of Python.
    """
    state = 1

    def below(limit):
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % limit

    arrival, rows = 0, []
    for index in range(150):
        arrival += below(40) * 1_000_000
        family, shared = below(5), below(12)
        prompt = BLOCK * shared + below(300) + 1
        keys = [
            (family + 1) * 1000 + place if place < shared else (index + 10) * 1000 + place
            for place in range(-(-prompt // BLOCK))
        ]
        row = {"event": "REQUEST", "id": index, "prompt": prompt, "output": 1 + below(120)}
        row |= {"t": arrival, "keys": keys, "key_tokens": BLOCK, "priority": below(3)}
        row |= {"tenant": f"tenant {below(3)}", "predicted": 1 + below(120)}
        if below(2):
            row["slo"] = {"ttft": (1 + below(900)) * 1_000_000}
        if below(2) and shared:
            row["retention"] = [[0, BLOCK * shared, 60 + below(40), below(900) * 1_000_000]]
        rows.append(orjson.dumps(row) + b"\n")
    path.write_bytes(b"".join(rows))


def write_chats(path):
    """Write the first 3,000 requests of the bundled trace, in the format of Mooncake."""
    rows = (
        {
            "timestamp": request.arrival // 1_000_000,
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": list(request.keys),
        }
        for request in islice(Mooncake(), 3000)
    )
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


@pytest.fixture
def recorded(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command line and returns a summary of its trace.

    It runs in a directory of its own, so that paths in the header are always the same.
    """
    monkeypatch.chdir(tmp_path)
    write_mixed(tmp_path / MIXED)
    # Hide the stop reasons: readers did not use them when this run was first recorded.
    sessions = gzip.decompress((DATA / f"{SESSIONS}.gz").read_bytes())
    (tmp_path / SESSIONS).write_bytes(sessions.replace(b'"stop":', b'"then":'))

    def run(*arguments):
        if CHATS in arguments:
            write_chats(tmp_path / CHATS)
        # The model that was the default when the runs were recorded; some sessions are longer
        # than its positions.
        model = () if arguments[0] == "run" else ("--model", "llama-3-8b")
        code = frame.run([*arguments, *model, "--trace", "run.jsonl"])
        told = capsys.readouterr().err.splitlines()
        assert (code, [line for line in told if "8,192 positions" not in line]) == (0, [])
        return read(tmp_path / "run.jsonl")

    return run


@pytest.mark.parametrize("golden", RUNS.values(), ids=list(RUNS))
def test_trace_of_a_run(recorded, golden):
    """A run writes its recorded trace, which shows what the run is for."""
    verb, *_ = arguments = golden.arguments.split()
    pytest.importorskip({"compare": "kvcore_lab", "run": "torch"}.get(verb, "kvcore"))
    run = recorded(*arguments)
    shown = run.ways | run.counts.keys()
    assert {*golden.shows.split()} <= shown
    assert golden.lacks not in shown
    assert run.digests == (golden.whole, golden.events, golden.written)


def test_trace_of_forks_with_copy_on_write(tmp_path):
    """Forks that share blocks, copy on write and roll back write the recorded trace."""
    path = tmp_path / "run.jsonl"
    with Trace(path) as trace:
        cache = KVCache(16, 4, eviction=LRU(), prefix=Radix(), trace=trace)
        now = 0
        for index in range(12):
            shared, prompt = index % 3 + 1, 9 + index
            keys = [
                place if place < shared else 100 * index + place
                for place in range(-(-prompt // 4))
            ]
            root = cache.open(
                Request(id=index, prompt_tokens=prompt, keys=keys, key_tokens=4), None, now
            )
            cache.commit(root, prompt - root.computed, now + 1)
            family = [root]
            for branch in range(1 + index % 3):
                family.append(cache.fork(family[branch // 2], now + 2 + branch))
            for step, sequence in enumerate(family):
                cache.extend(sequence, 2 + step, now + 10 + step)
                cache.commit(sequence, 2 + step, now + 10 + step)
            cache.rollback(family[-1], 1 + index % 2, now + 20)
            for sequence in family if index % 2 else family[::-1]:
                cache.close(sequence, now + 21)
            now += 30
    run = read(path)
    assert {"FORK", "COPY"} <= run.counts.keys()
    assert {"capacity", "rollback", "close"} <= run.ways
    assert run.digests == FORKS
