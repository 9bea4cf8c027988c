"""Two runs of the same requests: what each came to, and who fared differently."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import attrs

from kvcore.analysis._setting import Asked, Given, Setting
from kvcore.analysis.compare import Progress, Tick
from kvcore.analysis.replay import served
from kvcore.cache import KVCache
from kvcore.cache.layout import BlockLayout
from kvcore.cache.residency import CacheStats
from kvcore.errors import InputError, TraceError
from kvcore.files import part_of
from kvcore.plugins.manager import Plugins
from kvcore.request import SLO, Key, Request, TextRequest
from kvcore.serving import Batch, Batching, DecodeSteps, Job, LatencyModel, Scheduler
from kvcore.serving.decode_batch import Decoders
from kvcore.serving.executor import SimulatedExecutor
from kvcore.serving.result import MET, UNJUDGED, RunLog
from kvcore.serving.simulate import serve
from kvcore.serving.stats import Distribution, distribution
from kvcore.trace import Trace, TraceWorkload
from kvcore.trace.check import advanced
from kvcore.trace.events import EVENTS
from kvcore.trace.reader import Line, TraceReader, read_request
from kvcore.trace.writer import version
from kvcore.units import NS_PER_S, PS_PER_NS

SECOND = NS_PER_S * PS_PER_NS


@attrs.frozen(kw_only=True)
class Figures:
    """What a run came to, as far as a trace can tell. Times are None without a clock.

    Attributes:
        config: what it was run with: `blocks`, `block_size`, plugins by kind, and with a
            clock `batching`, `slo` (ns) and `rate_scale`.
        requests, completed, rejected: how many there were.
        hit: `lookup_blocks`, `hit_blocks`, `self_hit_blocks`, `lookup_tokens`, `hit_tokens`
            and `ratio` by `block`, `token` and `request`, as in a simulation's summary.
        evicted_blocks: blocks that left the cache, for room or because they expired.
        forgotten_blocks: blocks that running sequences forgot.
        preemptions: by kind, `pause` and `recompute`.
        ttft_s, tpot_s, e2e_s, queue_s: distributions in seconds.
        simulated_s: from the first arrival to the last end.
        throughput_tokens_s: generated tokens a second.
        goodput: requests a second that met their SLO; None where none was expected.
        slo_met: their share of all that had one.
    """

    config: dict[str, Any]
    requests: int
    completed: int
    rejected: int
    hit: dict[str, Any]
    evicted_blocks: int
    forgotten_blocks: int
    preemptions: dict[str, int]
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    queue_s: Distribution | None
    simulated_s: float | None
    throughput_tokens_s: float | None
    goodput: float | None
    slo_met: float | None

    @classmethod
    def of(
        cls,
        config: dict[str, Any],
        log: RunLog,
        stats: CacheStats,
        evicted: int,
        *,
        timed: bool,
    ) -> Figures:
        """Count up a run. O(n log n) in its requests."""
        begin, end = min(log.arrival, default=0), max((*log.arrival, *log.finish), default=0)
        seconds = (end - begin) / NS_PER_S if timed else 0
        generated = sum(log.output) - sum(log.output[row] for row in log.reasons)
        judged, met = len(log.verdict) - log.verdict.count(UNJUDGED), log.verdict.count(MET)
        return cls(
            config=config,
            requests=len(log.ids),
            completed=len(log.ids) - len(log.reasons),
            rejected=len(log.reasons),
            hit={
                "lookup_blocks": stats.lookup_blocks,
                "hit_blocks": stats.hit_blocks,
                "self_hit_blocks": stats.self_hit_blocks,
                "lookup_tokens": stats.lookup_tokens,
                "hit_tokens": stats.hit_tokens,
                "ratio": stats.ratios(),
            },
            evicted_blocks=evicted,
            forgotten_blocks=stats.dropped_blocks,
            preemptions={"pause": sum(log.pauses), "recompute": sum(log.recomputes)},
            ttft_s=_times(log.arrival, log.first_token) if timed else None,
            tpot_s=distribution([t for t in log.tpot() if t >= 0], SECOND) if timed else None,
            e2e_s=_times(log.arrival, log.finish) if timed else None,
            queue_s=_times(log.arrival, log.admitted) if timed else None,
            simulated_s=seconds if timed else None,
            throughput_tokens_s=generated / seconds if seconds else None,
            goodput=met / seconds if seconds and judged else None,
            slo_met=met / judged if timed and judged else None,
        )


@attrs.frozen
class Fate:
    """What became of a request in one run.

    Attributes:
        hit_tokens: prompt tokens that hit at first admission.
        ttft: ns to its first token; None without a clock, or where there was none.
        rejected: whether it was turned away.
    """

    hit_tokens: int
    ttft: int | None
    rejected: bool


@attrs.frozen
class Change:
    """A request that fared differently.

    Attributes:
        request: its id.
        prompt: its prompt, in tokens.
        recorded, rerun: what became of it.
    """

    request: int | str
    prompt: int
    recorded: Fate
    rerun: Fate

    @property
    def tokens(self) -> int:
        """Hit tokens it gained; below 0: lost."""
        return self.rerun.hit_tokens - self.recorded.hit_tokens

    @property
    def ttft(self) -> int:
        """Nanoseconds by which its first token comes later; 0 where one of the two is none."""
        before, after = self.recorded.ttft, self.rerun.ttft
        return 0 if before is None or after is None else after - before

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        recorded, rerun = (
            {
                "hit_tokens": fate.hit_tokens,
                "ttft_s": None if fate.ttft is None else fate.ttft / NS_PER_S,
                "rejected": fate.rejected,
            }
            for fate in (self.recorded, self.rerun)
        )
        return {"id": self.request, "prompt": self.prompt, "recorded": recorded, "rerun": rerun}


def changes(recorded: RunLog, rerun: RunLog) -> Iterator[Change]:
    """Yield the requests that fared differently, in the order in which they ended. O(n)."""
    fates = dict(_fates(rerun))
    prompts = dict(zip(recorded.ids, recorded.prompt, strict=True))
    for name, fate in _fates(recorded):
        if fates[name] != fate:
            yield Change(name, prompts[name], fate, fates[name])


def _fates(log: RunLog) -> Iterator[tuple[int | str, Fate]]:
    columns = zip(log.ids, log.hit, log.arrival, log.first_token, strict=True)
    for row, (name, hit, arrival, first) in enumerate(columns):
        ttft = None if first < 0 else first - arrival
        yield name, Fate(hit, ttft, rejected=row in log.reasons)


def _times(begin: Iterable[int], end: Iterable[int]) -> Distribution | None:
    """Return the distribution of the times to each end there is."""
    return distribution([b - a for a, b in zip(begin, end, strict=True) if b >= 0], NS_PER_S)


BY_HAND = (
    "is no replay of one request after another, so its calls were made by hand; what "
    "`kvcore compare`, `simulate` and `run` have recorded can be run again"
)


class Recorded:
    """The requests of a trace, line by line, as a run would have logged them.

    Args:
        reader: of the trace; named in errors.
        header: its first line.
        slo: what is expected for requests that bring no SLO of their own.

    Attributes:
        log, stats: as those of a run. Without a clock a request ends when it is closed.
        evicted: blocks that left the cache, for room or because they expired.
    """

    def __init__(self, reader: TraceReader, header: Line, slo: SLO | None) -> None:
        self.log = RunLog(header["blocks"], slo)
        self.stats = CacheStats()
        self.evicted = 0
        self._reader = reader
        self._timed = header["mode"] != "untimed"
        self._geometry = BlockLayout(header["count"], header["block_size"], header["key_tokens"])
        self._jobs: dict[int | str, Job] = {}
        self._open: dict[int, Job] = {}
        self._steps = DecodeSteps()
        self._serial = 0
        events = (name for name in EVENTS if hasattr(self, f"_{name.lower()}"))
        self._take = {name: getattr(self, f"_{name.lower()}") for name in events}

    def take(self, line: Line) -> None:
        """Take in a line after HEADER. O(1), or O(keys) of a request.

        Raises:
            InputError: it is of no run that can be made again.
            TraceError: a request that cannot be.
        """
        take = self._take.get(line["event"])
        if take is not None:
            take(line)

    def _request(self, line: Line) -> None:
        if not self._timed and self._jobs:
            self._by_hand()
        try:
            request = read_request(line)
        except InputError as error:
            self._reader.fail(f"REQUEST: {error}")
        self._serial += 1
        slo = request.slo or self.log.slo
        job = Job(request, self._serial, line["t"], self._steps, request.prompt_tokens, slo)
        self._jobs[request.id] = job

    def _hit(self, line: Line) -> None:
        self._admit(line, line["blocks"])

    def _miss(self, line: Line) -> None:
        if line["seq"] not in self._open:
            self._admit(line, 0)

    def _admit(self, line: Line, hit: int) -> None:
        job = self._jobs.get(line["request"])
        again = "again" in line
        if job is None or (again and not self._timed):
            self._by_hand()
        self._open[line["seq"]] = job
        _, tokens, _, _, lookup, _ = self._geometry.prompt(job.request)
        hit_tokens = hit * self._geometry.block_size
        self.stats.admitted(lookup, hit, tokens, hit_tokens, resumed=again)
        if not again:
            job.admitted, job.hit = line["t"], hit_tokens

    def _evict(self, line: Line) -> None:
        if line["scope"] == "sequence":
            self.stats.dropped_blocks += line["blocks"]
        else:
            self.evicted += sum(abs(count) for _, count in line["runs"])

    def _free(self, line: Line) -> None:
        if line["reason"] == "rollback":
            self._by_hand()
        elif line["reason"] == "close":
            job = self._open.pop(line["seq"])
            if not self._timed:
                self.log.ended(self._jobs.pop(job.request.id), line["t"])

    def _first_token(self, line: Line) -> None:
        self._jobs[line["request"]].first_token = line["t"]

    def _preempt(self, line: Line) -> None:
        job = self._jobs[line["request"]]
        job.pauses += line["how"] == "pause"
        job.recomputes += line["how"] == "recompute"

    def _finish(self, line: Line) -> None:
        self.log.ended(self._jobs.pop(line["request"]), line["t"])

    def _reject(self, line: Line) -> None:
        self.log.rejected(self._jobs.pop(line["request"]), line["why"])

    def _fork(self, line: Line) -> None:
        del line
        self._by_hand()

    def _end(self, line: Line) -> None:
        del line
        if self._jobs:
            self._by_hand()

    def _by_hand(self) -> NoReturn:
        msg = f"{self._reader.file}:{self._reader.line}: the trace {BY_HAND}"
        raise InputError(msg)


Told = Mapping[int | str, Sequence[Key]]


class TellingExecutor(SimulatedExecutor):
    """Computes nothing, and names the blocks that texts fill when their tokens would be known.

    Each step is run by itself, as on tensors.

    Args:
        latency: the latency model.
        told: keys of generated blocks by request, in order.
    """

    def __init__(self, latency: LatencyModel, told: Told) -> None:
        super().__init__(latency)
        self.jumps = False
        self.named: list[tuple[Job, Sequence[Key]]] = []
        self._told = told
        self._count = dict.fromkeys(told, 0)

    def run(
        self, batch: Batch, chunks: Sequence[tuple[Job, int]], decoders: Decoders | None
    ) -> int:
        """Return the picoseconds the step takes; `named` has the keys it tells."""
        self.named.clear()
        for job, tokens in chunks:
            if job.computed + tokens == job.target:
                self._tell(job)
        for job in decoders or ():
            self._tell(job)
        return super().run(batch, chunks, decoders)

    def _tell(self, job: Job) -> None:
        """Name the blocks of `job` that are full with the token that this step generates."""
        request = job.request
        if request.id not in self._told:
            return
        # The K/V of the last token is never computed.
        known = request.prompt_tokens + min(job.generated + 1, request.output_tokens - 1)
        full = known // request.key_tokens - request.prompt_tokens // request.key_tokens
        keys = self._told[request.id][self._count[request.id] : full]
        if keys:
            self._count[request.id] = full
            self.named.append((job, keys))


def as_text(request: Request) -> TextRequest:
    """Return a request whose generated keys are not known yet, but will be told."""
    fields = {name: getattr(request, name) for name in _FIELDS}
    return TextRequest(**fields, tokens=(), publish=True)


_FIELDS = tuple(field.name for field in attrs.fields(Request) if field.name != "output_keys")


SCHEMA = 1


_STEPS = 256


@attrs.frozen(kw_only=True)
class WhatIf:
    """A recorded run, and the same requests run again.

    Attributes:
        file: the trace.
        kvcore, here: the versions that wrote it and ran it again; two may differ in what
            they decide.
        workload: the name of its workload.
        timed: whether there was a clock.
        recorded, rerun: the two runs.
        changes: the requests that fared differently, in the order in which they ended.
    """

    file: str
    kvcore: str
    here: str
    workload: str
    timed: bool
    recorded: Figures
    rerun: Figures
    changes: list[Change]

    def gained(self, most: int = 5) -> list[Change]:
        """Return those that gained most hit tokens, the most first."""
        return _first(self.changes, most, lambda change: -change.tokens)

    def lost(self, most: int = 5) -> list[Change]:
        """Return those that lost most hit tokens, the most first."""
        return _first(self.changes, most, lambda change: change.tokens)

    def sooner(self, most: int = 5) -> list[Change]:
        """Return those whose first token comes earlier, the most so first."""
        return _first(self.changes, most, lambda change: change.ttft)

    def later(self, most: int = 5) -> list[Change]:
        """Return those whose first token comes later, the most so first."""
        return _first(self.changes, most, lambda change: -change.ttft)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "schema": SCHEMA,
            "file": self.file,
            "kvcore": {"recorded": self.kvcore, "rerun": self.here},
            "workload": self.workload,
            "timed": self.timed,
            "recorded": attrs.asdict(self.recorded),
            "rerun": attrs.asdict(self.rerun),
            "changes": [change.as_dict() for change in self.changes],
        }


def whatif(
    file: str | os.PathLike[str],
    *,
    eviction: Given = None,
    prefix: Given = None,
    retention: Given = None,
    scheduler: Given = None,
    latency: Given = None,
    blocks: int | None = None,
    block_size: int | None = None,
    batching: Batching | Mapping[str, Any] | None = None,
    slo: SLO | None = None,
    rate_scale: float | None = None,
    export: str | os.PathLike[str] | None = None,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
) -> WhatIf:
    """Check a trace, run its requests again with something different, and compare.

    All that is not given is as the header has it, so that with nothing given the new run is
    the recorded one, line by line. Requests of a session come when the one before has ended
    and their client has thought, in the new run's own time. Costs about 15 us a line of the
    trace, and the new run.

    Args:
        file: a trace of `kvcore compare`, or under the model's clock of `simulate` or `run`.
        eviction: a plugin: a name with options (`"lfu:half_life=300"`), an instance, a
            class, or a function that builds one.
        prefix: likewise.
        retention: likewise; `"none"`: nothing is forgotten.
        scheduler: likewise.
        latency: likewise.
        blocks: of the pool.
        block_size: tokens in a block; without `blocks`, in a pool of the same memory.
        batching: caps of a step: a `Batching`, or those that differ (`{"max_seqs": 8}`).
        slo: what is expected for requests that bring no SLO; `SLO()`: nothing. The recorded
            run is judged by it too.
        rate_scale: how many times as fast as in the workload open-loop requests arrive.
        export: the file to write the trace of the new run to.
        plugins: where names are looked up; None: what is installed.
        progress: is told how many requests have been run again; None: nobody is.

    Raises:
        InputError: a trace that cannot be run again (wall clock, calls made by hand), parts
            that do not fit one another or the trace, or an export over the trace itself.
        PluginError: a plugin that is not installed, or cannot work here.
        PolicyError: a plugin failed.
        TraceError: the trace is damaged, or cut.
    """
    asked = Asked(
        eviction=eviction,
        prefix=prefix,
        retention=retention,
        scheduler=scheduler,
        latency=latency,
        blocks=blocks,
        block_size=block_size,
        batching=batching,
        slo=slo,
        rate_scale=rate_scale,
    )
    workload = TraceWorkload(file)
    header = workload.header
    setting = Setting(workload.file, header, asked, plugins or Plugins())
    if export is not None:
        _spare(workload.file, Path(export))
    with ExitStack() as stack:
        trace = None
        if export is not None:
            run = {name: header[name] for name in ("mode", "workload", "seed")}
            trace = stack.enter_context(Trace(export, **run, **setting.extras()))
        rerun = _Rerun(setting, setting.cache(trace), workload)
        recorded = _verified(workload.file, header, setting.slo)
        steps = progress or _untold
        count = len(recorded.log.ids)
        rerun.tick = stack.enter_context(steps(f"running {workload.name} again", count))
        rerun.run()
    return WhatIf(
        file=str(workload.file),
        kvcore=header["kvcore"],
        here=version(),
        workload=workload.name,
        timed=setting.timed,
        recorded=Figures.of(
            setting.recorded_config(),
            recorded.log,
            recorded.stats,
            recorded.evicted,
            timed=setting.timed,
        ),
        rerun=rerun.figures(),
        changes=list(changes(recorded.log, rerun.log)),
    )


class _Rerun:
    """Runs the requests of a trace again."""

    def __init__(self, setting: Setting, cache: KVCache, workload: TraceWorkload) -> None:
        """Build the other parts."""
        self.tick: Tick = _unseen
        self.log = RunLog(cache.pool.blocks)
        self._setting, self._cache, self._workload = setting, cache, workload
        self._server = (setting.scheduler(), setting.latency()) if setting.timed else None

    def run(self) -> None:
        """Run them all."""
        if self._server is None:
            self._replay()
        else:
            self._serve(*self._server)

    def figures(self) -> Figures:
        """Return what it came to."""
        cache, prefix = self._cache, self._cache.prefix
        plugins = (cache.eviction, prefix, cache.retention, *(self._server or ()))
        return Figures.of(
            self._setting.config(filter(None, plugins)),
            self.log,
            cache.stats,
            cache.tree.evicted_blocks + cache.tree.expired_blocks,
            timed=self._setting.timed,
        )

    def _replay(self) -> None:
        """Open, commit and close one after another."""
        steps, size = DecodeSteps(), self._cache.geometry.block_size
        for serial, seq in enumerate(served(self._requests(), self._cache), 1):
            request = seq.request
            job = Job(request, serial, request.arrival, steps, request.prompt_tokens)
            job.hit = seq.hit_blocks * size
            self.log.ended(job, request.arrival)

    def _serve(self, scheduler: Scheduler, latency: LatencyModel) -> None:
        """Serve them under the model's clock."""
        told = self._workload.told
        latency.bind()
        loop, _ = serve(
            self._requests(),
            self._cache,
            scheduler,
            TellingExecutor(latency, told) if told else SimulatedExecutor(latency),
            self._setting.batching,
            slo=self._setting.slo,
            rate_scale=self._setting.rate_scale,
            residency=False,
        )
        self.log = loop.log

    def _requests(self) -> Iterator[Request]:
        """Yield the requests, telling now and then how many there were."""
        told, fresh = self._workload.told, 0
        for request in self._workload:
            yield as_text(request) if request.id in told else request
            fresh += 1
            if fresh == _STEPS:
                self.tick(fresh)
                fresh = 0
        self.tick(fresh)


def _verified(file: Path, header: Line, slo: SLO | None) -> Recorded:
    """Check every line of a trace; return what became of its requests.

    Raises:
        InputError, TraceError: as `whatif` does.
    """
    reader = TraceReader(file)
    state, recorded = None, Recorded(reader, header, slo)
    for line in reader:
        state = advanced(reader, state, line)
        recorded.take(line)
    if not reader.complete:
        msg = (
            f"{file}: incomplete: {reader.cut_reason}. A run that was cut cannot be compared "
            "with a whole one: record it again, or see with `kvcore replay` what there is"
        )
        raise TraceError(msg)
    return recorded


def _spare(file: Path, export: Path) -> None:
    """Refuse to write over the trace that is read."""
    for written in (export, part_of(export)):
        if written.exists() and file.exists() and written.samefile(file):
            msg = f"cannot write {export}: that is the trace that is read; name another file"
            raise InputError(msg)


def _first(changed: list[Change], most: int, key: Callable[[Change], int]) -> list[Change]:
    """Return at most so many of those with a `key` below 0, the lowest first."""
    return sorted((change for change in changed if key(change) < 0), key=key)[:most]


def _untold(_: str, __: int | None) -> nullcontext[Tick]:
    return nullcontext(_unseen)


def _unseen(_: int) -> None:
    pass
