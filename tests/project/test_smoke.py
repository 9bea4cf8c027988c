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
    documents = []
    for pure in ("", "1"):
        documents.append(
            json.loads(run("simulate", "--limit", "300", "--json", KVCORE_PURE=pure))
        )
        del documents[-1]["wall_s"]
    assert documents[0]["completed"] == 300
    assert documents[0] == documents[1]


def test_a_trace_is_written_and_checked(tmp_path):
    """`simulate --trace` writes a trace that `replay` finds right."""
    trace = tmp_path / "run.jsonl.gz"
    run("simulate", "zipf:requests=100,rate=20", "--trace", str(trace))
    assert "100" in run("replay", str(trace))


def test_packages_of_the_wheel_add_their_verbs(tmp_path):
    """Verbs of packages run: a comparison, a leaderboard, a router, an explanation."""
    assert "optimum" in run("compare", "--limit", "300")
    assert "lru" in run("leaderboard", "--panel", "quick", "--policy", "lru")
    assert "lmetric" in run(
        "routers", "--limit", "200", "--replicas", "2", "--routers", "lmetric"
    )
    trace = tmp_path / "run.jsonl.gz"
    run(
        "compare",
        "--limit",
        "300",
        "--eviction",
        "lru",
        "--blocks",
        "500",
        "--trace",
        str(trace),
    )
    assert "tokens" in run("explain", str(trace), "--summary")


class Deepest(kvcore.ScoreEviction):
    """Evict the span that begins deepest."""

    name = "deepest"

    def score(self, span, now):
        """Return the negative depth."""
        return -span.depth


class TestDeepest(EvictionPolicyTests):
    """The conformance kit passes on a policy of a user."""

    eviction = Deepest
