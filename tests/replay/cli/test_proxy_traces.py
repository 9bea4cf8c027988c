"""Tests of verbs on the trace of a proxy, which tells of requests and of no cache."""

import pytest
from helpers.commands import run_here
from helpers.traces import seal

HEADER = {
    "n": 0,
    "t": 0,
    "event": "HEADER",
    "schema": 2,
    "kvcore": "0.1.0",
    "mode": "wall",
    "count": "tokens",
    "block_size": 16,
    "key_tokens": 16,
    "blocks": 8192,
    "plugins": {"router": {"name": "round-robin", "options": {}}},
    "workload": None,
    "seed": None,
    "replicas": [{"count": 2}],
    "routing": {"view": "index"},
}


@pytest.fixture
def path(tmp_path):
    """Return the trace of a proxy, with two requests that went to two servers."""
    events = [HEADER]
    for n in range(2):
        request = {"prompt": 33, "output": 4, "keys": [1, 2], "key_tokens": 16}
        events.append({"n": 0, "t": n, "event": "REQUEST", "id": n, **request})
        events.append({"n": 0, "t": n, "event": "ROUTE", "request": n, "replica": n})
    return seal(tmp_path / "day.jsonl", events)


@pytest.mark.parametrize("replica", [(), ("--replica", "0")])
@pytest.mark.parametrize(
    "verb",
    [
        ("explain", "--summary"),
        ("explain", "1"),
        ("report", "-o", "OUT"),
        ("view", "-o", "OUT"),
        ("watch",),
        ("plot", "--kind", "timeline", "-o", "OUT"),
        ("export", "--to", "vllm", "--out", "OUT"),
        ("export", "--to", "dynamo", "--out", "OUT"),
    ],
    ids=" ".join,
)
def test_what_tells_of_caches_refuses_the_trace_of_a_proxy(path, tmp_path, verb, replica):
    """A verb that tells of caches says that a proxy's trace has none, as `replay` does.

    It says so whether a replica is named or not, and writes nothing.
    """
    out = tmp_path / "out.svg"
    name, *options = [str(out) if word == "OUT" else word for word in verb]
    found = run_here(name, path, *options, *replica)
    assert found.returncode == 1
    assert found.stderr == run_here("replay", path).stderr
    assert f"{path}:1: HEADER: a proxy has written this trace" in found.stderr
    assert not out.exists()
    assert not found.stdout


def test_tracks_of_a_proxy_are_refused(path, tmp_path):
    """Tracks for Perfetto, which would show requests that queue for ever, are refused too."""
    found = run_here("export", path, "--to", "perfetto", "--out", tmp_path / "tracks.json")
    assert found.stderr == run_here("replay", path).stderr


@pytest.mark.parametrize(
    "verb",
    [
        ("simulate",),
        ("compare", "--price", "openai"),
        ("explain", "--summary", "--price", "openai"),
        ("export", "--to", "mooncake", "--out", "OUT"),
        ("export", "--anonymise", "--out", "OUT"),
    ],
    ids=" ".join,
)
def test_what_reads_requests_takes_the_trace_of_a_proxy(path, tmp_path, verb):
    """The requests of a proxy's trace are run, billed and exported."""
    out = str(tmp_path / "out.jsonl")
    name, *options = [out if word == "OUT" else word for word in verb]
    found = run_here(name, path, *options)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("named", ["", "trace:"])
def test_a_simulation_with_another_router_than_the_recorded_one_says_so(path, named):
    """A trace of a proxy names its router; a run by another one tells how to have that."""
    other = run_here("simulate", f"{named}{path}", "--replicas", "2", "--router", "lmetric")
    assert "recorded with another router: '--router round-robin' routes as then" in other.stderr
    same = run_here("simulate", f"{named}{path}", "--replicas", "2", "--limit", "2")
    assert "another router" not in same.stderr
