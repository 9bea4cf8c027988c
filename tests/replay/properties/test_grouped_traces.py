"""Traces of random servers with cache groups: they record the run, and damage is found."""

from collections import Counter
from random import Random

import pytest
from helpers.grouped_traces import TIERS, grouped_run
from helpers.recorded_runs import check_recorded, drawn_lines, is_detected
from helpers.traces import lines, seal
from hypothesis import settings

from kvcore import InputError
from kvcore_replay.check.trace import check_trace
from kvcore_replay.recorded_run import recorded_run
from kvcore_replay.what_if import whatif

PARTS = 6
SEEDS = max(24, settings.default.max_examples // 50)
"""Tests that share the seeds of runs without tiers, and how many there are."""

RUNS = [(seed, ()) for seed in range(6)]
"""Seeds of runs, and their tiers."""

DAMAGED = [*RUNS, *enumerate(TIERS[:3])]
"""The same of runs whose traces are damaged."""


@pytest.mark.parametrize("part", range(PARTS))
def test_a_traced_run_is_the_same_run_and_is_checked(part, tmp_path):
    """A trace changes no decision, every line of it is right, and its counts are the run's."""
    path, met = tmp_path / "trace.jsonl", Counter()
    for seed in range(part, SEEDS, PARTS):
        (alone, _), (traced, cache) = grouped_run(seed), grouped_run(seed, path)
        report = check_recorded(path, alone, traced, cache)
        assert sum(group["cached"] for group in report.groups) == report.pool["cached"]
        met += Counter(report.events)
    assert {"HIT", "EVICT", "PREEMPT"} <= met.keys()


@pytest.mark.parametrize("seed", range(2 * len(TIERS)))
def test_a_traced_run_with_tiers_is_checked(seed, tmp_path):
    """A trace with tiers changes no decision; it has the blocks and bytes that these moved."""
    path, tiers = tmp_path / "trace.jsonl", TIERS[seed % len(TIERS)]
    alone, _ = grouped_run(seed, tiers=tiers)
    traced, cache = grouped_run(seed, path, tiers=tiers)
    cache.check_integrity()
    cache.tiers.check_integrity()
    summary = {**traced.summary(), "wall_s": 0}
    assert summary == {**alone.summary(), "wall_s": 0}
    report = check_trace(path)
    assert report.complete
    for told, tier in zip(report.tiers, summary["tiers"], strict=True):
        assert {name: tier[name] for name in told if name in tier} == {
            name: value for name, value in told.items() if name in tier
        }
    tokens = sum(tier["hit_blocks"] for tier in summary["tiers"]) * cache.geometry.block_size
    assert recorded_run(path).loaded_tokens == tokens


@pytest.mark.parametrize(("mode", "sound"), [("model", False), ("wall", True)])
def test_a_client_may_leave_before_it_is_admitted(mode, sound, tmp_path):
    """A REJECT of a request that fits is that of a client who has left, by the wall clock."""
    path = tmp_path / "trace.jsonl"
    grouped_run(3, path, count=4)
    header, *others, end = lines(path)
    asked = next(line for line in others if line["event"] == "REQUEST")
    asked = asked | {"id": "gone", "t": others[-1]["t"]}
    left = {"n": 0, "t": asked["t"], "event": "REJECT", "request": "gone", "why": "it has left"}
    seal(path, [header | {"mode": mode}, *others, asked, left, end])
    assert is_detected(path) is not sound


@pytest.mark.parametrize(("seed", "tiers"), DAMAGED)
def test_a_removed_or_repeated_line_is_found(seed, tiers, tmp_path):
    """A line that is missing or written twice is found behind a right digest.

    The exception is a FREE of a window that has passed no private block, if it may come later.
    """
    path, rng = tmp_path / "trace.jsonl", Random(seed)
    grouped_run(seed, path, count=14, blocks=60, tiers=tiers)
    recorded = lines(path)
    for n in drawn_lines(rng, recorded, range(1, len(recorded) - 1), 12):
        seal(path, recorded[:n] + recorded[n + 1 :])
        may_wait = recorded[n].get("reason") == "passed" and not recorded[n]["runs"]
        assert is_detected(path) or may_wait, recorded[n]
        seal(path, recorded[: n + 1] + recorded[n:])
        assert is_detected(path), recorded[n]


@pytest.mark.parametrize(("seed", "tiers"), DAMAGED)
def test_a_line_of_another_group_or_block_is_found(seed, tiers, tmp_path):
    """A block that goes to another group, is named in it or evicted from it is found.

    So is another block in its stead.

    The exceptions are a FREE of a window that has passed no private block, if it may come
    later, and a DROP in place of which another block of the tier may leave.
    """
    path = tmp_path / "trace.jsonl"
    grouped_run(seed, path, count=14, blocks=60, tiers=tiers)
    recorded = lines(path)
    groups = len(recorded[0]["cache_groups"]["groups"])
    of_groups = [n for n, line in enumerate(recorded) if "group" in line]
    for n in drawn_lines(Random(seed), recorded, of_groups, 12):
        line = recorded[n]
        other = line | {"group": (line["group"] + 1) % groups}
        seal(path, [*recorded[:n], other, *recorded[n + 1 :]])
        may_be = line["event"] == "DROP" or (line["event"] == "FREE" and not line["runs"])
        assert is_detected(path) or may_be, line
        if line.get("runs"):
            (block, count), *rest = line["runs"]
            other = line | {"runs": [[block + 1, count], *rest]}
            seal(path, [*recorded[:n], other, *recorded[n + 1 :]])
            assert is_detected(path), other


@pytest.mark.parametrize(("seed", "tiers"), RUNS)
def test_an_eviction_in_an_earlier_call_is_found(seed, tiers, tmp_path):
    """A block that is evicted before the call which takes it has begun is found."""
    path = tmp_path / "trace.jsonl"
    grouped_run(seed, path, count=14, blocks=60, tiers=tiers)
    recorded = lines(path)
    moved = 0
    for n in range(2, len(recorded) - 1):
        line, before = recorded[n], recorded[n - 1]
        if line["event"] == "EVICT" and before["event"] in ("MISS", "REQUEST", "COMMIT"):
            other = [line | {"t": before["t"]}, before]
            seal(path, [*recorded[: n - 1], *other, *recorded[n + 1 :]])
            assert is_detected(path), line
            moved += 1
    assert moved


@pytest.mark.parametrize(("seed", "tiers"), [*RUNS, *enumerate(TIERS)])
def test_a_run_with_groups_is_made_again(seed, tiers, tmp_path):
    """A recorded run that is made again has the same lines, and another pool other ones."""
    path, again = tmp_path / "trace.jsonl", tmp_path / "again.jsonl"
    grouped_run(seed, path, blocks=150, count=28, tiers=tiers)
    same = whatif(path, export=again)
    assert again.read_bytes() == path.read_bytes()
    assert same.changes == []
    assert same.rerun.hit == same.recorded.hit
    smaller = whatif(path, blocks=100)
    assert smaller.rerun.evicted_blocks != same.rerun.evicted_blocks


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"block_size": 32}, "blocks have the sizes that the model needs"),
        (
            {"replicas": 2, "view": "events", "router": "prefix-affinity"},
            "view 'events' of cache groups",
        ),
        ({"retention": "window:tokens=100"}, "which retention does not know"),
    ],
)
def test_what_groups_do_not_know_is_refused(change, problem, tmp_path):
    """A recorded run with groups is not made again with what they do not know."""
    path = tmp_path / "trace.jsonl"
    grouped_run(1, path)
    with pytest.raises(InputError, match=problem):
        whatif(path, **change)
