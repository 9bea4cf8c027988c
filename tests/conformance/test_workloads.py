"""The built-in workloads pass the tests that every workload must pass."""

from pathlib import Path

from kvcore.testing.workloads import WorkloadTests
from kvcore_plugins.workloads import Azure, Jsonl, Mooncake, Weka, Zipf

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
