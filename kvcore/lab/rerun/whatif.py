"""What if: the requests of a trace once more, under another policy, pool or scheduler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import attrs

from kvcore.cache import KVCache
from kvcore.errors import InputError, TraceError
from kvcore.files import part_of
from kvcore.lab.compare import Progress, Tick
from kvcore.lab.rerun.figures import Change, Figures, changes
from kvcore.lab.rerun.recorded import Recorded
from kvcore.lab.rerun.setting import Asked, Given, Setting
from kvcore.lab.rerun.told import TellingExecutor, as_text
from kvcore.lab.untimed import served
from kvcore.plugins import Plugins
from kvcore.policy import DecodeSteps, Job, LatencyModel, Scheduler
from kvcore.request import SLO, Request
from kvcore.serving import Batching
from kvcore.serving.executors import SimulatedExecutor
from kvcore.serving.log import RunLog
from kvcore.serving.simulate import serve
from kvcore.trace import Trace, TraceWorkload
from kvcore.trace.reader import Line, TraceReader
from kvcore.trace.replay import advanced
from kvcore.trace.writer import version

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
            prefix.evicted + prefix.expired_blocks,
            timed=self._setting.timed,
        )

    def _replay(self) -> None:
        """Open, commit and close one after another."""
        steps, size = DecodeSteps(), self._cache.geometry.block_size
        for serial, seq in enumerate(served(self._requests(), self._cache), 1):
            request = seq.request
            job = Job(request, serial, request.arrival, steps, request.prompt)
            job.hit = seq.hit_blocks * size
            self.log.ended(job, request.arrival)

    def _serve(self, scheduler: Scheduler, latency: LatencyModel) -> None:
        """Serve them under the model's clock."""
        told = self._workload.told
        latency.claim()
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
