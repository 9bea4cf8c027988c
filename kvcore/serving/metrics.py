"""The summary of a run: every number of its JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.cache import KVCache
from kvcore.policy import LatencyModel
from kvcore.request import SLO
from kvcore.serving.batching import Batching
from kvcore.serving.load import offered_load
from kvcore.serving.log import MET, UNJUDGED, RunLog
from kvcore.serving.quantiles import distribution
from kvcore.units import NANOSECONDS, PICOSECONDS

SCHEMA = 1
SECOND = NANOSECONDS * PICOSECONDS


def summary(
    log: RunLog, cache: KVCache, batching: Batching, latency: LatencyModel, wall_s: float
) -> dict[str, Any]:
    """Return the numbers of a run, as docs/reference/simulate-result.md explains them."""
    stats, prefix, geometry = cache.stats, cache.prefix, cache.geometry
    tokens = cache.pool.blocks * geometry.block_size
    first, end = simulated(log)
    span = end - first
    seconds = span / NANOSECONDS
    generated = sum(log.output) - sum(log.output[row] for row in log.reasons)
    judged = len(log.verdict) - log.verdict.count(UNJUDGED)
    met = log.verdict.count(MET)
    return {
        "schema": SCHEMA,
        "count": geometry.count,
        "requests": len(log.ids),
        "completed": len(log.ids) - len(log.reasons),
        "rejected": len(log.reasons),
        "offered_load": offered_load(log, batching, latency, tokens),
        "simulated_s": seconds,
        "wall_s": wall_s,
        "steps": log.steps,
        "ttft_s": distribution(_between(log.arrival, log.first_token), NANOSECONDS),
        "tpot_s": distribution([time for time in log.tpot() if time >= 0], SECOND),
        "itl_s": log.itl.distribution(SECOND),
        "e2e_s": distribution(_between(log.arrival, log.finish), NANOSECONDS),
        "queue_s": distribution(_between(log.arrival, log.admitted), NANOSECONDS),
        "throughput_tokens_s": generated / seconds if span else None,
        "goodput": met / seconds if span and judged else None,
        "slo": _slo(log.slo or SLO())
        | {"own": log.own_slos, "met": met / judged if judged else None},
        "preemptions": {"pause": sum(log.pauses), "recompute": sum(log.recomputes)},
        "forgotten_blocks": stats.forgotten_blocks,
        "evicted_blocks": prefix.evicted + prefix.expired_blocks,
        "hit": {
            "lookup_blocks": stats.lookup_blocks,
            "hit_blocks": stats.hit_blocks,
            "self_hit_blocks": stats.self_hit_blocks,
            "lookup_tokens": stats.lookup_tokens,
            "hit_tokens": stats.hit_tokens,
            "ratio": stats.ratios(),
        },
        "lost_tokens": stats.lost_tokens,
        "residency": None if prefix.residency is None else prefix.residency.by_tier(),
        "pool": {"block_size": geometry.block_size} | log.pool.summary(first, end),
    }


def simulated(log: RunLog) -> tuple[int, int]:
    """Return when (ns) the first request arrived, and when the last finished, or arrived."""
    first = min(log.arrival, default=0)
    return first, max(max(log.arrival, default=0), max(log.finish, default=0))


def _between(begin: Sequence[int], end: Sequence[int]) -> list[int]:
    """Return the times from `begin` to `end`, where there is an end."""
    return [b - a for a, b in zip(begin, end, strict=True) if b >= 0]


def _slo(slo: SLO) -> dict[str, float | None]:
    return {
        f"{name}_s": None if time is None else time / NANOSECONDS
        for name, time in (("ttft", slo.ttft), ("tpot", slo.tpot), ("deadline", slo.deadline))
    }
