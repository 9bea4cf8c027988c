"""CPUs and memory of a process: the host's, or less by affinity and limits of cgroups."""

import os

import pytest

from kvcore_plugins import host


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Return a function that writes cgroup files and the process's own cgroups."""

    def write(own, files):
        (tmp_path / "own").write_text(own)
        (tmp_path / "meminfo").write_text("MemTotal: 16000 kB\nMemAvailable: 8000 kB\n")
        for name, text in files.items():
            path = tmp_path / "fs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(host, "CGROUPS", tmp_path / "fs")
        monkeypatch.setattr(host, "OWN_CGROUPS", tmp_path / "own")
        monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    return write


V1 = "4:cpu,cpuacct:/a\n3:memory:/a\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("", {}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "250000 100000\n"}, 2),
        ("0::/hidden\n", {"cpu.max": "50000 100000\n"}, 1),
        (V1, {f"cpu,cpuacct/a/cpu.cfs_{name}_us": "-1\n" for name in ("quota", "period")}, 8),
        (
            V1,
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
)
def test_cpus_are_limited_by_affinity_and_quotas(cgroups, own, files, expected):
    """`cpus()` is the smallest of the affinity and the quotas of the cgroup and its parents."""
    cgroups(own, files)
    assert host.cpus() == expected


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("", {}, (8_192_000, 16_384_000)),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "1\n"}, (8_192_000, 16_384_000)),
        (
            "0::/\n",
            {
                "memory.max": "5000\n",
                "memory.current": "4000\n",
                "memory.stat": "anon 3000\ninactive_file 500\n",
            },
            (1_500, 5_000),
        ),
        (
            V1,
            {
                "memory/a/memory.limit_in_bytes": "5000\n",
                "memory/a/memory.usage_in_bytes": "6000\n",
            },
            (0, 5_000),
        ),
    ],
)
def test_memory_is_limited_by_cgroups(cgroups, own, files, expected):
    """`memory()` is the host's free and total bytes, or less where a cgroup has a limit."""
    cgroups(own, files)
    assert host.memory() == expected
