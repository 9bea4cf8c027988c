"""Smoke tests of an installed kvcore; `tox -e wheel` runs them outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version

import kvcore
from kvcore.testing import EvictionPolicyTests
from kvcore_cli.main import known_verbs, loaded_verb


def run(*words, **environment):
    """Run the command line in a process, and return what it prints on stdout."""
    command = [sys.executable, "-m", "kvcore", *words]
    env = os.environ | environment
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def document(*words, **environment):
    """Return the JSON document that the command line prints."""
    return json.loads(run(*words, "--json", **environment))


def test_the_version_is_that_of_the_package():
    """`--version` prints the version of the metadata, and the core that is expected."""
    name, number, core = run("--version").strip().split(" ", 2)
    assert (name, number) == ("kvcore", version("kvcore"))
    assert core.startswith(os.environ.get("KVCORE_SMOKE", "(loop in "))


def test_every_verb_can_be_loaded():
    """The modules of all verbs are installed."""
    assert len(known_verbs()) > 20
    for verb in known_verbs():
        assert loaded_verb(verb).callback or verb == "demo"


def test_the_bundled_trace_is_served_the_same_by_both_cores():
    """`simulate` serves the bundled trace, and gives the same without the core in C."""
    fast, pure = (
        document("simulate", "--limit", "300", KVCORE_PURE=pure) for pure in ("", "1")
    )
    assert fast["completed"] == 300
    assert fast | {"wall_s": 0} == pure | {"wall_s": 0}


def test_a_trace_is_written_and_checked(tmp_path):
    """`simulate --trace` writes a trace that `replay` finds right."""
    trace = str(tmp_path / "run.jsonl.gz")
    run("simulate", "zipf:requests=100,rate=20", "--trace", trace)
    assert document("replay", trace)["finished"] == 100


def test_a_comparison_is_explained(tmp_path):
    """`explain` counts the hits that `compare` counts."""
    trace = str(tmp_path / "run.jsonl.gz")
    one = ("--eviction", "lru", "--blocks", "500", "--trace", trace)
    (row,) = document("compare", "--limit", "300", *one)["rows"]
    explained = document("explain", trace, "--summary")
    assert 0 < explained["hit_tokens"] == row["hit_blocks"] * row["block_size"]


def test_the_leaderboard_compares_with_lru():
    """LRU has the score 1."""
    (policy,) = document("leaderboard", "--panel", "quick", "--policy", "lru")["policies"]
    assert policy["score"]["headline"] == "1.0000"


def test_routers_share_requests():
    """A router's row has the hits and the load of its replicas."""
    router = ("--limit", "200", "--replicas", "2", "--routers", "lmetric")
    (row,) = document("routers", *router)["rows"]
    assert 0 < row["hit_ratio"] < row["share_of_optimum"] <= 1
    assert 1 <= row["imbalance_requests"] < 2


class Deepest(kvcore.ScoreEviction):
    """Evict the span that begins deepest."""

    name = "deepest"

    def score(self, span, now):
        """Return the negative depth."""
        return -span.depth


class TestDeepest(EvictionPolicyTests):
    """The conformance kit passes on a policy of a user."""

    eviction = Deepest
