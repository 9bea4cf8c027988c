"""The built-in workloads pass the tests that every workload must pass."""

import json
from pathlib import Path
from typing import ClassVar

import pytest
from helpers.kv_events import batch, record, stored

from kvcore.testing.workload import WorkloadTests
from kvcore_events.workload import KvEvents
from kvcore_lab.comparison import compare_policies
from kvcore_plugins.workload import (
    Azure,
    Bench,
    Chat,
    Jsonl,
    Lengths,
    LMCache,
    Mooncake,
    Recording,
    Weka,
    Zipf,
)

DATA = Path(__file__).parents[2] / "data"


class TestMooncake(WorkloadTests):
    """The trace that comes with kvcore."""

    workload = Mooncake


class TestWeka(WorkloadTests):
    """Recorded sessions, one with subagents."""

    workload = staticmethod(lambda: Weka(DATA / "weka_sessions.jsonl.gz"))


class TestAzure(WorkloadTests):
    """The first rows of a recorded trace."""

    workload = staticmethod(lambda: Azure(DATA / "azure_2023_conv_head.csv"))


class TestBench(WorkloadTests):
    """The requests of a benchmark's clients."""

    workload = staticmethod(lambda: Bench(requests=300, concurrency=7, spread=0.2))


class TestZipf(WorkloadTests):
    """Generated requests."""

    workload = staticmethod(lambda: Zipf(requests=300, prefixes=20))


class TestJsonl(WorkloadTests):
    """A trace with every field that a request can have."""

    workload = staticmethod(lambda: Jsonl(DATA / "requests.jsonl"))


class TestKvEvents(WorkloadTests):
    """A recording in full-report mode: requests of popular prefixes, some in two chunks."""

    @pytest.fixture(autouse=True)
    def recording(self, tmp_path):
        """Write the recording."""
        batches = []
        for serial in range(40):
            prefix, own = serial % 3, 1000 + 2 * serial
            batches += [
                batch(stored(prefix, own, size=16), ts=serial / 4),
                batch(stored(own + 1, parent=own, size=16), ts=serial / 4),
            ]
        self.path = record(tmp_path / "events.jsonl.gz", *batches)

    def make(self):
        """Return the workload that reads the recording."""
        return KvEvents(self.path, lookups="full")


class TestKvEventsWithLog(WorkloadTests):
    """A log of requests, joined to a recording by time."""

    @pytest.fixture(autouse=True)
    def files(self, tmp_path):
        """Write the recording and the log."""
        self.path = record(tmp_path / "e.jsonl", batch(stored(1, size=4)), batch(ts=9.0))
        self.log = tmp_path / "log.jsonl"
        rows = [
            f'{{"id":{n},"time":{n / 10},"tokens":{[*range(n % 7), 1, 2, 3]}}}'
            for n in range(60)
        ]
        self.log.write_text("\n".join(rows))

    def make(self):
        """Return the workload that reads the recording and the log."""
        return KvEvents(self.path, requests=self.log)


class TestRecording(WorkloadTests):
    """The requests of a traced comparison."""

    @pytest.fixture(autouse=True)
    def trace(self, tmp_path):
        """Record the trace of a comparison."""
        self.path = tmp_path / "trace.jsonl.gz"
        compare_policies(Zipf(requests=100, prefixes=20), "lru", 300, trace=self.path)

    def make(self):
        """Return the workload that reads the trace."""
        return Recording(self.path)


class FileTests(WorkloadTests):
    """Conformance tests of a workload that reads one file, `file`, which has `text`."""

    options: ClassVar = {}

    @pytest.fixture(autouse=True)
    def _write(self, tmp_path):
        self.path = tmp_path / self.file
        self.path.write_text(self.text)

    def make(self):
        """Return the workload that reads the file."""
        return self.workload(self.path, **self.options)


class TestLMCache(FileTests):
    """Logged lookups of two models with popular prefixes, some of them out of order."""

    workload, file = LMCache, "lookup_hashes.jsonl"
    text = "\n".join(
        f'{{"timestamp":{1e9 + n / 5 - n % 2 / 2},"request_id":"r{n % 50}",'
        f'"model_name":"m{n % 2}","chunk_size":256,"seq_len":{512 + n},'
        f'"chunk_hashes":["{hex(n % 3)}","{hex(10 + n)}"]}}'
        for n in range(60)
    )


CHATS = [
    {"messages": [{"role": role, "content": text * (n % 5 + 1)} for role, text in turns]}
    for n, turns in enumerate(
        [[("system", "Be kind. "), ("user", "Why? "), ("assistant", "So. "), ("user", "Oh. "),
          ("assistant", "Yes, since all ships are. "), ("user", "And boats? ")][:1 + n % 6]
         for n in range(40)]
    )
]  # fmt: skip


class TestChat(FileTests):
    """Overlapping conversations with equal beginnings, and requests of one turn."""

    workload, file = Chat, "chats.jsonl"
    options: ClassVar = {"rate": 2, "think": 0.7, "key_tokens": 2}
    text = "".join(json.dumps(chat) + "\n" for chat in CHATS)


class TestChatArray(FileTests):
    """The conversations as a JSON array without times, with a token per byte."""

    workload, file = Chat, "chats.json"
    options: ClassVar = {"tokens": "bytes", "key_tokens": 16}
    text = json.dumps(CHATS)


class TestLengthsWithoutTimes(FileTests):
    """A table of lengths, whose arrivals are drawn."""

    workload, file = Lengths, "lengths.csv"
    options: ClassVar = {"rate": 3}
    text = "input,output\n" + "".join(f"{n + 1},{n}\n" for n in range(60))


class TestBenchmark(FileTests):
    """The result of a vLLM benchmark in which some requests failed."""

    workload, file = Lengths, "result.json"
    text = json.dumps(
        {
            "backend": "vllm",
            "duration": 60.0,
            "input_lens": [*range(1, 61)],
            "output_lens": [n % 7 for n in range(60)],
            "start_times": [n + n % 3 for n in range(60)],
            "errors": ["" if n % 9 else "gone" for n in range(60)],
        }
    )


class TestLengths(FileTests):
    """A table in BurstGPT's format, with sessions."""

    workload, file = Lengths, "lengths.csv"
    text = "Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens\n"
    text += "\n".join(
        f"{n / 7},chat{n % 4},ChatGPT,{n + 1},{n % 9},{n + 1 + n % 9}" for n in range(60)
    )
