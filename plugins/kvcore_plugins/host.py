"""CPUs and memory that this process may use, within the limits of its cgroups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


def cpus() -> int:
    """Return the number of CPUs that this process may use, by affinity and cgroup quotas."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        count = os.cpu_count() or 1
    for group in _cgroups("cpu"):
        # The files of cgroup version 2, and of version 1.
        quota = _words(group / "cpu.max") or [
            *_words(group / "cpu.cfs_quota_us"),
            *_words(group / "cpu.cfs_period_us"),
        ]
        match quota:
            case [time, period] if time.isdigit():  # not "max", nor -1
                count = min(count, int(time) // int(period))
    return max(count, 1)


def memory() -> tuple[int | None, int | None]:
    """Return the free and the total bytes of memory for this process; None if unknown."""
    sizes = _table(MEMINFO, unit=1024)
    free, total = sizes.get("MemAvailable:"), sizes.get("MemTotal:")
    for group in _cgroups("memory"):
        limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
        # Without a limit version 1 has a number above all memory.
        if limit and used and limit[0].isdigit() and int(limit[0]) < (total or 0):
            stat = _table(group / "memory.stat")
            # Pages of files count as used, and are freed when memory is needed.
            files = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            total = int(limit[0])
            free = max(0, min(free or total, total - int(used[0]) + files))
    return free, total


def _cgroups(controller: str) -> Iterator[Path]:
    """Yield the folders of the cgroups of this process, each before its parents."""
    for line in _lines(OWN_CGROUPS):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") or not controllers:
            own = PurePosixPath(path).relative_to("/")
            for part in (own, *own.parents):
                # In a container its own cgroup is the root.
                yield CGROUPS / controllers / part


def _table(path: Path, unit: int = 1) -> dict[str, int]:
    """Return the numbers in a file by name; its lines begin with a name and a number."""
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1 and row[1].isdigit()}


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
