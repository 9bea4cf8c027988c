"""The built-in workloads pass the tests that every workload must pass."""

from pathlib import Path

import pytest
from helpers.kv_events import batch, record, stored

from kvcore.analysis import compare
from kvcore.testing.workload import WorkloadTests
from kvcore_plugins.workload import (
    Azure,
    Jsonl,
    KvEvents,
    Lengths,
    LMCache,
    Mooncake,
    Recording,
    Weka,
    Zipf,
)

DATA = Path(__file__).parents[1] / "data"


class TestMooncake(WorkloadTests):
    """The trace that comes with kvcore."""

    workload = Mooncake


class TestWeka(WorkloadTests):
    """Recorded sessions, one with subagents."""

    workload = staticmethod(lambda: Weka(DATA / "weka_sessions.jsonl.gz"))


class TestAzure(WorkloadTests):
    """The first rows of a recorded trace."""

    workload = staticmethod(lambda: Azure(DATA / "azure_2023_conv_head.csv"))


class TestZipf(WorkloadTests):
    """Generated requests."""

    workload = staticmethod(lambda: Zipf(requests=300, prefixes=20))


class TestJsonl(WorkloadTests):
    """A trace of every field a request can have."""

    workload = staticmethod(lambda: Jsonl(DATA / "requests.jsonl"))


class TestKvEvents(WorkloadTests):
    """A recording in full-report mode: requests of popular prefixes, some in two chunks."""

    @pytest.fixture(autouse=True)
    def recording(self, tmp_path):
        """Write it."""
        batches = []
        for serial in range(40):
            prefix, own = serial % 3, 1000 + 2 * serial
            batches += [
                batch(stored(prefix, own, size=16), ts=serial / 4),
                batch(stored(own + 1, parent=own, size=16), ts=serial / 4),
            ]
        self.path = record(tmp_path / "events.jsonl.gz", *batches)

    def make(self):
        """Return what reads it."""
        return KvEvents(self.path, lookups="full")


class TestKvEventsWithLog(WorkloadTests):
    """A log of requests, joined to a recording by time."""

    @pytest.fixture(autouse=True)
    def files(self, tmp_path):
        """Write both."""
        self.path = record(tmp_path / "e.jsonl", batch(stored(1, size=4)), batch(ts=9.0))
        self.log = tmp_path / "log.jsonl"
        rows = [
            f'{{"id":{n},"time":{n / 10},"tokens":{[*range(n % 7), 1, 2, 3]}}}'
            for n in range(60)
        ]
        self.log.write_text("\n".join(rows))

    def make(self):
        """Return what reads them."""
        return KvEvents(self.path, requests=self.log)


class TestRecording(WorkloadTests):
    """The requests of a traced comparison."""

    @pytest.fixture(autouse=True)
    def trace(self, tmp_path):
        """Record it."""
        self.path = tmp_path / "trace.jsonl.gz"
        compare(Zipf(requests=100, prefixes=20), "lru", 300, trace=self.path)

    def make(self):
        """Return what reads it."""
        return Recording(self.path)


class TestLMCache(WorkloadTests):
    """Logged lookups of two models with popular prefixes, some of them out of order."""

    @pytest.fixture(autouse=True)
    def log(self, tmp_path):
        """Write it."""
        self.path = tmp_path / "lookup_hashes.jsonl"
        rows = [
            f'{{"timestamp":{1e9 + n / 5 - n % 2 / 2},"request_id":"r{n % 50}",'
            f'"model_name":"m{n % 2}","chunk_size":256,"seq_len":{512 + n},'
            f'"chunk_hashes":["{hex(n % 3)}","{hex(10 + n)}"]}}'
            for n in range(60)
        ]
        self.path.write_text("\n".join(rows))

    def make(self):
        """Return what reads it."""
        return LMCache(self.path)


class TestLengths(WorkloadTests):
    """A table as BurstGPT has it, with sessions."""

    @pytest.fixture(autouse=True)
    def table(self, tmp_path):
        """Write it."""
        self.path = tmp_path / "lengths.csv"
        rows = [
            f"{n / 7},chat{n % 4},ChatGPT,{n + 1},{n % 9},{n + 1 + n % 9}" for n in range(60)
        ]
        header = "Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens"
        self.path.write_text("\n".join([header, *rows]))

    def make(self):
        """Return what reads it."""
        return Lengths(self.path)
