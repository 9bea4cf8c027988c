"""Tests of `kvcore plan --executor ray`."""

from __future__ import annotations

import pytest
from helpers.commands import run_here

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.slow

WORDS = (
    *("plan", "zipf:requests=40,prefixes=4,rate=4", "--slo", "ttft=0.2", "--json"),
    *("--tensor-parallel", "1", "--max-gpus", "1", "--tier", "none"),
)


def test_a_cluster_finds_the_same_plan_as_one_process(tmp_path):
    """A plan that is simulated on a local Ray cluster is the one of this process."""
    ray = run_here(*WORDS, "--executor", "ray:local", "--out", "ray", cwd=tmp_path)
    assert (ray.returncode, ray.stderr) == (0, "")
    assert ray.stdout == run_here(*WORDS, "--jobs", "1", "--out", "here", cwd=tmp_path).stdout
