"""Traces of random servers with a pool for each kind of layer: they record the run."""

from collections import Counter
from random import Random

import pytest
from helpers.pooled_traces import pooled_run
from helpers.recorded_runs import check_recorded, drawn_lines, is_detected
from helpers.traces import lines, seal
from hypothesis import settings

from kvcore import InputError
from kvcore_replay.check.trace import check_trace
from kvcore_replay.what_if import whatif

OF_POOLS = ("KEEP", "TOMBSTONE")

PARTS = 4
SEEDS = max(24, settings.default.max_examples // 50)
"""Tests that share the seeds of runs, and how many there are."""


@pytest.mark.parametrize("part", range(PARTS))
def test_a_traced_run_is_the_same_run_and_is_checked(part, tmp_path):
    """A trace changes no decision, every line of it is right, and its counts are the run's.

    In every other part clients pin prompts, whose windows and states leave all the same.
    """
    path, met, pins = tmp_path / "trace.jsonl", Counter(), part % 2 == 1
    for seed in range(part, SEEDS, PARTS):
        alone, _ = pooled_run(seed, pins=pins)
        traced, cache = pooled_run(seed, path, pins=pins)
        report = check_recorded(path, alone, traced, cache)
        slots = {pool["pool"]: (pool["slots"], pool["free"]) for pool in report.pools}
        assert slots == {side.name: (side.slots, side.free) for side in cache.tree.sides}
        met += Counter(report.events)
    assert {"HIT", "EVICT", "PREEMPT", "SPLIT", *OF_POOLS} <= met.keys()


def of_pools(recorded):
    """Return the numbers of the lines on pools, and of the splits and hits that they make."""
    return [
        n
        for n, line in enumerate(recorded)
        if line["event"] in (*OF_POOLS, "SPLIT", "HIT")
        or line.get("reason") == "passed"
        or line.get("by") in ("window", "state")
    ]


@pytest.mark.parametrize("seed", range(9))
def test_a_removed_or_repeated_line_is_found(seed, tmp_path):
    """A line on pools that is missing or written twice is found behind a right digest.

    The exceptions are a KEEP after which nothing is kept, if none of what it uses is evicted,
    and a FREE of window slots that the COMMIT just after it would free as well.
    """
    path, rng = tmp_path / "trace.jsonl", Random(seed)
    pooled_run(seed, path, count=14)
    recorded = lines(path)
    numbers = of_pools(recorded)
    for n in drawn_lines(rng, recorded, numbers, 12):
        line, before, after = recorded[n], recorded[n - 1]["event"], recorded[n + 1]
        seal(path, recorded[:n] + recorded[n + 1 :])
        shares = "windows" in line or "state" in line or before in ("COMMIT", "SPLIT")
        may_be = line["event"] == "KEEP" and not shares
        may_be |= line["event"] == "FREE" and after.get("how") == "same"
        assert is_detected(path) or may_be, line
        seal(path, recorded[: n + 1] + recorded[n:])
        assert is_detected(path), line


@pytest.mark.parametrize("seed", range(9))
def test_a_line_that_is_changed_is_found(seed, tmp_path):
    """A loss of another pool, span or request is found, and so are slots of another span."""
    path, rng = tmp_path / "trace.jsonl", Random(seed)
    pooled_run(seed, path, count=14)
    recorded = lines(path)
    spans = {line["span"] for line in recorded if line["event"] == "COMMIT"}
    changed = [n for n in of_pools(recorded) if recorded[n]["event"] not in ("SPLIT", "HIT")]
    for n in drawn_lines(rng, recorded, changed, 16):
        line = recorded[n]
        if line["event"] == "TOMBSTONE":
            pool = "state" if line["pool"] == "window" else "window"
            others = [{"pool": pool}, {"for": (line["for"] + 1) % 14}]
            others.append({"span": rng.choice(sorted(spans - {line["span"]}))})
        elif line["event"] == "EVICT":
            others = [{"by": "state" if line["by"] == "window" else "window"}, {"by": "lru"}]
        elif line["event"] == "FREE":
            ((first, count),) = line["forgotten"]
            others = [
                {"forgotten": [[first + 1, count]]},
                {"forgotten": [[first, count + 10**6]]},
            ]
        else:
            spans_kept, state = line.get("windows", []), line.get("state")
            others = [{"windows": [*spans_kept, 10**6]}, {"state": (state or 0) + 1}]
            if spans_kept:
                others.append({"windows": spans_kept[1:]})
        other = line | rng.choice(others)
        seal(path, [*recorded[:n], other, *recorded[n + 1 :]])
        assert is_detected(path), other


def test_a_fork_is_found(tmp_path):
    """A sequence with pools has no forks: the line that closes the child is refused."""
    path = tmp_path / "trace.jsonl"
    pooled_run(0, path, count=3)
    recorded = lines(path)
    n = next(n for n, line in enumerate(recorded) if line["event"] == "FIRST_TOKEN")
    fork = {"t": recorded[n]["t"], "event": "FORK", "seq": 1, "child": 2}
    ends = fork | {"event": "FREE", "seq": 2, "runs": [], "reason": "close"}
    del ends["child"]
    seal(path, [*recorded[: n + 1], fork, ends, *recorded[n + 1 :]])
    assert is_detected(path)


@pytest.mark.parametrize("seed", range(6))
def test_a_run_with_pools_is_made_again(seed, tmp_path):
    """A recorded run that is made again has the same lines, and another pool other slots."""
    path, again = tmp_path / "trace.jsonl", tmp_path / "again.jsonl"
    pooled_run(seed, path)
    same = whatif(path, export=again)
    assert again.read_bytes() == path.read_bytes()
    assert same.changes == []
    assert same.rerun.hit == same.recorded.hit
    blocks = lines(path)[0]["blocks"]
    whatif(path, blocks=2 * blocks, export=again)
    before, after = (lines(file)[0]["layer_pools"] for file in (path, again))
    assert {name: slots for name, slots in after.items() if name != "window"} == {
        name: 2 * slots for name, slots in before.items() if name != "window"
    }
    check_trace(again)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"block_size": 32}, "layer pools, whose blocks have the sizes that the model needs"),
        ({"like": "vllm"}, "share what is computed, and allocate by chunk: give"),
        ({"retention": "window:tokens=100"}, "which retention does not know"),
        ({"tier": ["host:memory=1GiB"]}, "which tier does not know"),
        ({"drafter": "acceptance"}, "pools of their own, which drafter does not know"),
    ],
)
def test_what_pools_do_not_know_is_refused(change, problem, tmp_path):
    """A recorded run with pools is not made again with what they do not know."""
    path = tmp_path / "trace.jsonl"
    pooled_run(0, path)
    with pytest.raises(InputError, match=problem):
        whatif(path, **change)
