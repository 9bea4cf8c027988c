"""Helpers for tests of sweeps: a small file, the command, and a policy that kills.

The policy kills its own process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from time import sleep

SMALL = """mode = "compare"
workload = ["zipf:requests=60,prefixes=4", "zipf:requests=40,prefixes=4"]
eviction = ["lru", "lfu", "optimum"]
blocks = [160, 400]
"""
"""12 cells."""

MORTAL = '''
import os, signal
from pathlib import Path
from typing import ClassVar
import attrs
from kvcore.hookspecs import hookimpl
from kvcore_plugins.eviction import LRU


@attrs.define(slots=False, eq=False)
class Mortal(LRU):
    """LRU, whose process is killed at its first victim unless a file is there already."""

    name: ClassVar[str] = "mortal"
    seen: str = attrs.field(default="never")

    def victim(self, now):
        if not os.path.exists(self.seen):
            if self.seen != "never":
                Path(self.seen).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().victim(now)


@hookimpl
def kvcore_eviction_policies():
    return [Mortal]
'''


def install_mortal(folder):
    """Install the policy `mortal` into `folder`; return an environment that imports it."""
    folder.mkdir()
    (folder / "mortal.py").write_text(MORTAL)
    info = folder / "mortal-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mortal\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvcore]\nmortal = mortal\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


def suicide():
    """Return a task function that sends the signal `task` to its own process."""
    return lambda task: os.kill(os.getpid(), task)


def command(*arguments):
    """Return the command line of `kvcore sweep`."""
    return [sys.executable, "-m", "kvcore", "sweep", *map(str, arguments)]


def run(*arguments, cwd, env=None):
    """Run `kvcore sweep` as a process to its end."""
    return subprocess.run(
        command(*arguments), cwd=cwd, env=env, capture_output=True, text=True, check=False
    )


def wait_for(cells, journal, process):
    """Wait until a journal has `cells` cells, or the process that writes it has ended."""
    while finished(journal) < cells and process.poll() is None:
        sleep(0.002)


def finished(journal):
    """Return the number of cells in a journal."""
    try:
        return journal.read_bytes().count(b'"cell":')
    except FileNotFoundError:
        return 0


class NoRowError(Exception):
    """An error that keeps a text in place of its argument, so that it cannot be unpickled."""

    def __init__(self, *, row):
        super().__init__(f"no row {row}")


def read_no_row():
    """Raise an error that cannot be made again from its message."""
    raise NoRowError(row=7)
