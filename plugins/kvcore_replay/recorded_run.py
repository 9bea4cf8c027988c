"""The request log of a recorded run, rebuilt from its trace, and its summary."""

from __future__ import annotations

import os
from array import array
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
from msgspec.structs import replace

from kvcore.cache.layout import BlockLayout
from kvcore.cache.residency import CacheStats
from kvcore.errors import InputError, TraceError
from kvcore.progress import Tick, ticked, unseen
from kvcore.request import SLO
from kvcore.serving import DecodeSteps, Job
from kvcore.serving.result import Outcome, hit_fields
from kvcore.serving.stats import RunLog
from kvcore.trace import events
from kvcore.trace.events import methods_by_event
from kvcore.trace.fields import slo_of
from kvcore.untrusted import BYTES_OF_REQUEST, FREE_REQUESTS
from kvcore_plugins.traces.reader import TraceReader, read_request
from kvcore_plugins.workload.recorded import TraceWorkload
from kvcore_replay.check.base import Caps
from kvcore_replay.check.trace import CheckedReader, Checker, check_event
from kvcore_replay.pricing import PriceModel, find_price
from kvcore_replay.state.replicas import Replicas

if TYPE_CHECKING:
    # Imported when there are prices.
    from kvcore_replay.billing import Bills

__all__ = ["RunSummary"]


@attrs.frozen(kw_only=True)
class RunSummary:
    """Summary of a run as far as a trace records it. Times are None without a clock.

    Attributes:
        config: its configuration: `blocks`, `block_size`, plugins by kind, and with a clock
            `batching`, `slo` (ns) and `rate_scale`.
        requests, completed, rejected: number of requests, in all and by outcome.
        hit: `lookup_blocks`, `hit_blocks`, `self_hit_blocks`, `lookup_tokens`, `hit_tokens`
            and `ratio` by `block`, `token` and `request`, as in a simulation's summary.
        evicted_blocks: blocks that left the cache, for room or because they expired.
        forgotten_blocks: blocks of running sequences that the retention policy dropped.
        compactions, compacted_tokens: compactions of running sequences, and the tokens that
            they removed.
        preemptions: number of preemptions by kind: `pause`, `recompute` and `swap`.
        loaded_tokens: prompt tokens that were loaded from tiers at first admissions.
        ttft_s, tpot_s, e2e_s, queue_s: distributions in seconds.
        simulated_s: seconds from the first arrival to the last end.
        throughput_tokens_s: generated tokens per second.
        goodput: requests per second that met their SLO; None without SLOs.
        slo_met: share of the requests with an SLO that met it; None without SLOs.
        offered_load, saturation: the load, and the queue, as in a simulation's summary; None
            if unknown.
        cost: what its GPUs cost, as in a simulation's summary; None if unknown.
        bill: the bill of an API that caches prompts; None without prices.
    """

    config: dict[str, Any]
    requests: int
    completed: int
    rejected: int
    hit: dict[str, Any]
    evicted_blocks: int
    forgotten_blocks: int
    compactions: int
    compacted_tokens: int
    preemptions: dict[str, int]
    loaded_tokens: int = 0
    ttft_s: dict[str, float] | None
    tpot_s: dict[str, float] | None
    e2e_s: dict[str, float] | None
    queue_s: dict[str, float] | None
    simulated_s: float | None
    throughput_tokens_s: float | None
    goodput: float | None
    slo_met: float | None
    offered_load: float | None = None
    saturation: dict[str, Any] | None = None
    cost: dict[str, Any] | None = None
    bill: Bills | None = None

    @property
    def saturated(self) -> bool:
        """Whether the queue grew until the last arrival."""
        return self.saturation is not None and self.saturation["saturated"]

    @classmethod
    def from_log(
        cls,
        config: dict[str, Any],
        log: RunLog,
        stats: CacheStats,
        evicted: int,
        *,
        timed: bool,
    ) -> RunSummary:
        """Summarise a run from its log. O(n log n) in its requests."""
        run = Outcome(log)
        clock: dict[str, Any] = {
            "simulated_s": run.simulated_s,
            "throughput_tokens_s": run.throughput_tokens_s,
            "goodput": run.goodput,
            "slo_met": run.slo_attainment,
        }
        for name in ("ttft", "tpot", "e2e", "queue"):
            times = getattr(run, name)
            clock[f"{name}_s"] = None if times is None else times.as_dict()
        return cls(
            config=config,
            requests=len(log.ids),
            completed=len(log.ids) - len(log.reasons),
            rejected=len(log.reasons),
            hit=hit_fields(stats),
            evicted_blocks=evicted,
            forgotten_blocks=stats.dropped_blocks,
            compactions=stats.compactions,
            compacted_tokens=stats.compacted_tokens,
            preemptions={
                "pause": sum(log.pauses),
                "recompute": sum(log.recomputes),
                "swap": sum(log.swaps),
            },
            loaded_tokens=sum(log.loaded),
            **clock if timed else dict.fromkeys(clock),
        )


BY_HAND = (
    "is no replay of one request after another, so its calls were made by hand; what "
    "`kvcore compare`, `simulate` and `run` have recorded can be run again"
)


class Recorded:
    """Rebuilds the request log of a run from the lines of its trace.

    Args:
        reader: the reader of the trace, which errors name.
        header: its first line.
        slo: the SLO of requests that have none of their own.
        log: the log to which requests are added; None: a new one.

    Attributes:
        header: the first line.
        log, stats: those of the run. Without a clock a request ends when it is closed.
        evicted: blocks that left the cache, for room or because they expired.
        rows: the rows of `log` that it has finished, with a clock.
        handed: of requests that it has prefilled for another replica: the arrival (ns), and
            tokens of the prompt, of those that hit or were loaded, and of the output here.
        follows: whether a request follows another; if none does, `last_start` says nothing.
    """

    def __init__(
        self,
        reader: TraceReader,
        header: events.Header,
        slo: SLO | None,
        log: RunLog | None = None,
    ) -> None:
        self.header = header
        self.log = RunLog(header.blocks, slo) if log is None else log
        self.stats = CacheStats()
        self.evicted = 0
        self.rows = array("q")
        self.handed: list[tuple[int, int, int, int]] = []
        self._reader = reader
        self._timed = header.mode != "untimed"
        self._drafts = "drafter" in header.plugins
        self._caps = Caps.from_header(header)
        self._geometry = BlockLayout(header.count, header.block_size, header.key_tokens)
        self._jobs: dict[int | str, Job] = {}
        self._open: dict[int, Job] = {}
        self._resumed: set[int] = set()
        self._steps = DecodeSteps()
        self._serial = 0
        self.follows = False
        size = reader.file.stat().st_size
        self._most_requests = FREE_REQUESTS + size // BYTES_OF_REQUEST
        self._take = methods_by_event(
            self,
            *("REQUEST", "HIT", "MISS", "LOAD", "EVICT", "COMPACT", "FREE", "FIRST_TOKEN"),
            *("PREEMPT", "FINISH", "REJECT", "FORK", "END"),
        )

    def take(self, event: events.Event) -> None:
        """Apply a line after HEADER. O(1), or O(keys) of a request.

        Raises:
            InputError: the trace is of no run that can be made again.
            TraceError: a request is not valid.
        """
        take = self._take.get(event.event)
        if take is not None:
            take(event)

    def job(self, request: int | str) -> Job | None:
        """Return the job of a request that has not ended; None if there is none."""
        return self._jobs.get(request)

    def hand_over(self, request: int | str) -> Job:
        """Remove and return the job of a request that continues on another replica."""
        return self._jobs.pop(request)

    def _request(self, event: events.Request) -> None:
        if not self._timed and self._jobs:
            self._by_hand()
        try:
            request = read_request(event)
        except InputError as error:
            self._reader.fail(f"REQUEST: {error}")
        self._serial += 1
        if self._serial > self._most_requests:
            self._reader.fail(
                f"REQUEST: to run it again, a file of this size has at most "
                f"{self._most_requests:,} requests; if you trust it, decompress it first"
            )
        if request.after is None:
            self.log.last_start = max(self.log.last_start or 0, event.t)
        self.follows |= request.after is not None
        slo = request.slo or self.log.slo
        job = Job(request, self._serial, event.t, self._steps, request.prompt_tokens, slo)
        job.output_tokens = self._caps.output(event)
        self._jobs[request.id] = job

    def _hit(self, event: events.Hit | events.Miss) -> None:
        """Admit a request by a HIT or MISS line; a MISS after HIT tells nothing more."""
        if event.seq in self._open:
            return
        job, hit = self._jobs.get(event.request), getattr(event, "blocks", 0)
        again = bool(event.again)
        if job is None or (again and not self._timed):
            self._by_hand()
        self._open[event.seq] = job
        _, tokens, _, _, lookup, _ = self._geometry.prompt(job.request)
        hit_tokens = hit * self._geometry.block_size
        self.stats.admitted(lookup, hit, tokens, hit_tokens, resumed=again)
        if again:
            self._resumed.add(event.seq)
        else:
            job.admitted, job.hit = event.t, hit_tokens

    _miss = _hit

    def _load(self, event: events.Load) -> None:
        size = self._geometry.block_size
        opened = self._open.get(event.seq)  # a prefetch opens a sequence without a job
        if opened is None or event.seq in self._resumed:
            return
        if isinstance(event.hit, int):
            # Lines of groups say what the sequence has once all of them are done.
            opened.loaded = event.hit * size - opened.hit
        else:
            opened.loaded += event.blocks * size

    def _evict(self, event: events.Evict | events.Drop) -> None:
        if event.scope == "sequence":
            self.stats.dropped_blocks += event.blocks
        else:
            self.evicted += sum(abs(count) for _, count in event.runs)

    def _compact(self, event: events.Compact) -> None:
        self.stats.compactions += 1
        self.stats.compacted_tokens += event.held - event.tokens

    def _free(self, event: events.Free) -> None:
        if event.reason == "rollback":
            if not self._drafts:
                self._by_hand()
        elif event.reason == "close":
            job = self._open.pop(event.seq, None)
            if job is not None and not self._timed:
                self.log.ended(self._jobs.pop(job.request.id), event.t)

    def _first_token(self, event: events.FirstToken) -> None:
        self._jobs[event.request].first_token = event.t

    def _preempt(self, event: events.Preempt) -> None:
        job = self._jobs[event.request]
        job.pauses += event.how == "pause"
        job.recomputes += event.how == "recompute"
        job.swaps += event.how == "swap"

    def _finish(self, event: events.Finish) -> None:
        job = self._jobs.pop(event.request)
        job.output_tokens = event.output
        self.rows.append(len(self.log.ids))
        self.log.ended(job, event.t)

    def _reject(self, event: events.Reject) -> None:
        self.log.rejected(self._jobs.pop(event.request), event.why)

    def _end(self, event: events.End) -> None:
        # With a clock, jobs are left of requests that a replica was to decode and gave up.
        if self._jobs and not self._timed:
            self._by_hand()

    def _by_hand(self, event: events.Fork | None = None) -> NoReturn:
        msg = f"{self._reader.file}:{self._reader.line}: the trace {BY_HAND}"
        raise InputError(msg)

    _fork = _by_hand


class RecordedLives:
    """Rebuilds the request log of a cluster from the lines of its trace.

    Args: those of `Recorded`.

    Attributes:
        header: the first line.
        log: the log of all requests; of a request that was served again, its last time.
        lives: the lives of each replica, the requests that it finished by their `rows`.
    """

    def __init__(self, reader: TraceReader, header: events.Header, slo: SLO | None) -> None:
        self.header, self.log = header, RunLog(header.blocks, slo)
        self._placed = Replicas(header)
        self._make = partial(Recorded, reader, slo=slo, log=self.log)
        self.lives = [[self._make(own)] for own in self._placed.headers]
        # The requests that the router rejected are those of a server without other requests.
        self._refused = self._make(header)
        # With split phases, the replica that prefills a request, and its job there when that is
        # done.
        self._prefills: dict[int | str, Recorded] = {}
        self._prefilled: dict[int | str, Job] = {}

    @property
    def stats(self) -> CacheStats:
        """The counts of the caches, in the order in which a result adds them."""
        return CacheStats.sum(life.stats for lives in self.lives for life in lives)

    @property
    def evicted(self) -> int:
        """Blocks that left the caches, for room or because they expired."""
        return sum(life.evicted for lives in self.lives for life in lives)

    @property
    def follows(self) -> bool:
        """Whether a request follows another."""
        return any(life.follows for life in chain(*self.lives, [self._refused]))

    def take(self, event: events.Event) -> None:
        """Apply a line. O(1), or O(keys) of a request.

        Raises:
            TraceError: a request is not valid.
        """
        request = self._placed.requests.get(getattr(event, "request", ""))
        placed = self._placed.place(event)
        if placed is not None:
            replica, line = placed
            if event.event == "FAIL":
                self.lives[replica].append(self._make(self._placed.headers[replica]))
                return
            life = self.lives[replica][-1]
            if event.event == "FINISH" and self._hands_over(life, event):  # type: ignore[arg-type]
                return
            if getattr(event, "leg", None) == "prefill":
                self._prefills[event.request] = life  # type: ignore[attr-defined]
            if event.event == "ROUTE" and request:
                # It arrived when it came to the cluster, not when it came to the replica.
                line = replace(line, t=request.t)
            life.take(line)
        elif event.event == "REJECT" and request:
            self._refused.take(request)
            self._refused.take(event)

    def _hands_over(self, life: Recorded, event: events.Finish) -> bool:
        """Return True if the request that ends on a replica continues on another one.

        Where it continues, its job takes over the times and counts of the prefill.
        """
        name = event.request
        if self._prefills.get(name) is life:
            del self._prefills[name]
            done = self._prefilled[name] = life.hand_over(name)
            tokens = done.request.prompt_tokens, done.hit + done.loaded, event.output
            life.handed.append((done.arrival, *tokens))
            return True
        job, before = life.job(name), self._prefilled.pop(name, None)
        if job is not None and before is not None:
            job.admitted = before.admitted
            if job.first_token is None:
                job.first_token = before.first_token
            job.hit, job.loaded = before.hit, before.loaded
            job.pauses += before.pauses
            job.recomputes += before.recomputes
            job.swaps += before.swaps
        return False


def bill_trace(
    file: str | os.PathLike[str], price: PriceModel | str, tick: Tick = unseen
) -> Bills:
    """Return the bills of an API for the requests of a trace, also with the hits of its run.

    `tick` is called with the bytes of the file that have been read.

    Raises:
        InputError: an unknown price, or a trace of calls that were made by hand.
        TraceError: the trace is damaged, or cut.
    """
    from kvcore_replay.billing import bill  # noqa: PLC0415 - for prices alone

    price = find_price(price) if isinstance(price, str) else price
    workload = TraceWorkload(file)
    recorded = verified_log(workload.file, None, tick)
    return bill(workload, price, log=recorded.log)


def recorded_run(
    file: str | os.PathLike[str], tick: Tick = unseen, replica: int | str | None = None
) -> RunSummary:
    """Return the summary of a recorded run; its trace is checked line by line.

    The summary of a cluster is over all requests, or over those of a `replica`. Its
    configuration and its SLO are those of its header. `tick` is called with the bytes of the
    file that have been read.

    Raises:
        InputError: the file cannot be opened, or is a trace of calls that were made by hand.
        TraceError: the trace is damaged, or cut.
    """
    workload = TraceWorkload(file)
    header = workload.header.as_dict()
    slo = slo_of(header["slo"]) if header.get("slo") else None
    recorded = verified_log(workload.file, slo, tick, replica)
    timed = header["mode"] != "untimed"
    config = recorded.header.as_dict()
    return RunSummary.from_log(
        config, recorded.log, recorded.stats, recorded.evicted, timed=timed
    )


def verified_log(
    file: Path,
    slo: SLO | None,
    tick: Tick = unseen,
    replica: int | str | None = None,
) -> Recorded | RecordedLives:
    """Check every line of a trace; return the log of its requests, or of those of a replica.

    Raises:
        InputError, TraceError: as `whatif` does.
    """
    alone = None if replica is None else CheckedReader(file, replica)
    reader = alone or TraceReader(file)
    checker: Checker | None = None
    recorded: Recorded | RecordedLives | None = None
    for event in ticked(reader, tick):
        if alone is None:
            checker = check_event(reader, checker, event)
        else:
            alone.check(event)
        if recorded is not None:
            recorded.take(event)
        elif isinstance(event, events.Header):  # checked now
            recorded = (RecordedLives if event.replicas else Recorded)(reader, event, slo)
    if not reader.complete:
        msg = (
            f"{file}: incomplete: {reader.cut_reason}. A run that was cut cannot be compared "
            "with a whole one: record it again, or see with `kvcore replay` what there is"
        )
        raise TraceError(msg)
    assert recorded is not None  # a complete trace has a header
    if not recorded.follows:
        recorded.log.last_start = None
    return recorded
