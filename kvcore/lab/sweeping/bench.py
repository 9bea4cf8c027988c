"""One cell run: simulated under a clock, or replayed without one."""

from __future__ import annotations

from time import perf_counter
from traceback import extract_tb
from typing import Any

import attrs

from kvcore.errors import KvcoreError
from kvcore.lab.optimum import Optimum
from kvcore.lab.sweeping.cell import Cell, Mode
from kvcore.lab.sweeping.parts import Parts, Shelf
from kvcore.lab.untimed import replay
from kvcore.serving import simulate

HITS = {
    "lookup_blocks": "lookup_blocks",
    "hit_blocks": "hit_blocks",
    "hit_ratio_block": "ratio.block",
    "hit_ratio_token": "ratio.token",
    "hit_ratio_request": "ratio.request",
}
TIMES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s")
SPREAD = ("mean", "p50", "p90", "p95", "p99")

TIMED = {
    **{name: name for name in ("requests", "completed", "rejected", "offered_load")},
    "simulated_s": "simulated_s",
    # `steps` is what they may hold.
    "step_count": "steps",
    **{f"{time}_{part}": f"{time}.{part}" for time in TIMES for part in SPREAD},
    "throughput_tokens_s": "throughput_tokens_s",
    "goodput": "goodput",
    "slo_met": "slo.met",
    "preemptions_pause": "preemptions.pause",
    "preemptions_recompute": "preemptions.recompute",
    "evicted_blocks": "evicted_blocks",
    **{name: f"hit.{path}" for name, path in HITS.items()},
    "lost_tokens": "lost_tokens",
    "pool_active_mean": "pool.active.mean",
    "pool_active_peak": "pool.active.peak",
}
"""Columns of a simulated cell, and where each is in the summary of its run."""

UNTIMED = ("requests", *HITS, "evicted_blocks")

RESULTS: dict[Mode, tuple[str, ...]] = {"simulate": tuple(TIMED), "compare": UNTIMED}
"""The columns that a cell's run fills, by mode."""


@attrs.frozen
class Task:
    """A cell to be run, and the digest that names it."""

    digest: str
    cell: Cell


@attrs.frozen
class Outcome:
    """What came of a task.

    Attributes:
        digest: of its cell.
        result: its columns; None if it failed.
        error: why it failed.
        wall_s: seconds it took.
    """

    digest: str
    result: dict[str, Any] | None
    error: str | None = None
    wall_s: float = 0.0


class Bench:
    """Runs one task after another in one process."""

    def __init__(self) -> None:
        self._shelf = Shelf()

    def attempt(self, task: Task) -> Outcome:
        """Run a task; what it raises is its outcome, so that the other cells go on."""
        begin = perf_counter()
        try:
            result = self._run(task)
        except Exception as error:  # noqa: BLE001 - told, and the sweep fails in the end
            return Outcome(task.digest, None, _reason(error))
        return Outcome(task.digest, result, wall_s=round(perf_counter() - begin, 6))

    def _run(self, task: Task) -> dict[str, Any]:
        parts = Parts(task.cell, self._shelf)
        if parts.digest != task.digest:
            msg = (
                "this process would run another cell: a file, a plugin or kvcore itself has "
                "changed since the sweep began, or is not the same on this machine"
            )
            raise KvcoreError(msg)
        return _timed(parts) if task.cell.mode == "simulate" else self._untimed(parts)

    def _untimed(self, parts: Parts) -> dict[str, Any]:
        if isinstance(parts.eviction, Optimum):
            future = self._shelf.future(parts.cell, parts.geometry)
            stats, evicted = parts.eviction.replay(
                future, parts.blocks, parts.geometry.block_size
            )
        else:
            cache = parts.cache()
            stats = replay(parts.workload, cache)
            evicted = cache.prefix.evicted + cache.prefix.expired_blocks
        return {
            "requests": stats.requests,
            "lookup_blocks": stats.lookup_blocks,
            "hit_blocks": stats.hit_blocks,
            **{f"hit_ratio_{unit}": ratio for unit, ratio in stats.ratios().items()},
            "evicted_blocks": evicted,
        }


def _timed(parts: Parts) -> dict[str, Any]:
    summary = simulate(
        parts.workload,
        cache=parts.cache(),
        scheduler=parts.scheduler,
        latency=parts.latency,
        batching=parts.batching,
        slo=parts.slo,
        rate_scale=parts.cell.rate_scale,
        residency=False,
    ).summary()
    return {column: _at(summary, path) for column, path in TIMED.items()}


def _at(document: Any, path: str) -> Any:
    """Return what is at a dotted path; None below what is None."""
    for name in path.split("."):
        document = None if document is None else document[name]
    return document


def _reason(error: Exception) -> str:
    """Say what failed; of what is no error of kvcore's making, where."""
    if isinstance(error, KvcoreError):
        return str(error)
    *_, frame = extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {frame.name} ({frame.lineno}): {error}"
