"""Recordings of an engine replay, whatever calls the engine makes."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from helpers.toy_engine import SIZE, ToyEngine, drive, random_request

from kvcore import Request
from kvcore.plugins import resolve
from kvcore_hosting import EngineRecorder
from kvcore_replay.check.trace import check_trace


@pytest.mark.parametrize("policy", ["lru", "lfu", "arc", "s3fifo", "slru", "cost"])
@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_recording_replays_to_the_evictions_of_the_engine(
    tmp_path: Path, policy: str, seed: int, *, loses: bool
) -> None:
    """A recording replays to the evictions and hits of the engine.

    The engine has duplicates, preemptions, and blocks that it evicts early or loses. Below a
    lost block a hit of the engine is a computed block in the trace, so the trace may have fewer
    hits.
    """
    rng = Random(f"{policy} {seed}")
    path = tmp_path / "engine.jsonl"
    engine = ToyEngine(path, policy, rng.choice([12, 20, 40]), SIZE, early=seed % 3)
    drive(engine, rng, 150, loses=loses)
    assert engine.recorder.failure is None
    assert not engine.recorder.disagreements
    report = check_trace(path)
    assert report.complete
    assert report.evictions == engine.digest.as_dict()
    hits = report.hit["hit_blocks"] + report.hit["self_hit_blocks"]
    assert hits <= engine.hits if loses else hits == engine.hits
    assert engine.digest.blocks > 20


def do_anything(
    recorder: EngineRecorder, rng: Random, request: Request, keys: list[int], now: int
) -> None:
    """Make one random call."""
    some, name, blocks = rng.choices(keys, k=rng.randrange(3)), request.id, rng.randrange(6)
    output = rng.choice([None, 0, 3, 9])
    calls = [
        lambda: recorder.request(request, now),
        lambda: recorder.opened(name, hit=blocks, blocks=blocks // 2, evicted=some, now=now),
        lambda: recorder.extended(name, blocks=blocks // 3, evicted=some, now=now),
        lambda: recorder.committed(name, blocks=blocks, now=now),
        lambda: recorder.answered(name, now),
        lambda: recorder.closed(name, now, output=output),
        lambda: recorder.closed(name, now, output=2),
        lambda: recorder.dropped(rng.choice(keys), now),
        lambda: None if now % 10 else recorder.cleared(now),
    ]
    rng.choice(calls)()


@pytest.mark.parametrize("seed", range(40))
def test_random_calls_leave_a_consistent_recording(tmp_path: Path, seed: int) -> None:
    """Random calls raise nothing, and leave lines that do not contradict each other."""
    rng, path = Random(seed), tmp_path / "engine.jsonl"
    recorder = EngineRecorder(
        path, blocks=30, block_size=SIZE, eviction=resolve("eviction", "lru"), engine="toy 1.0"
    )
    requests = [random_request(rng, name) for name in range(12)]
    keys = [key for request in requests for key in request.keys] + [-1]
    for now in range(300):
        do_anything(recorder, rng, rng.choice(requests), keys, now)
    recorder.close()
    assert recorder.disagreements
    assert recorder.failure is None
    assert check_trace(path).complete
