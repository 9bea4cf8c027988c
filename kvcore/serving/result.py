"""The result of a run: one row a request, a summary, and both as files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import orjson

from kvcore.cache import KVCache, Recorder
from kvcore.cache.residency import CacheStats
from kvcore.extras import import_extra
from kvcore.files import atomic_file, make_directory
from kvcore.plugins import describe
from kvcore.request import SLO, Request
from kvcore.serving.batcher import Batching
from kvcore.serving.latency import Executor, LatencyModel
from kvcore.serving.load import Saturation, offered_load, saturation_of
from kvcore.serving.loop import MET, UNJUDGED, RunLog
from kvcore.serving.scheduler import Scheduler
from kvcore.serving.stats import Fragmentation, Percentiles
from kvcore.units import NS_PER_S, PS_PER_S
from kvcore.workloads import Workload

SCHEMA = 1


def _between(begin: Sequence[int], end: Sequence[int]) -> list[int]:
    """Return the times from `begin` to `end`, where there is an end."""
    return [b - a for a, b in zip(begin, end, strict=True) if b >= 0]


def hit_fields(stats: CacheStats) -> dict[str, Any]:
    """Return lookups, hits and hit ratios of a run as JSON has them."""
    counts = ("lookup_blocks", "hit_blocks", "self_hit_blocks", "lookup_tokens", "hit_tokens")
    return {name: getattr(stats, name) for name in counts} | {"ratio": stats.ratios()}


def _slo_seconds(time: int | None) -> float | None:
    return None if time is None else time / NS_PER_S


def _as_dict(percentiles: Percentiles | None) -> dict[str, float] | None:
    return None if percentiles is None else percentiles.as_dict()


def record_run(
    trace: Recorder,
    workload: Iterable[Request],
    scheduler: Scheduler,
    executor: Executor,
    batching: Batching,
    *,
    rate_scale: float,
    slo: SLO | None,
) -> None:
    """Describe a run to `trace`, so that it can be made again."""
    latency = executor.latency
    expected = {} if slo is None else {"slo": slo}
    trace.describe(
        mode=executor.mode,
        executor=executor.name,
        workload=workload if isinstance(workload, Workload) else None,
        plugins={plugin.kind: describe(plugin) for plugin in (scheduler, *executor.plugins)},
        batching=attrs.asdict(batching),
        latency=latency.coefficients(),
        rate_scale=rate_scale,
        **expected,
    )


SUMMARY, REQUESTS = "summary.json", "requests.jsonl"


@attrs.frozen
class HitRatio:
    """Share of the prompts that hit, counted in three ways; None without a lookup.

    Attributes:
        block: of the blocks that were looked up.
        token: of the prompt tokens.
        request: the mean of the requests' own ratios.
    """

    block: float | None
    token: float | None
    request: float | None


@attrs.frozen(slots=False, eq=False)
class Outcome:
    """What became of the requests of a run: the numbers that follow from its log alone.

    Numbers are computed when they are first asked for, and once.

    Attributes:
        log: the columns that were recorded while it ran.
    """

    log: RunLog

    @cached_property
    def ttft(self) -> Percentiles | None:
        """Times to first token; None if no request has one."""
        return Percentiles.of(_between(self.log.arrival, self.log.first_token), NS_PER_S)

    @cached_property
    def tpot(self) -> Percentiles | None:
        """Mean times of the tokens after the first, by request; None without any."""
        return Percentiles.of([time for time in self.log.tpot() if time >= 0], PS_PER_S)

    @cached_property
    def itl(self) -> Percentiles | None:
        """Inter-token latencies: all gaps between two tokens of a request; None without any.

        The mean is exact; percentiles are at most 1 % too large.
        """
        return self.log.itl.percentiles(PS_PER_S)

    @cached_property
    def e2e(self) -> Percentiles | None:
        """Times from arrival to finish; None if no request finished."""
        return Percentiles.of(_between(self.log.arrival, self.log.finish), NS_PER_S)

    @cached_property
    def queue(self) -> Percentiles | None:
        """Times from arrival to first admission; None if no request was admitted."""
        return Percentiles.of(_between(self.log.arrival, self.log.admitted), NS_PER_S)

    @property
    def simulated_s(self) -> float:
        """Seconds from the first arrival to the last finish (or arrival)."""
        first, end = self._span
        return (end - first) / NS_PER_S

    @property
    def throughput_tokens_s(self) -> float | None:
        """Output tokens of finished requests a second; None if none asks for any."""
        output, rejected = self.log.output, self.log.reasons
        if not any(output):
            return None
        generated = sum(output) - sum(output[row] for row in rejected)
        return generated / self.simulated_s if self.simulated_s else None

    @property
    def goodput(self) -> float | None:
        """Requests a second that met their SLO; None if none can be judged."""
        met = self.log.verdict.count(MET)
        return met / self.simulated_s if self.simulated_s and self._judged else None

    @property
    def slo_attainment(self) -> float | None:
        """Share of the requests judged by an SLO that met it; None without any."""
        return self.log.verdict.count(MET) / self._judged if self._judged else None

    @property
    def _judged(self) -> int:
        """Requests that have a sample of something that their SLO states."""
        return len(self.log.verdict) - self.log.verdict.count(UNJUDGED)

    @cached_property
    def _span(self) -> tuple[int, int]:
        """When (ns) the first request arrived, and when the last finished, or arrived."""
        log = self.log
        last = max(max(log.arrival, default=0), max(log.finish, default=0))
        return min(log.arrival, default=0), last


@attrs.frozen(slots=False, eq=False)
class Result(Outcome):
    """The result of a run. See docs/reference/simulate-result.md for every number.

    Numbers are computed when they are first asked for, and once.

    Attributes:
        log: the columns that were recorded while it ran.
        cache: the cache it ran with.
        batching, latency: the limits of a step and the latency model it ran with.
        fragmentation: what memory was used for, where that was measured.
        wall_s: seconds the run took on this machine; all else is the same on every one.
        max_output: output tokens that a request reserved, in contiguous memory.
    """

    cache: KVCache
    batching: Batching
    latency: LatencyModel
    fragmentation: Fragmentation | None
    wall_s: float = 0.0
    max_output: int | None = None

    @cached_property
    def hit_ratio(self) -> HitRatio:
        """Hit ratio by block, by token and by request."""
        return HitRatio(**self.cache.stats.ratios())

    @cached_property
    def offered_load(self) -> float | None:
        """Arrival rate times the least time a request needs; see `offered_load`."""
        tokens = self.cache.pool.blocks * self.cache.geometry.block_size
        return offered_load(self.log, self.batching, self.latency, tokens)

    @cached_property
    def saturation(self) -> Saturation | None:
        """Whether the queue grew for as long as requests came; None if that cannot be told."""
        return saturation_of(self.log, self.batching.max_seqs, self.offered_load)

    @cached_property
    def requests(self) -> dict[str, list[Any]]:
        """The requests by column, in the order in which they ended.

        Made when first asked for: some 500 bytes a request.
        """
        log = self.log
        finished = [row not in log.reasons for row in range(len(log.ids))]
        return {
            "id": log.ids,
            "status": ["finished" if done else "rejected" for done in finished],
            "reason": [log.reasons.get(row) for row in range(len(log.ids))],
            "tenant": log.tenants,
            "arrival_s": _seconds(log.arrival),
            "admitted_s": _seconds(log.admitted),
            "finish_s": _seconds(log.finish),
            "queue_s": _seconds(_since(log.arrival, log.admitted)),
            "ttft_s": _seconds(_since(log.arrival, log.first_token)),
            "tpot_s": _seconds(log.tpot(), PS_PER_S),
            "e2e_s": _seconds(_since(log.arrival, log.finish)),
            "prompt": log.prompt.tolist(),
            "output": log.output.tolist(),
            "hit_tokens": log.hit.tolist(),
            "pauses": log.pauses.tolist(),
            "recomputes": log.recomputes.tolist(),
            "met_slo": [None if v == UNJUDGED else bool(v) for v in log.verdict],
        }

    def summary(self) -> dict[str, Any]:
        """Return the numbers of the run as JSON has them.

        Costs O(n log n) for n requests, and O(m) for m events.
        """
        log, cache, slo = self.log, self.cache, self.log.slo or SLO()
        stats, tree, geometry = cache.stats, cache.tree, cache.geometry
        measured = self.fragmentation
        return {
            "schema": SCHEMA,
            "count": geometry.accounting,
            "requests": len(log.ids),
            "completed": len(log.ids) - len(log.reasons),
            "rejected": len(log.reasons),
            "offered_load": self.offered_load,
            "saturation": None if self.saturation is None else self.saturation.as_dict(),
            "simulated_s": self.simulated_s,
            "wall_s": self.wall_s,
            "steps": log.steps,
            "ttft_s": _as_dict(self.ttft),
            "tpot_s": _as_dict(self.tpot),
            "itl_s": _as_dict(self.itl),
            "e2e_s": _as_dict(self.e2e),
            "queue_s": _as_dict(self.queue),
            "throughput_tokens_s": self.throughput_tokens_s,
            "goodput": self.goodput,
            "slo": {
                "ttft_s": _slo_seconds(slo.ttft_ns),
                "tpot_s": _slo_seconds(slo.tpot_ns),
                "deadline_s": _slo_seconds(slo.deadline_ns),
                "own": log.own_slos,
                "judged": self._judged,
                "met": self.slo_attainment,
            },
            "preemptions": {"pause": sum(log.pauses), "recompute": sum(log.recomputes)},
            "forgotten_blocks": stats.dropped_blocks,
            "compactions": stats.compactions,
            "compacted_tokens": stats.compacted_tokens,
            "deferred_compactions": stats.deferred_compactions,
            "evicted_blocks": tree.evicted_blocks + tree.expired_blocks,
            "hit": hit_fields(stats),
            "lost_tokens": stats.lost_tokens,
            "residency": None if tree.residency is None else tree.residency.by_tier(),
            "pool": {"block_size": geometry.block_size} | log.pool.summary(*self._span),
            "fragmentation": None if measured is None else attrs.asdict(measured),
        }

    def to_frame(self) -> Any:
        """Return a polars DataFrame of `requests`, one row a request.

        Raises:
            PluginError: polars is not installed.
        """
        needed = "to_frame needs polars, which cannot be imported"
        instead = ", or make a frame of `result.requests` yourself"
        pl = import_extra("polars", needed, "lab", instead)
        ids = [str(name) for name in self.requests["id"]]
        return pl.DataFrame({**self.requests, "id": ids}, infer_schema_length=None)

    def write(self, directory: Path | str, **more: Any) -> None:
        """Write `summary.json` and `requests.jsonl` to `directory`, made if need be.

        Both appear when both are whole; what had these names before is replaced. The
        summary has the entries `more` besides its own.

        Raises:
            InputError: the directory cannot be made, or a file not be opened.
            StorageError: the disk refused what was written.
        """
        directory = Path(directory)
        make_directory(directory)
        with (
            atomic_file(directory / SUMMARY) as document,
            atomic_file(directory / REQUESTS) as lines,
        ):
            names = list(self.requests)
            for row in zip(*self.requests.values(), strict=True):
                line = orjson.dumps(dict(zip(names, row, strict=True)))
                lines.write(f"{line.decode()}\n")
            text = orjson.dumps(self.summary() | more, option=orjson.OPT_INDENT_2)
            document.write(f"{text.decode()}\n")


def _seconds(times: Iterable[int], second: int = NS_PER_S) -> list[float | None]:
    return [None if time < 0 else time / second for time in times]


def _since(begin: Iterable[int], end: Iterable[int]) -> list[int]:
    """Return the nanoseconds from `begin` to `end`; -1 where there is no end."""
    return [b - a if b >= 0 else -1 for a, b in zip(begin, end, strict=True)]
