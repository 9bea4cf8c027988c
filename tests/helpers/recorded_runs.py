"""Checks of recorded runs: a trace is that of its run, and damage of it is detected."""

from itertools import chain, zip_longest

from kvcore import TraceError
from kvcore_replay.check.trace import check_trace
from kvcore_replay.recorded_run import recorded_run


def check_recorded(path, alone, traced, cache):
    """Check that the trace of a run has its figures, and changed none of those without it.

    Return the report on the trace.
    """
    cache.check_integrity()
    summary = {**traced.summary(), "wall_s": 0}
    assert summary == {**alone.summary(), "wall_s": 0}
    report, recorded = check_trace(path), recorded_run(path)
    assert report.complete
    assert report.pool["free"] == cache.pool.free_blocks
    pinned = cache.pins.blocks if cache.pins else 0
    assert report.pool["cached"] == cache.unpinned_blocks + pinned
    assert recorded.evicted_blocks == summary["evicted_blocks"]
    assert recorded.preemptions == summary["preemptions"]
    for name in ("hit_blocks", "lookup_blocks", "self_hit_blocks"):
        assert report.hit[name] == recorded.hit[name]
    assert recorded.hit["hit_tokens"] == traced.cache.stats.hit_tokens
    return report


def drawn_lines(rng, recorded, numbers, count):
    """Return up to `count` of the `numbers` of lines at random, the kinds of lines in turn.

    The kind of a line is its event, with its reason, its policy or its way if it has them.
    """
    kinds = {}
    for n in rng.sample(numbers, len(numbers)):
        line = recorded[n]
        kind = [line.get(name) for name in ("event", "reason", "by", "how")]
        kinds.setdefault(str(kind), []).append(n)
    in_turn = chain.from_iterable(zip_longest(*kinds.values()))
    return [n for n in in_turn if n is not None][:count]


def is_detected(path):
    """Return True if a replay finds that a trace is damaged or incomplete."""
    try:
        return not check_trace(path).complete
    except TraceError as error:
        return str(error).startswith(f"{path}:")
