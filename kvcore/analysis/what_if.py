"""What-if: the requests of a trace run again under other options, and compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from kvcore.analysis.serial_replay import served
from kvcore.cache import KVCache
from kvcore.cache.layout import BlockLayout
from kvcore.cache.residency import CacheStats
from kvcore.config.recorded import RecordedParts
from kvcore.config.run_config import PluginChoice, TierChoices
from kvcore.errors import InputError, TraceError
from kvcore.files import file_bytes, refuse_overwrite
from kvcore.notebook import Shown, data_frame
from kvcore.plugins.manager import Plugins
from kvcore.progress import Progress, Tick, silent, ticked, unseen
from kvcore.request import SLO, Key, Request, TextRequest
from kvcore.serving import Batching, DecodeSteps, Job, LatencyModel, StepResult, StepWork
from kvcore.serving.latency import SimulatedExecutor
from kvcore.serving.loop import RunLog
from kvcore.serving.result import Outcome, hit_fields
from kvcore.serving.simulate import serve
from kvcore.trace import Trace, TraceWorkload
from kvcore.trace.check import check_event
from kvcore.trace.fields import read_request, slo_of, version
from kvcore.trace.reader import ServerReader, TraceReader
from kvcore.units import NS_PER_S

if TYPE_CHECKING:
    # The Structs are imported with the first trace that is read: msgspec takes a while.
    # And these where there are prices.
    from kvcore.analysis.billing import Bills
    from kvcore.config.run_config import FailureChoices, ReplicaChoices
    from kvcore.models.pricing import PriceModel
    from kvcore.trace import events
    from kvcore.trace.check import Checker


@attrs.frozen(kw_only=True)
class RunSummary:
    """Summary of a run as far as a trace records it. Times are None without a clock.

    Attributes:
        config: what it was run with: `blocks`, `block_size`, plugins by kind, and with a
            clock `batching`, `slo` (ns) and `rate_scale`.
        requests, completed, rejected: how many there were.
        hit: `lookup_blocks`, `hit_blocks`, `self_hit_blocks`, `lookup_tokens`, `hit_tokens`
            and `ratio` by `block`, `token` and `request`, as in a simulation's summary.
        evicted_blocks: blocks that left the cache, for room or because they expired.
        forgotten_blocks: blocks that running sequences forgot.
        compactions, compacted_tokens: compactions of running sequences, and the tokens that
            they removed.
        preemptions: by kind, `pause`, `recompute` and `swap`.
        loaded_tokens: prompt tokens that came from tiers at first admissions.
        ttft_s, tpot_s, e2e_s, queue_s: distributions in seconds.
        simulated_s: from the first arrival to the last end.
        throughput_tokens_s: generated tokens a second.
        goodput: requests a second that met their SLO; None where none was expected.
        slo_met: their share of all that had one.
        bill: what an API that caches prompts would have charged; None without prices.
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
    bill: Bills | None = None

    @classmethod
    def of(
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


@attrs.frozen
class RequestOutcome:
    """Outcome of a request in one run.

    Attributes:
        hit_tokens: prompt tokens that hit at first admission.
        ttft: ns to its first token; None without a clock, or where there was none.
        rejected: whether it was turned away.
    """

    hit_tokens: int
    ttft: int | None
    rejected: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        ttft = None if self.ttft is None else self.ttft / NS_PER_S
        return {"hit_tokens": self.hit_tokens, "ttft_s": ttft, "rejected": self.rejected}


@attrs.frozen
class Change:
    """A request whose outcome differs between the two runs.

    Attributes:
        request: its id.
        prompt: its prompt, in tokens.
        recorded, rerun: what became of it.
    """

    request: int | str
    prompt: int
    recorded: RequestOutcome
    rerun: RequestOutcome

    @property
    def tokens(self) -> int:
        """Hit tokens gained in the second run; negative if lost."""
        return self.rerun.hit_tokens - self.recorded.hit_tokens

    @property
    def ttft(self) -> int:
        """Delay of the first token in ns, second run minus first; 0 if either has none."""
        before, after = self.recorded.ttft, self.rerun.ttft
        return 0 if before is None or after is None else after - before

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {
            "id": self.request,
            "prompt": self.prompt,
            "recorded": self.recorded.as_dict(),
            "rerun": self.rerun.as_dict(),
        }


def changes(recorded: RunLog, rerun: RunLog) -> Iterator[Change]:
    """Yield the requests whose outcomes differ, in the order in which they ended. O(n)."""
    fates = dict(_outcomes(rerun))
    prompts = dict(zip(recorded.ids, recorded.prompt, strict=True))
    for name, fate in _outcomes(recorded):
        if fates[name] != fate:
            yield Change(name, prompts[name], fate, fates[name])


def _outcomes(log: RunLog) -> Iterator[tuple[int | str, RequestOutcome]]:
    columns = zip(log.ids, log.hit, log.arrival, log.first_token, strict=True)
    for row, (name, hit, arrival, first) in enumerate(columns):
        ttft = None if first < 0 else first - arrival
        yield name, RequestOutcome(hit, ttft, rejected=row in log.reasons)


BY_HAND = (
    "is no replay of one request after another, so its calls were made by hand; what "
    "`kvcore compare`, `simulate` and `run` have recorded can be run again"
)

FREE_REQUESTS, BYTES_OF_REQUEST = 1 << 16, 16
"""Requests that any trace may have, and the bytes of the file for each more: one takes 1 kB."""


class Recorded:
    """Rebuilds the request log of a run from the lines of its trace.

    Args:
        reader: of the trace; named in errors.
        header: its first line.
        slo: what is expected for requests that bring no SLO of their own.
        log: what is added to; None: a new one.

    Attributes:
        log, stats: as those of a run. Without a clock a request ends when it is closed.
        evicted: blocks that left the cache, for room or because they expired.
    """

    def __init__(
        self,
        reader: TraceReader,
        header: events.Header,
        slo: SLO | None,
        log: RunLog | None = None,
    ) -> None:
        self.log = RunLog(header.blocks, slo) if log is None else log
        self.stats = CacheStats()
        self.evicted = 0
        self._reader = reader
        self._timed = header.mode != "untimed"
        self._drafts = "drafter" in header.plugins
        self._geometry = BlockLayout(header.count, header.block_size, header.key_tokens)
        self._jobs: dict[int | str, Job] = {}
        self._open: dict[int, Job] = {}
        self._resumed: set[int] = set()
        self._steps = DecodeSteps()
        self._serial = 0
        size = reader.file.stat().st_size
        self._most_requests = FREE_REQUESTS + size // BYTES_OF_REQUEST
        self._take: dict[str, Callable[[Any], None]] = {
            "REQUEST": self._request,
            "HIT": self._hit,
            "MISS": self._miss,
            "LOAD": self._load,
            "EVICT": self._evict,
            "COMPACT": self._compact,
            "FREE": self._free,
            "FIRST_TOKEN": self._first_token,
            "PREEMPT": self._preempt,
            "FINISH": self._finish,
            "REJECT": self._reject,
            "FORK": self._fork,
            "END": self._end,
        }

    def take(self, event: events.Event) -> None:
        """Apply a line after HEADER. O(1), or O(keys) of a request.

        Raises:
            InputError: it is of no run that can be made again.
            TraceError: a request that cannot be.
        """
        take = self._take.get(event.event)
        if take is not None:
            take(event)

    def job(self, request: int | str) -> Job | None:
        """Return the job of a request that has not ended; None: there is none."""
        return self._jobs.get(request)

    def hand_over(self, request: int | str) -> Job:
        """Return the job of a request that goes on elsewhere, and forget it."""
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
        slo = request.slo or self.log.slo
        job = Job(request, self._serial, event.t, self._steps, request.prompt_tokens, slo)
        self._jobs[request.id] = job

    def _hit(self, event: events.Hit) -> None:
        self._admit(event, event.blocks)

    def _miss(self, event: events.Miss) -> None:
        if event.seq not in self._open:
            self._admit(event, 0)

    def _admit(self, event: events.Hit | events.Miss, hit: int) -> None:
        job = self._jobs.get(event.request)
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

    def _load(self, event: events.Load) -> None:
        if event.seq not in self._resumed:
            self._open[event.seq].loaded += event.blocks * self._geometry.block_size

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
            job = self._open.pop(event.seq)
            if not self._timed:
                self.log.ended(self._jobs.pop(job.request.id), event.t)

    def _first_token(self, event: events.FirstToken) -> None:
        self._jobs[event.request].first_token = event.t

    def _preempt(self, event: events.Preempt) -> None:
        job = self._jobs[event.request]
        job.pauses += event.how == "pause"
        job.recomputes += event.how == "recompute"
        job.swaps += event.how == "swap"

    def _finish(self, event: events.Finish) -> None:
        self.log.ended(self._jobs.pop(event.request), event.t)

    def _reject(self, event: events.Reject) -> None:
        self.log.rejected(self._jobs.pop(event.request), event.why)

    def _fork(self, event: events.Fork) -> None:
        del event
        self._by_hand()

    def _end(self, event: events.End) -> None:
        del event
        if self._jobs:
            self._by_hand()

    def _by_hand(self) -> NoReturn:
        msg = f"{self._reader.file}:{self._reader.line}: the trace {BY_HAND}"
        raise InputError(msg)


class RecordedLives:
    """Rebuilds the request log of a cluster from the lines of its trace.

    Args: as of `Recorded`.

    Attributes:
        log: of all requests; of one that was served again its last time.
    """

    def __init__(self, reader: TraceReader, header: events.Header, slo: SLO | None) -> None:
        from kvcore.trace.replicas import Replicas  # noqa: PLC0415  (imports msgspec)

        self.log = RunLog(header.blocks, slo)
        self._placed = Replicas(header)
        self._reader, self._slo = reader, slo
        self._lives = [[self._make(own)] for own in self._placed.headers]
        # What was turned away by the router is of a server that got nothing else.
        self._refused = self._make(header)
        # Of split phases: where a request is prefilled, and its job there once that is done.
        self._prefills: dict[int | str, Recorded] = {}
        self._prefilled: dict[int | str, Job] = {}

    def _make(self, header: events.Header) -> Recorded:
        return Recorded(self._reader, header, self._slo, self.log)

    @property
    def stats(self) -> CacheStats:
        """The counts of the caches, in the order in which a result adds them."""
        return CacheStats.sum(life.stats for lives in self._lives for life in lives)

    @property
    def evicted(self) -> int:
        """Blocks that left the caches, for room or because they expired."""
        return sum(life.evicted for lives in self._lives for life in lives)

    def take(self, event: events.Event) -> None:
        """Apply a line. O(1), or O(keys) of a request.

        Raises:
            TraceError: a request that cannot be.
        """
        if event.event == "HEADER":
            return
        request = self._placed.requests.get(getattr(event, "request", ""))
        placed = self._placed.place(event)
        if placed is not None:
            number, line = placed
            if event.event == "FAIL":
                self._lives[number].append(self._make(self._placed.headers[number]))
                return
            life = self._lives[number][-1]
            if event.event == "FINISH" and self._hands_over(life, event):  # type: ignore[arg-type]
                return
            if getattr(event, "leg", None) == "prefill":
                self._prefills[event.request] = life  # type: ignore[attr-defined]
            # It came when it came to the cluster, not to the replica.
            life.take(request if event.event == "ROUTE" and request else line)
        elif event.event == "REJECT" and request:
            self._refused.take(request)
            self._refused.take(event)

    def _hands_over(self, life: Recorded, event: events.Finish) -> bool:
        """Return True if the request that ends there goes on elsewhere.

        Where it goes on it is the request that was prefilled.
        """
        name = event.request
        if self._prefills.get(name) is life:
            del self._prefills[name]
            self._prefilled[name] = life.hand_over(name)
            return True
        job, before = life.job(name), self._prefilled.pop(name, None)
        if job is not None and before is not None:
            job.admitted, job.first_token = before.admitted, before.first_token
            job.hit, job.loaded = before.hit, before.loaded
            job.pauses += before.pauses
            job.recomputes += before.recomputes
            job.swaps += before.swaps
        return False


Told = Mapping[int | str, Sequence[Key]]


class TellingExecutor(SimulatedExecutor):
    """Simulates steps and replays the recorded keys of generated blocks as they fill.

    Each step is run by itself, as on tensors.

    Args:
        latency: the latency model.
        told: keys of generated blocks by request, in order.
    """

    def __init__(self, latency: LatencyModel, told: Told) -> None:
        super().__init__(latency)
        self.jumps = False
        self._told = told
        self._count = dict.fromkeys(told, 0)

    def run(
        self, work: StepWork, chunks: Sequence[tuple[Job, int]], decoding: Iterable[Job]
    ) -> StepResult:
        """Return the time of the step, and the keys that become known with it."""
        done = [job for job, tokens in chunks if job.computed + tokens == job.target]
        named = [(job, keys) for job in (*done, *decoding) if (keys := self._keys_of_next(job))]
        return super().run(work, chunks, decoding)._replace(named=named)

    def _keys_of_next(self, job: Job) -> Sequence[Key]:
        """Return the keys of the blocks that are full with the next token of `job`."""
        request = job.request
        if request.id not in self._told:
            return ()
        # The K/V of the last token is never computed.
        known = request.prompt_tokens + min(job.generated + 1, request.output_tokens - 1)
        full = known // request.key_tokens - request.prompt_tokens // request.key_tokens
        keys = self._told[request.id][self._count[request.id] : full]
        if keys:
            self._count[request.id] = full
        return keys


def as_text(request: Request) -> TextRequest:
    """Return `request` as one whose generated keys become known while it runs."""
    fields = {name: getattr(request, name) for name in _FIELDS}
    return TextRequest(**fields, tokens=(), publish=True)


_FIELDS = tuple(field.name for field in attrs.fields(Request) if field.name != "output_keys")

SCHEMA = 1


@attrs.frozen(kw_only=True)
class WhatIf(Shown):
    """The result of `whatif`: a recorded run, and the same requests run again.

    Attributes:
        file: the trace.
        header: its first line.
        kvcore, here: the versions that wrote it and ran it again; two may differ in what
            they decide.
        workload: the name of its workload.
        timed: whether there was a clock.
        recorded, rerun: the two runs.
        changes: the requests that fared differently, in the order in which they ended.
    """

    file: str
    header: Mapping[str, Any]
    kvcore: str
    here: str
    workload: str
    timed: bool
    recorded: RunSummary
    rerun: RunSummary
    changes: list[Change]

    def to_frame(self) -> Any:
        """Return a polars DataFrame of the requests that fared differently.

        Raises:
            PluginError: polars is not installed.
        """
        rows = [
            {"request": str(change.request), "prompt": change.prompt}
            | {f"recorded_{name}": value for name, value in change.recorded.as_dict().items()}
            | {f"rerun_{name}": value for name, value in change.rerun.as_dict().items()}
            for change in self.changes
        ]
        return data_frame(rows, "`whatif.changes`")

    def gained(self, most: int = 5) -> list[Change]:
        """Return the requests that gained most hit tokens, largest gain first."""
        return _first(self.changes, most, lambda change: -change.tokens)

    def lost(self, most: int = 5) -> list[Change]:
        """Return the requests that lost most hit tokens, largest loss first."""
        return _first(self.changes, most, lambda change: change.tokens)

    def sooner(self, most: int = 5) -> list[Change]:
        """Return the requests whose first token comes earlier, largest change first."""
        return _first(self.changes, most, lambda change: change.ttft)

    def later(self, most: int = 5) -> list[Change]:
        """Return the requests whose first token comes later, largest change first."""
        return _first(self.changes, most, lambda change: -change.ttft)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        unbilled = attrs.filters.exclude("bill") if self.recorded.bill is None else None
        return {
            "schema": SCHEMA,
            "file": self.file,
            "kvcore": {"recorded": self.kvcore, "rerun": self.here},
            "workload": self.workload,
            "timed": self.timed,
            "recorded": attrs.asdict(self.recorded, filter=unbilled),
            "rerun": attrs.asdict(self.rerun, filter=unbilled),
            "changes": [change.as_dict() for change in self.changes],
        }


def whatif(
    file: str | os.PathLike[str],
    *,
    eviction: PluginChoice | None = None,
    prefix: PluginChoice | None = None,
    retention: PluginChoice | None = None,
    scheduler: PluginChoice | None = None,
    latency: PluginChoice | None = None,
    drafter: PluginChoice | None = None,
    tier: TierChoices = None,
    blocks: int | None = None,
    block_size: int | None = None,
    batching: Batching | Mapping[str, Any] | None = None,
    slo: SLO | None = None,
    rate_scale: float | None = None,
    export: str | os.PathLike[str] | None = None,
    router: PluginChoice | None = None,
    replicas: ReplicaChoices | None = None,
    view: str | None = None,
    fail: FailureChoices | None = None,
    autoscale: str | None = None,
    disaggregate: str | None = None,
    price: PriceModel | str | None = None,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
) -> WhatIf:
    """Check a trace, run its requests again with other options, and compare the runs.

    All that is not given is as the header has it, so that with nothing given the new run is
    the recorded one, line by line. Requests of a session come when the one before has ended
    and their client has thought, in the new run's own time. Costs about 15 us a line of the
    trace, and the new run.

    Args:
        file: a trace of `kvcore compare`, or under the model's clock of `simulate` or `run`; or
            the recording of an engine, whose calls are made again when it made them.
        eviction: a plugin: a name with options (`"lfu:half_life=300"`), an instance, a
            class, or a function that builds one.
        prefix: likewise.
        retention: likewise; `"none"`: nothing is forgotten.
        scheduler: likewise.
        latency: likewise.
        drafter: likewise; `"none"`: a step gives one token a sequence.
        tier: tiers below the pool, nearest first, each likewise; `"none"`: there are none.
        blocks: of the pool.
        block_size: tokens in a block; without `blocks`, in a pool of the same memory.
        batching: caps of a step: a `Batching`, or those that differ (`{"max_seqs": 8}`).
        slo: what is expected for requests that bring no SLO; `SLO()`: nothing. The recorded
            run is judged by it too.
        rate_scale: how many times as fast as in the workload open-loop requests arrive.
        export: the file to write the trace of the new run to.
        router: of a cluster, the plugin that picks the replica of a request.
        replicas: how many there are, or tables of their options; a server's trace is then
            run again by several such servers.
        view: what the router knows of their caches.
        fail: replicas that fail; `"none"`: none does.
        autoscale: the planner that starts and stops replicas; `"none"`: all are up.
        disaggregate: the pools of split phases; `"none"`: every replica does both.
        price: the prices of an API that caches prompts, or their text; None: no bills.
        plugins: where names are looked up; None: what is installed.
        progress: is given the bytes of the trace that are checked, and then the requests that
            have been run again; None: nothing is.

    Raises:
        InputError: a trace that cannot be run again (wall clock, calls made by hand), parts
            that do not fit one another or the trace, or an export over the trace itself.
        PluginError: a plugin that is not installed, or cannot work here.
        PolicyError: a plugin failed.
        TraceError: the trace is damaged, or cut.
    """
    changes_asked: dict[str, Any] = {"eviction": eviction, "prefix": prefix}
    changes_asked |= {"retention": retention, "scheduler": scheduler, "latency": latency}
    changes_asked |= {"drafter": drafter}
    changes_asked |= {"tier": tier}
    changes_asked |= {"blocks": blocks, "block_size": block_size, "batching": batching}
    changes_asked |= {"slo": slo, "rate_scale": rate_scale}
    routing: dict[str, Any] = {"router": router, "replicas": replicas, "view": view}
    routing |= {"fail": () if fail in NO_FAILURES else fail, "autoscale": autoscale}
    routing |= {"disaggregate": disaggregate}
    workload = TraceWorkload(file)
    header = workload.header
    parts = _parts(workload, header, changes_asked, routing, plugins)
    if export is not None:
        refuse_overwrite(export, [workload.file])
    progress = progress or silent
    with ExitStack() as stack:
        trace = None
        if export is not None:
            trace = stack.enter_context(Trace(export, **parts.header()))
            if header.engine:
                trace.describe(mode="wall")
        rerun = _rerun_of(parts, trace, workload)
        with progress(f"checking {workload.file}", file_bytes(workload.file)) as tick:
            recorded = _verified(workload.file, workload.header, parts.slo, tick)
        shown = f"running {workload.name} again", len(recorded.log.ids)
        log = rerun.run(stack.enter_context(progress(*shown)))
    before, after = _bills(workload, price, recorded.log, log)
    return WhatIf(
        file=str(workload.file),
        header=header.as_dict(),
        kvcore=header.kvcore,
        here=version(),
        workload=workload.name,
        timed=parts.timed,
        recorded=attrs.evolve(
            RunSummary.of(
                parts.recorded(),
                recorded.log,
                recorded.stats,
                recorded.evicted,
                timed=parts.timed,
            ),
            bill=before,
        ),
        rerun=attrs.evolve(rerun.summary(log), bill=after),
        changes=list(changes(recorded.log, log)),
    )


def bill_trace(
    file: str | os.PathLike[str], price: PriceModel | str, tick: Tick = unseen
) -> Bills:
    """Return what an API would have charged for the requests of a trace, with its hits too.

    `tick` is called with the bytes of the file that are done.

    Raises:
        InputError: an unknown price, or a trace of calls that were made by hand.
        TraceError: the trace is damaged, or cut.
    """
    workload = TraceWorkload(file)
    recorded = _verified(workload.file, workload.header, None, tick)
    (found,) = _bills(workload, price, recorded.log)
    assert found is not None
    return found


def recorded_run(
    file: str | os.PathLike[str], tick: Tick = unseen, replica: int | str | None = None
) -> RunSummary:
    """Return the summary of a recorded run, whose trace is checked line by line.

    Of a cluster it is that of all requests, or of those of a `replica`.

    Its configuration is that of the header, and it is judged by the SLO there. `tick` is
    called with the bytes of the file that are done.

    Raises:
        InputError: the file cannot be opened, or is a trace of calls that were made by hand.
        TraceError: the trace is damaged, or cut.
    """
    workload = TraceWorkload(file)
    header = workload.header.as_dict()
    slo = slo_of(header["slo"]) if header.get("slo") else None
    recorded = _verified(workload.file, workload.header, slo, tick, replica)
    timed = header["mode"] != "untimed"
    return RunSummary.of(header, recorded.log, recorded.stats, recorded.evicted, timed=timed)


def _bills(
    workload: TraceWorkload, price: PriceModel | str | None, *logs: RunLog
) -> list[Bills | None]:
    """Return the bills of runs of `workload`, if there are prices."""
    if price is None:
        return [None] * len(logs)
    from kvcore.analysis.billing import bill  # noqa: PLC0415 - for prices alone

    return [bill(workload, price, log=log) for log in logs]


NO_FAILURES = ("none", ["none"], ("none",))
"""What says of failures that there are none."""


def _parts(
    workload: TraceWorkload,
    header: events.Header,
    changes: dict[str, Any],
    routing: dict[str, Any],
    plugins: Plugins | None,
) -> RecordedParts:
    """Return the parts of the run again: those of a cluster where it was or is to be one."""
    given = [name for name, value in routing.items() if value is not None]
    if header.replicas or routing["replicas"] is not None:
        from kvcore.config.recorded_cluster import RecordedCluster  # noqa: PLC0415 - of several

        kind: type[RecordedParts] = RecordedCluster
    elif given:
        msg = (
            f"{workload.file} is the trace of one server, which has no {given[0]}: give "
            "--replicas too, to see what several of it would do"
        )
        raise InputError(msg)
    else:
        kind = RecordedParts
    fields = header.as_dict()
    if header.engine:
        if given:
            msg = (
                f"{workload.file} is the recording of one engine, whose calls are of one cache"
            )
            raise InputError(msg)
        # Its steps took the time they took: there is no clock to run them by again.
        fields["mode"] = "untimed"
        del fields["engine"]
    return kind(workload.file, fields, workload, changes | routing, plugins)


def _rerun_of(
    parts: RecordedParts, trace: Trace | None, workload: TraceWorkload
) -> _Rerun | _ClusterRerun:
    """Return what runs the requests of a trace again."""
    if parts.many:
        return _ClusterRerun(parts, trace, workload)
    if workload.header.engine:
        return _EngineRerun(parts, parts.cache(trace), workload)
    return _Rerun(parts, parts.cache(trace), workload)


class _ClusterRerun:
    """Runs the requests of a cluster's trace again, or those of a server on several."""

    def __init__(
        self, parts: RecordedParts, trace: Trace | None, workload: TraceWorkload
    ) -> None:
        self._parts, self._workload = parts, workload
        self._arguments = parts.cluster(trace)  # type: ignore[attr-defined]  # of RecordedCluster

    def run(self, tick: Tick) -> RunLog:
        """Serve every request."""
        from kvcore.cluster import simulate_cluster  # noqa: PLC0415 - of several servers

        requests = ticked(self._workload, tick)
        self._result = simulate_cluster(requests, **self._arguments, residency=False)
        return self._result.log

    def summary(self, log: RunLog) -> RunSummary:
        """Return the summary of the second run."""
        result = self._result
        life, caches = result.lives[0][0], [each.cache for each in chain(*result.lives)]
        cache, made = life.cache, self._parts
        plugins = (
            cache.eviction,
            cache.prefix,
            cache.retention,
            made.scheduler(),
            life.latency,
        )
        levels = () if cache.tiers is None else cache.tiers.levels
        used = [*filter(None, plugins), *(level.tier for level in levels), result.router]
        evicted = sum(c.tree.evicted_blocks + c.tree.expired_blocks for c in caches)
        return RunSummary.of(made.rerun(used), log, result.stats, evicted, timed=True)


class _Rerun:
    """Runs the requests of a trace again."""

    def __init__(self, parts: RecordedParts, cache: KVCache, workload: TraceWorkload) -> None:
        self._parts, self._cache, self._workload = parts, cache, workload
        self._server = (parts.scheduler(), parts.latency()) if parts.timed else None
        self._drafter = None if parts.config.drafter is None else parts.built("drafter")

    def run(self, tick: Tick) -> RunLog:
        """Serve every request: in the loop under the model's clock, or serially without one."""
        told = self._workload.recorded_keys
        requests = (
            as_text(request) if request.id in told else request
            for request in ticked(self._workload, tick)
        )
        if self._server is None:
            return self._replayed(requests)
        scheduler, latency = self._server
        latency.bind()
        executor = TellingExecutor(latency, told) if told else SimulatedExecutor(latency)
        if drafter := self._drafter:
            from kvcore.serving.speculation import SpeculativeSimulator  # noqa: PLC0415 - rare

            if told:
                msg = (
                    f"drafter {drafter.name!r} with texts that publish what they generate, "
                    "which a run alone knows: give drafter 'none'"
                )
                raise InputError(msg)
            executor = SpeculativeSimulator(latency, drafter)
        loop, _ = serve(
            requests,
            self._cache,
            scheduler,
            executor,
            self._parts.batching,
            slo=self._parts.slo,
            rate_scale=self._parts.config.rate_scale,
            residency=False,
        )
        return loop.log

    def summary(self, log: RunLog) -> RunSummary:
        """Return the summary of the second run."""
        cache, prefix = self._cache, self._cache.prefix
        levels = () if cache.tiers is None else cache.tiers.levels
        tiers = [level.tier for level in levels]
        plugins = (
            cache.eviction,
            prefix,
            cache.retention,
            *(self._server or ()),
            self._drafter,
            *tiers,
        )
        evicted = cache.tree.evicted_blocks + cache.tree.expired_blocks
        config = self._parts.rerun(filter(None, plugins))
        return RunSummary.of(config, log, cache.stats, evicted, timed=self._parts.timed)

    def _replayed(self, requests: Iterable[Request]) -> RunLog:
        log, steps = RunLog(self._cache.pool.blocks), DecodeSteps()
        for serial, seq in enumerate(served(requests, self._cache), 1):
            request = seq.request
            job = Job(request, serial, request.arrival, steps, request.prompt_tokens)
            job.hit = seq.hit_blocks * self._cache.geometry.block_size
            log.ended(job, request.arrival)
        return log


class _EngineRerun(_Rerun):
    """Makes the calls of an engine again, each when the engine made it."""

    def run(self, tick: Tick) -> RunLog:
        """Make all calls of the recording."""
        from kvcore.analysis.engine_rerun import EngineRerun  # noqa: PLC0415 - for engines alone

        rerun = EngineRerun(self._workload.file, self._cache, tick)
        rerun.run()
        return rerun.log


def _verified(
    file: Path,
    header: events.Header,
    slo: SLO | None,
    tick: Tick = unseen,
    replica: int | str | None = None,
) -> Recorded | RecordedLives:
    """Check every line of a trace; return the log of its requests.

    Raises:
        InputError, TraceError: as `whatif` does.
    """
    whole = replica is None
    reader = TraceReader(file) if whole else ServerReader(file, replica)
    checker: Checker | None = None
    recorded = (RecordedLives if header.replicas and whole else Recorded)(reader, header, slo)
    for event in ticked(reader, tick):
        checker = check_event(reader, checker, event)
        recorded.take(event)
    if not reader.complete:
        msg = (
            f"{file}: incomplete: {reader.cut_reason}. A run that was cut cannot be compared "
            "with a whole one: record it again, or see with `kvcore replay` what there is"
        )
        raise TraceError(msg)
    return recorded


def _first(changed: list[Change], most: int, key: Callable[[Change], int]) -> list[Change]:
    """Return at most `most` changes whose `key` is below 0, the lowest first."""
    return sorted((change for change in changed if key(change) < 0), key=key)[:most]
