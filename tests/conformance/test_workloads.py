"""The built-in workloads pass the tests that every workload must pass."""

from pathlib import Path

from kvcore.testing.workloads import WorkloadTests
from kvcore_plugins.workloads import Azure, Jsonl, Mooncake, Weka, Zipf

DATA = Path(__file__).parents[1] / "data"


class TestMooncake(WorkloadTests):
    workload = Mooncake


class TestWeka(WorkloadTests):
    workload = staticmethod(lambda: Weka(DATA / "weka_sessions.jsonl.gz"))


class TestAzure(WorkloadTests):
    workload = staticmethod(lambda: Azure(DATA / "azure_2023_conv_head.csv"))


class TestZipf(WorkloadTests):
    workload = staticmethod(lambda: Zipf(requests=300, prefixes=20))


class TestJsonl(WorkloadTests):
    workload = staticmethod(lambda: Jsonl(DATA / "requests.jsonl"))
