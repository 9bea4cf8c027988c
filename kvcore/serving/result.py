"""The result of a run: one row a request, a summary, and both as files."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import chain, compress, pairwise, repeat
from math import floor, sqrt
from operator import add, mul, sub
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import attrs

from kvcore.cache import Recorder, ServedCache
from kvcore.cache.residency import CacheStats
from kvcore.files import atomic_file, make_directory
from kvcore.models.cost import attended_pairs
from kvcore.notebook import Shown, data_frame
from kvcore.plugins import Plugin, describe
from kvcore.request import SLO, Request
from kvcore.serving.latency import Executor, LatencyModel, StepWork
from kvcore.serving.scheduler import Batching, Scheduler
from kvcore.serving.stats import (
    MET,
    UNJUDGED,
    Column,
    Fragmentation,
    Percentiles,
    RunLog,
    Times,
    batches,
    mean_gaps,
)
from kvcore.units import NS_PER_S, PS_PER_NS, PS_PER_S, format_number
from kvcore.workloads import Workload

SCHEMA = 1


def _between(begin: Column[int], end: Column[int]) -> Times:
    """Return the times from `begin` to `end`, where there is an end."""
    return Times(lambda: chain.from_iterable(map(_differences, begin.parts(), end.parts())))


def _differences(begin: Sequence[int], end: Sequence[int]) -> Iterator[int]:
    """Yield the times from `begin` to `end`, where there is an end: in C."""
    times = map(sub, end, begin)
    return times if min(end, default=0) >= 0 else compress(times, [time >= 0 for time in end])


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
    """Record the configuration of a run in `trace`, so that the run can be repeated."""
    latency, rules = executor.latency, batching.rules
    expected = {} if slo is None else {"slo": slo}
    # Rules that override nothing are their options, which `batching` has.
    plugins = (scheduler, *([rules] if rules.decides() else []), *executor.plugins)
    trace.describe(
        mode=executor.mode,
        executor=executor.name,
        workload=workload if isinstance(workload, Workload) else None,
        plugins={plugin.kind: describe(plugin) for plugin in plugins},
        batching=batching.as_dict(),
        latency=latency.coefficients(),
        rate_scale=rate_scale,
        **expected,
    )


FEWEST = 30
"""Requests below which a queue is too short to have a trend."""

STEPS = 10
"""Times at which jobs are admitted, below which the queue may be that of one long step."""

MOMENTS = 64
"""Number of parts into which the time of arrivals is divided to sample the queue."""

LAST = MOMENTS // 4
"""The last moments, at which the queue of a server that is too slow is never empty."""


def _of_finished(log: RunLog, *names: str) -> Iterator[list[Sequence[int]]]:
    """Yield these columns of the requests that finished, some rows at a time."""
    columns = log.columns()
    for finish, *parts in zip(*(columns[n].parts() for n in ("finish", *names)), strict=True):
        if log.reasons:
            done = [time >= 0 for time in finish]
            yield [array("q", compress(part, done)) for part in parts]
        else:
            yield parts


def _column_of_finished(log: RunLog, name: str) -> Times:
    """Return one of the columns of the requests that finished."""
    return Times(lambda: chain.from_iterable(part for (part,) in _of_finished(log, name)))


class Saturation(NamedTuple):
    """Whether the queue of a run grew until the last arrival, by the times of its requests.

    Attributes:
        saturated: whether it did.
        waiting_half, waiting_end: mean number of waiting requests in the eighth of the time
            of arrivals before its half, and before its end.
        arrivals_per_s: requests that arrive a second, from the first arrival to the last.
        served_per_s: requests that finish a second, from the first arrival to the last
            finish.
    """

    saturated: bool
    waiting_half: float
    waiting_end: float
    arrivals_per_s: float
    served_per_s: float

    @property
    def why(self) -> str:
        """The figures in words."""
        come, served, half, end = map(
            format_number,
            (self.arrivals_per_s, self.served_per_s, self.waiting_half, self.waiting_end),
        )
        return (
            f"{come} requests/s come and {served}/s are served; {half} wait at half time, "
            f"{end} when the last ones arrive"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON; `holds`, which costs simulations, is None."""
        return {**self._asdict(), "why": self.why, "holds": None}


def saturation_of(log: RunLog, max_seqs: int, load: float | None) -> Saturation | None:
    """Return whether the queue of a run grew until the last arrival. O(n).

    None if that is unknown: fewer than `FEWEST` requests finished, or all came at once. A
    queue has grown if it is longer at the end of arrivals than at half time, and at the end
    longer than chance makes it: than twice the root of the number of requests. Where the
    offered load is above 1 that is all. Otherwise the queue must also never have been empty
    in the last quarter of the time, so that a burst does not count, and jobs must have been
    admitted at `STEPS` times of the second half, so that one long step does not count.
    """
    came, admitted, finished = (
        _column_of_finished(log, name) for name in ("arrival", "admitted", "finish")
    )
    queue = Queue.of(came, admitted, finished, max_seqs)
    if queue is None:
        return None
    overloaded = load is not None and load > 1
    saturated = queue.grows and (overloaded or queue.persists)
    come_per_s = (queue.requests - 1) * NS_PER_S / queue.span
    served_per_s = queue.requests * NS_PER_S / (max(finished) - queue.first)
    return Saturation(saturated, queue.half, queue.end, come_per_s, served_per_s)


class Queue(NamedTuple):
    """The requests that waited in a run, as of its last arrival.

    All fields are final by then except `persists`, which may become true later if too few
    jobs were admitted so far.

    Attributes:
        requests: number of requests that arrived.
        first: when the first of them arrived, ns.
        span: ns from the first arrival to the last.
        half, end: waiting requests before half of the time, and before its end.
        grows: whether the queue is longer at the end than before, and than chance makes it.
        persists: whether it was never empty at the end, and jobs were admitted often.
    """

    requests: int
    first: int
    span: int
    half: float
    end: float
    grows: bool
    persists: bool

    @classmethod
    def of(
        cls,
        came: Iterable[int],
        admitted: Iterable[int],
        finished: Iterable[int],
        max_seqs: int,
    ) -> Queue | None:
        """Return the queue, by times (ns) in any order; None if they are too few for a trend.

        The times are iterated over more than once. O(n), in memory that does not grow with n.
        """
        first, last = min(came, default=0), max(came, default=0)
        requests, span = sum(map(len, batches(came))), last - first
        if requests < FEWEST or not span:
            return None
        times = moments(first, last)
        before = _counts(bisect_left, came, times)
        started = _counts(bisect_right, admitted, times)
        ended = _counts(bisect_right, finished, times)
        # Those admitted may be paused: more than `max_seqs` cannot be running.
        queue = [
            here - min(begun, done + max_seqs)
            for here, begun, done in zip(before, started, ended, strict=True)
        ]
        eighth, middle = MOMENTS // 8, MOMENTS // 2
        half = sum(queue[middle - eighth + 1 : middle + 1]) / eighth
        end = sum(queue[-eighth:]) / eighth
        later: set[int] = set()
        for at in admitted:
            if at > first + span // 2:
                later.add(at)
                if len(later) == STEPS:
                    break
        return cls(
            requests,
            first,
            span,
            half,
            end,
            end > half and end > 2 * sqrt(requests),
            len(later) == STEPS and min(queue[-LAST:]) > 0,
        )


def _counts(
    place: Callable[[list[int], int], int], events: Iterable[int], times: list[int]
) -> list[int]:
    """Count the `events` before each of `times`; `place` bisects, left or right."""
    counts = [0] * len(times)
    for batch in batches(events):
        batch.sort()  # as good as sorted: few requests overtake others
        counts = list(map(add, counts, map(place, repeat(batch), times)))
    return counts


def moments(first: int, last: int) -> list[int]:
    """Return the times (ns) at which the queue is sampled, from those of two arrivals."""
    return [first + (last - first) * part // MOMENTS for part in range(MOMENTS + 1)]


Work: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
"""Columns of some requests: arrival (ns), and tokens: prompt, hit or loaded, output."""


def finished_work(log: RunLog) -> Iterator[Work]:
    """Yield the work of the requests that finished, some rows at a time."""
    columns = ("arrival", "prompt", "hit", "loaded", "output")
    for arrivals, prompts, hits, loaded, outputs in _of_finished(log, *columns):
        yield arrivals, prompts, list(map(add, hits, loaded)), outputs


def offered_load(
    finished: Iterable[Work],
    batching: Batching,
    latency: LatencyModel,
    pool_tokens: int,
    *,
    forgetting: bool,
) -> float | None:
    """Return arrival rate times the least time a request needs; None without a rate.

    The rate is that of the n requests that finished: n - 1 over the time between the first
    and the last arrival. The least time is a fluid bound: their work (without tokens that hit,
    and without recomputation after preemptions), spread evenly over the fewest steps that
    hold it, divided by n. Steps are at least

    - all tokens / `max_tokens`;
    - (decode tokens + prefills, each at least one step) / `max_seqs`;
    - tokens of K/V that decoding requests hold, summed over steps and without tokens that
      hit, over the tokens that the pool holds (a block that two requests compute at the same
      time is held once and counted twice).

    Under a retention policy (`forgetting`) the numbers of tokens that sequences hold and
    attend to are unknown here: that work is not counted.

    Where prefill and decode do not share steps, each has steps of its own. One average step
    is no longer than the mean of the steps it averages, since a step's time is a maximum of
    lines (Jensen). With `max_seqs` = 1 and one line this is the utilisation of queueing
    theory, arrival rate x mean service time. Above 1 the queue grows for as long as requests
    arrive. O(n), in memory that does not grow with n.

    Args:
        finished: the requests that finished, some at a time.
        batching: the limits of a step.
        latency: gives the time of a step.
        pool_tokens: tokens that the pool holds.
        forgetting: whether there is a retention policy.
    """
    requests = prefill = prefills = decode = held = 0
    times: list[int] = []
    none = [0] * len(latency.windows)
    pairs, context = none[:], none[:]
    most = batching.max_tokens
    for arrivals, prompts, hits, outputs in finished:
        if not arrivals:
            continue
        times += min(arrivals), max(arrivals)
        misses = list(map(sub, prompts, hits))
        later = [output - 1 if output else 0 for output in outputs]
        requests += len(arrivals)
        prefill += sum(misses)
        decode += sum(later)
        if batching.chunked:
            prefills += sum([-(-tokens // most) for tokens in misses])
        else:  # a step holds the longest, and each prefill takes one
            prefills += len(misses) - misses.count(0)
            most = max(most, *misses)
        if not forgetting:
            for at, window in enumerate(latency.windows):
                pairs[at] += _attended(hits, misses, window)
                context[at] += _attended(prompts, later, window)
            held += _attended(misses, later, None)
    span = max(times, default=0) - min(times, default=0)
    if not span:
        return None
    seqs, by_memory = batching.max_seqs, Fraction(held, pool_tokens)
    if batching.steps == "mixed" and seqs > 1:
        by_seqs = Fraction(prefills + decode, seqs)
        fewest = Fraction(prefill + decode, most), by_seqs, by_memory
        work = _time(latency, prefill, pairs, decode, context, max(fewest))
    else:
        steps = max(Fraction(prefill, most), Fraction(prefills, seqs))
        work = _time(latency, prefill, pairs, 0, none, steps)
        steps = max(Fraction(decode, seqs), by_memory)
        work += _time(latency, 0, none, decode, context, steps)
    rate = Fraction(requests - 1, span * PS_PER_NS)
    return float(work / requests * rate)


def _attended(contexts: Sequence[int], tokens: Sequence[int], window: int | None) -> int:
    """Count the (query, key) pairs of requests with `tokens` tokens after `contexts`."""
    if window is not None:
        return sum(map(attended_pairs, contexts, tokens, repeat(window)))
    triangles = (sum(map(mul, tokens, tokens)) + sum(tokens)) // 2
    pairs: int = sum(map(mul, contexts, tokens)) + triangles
    return pairs


def _time(
    latency: LatencyModel,
    prefill: int,
    pairs: list[int],
    decode: int,
    context: list[int],
    steps: Fraction,
) -> Fraction:
    """Return the picoseconds that the work takes in `steps` equal steps.

    The work of one of them need not be whole numbers. Its time is the weighted mean of whole
    steps around it, from all parts rounded down to all rounded up, the largest remainder
    first: exact where time is linear.
    """
    if not steps:
        return Fraction(0)
    parts = [part / steps for part in (prefill, decode, *pairs, *context)]
    corner = [floor(part) for part in parts]
    rests = [part - whole for part, whole in zip(parts, corner, strict=True)]
    order = sorted(range(len(parts)), key=rests.__getitem__, reverse=True)
    levels = [Fraction(1), *(rests[place] for place in order), Fraction(0)]
    time = Fraction(0)
    for place, (upper, lower) in zip([None, *order], pairwise(levels), strict=True):
        if place is not None:
            corner[place] += 1
        if upper > lower:
            tokens, sequences, *sums = corner
            attended = tuple(sums[: len(pairs)]), tuple(sums[len(pairs) :])
            work = StepWork(tokens, attended[0], sequences, attended[1])
            time += (upper - lower) * latency.duration(work)
    return time * steps


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
    """

    log: RunLog

    @cached_property
    def ttft(self) -> Percentiles | None:
        """Times to first token; None if no request has one."""
        return Percentiles.of(_between(self.log.arrival, self.log.first_token), NS_PER_S)

    @cached_property
    def tpot(self) -> Percentiles | None:
        """Mean times of the tokens after the first, by request; None without any."""
        return Percentiles.of(self.log.tpot(), PS_PER_S)

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
            "preemptions": {
                "pause": sum(log.pauses),
                "recompute": sum(log.recomputes),
                "swap": sum(log.swaps),
            },
        }

    @cached_property
    def requests(self) -> dict[str, list[Any]]:
        """The requests by column, in the order in which they ended.

        Made when first asked for: some 500 bytes a request. `request_parts` yields them some
        at a time.
        """
        whole: dict[str, list[Any]] = {}
        for part in self.request_parts():
            for name, column in part.items():
                whole.setdefault(name, []).extend(column)
        return whole

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
                "queue_s": _seconds(_since(came, part["admitted"])),
                "ttft_s": _seconds(_since(came, began)),
                "tpot_s": _seconds(mean_gaps(began, ended, part["output"]), PS_PER_S),
                "e2e_s": _seconds(_since(came, ended)),
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

        Both appear when both are whole, and replace files of these names. The summary has the
        entries `more` besides its own.

        Raises:
            InputError: the directory cannot be made, or a file not be opened.
            StorageError: the disk refused a write.
        """
        import orjson  # noqa: PLC0415 - for `--out` alone

        directory = Path(directory)
        make_directory(directory)
        with (
            atomic_file(directory / SUMMARY) as document,
            atomic_file(directory / REQUESTS) as lines,
        ):
            for part in self.request_parts():
                for row in zip(*part.values(), strict=True):
                    line = orjson.dumps(dict(zip(part, row, strict=True)))
                    lines.write(f"{line.decode()}\n")
            text = orjson.dumps(self.summary() | more, option=orjson.OPT_INDENT_2)
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
        """Arrival rate times the least time a request needs; see `offered_load`.

        None with a drafter: the least time of its steps is unknown.
        """
        if self.log.drafts is not None:
            return None
        tokens = self.cache.pool.blocks * self.cache.geometry.block_size
        forgetting = self.cache.forgets
        return offered_load(
            finished_work(self.log), self.batching, self.latency, tokens, forgetting=forgetting
        )

    @cached_property
    def saturation(self) -> Saturation | None:
        """Whether the queue grew until the last arrival; None if that is unknown."""
        return saturation_of(self.log, self.batching.max_seqs, self.offered_load)

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


def _seconds(times: Iterable[int], second: int = NS_PER_S) -> list[float | None]:
    return [None if time < 0 else time / second for time in times]


def _since(begin: Iterable[int], end: Iterable[int]) -> list[int]:
    """Return the nanoseconds from `begin` to `end`; -1 where there is no end."""
    return [b - a if b >= 0 else -1 for a, b in zip(begin, end, strict=True)]
