"""Admission, waiting and preemption: steps of 10 ns, blocks of 4 tokens."""

import pytest
from helpers.serving import ask, serve
from helpers.traces import lines, seal

from kvcore.errors import TraceError
from kvcore_replay.check.trace import replay as check_trace


def kinds(run):
    """Return (pauses, recomputes) of each request."""
    return {name: (row["pauses"], row["recomputes"]) for name, row in run.rows.items()}


def test_without_free_blocks_the_last_job_in_order_is_preempted():
    """Without free blocks the last job in order is preempted and frees its blocks.

    Later its prompt and its generated tokens are one prefill.
    """
    keys = {"a": [1, 2, 3], "b": [4, 5, 6]}
    requests = [ask(name, ord(name) - 97, 12, 14, keys=keys[name]) for name in keys]
    run = serve(requests, blocks=8)
    # b has 4 tokens when each needs a fifth block at 50; it prefills 12 + 4 tokens at 140.
    assert run.timeline("FIRST_TOKEN", "PREEMPT", "FINISH") == [
        "10 FIRST_TOKEN a",
        "20 FIRST_TOKEN b",
        "50 PREEMPT b",
        "140 FINISH a",
        "240 FINISH b",
    ]
    assert [line["how"] for line in run.lines if line["event"] == "PREEMPT"] == ["recompute"]
    assert (run.result.cache.stats.self_hit_blocks, run.sum("hit")) == (1, 0)


@pytest.mark.parametrize(("named", "found"), [((), 2), ((5, 6, 7), 4)])
def test_a_preempted_request_hits_its_blocks_that_are_left(named, found, tmp_path):
    """A preempted request hits the blocks of its prompt, and those of its output with keys.

    b has five full blocks when each needs a sixth; the last of them is evicted for a.
    """
    requests = [
        ask("a", 0, 8, 14, keys=[1, 2]),
        ask("b", 0, 8, 14, keys=[3, 4], output_keys=named),
    ]
    run = serve(requests, blocks=10)
    assert kinds(run) == {"a": (0, 0), "b": (0, 1)}
    assert run.result.cache.stats.self_hit_blocks == found
    path = tmp_path / "trace.jsonl"
    path.write_bytes(run.trace)
    assert check_trace(path).hit["self_hit_blocks"] == found
    # A HIT line with one block less than was cached is rejected.
    events = lines(path)
    again = next(line for line in events if line["event"] == "HIT" and line.get("again"))
    again["blocks"] -= 1
    seal(path, events)
    with pytest.raises(TraceError, match=f"{found - 1} blocks hit; {found} are cached"):
        check_trace(path)
