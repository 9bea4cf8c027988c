"""The result of a run: one row a request, a summary, and both as files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, compress
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

import attrs

import kvcore
from kvcore.cache import ServedCache
from kvcore.cache.residency import CacheStats
from kvcore.files import atomic_file, make_directory, to_json
from kvcore.notebook import Shown, data_frame
from kvcore.plugins import Plugin
from kvcore.request import SLO
from kvcore.serving.latency import LatencyModel
from kvcore.serving.scheduler import Batching
from kvcore.serving.stats import (
    MET,
    UNJUDGED,
    Column,
    Fragmentation,
    Percentiles,
    RunLog,
    Times,
    mean_gaps,
)
from kvcore.units import NS_PER_S, PS_PER_S

SCHEMA = 1

SUMMARY, REQUESTS, TRACE = "summary.json", "requests.jsonl", "trace.jsonl.gz"


class HitRatio(NamedTuple):
    """Share of the prompts that hit, counted in three ways; None without a lookup.

    Attributes:
        block: of the blocks that were looked up.
        token: of the prompt tokens.
        request: the mean of the requests' own ratios.
    """

    block: float | None
    token: float | None
    request: float | None


@attrs.frozen(slots=False, eq=False, repr=False)
class Outcome(Shown):
    """Outcome of the requests of a run: the figures that follow from its log alone.

    Numbers are computed when they are first asked for, and once.

    Attributes:
        log: the columns that were recorded while it ran.
        notes: what its workload says of the requests that were read.
    """

    log: RunLog
    notes: Sequence[str] = attrs.field(default=(), kw_only=True, repr=False)

    def __repr__(self) -> str:
        """Return the class with the numbers of requests and of simulated seconds."""
        requests, seconds = len(self.log.ids), self.simulated_s
        return f"{type(self).__name__}({requests:,} requests, {seconds:,.4g} simulated seconds)"

    @cached_property
    def ttft(self) -> Percentiles | None:
        """Times to first token; None if no request has one."""
        return Percentiles.from_samples(
            _between(self.log.arrival, self.log.first_token), NS_PER_S
        )

    @cached_property
    def tpot(self) -> Percentiles | None:
        """Mean times of the tokens after the first, by request; None without any."""
        return Percentiles.from_samples(self.log.tpot(), PS_PER_S)

    @cached_property
    def itl(self) -> Percentiles | None:
        """Inter-token latencies: all gaps between two tokens of a request; None without any.

        The mean is exact; percentiles are at most 1 % too large.
        """
        return self.log.itl.percentiles(PS_PER_S)

    @cached_property
    def e2e(self) -> Percentiles | None:
        """Times from arrival to finish; None if no request finished."""
        return Percentiles.from_samples(_between(self.log.arrival, self.log.finish), NS_PER_S)

    @cached_property
    def queue(self) -> Percentiles | None:
        """Times from arrival to first admission; None if no request was admitted."""
        return Percentiles.from_samples(_between(self.log.arrival, self.log.admitted), NS_PER_S)

    @property
    def simulated_s(self) -> float:
        """Seconds from the first arrival to the last finish (or arrival)."""
        first, end = self._span
        return (end - first) / NS_PER_S

    @property
    def throughput_tokens_s(self) -> float | None:
        """Output tokens of finished requests a second; None if none of them asks for any."""
        output, rejected = self.log.output, self.log.reasons
        generated = sum(output) - sum(output[row] for row in rejected)
        return generated / self.simulated_s if generated and self.simulated_s else None

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
        """Number of requests with a sample of a latency that their SLO limits."""
        return len(self.log.verdict) - self.log.verdict.count(UNJUDGED)

    def outcome_fields(self) -> dict[str, Any]:
        """Return the numbers that follow from the log, as JSON has them."""
        log, slo = self.log, self.log.slo or SLO()
        return {
            "requests": len(log.ids),
            "completed": len(log.ids) - len(log.reasons),
            "rejected": len(log.reasons),
            "simulated_s": self.simulated_s,
            "ttft_s": self.ttft and self.ttft.as_dict(),
            "tpot_s": self.tpot and self.tpot.as_dict(),
            "itl_s": self.itl and self.itl.as_dict(),
            "e2e_s": self.e2e and self.e2e.as_dict(),
            "queue_s": self.queue and self.queue.as_dict(),
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
            "preemptions": {
                "pause": sum(log.pauses),
                "recompute": sum(log.recomputes),
                "swap": sum(log.swaps),
            },
            **({"notes": list(self.notes)} if self.notes else {}),
        }

    @cached_property
    def requests(self) -> dict[str, list[Any]]:
        """The requests by column, in the order in which they ended.

        Made when first asked for: some 500 bytes a request. `request_parts` yields them some
        at a time.
        """
        columns: dict[str, list[Any]] = {}
        for part in self.request_parts():
            for name, column in part.items():
                columns.setdefault(name, []).extend(column)
        return columns

    def request_parts(self) -> Iterator[dict[str, list[Any]]]:
        """Yield `requests`, some rows at a time: memory holds 65,536 of them."""
        log = self.log
        columns = log.columns()
        first = 0
        for parts in zip(*(column.parts() for column in columns.values()), strict=True):
            part = dict(zip(columns, parts, strict=True))
            rows = range(first, first + len(part["ids"]))
            first = rows.stop
            came, began, ended = part["arrival"], part["first_token"], part["finish"]
            yield {
                "id": list(part["ids"]),
                "status": ["rejected" if row in log.reasons else "finished" for row in rows],
                "reason": [log.reasons.get(row) for row in rows],
                "tenant": list(part["tenants"]),
                "arrival_s": _seconds(came),
                "admitted_s": _seconds(part["admitted"]),
                "finish_s": _seconds(ended),
                "queue_s": _since(came, part["admitted"]),
                "ttft_s": _since(came, began),
                "tpot_s": _seconds(mean_gaps(began, ended, part["output"]), PS_PER_S),
                "e2e_s": _since(came, ended),
                "prompt": list(part["prompt"]),
                "output": list(part["output"]),
                "hit_tokens": list(part["hit"]),
                "loaded_tokens": list(part["loaded"]),
                "pauses": list(part["pauses"]),
                "recomputes": list(part["recomputes"]),
                "swaps": list(part["swaps"]),
                "met_slo": [None if v == UNJUDGED else bool(v) for v in part["verdict"]],
            }

    @cached_property
    def _span(self) -> tuple[int, int]:
        """The times (ns) of the first arrival, and of the last finish or arrival."""
        log = self.log
        last = max(max(log.arrival, default=0), max(log.finish, default=0))
        return min(log.arrival, default=0), last


class Reported(Outcome):
    """The result of one server or of several, as files and as a data frame."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """Return the numbers of the run as JSON has them."""

    def to_frame(self) -> Any:
        """Return a polars DataFrame of `requests`, one row a request.

        Raises:
            PluginError: polars is not installed.
        """
        ids = [str(name) for name in self.requests["id"]]
        types = dict.fromkeys(("reason", "tenant"), "str") | {"met_slo": "bool"}
        types |= {name: "float" for name in self.requests if name.endswith("_s")}
        return data_frame({**self.requests, "id": ids}, "`result.requests`", types)

    def write(self, directory: Path | str, **more: Any) -> None:
        """Write `summary.json` and `requests.jsonl` to `directory`, made if need be.

        Both appear when both are whole, and replace files of these names. The summary begins
        with the entries `more`, which replace its own.

        Raises:
            InputError: the directory cannot be made, a file not opened, or a value not written.
            StorageError: the disk refused a write.
        """
        directory = Path(directory)
        make_directory(directory)
        with (
            atomic_file(directory / SUMMARY) as document,
            atomic_file(directory / REQUESTS) as lines,
        ):
            for part in self.request_parts():
                for row in zip(*part.values(), strict=True):
                    fault = f"request {row[0]!r} cannot be written as JSON"
                    line = to_json(dict(zip(part, row, strict=True)), fault)
                    lines.write(f"{line.decode()}\n")
            fields = {"schema": SCHEMA, **more, **self.summary(), **more}
            text = to_json(fields, "the summary cannot be written as JSON", indent=True)
            document.write(f"{text.decode()}\n")


@attrs.frozen(slots=False, eq=False, repr=False)
class Result(Reported):
    """The result of a run. See docs/reference/simulate-result.md for every number.

    Numbers are computed when they are first asked for, and once.

    Attributes:
        log: the columns that were recorded while it ran.
        cache: the cache it ran with.
        batching, latency: the limits of a step and the latency model it ran with.
        fragmentation: how memory was used, if that was measured.
        wall_s: seconds the run took on this machine; all else is the same on every one.
        max_output: output tokens that a request reserved, in contiguous memory.
        drafter: the drafter; None: there was none.
    """

    cache: ServedCache
    batching: Batching
    latency: LatencyModel
    fragmentation: Fragmentation | None
    wall_s: float = 0.0
    max_output: int | None = None
    drafter: Plugin | None = None

    @cached_property
    def hit_ratio(self) -> HitRatio:
        """Hit ratio by block, by token and by request."""
        return HitRatio(**self.cache.stats.ratios())

    @cached_property
    def offered_load(self) -> float | None:
        """Arrival rate times the least time that a request needs, by a fluid bound.

        None with a drafter: the least time of its steps is unknown.
        """
        return kvcore.load_of(self)

    @cached_property
    def saturation(self) -> kvcore.Saturation | None:
        """Whether the queue grew until the last arrival; None if that is unknown."""
        return kvcore.saturation_of(self.log, self.batching.max_seqs, self.offered_load)

    def summary(self) -> dict[str, Any]:
        """Return the numbers of the run as JSON has them.

        Costs O(n log n) for n requests, in memory that does not grow with them from 65,536 on,
        and O(m) for m events.
        """
        log, cache = self.log, self.cache
        stats, pins, geometry = cache.stats, cache.pins, cache.geometry
        measured = self.fragmentation
        return {
            "schema": SCHEMA,
            "count": geometry.accounting,
            **self.outcome_fields(),
            "offered_load": self.offered_load,
            "saturation": None if self.saturation is None else self.saturation.as_dict(),
            "wall_s": self.wall_s,
            "steps": log.steps,
            "forgotten_blocks": stats.dropped_blocks,
            "compactions": stats.compactions,
            "compacted_tokens": stats.compacted_tokens,
            "deferred_compactions": stats.deferred_compactions,
            "evicted_blocks": cache.evicted_blocks,
            "pins": {
                "refused_blocks": pins.refused_blocks if pins is not None else 0,
                "yielded": pins.yielded if pins is not None else 0,
            },
            "hit": hit_fields(stats),
            "lost_tokens": stats.lost_tokens,
            "loaded_tokens": sum(log.loaded),
            "tiers": None if cache.tiers is None else cache.tiers.as_dict(),
            "reuse_ratio": (stats if cache.tiers is None else cache.tiers.hit_stats()).ratios(),
            "residency": cache.residency_by_tier(),
            "pool": {"block_size": geometry.block_size} | log.pool.summary(*self._span),
            "fragmentation": None if measured is None else measured._asdict(),
            **({} if log.drafts is None else {"drafts": log.drafts.as_dict()}),
        }


def _between(begin: Column[int], end: Column[int]) -> Times:
    """Return the times from `begin` to `end`, where there is an end."""
    return Times(lambda: chain.from_iterable(map(_differences, begin.parts(), end.parts())))


def _differences(begin: Sequence[int], end: Sequence[int]) -> Iterator[int]:
    """Yield the times from `begin` to `end`, where there is an end: in C."""
    times = map(sub, end, begin)
    return times if -1 not in end else compress(times, [time >= 0 for time in end])


def hit_fields(stats: CacheStats) -> dict[str, Any]:
    """Return lookups, hits and hit ratios of a run as JSON has them."""
    counts = ("lookup_blocks", "hit_blocks", "self_hit_blocks", "lookup_tokens", "hit_tokens")
    return {name: getattr(stats, name) for name in counts} | {"ratio": stats.ratios()}


def _slo_seconds(time: int | None) -> float | None:
    return None if time is None else time / NS_PER_S


def _seconds(times: Iterable[int], second: int = NS_PER_S) -> list[float | None]:
    return [None if time < 0 else time / second for time in times]


def _since(begin: Iterable[int], end: Iterable[int]) -> list[float | None]:
    """Return the seconds from `begin` to `end` (ns); None where there is no end."""
    return [None if b < 0 else (b - a) / NS_PER_S for a, b in zip(begin, end, strict=True)]
