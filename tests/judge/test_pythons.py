"""A leaderboard is the same file on each Python, in Python alone and with the core in C."""

import os
import shutil
import subprocess
import sys

import pytest
from helpers.native import needs_core

PANEL = """
shares = [50, 200]
[[stream]]
name = "tools"
workload = "agents:sessions=12"
timed = true
[[stream]]
name = "recency"
workload = "recency:requests=400"
"""
OPTIONS = ("--panel", "panel.toml", "--policy", "lfu", "--policy", "slru", "--jobs", "1")


def leaderboard_of(python, folder, **environment):
    """Return the file that `kvcore leaderboard` writes when a Python runs it."""
    (folder / "panel.toml").write_text(PANEL)
    command = [python, "-m", "kvcore", "leaderboard", *OPTIONS, "-o", "board.json"]
    env = {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return (folder / "board.json").read_bytes()


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Return the leaderboard of this Python."""
    return leaderboard_of(sys.executable, tmp_path_factory.mktemp("here"))


@needs_core
def test_the_core_in_c_writes_the_same_leaderboard(here, tmp_path):
    """Without the core in C the file has the same bytes."""
    assert leaderboard_of(sys.executable, tmp_path, KVCORE_PURE="1") == here


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_another_python_writes_the_same_leaderboard(minor, here, tmp_path):
    """Another Python on the path, for which kvcore is installed, writes the same bytes."""
    name = f"python3.{minor}"
    python = shutil.which(name)
    if python is None or minor == sys.version_info.minor:
        pytest.skip(f"there is no other {name} on the path")
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    found = subprocess.run(
        [python, "-c", "import kvcore_judge"], env=env, capture_output=True, check=False
    )
    if found.returncode:
        pytest.skip(f"{python} has no kvcore")
    assert leaderboard_of(python, tmp_path, PYTHONPATH="") == here
