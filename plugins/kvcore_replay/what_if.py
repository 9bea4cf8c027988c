"""What-if: run the requests of a trace again with other options, and compare both runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from fractions import Fraction
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack, cast

import attrs

from kvcore.cache import KVCache, ServedCache
from kvcore.cache import Sequence as CacheSequence
from kvcore.config.options import option_named
from kvcore.config.parts import RunParts, plugins_of
from kvcore.errors import InputError, OutOfBlocks, PluginError
from kvcore.files import file_bytes, refuse_overwrite
from kvcore.notebook import Shown, data_frame
from kvcore.plugins import Plugins
from kvcore.progress import Progress, Tick, silent, ticked
from kvcore.request import SLO, Key, Request, TextRequest
from kvcore.serving import Batching, DecodeSteps, Job, LatencyModel, StepResult, StepWork
from kvcore.serving.latency import SimulatedExecutor
from kvcore.serving.simulate import serve
from kvcore.serving.stats import RunLog
from kvcore.trace import Trace, events
from kvcore.trace.events import methods_by_event
from kvcore.trace.fields import version
from kvcore.units import NS_PER_S
from kvcore_plugins.load import Offered, Work, finished_work, offered, saturation_of
from kvcore_plugins.traces.reader import TraceReader, read_keys, read_request
from kvcore_plugins.workload.recorded import TraceWorkload
from kvcore_replay.gpu_cost import Cost, gpus_of_config, read_gpu_prices
from kvcore_replay.pricing import PriceModel, find_price
from kvcore_replay.recorded.config import ROUTED, replica_groups
from kvcore_replay.recorded.parts import RecordedParts
from kvcore_replay.recorded_run import Recorded, RecordedLives, RunSummary, verified_log
from kvcore_replay.state.cache import run_blocks
from kvcore_replay.untimed import with_loads

if TYPE_CHECKING:
    # Imported for clusters.
    from kvcore_cluster.options import ClusterOptions
    from kvcore_replay.recorded.cluster import RecordedCluster

__all__ = ["Change", "RequestOutcome", "WhatIf", "whatif"]


@attrs.frozen
class RequestOutcome:
    """Outcome of a request in one run.

    Attributes:
        hit_tokens: prompt tokens that hit at first admission.
        ttft: ns to its first token; None without a clock, or where there was none.
        rejected: whether the request was rejected.
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
        prompt: tokens of its prompt.
        recorded, rerun: its outcomes.
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


def changed_requests(recorded: RunLog, rerun: RunLog) -> Iterator[Change]:
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


RecordedKeys: TypeAlias = Mapping[int | str, Sequence[Key]]


class RecordedKeysExecutor(SimulatedExecutor):
    """Simulates steps and replays the recorded keys of generated blocks as they fill.

    Each step is run by itself, as on tensors.

    Args:
        latency: the latency model.
        keys: keys of generated blocks by request, in order.
    """

    def __init__(self, latency: LatencyModel, keys: RecordedKeys) -> None:
        super().__init__(latency)
        self.jumps = False
        self._keys = keys
        self._count = dict.fromkeys(keys, 0)

    def run(
        self, work: StepWork, chunks: Sequence[tuple[Job, int]], decoding: Iterable[Job]
    ) -> StepResult:
        """Return the time of the step, and the keys of the blocks that it fills."""
        done = [job for job, tokens in chunks if job.computed + tokens == job.target]
        named = [(job, keys) for job in (*done, *decoding) if (keys := self._keys_of_next(job))]
        return super().run(work, chunks, decoding)._replace(named=named)

    def _keys_of_next(self, job: Job) -> Sequence[Key]:
        """Return the keys of the blocks that the next token of `job` fills."""
        request = job.request
        if request.id not in self._keys:
            return ()
        # The K/V of the last token is never computed.
        known = request.prompt_tokens + min(job.generated + 1, request.output_tokens - 1)
        full = known // request.key_tokens - request.prompt_tokens // request.key_tokens
        keys = self._keys[request.id][self._count[request.id] : full]
        if keys:
            self._count[request.id] = full
        return keys


def as_text(request: Request) -> TextRequest:
    """Return `request` as one that publishes the keys it generates while it runs."""
    fields = {name: getattr(request, name) for name in _FIELDS}
    return TextRequest(**fields, tokens=(), publish=True)


_FIELDS = tuple(field.name for field in attrs.fields(Request) if field.name != "output_keys")


SCHEMA = 1


@attrs.frozen(kw_only=True, repr=False)
class WhatIf(Shown):
    """The result of `whatif`: a recorded run, and the same requests run again.

    Attributes:
        file: path of the trace.
        header: its first line.
        kvcore, here: the versions of kvcore that recorded the run and ran it again. Two
            versions may decide differently.
        workload: name of its workload.
        timed: whether the run had a clock.
        recorded, rerun: summaries of the two runs.
        changes: the requests with different outcomes, in the order in which they ended.
    """

    file: str
    header: Mapping[str, Any] = attrs.field(repr=False)
    kvcore: str
    here: str
    workload: str
    timed: bool
    recorded: RunSummary
    rerun: RunSummary
    changes: list[Change] = attrs.field(repr=False)

    def to_frame(self) -> Any:
        """Return a polars DataFrame of the requests with different outcomes.

        Raises:
            PluginError: polars is not installed.
        """
        rows = [
            {"request": str(change.request), "prompt": change.prompt}
            | {f"recorded_{name}": value for name, value in change.recorded.as_dict().items()}
            | {f"rerun_{name}": value for name, value in change.rerun.as_dict().items()}
            for change in self.changes
        ]
        outcome = {"hit_tokens": "int", "ttft_s": "float", "rejected": "bool"}
        types = {"request": "str", "prompt": "int"}
        for run in ("recorded", "rerun"):
            types |= {f"{run}_{name}": kind for name, kind in outcome.items()}
        return data_frame(rows, "`whatif.changes`", types)

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
    export: str | os.PathLike[str] | None = None,
    price: PriceModel | str | None = None,
    gpu_price: Mapping[str, float] | str | None = None,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
    **options: Unpack[ClusterOptions],
) -> WhatIf:
    """Check a trace, run its requests again with other options, and compare the runs.

    An option that is left out, or None, keeps its value of the header: without options the new
    run equals the recorded one, line by line. The requests of a session arrive when the one
    before has ended and the client has thought, both in the time of the new run. Costs about
    15 us per line of the trace, and the new run.

    With another model or device, a pool that was all that fits beside the weights is that
    again; any other one keeps its number of blocks. Another `block_size` without `blocks` keeps
    the memory of the pool. `slo` judges the recorded run as well; `SLO()` is none. `replicas`
    runs the trace of one server again on several. `"none"` leaves out the retention policy, the
    drafter, the tiers, the failures, the planner, or the split of `disaggregate`.

    Args:
        file: a trace of `kvcore compare`, or a trace of `simulate` or `run` by the model's
            clock; or the recording of an engine, whose calls are made again at their times.
        export: the file to which the trace of the new run is written.
        price: the prices of an API that caches prompts, or their text; None: no bills.
        gpu_price: dollars an hour by device, or their text, such as `h100=2.5`, in place of
            those of `gpu_cost.PRICES`.
        plugins: the plugins by which names are resolved; None: those installed.
        progress: shows the bytes of the trace that are checked, then the requests that have
            been run again; None: no progress.
        options: the options of `kvcore whatif`, and `batching`, which gives several of them:
            a `Batching`, or those that change (`{"max_seqs": 8}`).

    Raises:
        InputError: a trace that cannot be run again (wall clock, calls made by hand), options
            that a recorded run does not have or that do not fit one another or the trace, or
            an export over the trace itself.
        PluginError: a plugin is not installed, or cannot be used here.
        PolicyError: a plugin failed.
        TraceError: the trace is damaged, or cut.
    """
    changes = _changes(options)
    prices = read_gpu_prices(gpu_price)
    price = find_price(price) if isinstance(price, str) else price
    workload = TraceWorkload(file)
    header = workload.header
    parts = _parts(workload, header, changes, plugins)
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
            recorded = verified_log(workload.file, parts.slo, tick)
        shown = f"running {workload.name} again", len(recorded.log.ids)
        log = rerun.run(stack.enter_context(progress(*shown)))
    before = after = None
    if price is not None:
        from kvcore_replay.billing import bill  # noqa: PLC0415 - for prices alone

        before, after = (bill(workload, price, log=each) for each in (recorded.log, log))
    was = RunSummary.from_log(
        parts.recorded(), recorded.log, recorded.stats, recorded.evicted, timed=parts.timed
    )
    now = rerun.summary(log)
    return WhatIf(
        file=str(workload.file),
        header=header.as_dict(),
        kvcore=header.kvcore,
        here=version(),
        workload=workload.name,
        timed=parts.timed,
        recorded=attrs.evolve(
            was,
            bill=before,
            cost=_cost(was, recorded.log, prices),
            **_load(workload, changes.get("slo"), plugins, recorded),
        ),
        rerun=attrs.evolve(now, bill=after, cost=_cost(now, log, prices)),
        changes=list(changed_requests(recorded.log, log)),
    )


def _cost(run: RunSummary, log: RunLog, prices: Mapping[str, float]) -> dict[str, Any] | None:
    """Return the cost of a run; None without a device or a price, or with a planner."""
    gpus = gpus_of_config(run.config)
    cost = Cost.of_log(gpus, prices, log, run.simulated_s or 0.0) if gpus else None
    return None if cost is None else cost.as_dict()


def _load(
    workload: TraceWorkload,
    slo: SLO | None,
    plugins: Plugins | None,
    recorded: Recorded | RecordedLives,
) -> dict[str, Any]:
    """Return the fields of a `RunSummary` about load and queue of the recorded run.

    The load is unknown where a recorded plugin is not installed here.
    """
    header, log = workload.header, recorded.log
    if header.mode == "untimed" or header.engine:
        return {}
    fields = header.as_dict()
    options: Any = workload.file, fields, workload, {"slo": slo}, plugins
    if isinstance(recorded, Recorded):
        with suppress(InputError, PluginError):
            parts = RecordedParts(*options)
            latency = parts.latency()
            latency.bind()
            return _load_of_server(parts, parts.served_cache(), latency, log)
    load = None
    if isinstance(recorded, RecordedLives):
        from kvcore_replay.recorded.cluster import RecordedCluster  # noqa: PLC0415 - of several

        with suppress(InputError, PluginError):
            load = _load_of_replicas(RecordedCluster(*options), recorded)
    limits = (
        n * own["batching"].get("max_seqs", Batching().max_seqs)
        for n, own in replica_groups(fields)
    )
    return _load_fields(load, log, sum(limits))


def _load_of_replicas(parts: RecordedCluster, recorded: RecordedLives) -> float | None:
    """Return the offered load of a recorded cluster, as its result does."""
    log = recorded.log
    if any(own.config.drafter for own in parts.members):
        return None
    names = "arrival", "prompt", "hit", "loaded", "output"
    columns = [log.columns()[name] for name in names]
    total = Fraction(0)
    for own, lives in zip(parts.members, recorded.lives, strict=True):
        latency = own.latency()
        latency.bind()
        for life in lives:
            came, prompts, hits, loaded, outputs = (
                [column[row] for row in life.rows] for column in columns
            )
            ended = came, prompts, [*map(add, hits, loaded)], outputs
            work: list[Any] = [ended, list(zip(*life.handed, strict=True)) or ([],) * 4]
            total += _offered(own, own.served_cache(), latency, work).work
    came = [*chain.from_iterable(came for came, *_ in finished_work(log))]
    span = max(came, default=0) - min(came, default=0)
    return Offered(total, len(came), span).load(len(recorded.lives))


def _load_of_server(
    parts: RecordedParts, cache: ServedCache, latency: LatencyModel, log: RunLog
) -> dict[str, Any]:
    """Return the fields about load and queue of a run of one server, as its result does."""
    load = None
    if parts.config.drafter is None:
        load = _offered(parts, cache, latency, finished_work(log)).load()
    return _load_fields(load, log, parts.batching.max_seqs)


def _offered(
    parts: RunParts, cache: ServedCache, latency: LatencyModel, work: Iterable[Work]
) -> Offered:
    """Return what the requests of a server offer."""
    tokens = parts.blocks * parts.geometry.block_size
    return offered(work, parts.batching, latency, tokens, forgetting=cache.forgets)


def _load_fields(load: float | None, log: RunLog, max_seqs: int) -> dict[str, Any]:
    saturation = saturation_of(log, max_seqs, load)
    fields = None if saturation is None else saturation.as_dict()
    return {"offered_load": load, "saturation": fields}


NO_FAILURES = ("none", ["none"], ("none",))
"""Values of `fail` that stand for no failure."""


def _changes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that change a recorded run.

    Raises:
        InputError: an option that there is not, or that a recorded run cannot have.
    """
    changes = {name: value for name, value in options.items() if value is not None}
    for name in changes.keys() - {"batching"}:
        if not option_named(name).what_if:
            msg = f"{name}: a run is made again with the {name} that its trace has"
            raise InputError(msg)
    if changes.get("fail") in NO_FAILURES:
        changes["fail"] = ()
    return changes


def _parts(
    workload: TraceWorkload,
    header: events.Header,
    changes: dict[str, Any],
    plugins: Plugins | None,
) -> RecordedParts:
    """Return the parts of the second run: those of a cluster, or of one server."""
    routing = [name for name in ROUTED if name in changes]
    if header.replicas or "replicas" in changes:
        from kvcore_replay.recorded.cluster import RecordedCluster  # noqa: PLC0415 - of several

        kind: type[RecordedParts] = RecordedCluster
    elif routing:
        msg = (
            f"{workload.file} is the trace of one server, which has no {routing[0]}: give "
            "--replicas too, to see what several of it would do"
        )
        raise InputError(msg)
    else:
        kind = RecordedParts
    fields = header.as_dict()
    if header.engine:
        if routing:
            msg = (
                f"{workload.file} is the recording of one engine, whose calls are of one cache"
            )
            raise InputError(msg)
        # The times of its steps were measured: no latency model can run them again.
        fields["mode"] = "untimed"
        del fields["engine"]
    return kind(workload.file, fields, workload, changes, plugins)


def _rerun_of(
    parts: RecordedParts, trace: Trace | None, workload: TraceWorkload
) -> _Rerun | _ClusterRerun:
    """Return the object that runs the requests of a trace again."""
    if parts.many:
        return _ClusterRerun(cast("RecordedCluster", parts), trace, workload)
    if workload.header.engine:
        return _EngineRerun(parts, parts.cache(trace), workload)
    return _Rerun(parts, parts.served_cache(trace), workload)


class _ClusterRerun:
    """Runs the requests of a cluster's trace again, or those of one server on several."""

    def __init__(
        self, parts: RecordedCluster, trace: Trace | None, workload: TraceWorkload
    ) -> None:
        self._parts, self._workload = parts, workload
        self._arguments = parts.cluster(trace)

    def run(self, tick: Tick) -> RunLog:
        """Serve every request."""
        from kvcore_cluster.simulate import simulate_cluster  # noqa: PLC0415 - of several servers

        requests = ticked(self._workload, tick)
        self._result = simulate_cluster(requests, **self._arguments, residency=False)
        return self._result.log

    def summary(self, log: RunLog) -> RunSummary:
        """Return the summary of the second run."""
        result, parts = self._result, self._parts
        life = result.lives[0][0]
        drafter = None if parts.config.drafter is None else parts.built("drafter")
        used = plugins_of(life.cache, parts.scheduler(), life.latency, drafter, result.router)
        evicted = sum(
            cache_of_life.cache.evicted_blocks for cache_of_life in chain(*result.lives)
        )
        summary = RunSummary.from_log(parts.rerun(used), log, result.stats, evicted, timed=True)
        max_seqs = sum(member.batching.max_seqs for member in parts.members)
        return attrs.evolve(summary, **_load_fields(result.offered_load, log, max_seqs))


class _Rerun:
    """Runs the requests of a trace again."""

    def __init__(
        self, parts: RecordedParts, cache: ServedCache, workload: TraceWorkload
    ) -> None:
        self._parts, self._cache, self._workload = parts, cache, workload
        self._server = (parts.scheduler(), parts.latency()) if parts.timed else None
        self._drafter = None if parts.config.drafter is None else parts.built("drafter")

    def run(self, tick: Tick) -> RunLog:
        """Serve every request: by the model's clock, or serially without a clock."""
        keys = self._workload.recorded_keys
        requests = (
            as_text(request) if request.id in keys else request
            for request in ticked(self._workload, tick)
        )
        if self._server is None:
            return self._replayed(requests)
        scheduler, latency = self._server
        executor = RecordedKeysExecutor(latency, keys) if keys else SimulatedExecutor(latency)
        if drafter := self._drafter:
            from kvcore_plugins.drafter.speculation import SpeculativeSimulator  # noqa: PLC0415 - rare

            if keys:
                msg = (
                    f"drafter {drafter.name!r} with texts that publish what they generate, "
                    "which a run alone knows: give drafter 'none'"
                )
                raise InputError(msg)
            executor = SpeculativeSimulator(latency, drafter)
        loop, _, _ = serve(
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
        cache, parts = self._cache, self._parts
        config = parts.rerun(plugins_of(cache, *(self._server or ()), self._drafter))
        summary = RunSummary.from_log(
            config, log, cache.stats, cache.evicted_blocks, timed=parts.timed
        )
        if self._server is None:
            return summary
        return attrs.evolve(summary, **_load_of_server(parts, cache, self._server[1], log))

    def _replayed(self, requests: Iterable[Request]) -> RunLog:
        cache, steps = cast("KVCache", self._cache), DecodeSteps()
        log, size = RunLog(cache.pool.blocks), cache.geometry.block_size
        for serial, (seq, loaded) in enumerate(with_loads(requests, cache), 1):
            request = seq.request
            job = Job(request, serial, request.arrival, steps, request.prompt_tokens)
            job.hit, job.loaded = seq.hit_blocks * size, loaded * size
            log.ended(job, request.arrival)
        return log


@attrs.define(eq=False)
class _RecordedRequest:
    """A request of the recording.

    Attributes:
        request: the request, with the keys of the blocks that it has generated so far.
        job: its row in the log.
        resumed: whether it was admitted before.
        preempted: whether the next FREE of its sequence is due to a preemption.
    """

    request: Request
    job: Job
    resumed: bool = False
    preempted: bool = False


class _EngineRerun(_Rerun):
    """Makes the calls of an engine again: admissions, growth, commits and ends.

    Each call is made at its time in the engine and in the same order, whatever hits. So no
    assumption is made about how the engine would have scheduled with other hits, or how fast.
    Blocks that the engine had lost are not lost here, and no block is evicted before its room
    is needed. The size of the cache, and that of its blocks, may differ from the engine's.
    """

    _cache: KVCache

    def __init__(self, parts: RecordedParts, cache: KVCache, workload: TraceWorkload) -> None:
        super().__init__(parts, cache, workload)
        self._log = RunLog(cache.pool.blocks)
        # Lines count blocks of the engine; keys of its output come while a request runs.
        self._size, self._named = workload.header.block_size, workload.recorded_keys
        self._steps = DecodeSteps()
        self._requests: dict[int | str, _RecordedRequest] = {}
        self._seqs: dict[int, tuple[_RecordedRequest, CacheSequence]] = {}
        # The admission whose ALLOC, if it has one, is the next line.
        self._admitted: events.Hit | events.Miss | None = None
        self._calls = methods_by_event(
            self,
            *("REQUEST", "ALLOC", "KEYS", "COMMIT", "PREEMPT", "FREE"),
            *("FIRST_TOKEN", "FINISH", "REJECT"),
        )

    def run(self, tick: Tick) -> RunLog:
        """Make all calls; return the log of the requests, at the engine's times.

        `tick` is called with 1 for each request.

        Raises:
            InputError: at some time the blocks in use are more than the cache has.
        """
        self._tick = tick
        for event in TraceReader(self._workload.file):
            try:
                if event.event in ("HIT", "MISS"):
                    self._admitted = self._admitted or event  # type: ignore[assignment]
                    continue
                if self._admitted is not None and event.event != "ALLOC":
                    self._open(self._admitted, 0)
                call = self._calls.get(event.event)
                if call is not None:
                    call(event)
            except OutOfBlocks as error:
                msg = (
                    f"{self._workload.file}: at line {event.n + 1} the engine had more in use "
                    f"than there is room for: {error}; give more blocks"
                )
                raise InputError(msg) from error
        return self._log

    def _request(self, event: events.Request) -> None:
        request, serial = read_request(event), len(self._requests) + 1
        request = as_text(request) if request.id in self._named else request
        job = Job(request, serial, event.t, self._steps, request.prompt_tokens)
        self._requests[event.id] = _RecordedRequest(request, job)
        self._cache.announce(request, event.t)
        self._tick(1)

    def _open(self, event: events.Hit | events.Miss, allocated: int) -> None:
        """Admit the request of `event`, whose table has `allocated` blocks after its hit."""
        self._admitted = None
        record, cache = self._requests[event.request], self._cache
        request, size = record.request, cache.geometry.block_size
        hit = event.blocks if event.event == "HIT" else 0  # type: ignore[union-attr]
        tokens = (hit + allocated) * self._size
        # A resumed request computes the last of its earlier tokens again.
        end = max(request.prompt_tokens, tokens - self._size + 1)
        target = end if record.resumed else None
        first = max(0, tokens - cache.match(request, event.t, target).blocks * size)
        seq = cache.open(request, first, event.t, resumed=record.resumed, target=target)
        if not record.resumed:
            record.job.admitted, record.job.hit = event.t, seq.hit_blocks * size
        record.resumed = True
        self._seqs[event.seq] = record, seq

    def _alloc(self, event: events.Alloc) -> None:
        blocks = run_blocks(event.runs)
        if self._admitted is not None:
            self._open(self._admitted, blocks)
            return
        _, seq = self._seqs[event.seq]
        missing = (event.first + blocks) * self._size - seq.tokens - seq.compacted
        if missing > 0:
            self._cache.extend(seq, missing, event.t)

    def _keys(self, event: events.Keys) -> None:
        record, keys = self._requests[event.request], read_keys(event.keys)
        known = record.request.output_keys
        record.request = attrs.evolve(record.request, output_keys=[*known, *keys])
        for owner, seq in self._seqs.values():
            if owner is record:
                self._cache.append_keys(seq, keys)
        self._record("keys", event, keys=keys)

    def _commit(self, event: events.Commit) -> None:
        _, seq = self._seqs[event.seq]
        tokens = (event.first + event.blocks) * self._size - seq.position
        if tokens > 0:
            self._cache.commit(seq, tokens, event.t)

    def _preempt(self, event: events.Preempt) -> None:
        record, seq = self._seqs[event.seq]
        record.preempted = True
        record.job.recomputes += 1
        self._record("preempt", event, seq=seq.id, how="recompute")

    def _first_token(self, event: events.FirstToken) -> None:
        self._requests[event.request].job.first_token = event.t
        self._record("first_token", event, seq=self._seqs[event.seq][1].id)

    def _finish(self, event: events.Finish) -> None:
        record, seq = self._seqs[event.seq]
        self._record("finish", event, seq=seq.id, output=event.output)
        self._log.ended(record.job, event.t)

    def _reject(self, event: events.Reject) -> None:
        self._record("reject", event, why=event.why)
        self._log.rejected(self._requests[event.request].job, event.why)

    def _free(self, event: events.Free) -> None:
        if event.reason != "close":
            return
        record, seq = self._seqs.pop(event.seq)
        self._cache.close(seq, event.t, preempted=record.preempted)
        record.preempted = False

    def _record(self, method: str, event: Any, **fields: Any) -> None:
        """Write the line of the engine's server about a request, if there is a trace."""
        if self._cache.trace is not None:
            getattr(self._cache.trace, method)(event.t, request=event.request, **fields)


def _first(changed: list[Change], most: int, key: Callable[[Change], int]) -> list[Change]:
    """Return at most `most` changes whose `key` is below 0, the lowest first."""
    return sorted((change for change in changed if key(change) < 0), key=key)[:most]
