"""Run one cell of a sweep: simulated under a clock, or replayed without one."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import perf_counter
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs
import orjson

from kvcore.cache import EvictionPolicy, KVCache, ServedCache
from kvcore.config import RunConfig, RunParts
from kvcore.config.options import kind_of, option_default
from kvcore.config.values import slo_text, tiers_text
from kvcore.errors import InputError, KvcoreError
from kvcore.plugins import FAILURES, Plugin, Plugins
from kvcore.plugins.base import qualified
from kvcore.plugins.manager import check_name, installed
from kvcore.plugins.options import Spec, spec_of
from kvcore.request import SLO
from kvcore.serving.result import Reported
from kvcore.serving.stats import MET, Percentiles
from kvcore.trace.fields import plain, slo_field
from kvcore.units import NS_PER_S, window_text
from kvcore.workloads import Workload, notes_of
from kvcore.workloads.files import file_digest
from kvcore_cli.report.tables import told_of_run
from kvcore_cluster.options import replicas_text
from kvcore_lab.candidates import for_several_runs
from kvcore_lab.comparison import SHARING, KeptWorkload
from kvcore_lab.statistics import Parts, session_groups, sums
from kvcore_lab.sweep.grid import Mode, axes_of
from kvcore_lab.sweep.sources import class_digests, kvcore_digest
from kvcore_replay.belady import Belady, Future
from kvcore_replay.untimed import hits_of

if TYPE_CHECKING:
    from kvcore_cluster.config import ClusterParts

DIGEST_BYTES = 16

T = TypeVar("T")

HITS = {
    "lookup_blocks": "lookup_blocks",
    "hit_blocks": "hit_blocks",
    "hit_ratio_block": "ratio.block",
    "hit_ratio_token": "ratio.token",
    "hit_ratio_request": "ratio.request",
}

TIMES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s")

SPREAD = Percentiles._fields

TIMED_COLUMNS = {
    **{name: name for name in ("requests", "completed", "rejected", "offered_load")},
    "saturated": "saturation.saturated",
    "simulated_s": "simulated_s",
    # The axis `steps` is the kind of steps.
    "step_count": "steps",
    **{f"{time}_{part}": f"{time}.{part}" for time in TIMES for part in SPREAD},
    "throughput_tokens_s": "throughput_tokens_s",
    "goodput": "goodput",
    "slo_met": "slo.met",
    "preemptions_pause": "preemptions.pause",
    "preemptions_recompute": "preemptions.recompute",
    "preemptions_swap": "preemptions.swap",
    "evicted_blocks": "evicted_blocks",
    **{name: f"hit.{path}" for name, path in HITS.items()},
    "loaded_tokens": "loaded_tokens",
    **{f"reuse_ratio_{unit}": f"reuse_ratio.{unit}" for unit in ("block", "token", "request")},
    "lost_tokens": "lost_tokens",
    "pool_active_mean": "pool.active.mean",
    "pool_active_peak": "pool.active.peak",
}
"""Columns of a simulated cell, and the path of each in the summary of its run."""

CLUSTER_COLUMNS = {
    "imbalance_requests": "imbalance.requests.most",
    "imbalance_busy": "imbalance.busy.most",
    "retried": "retried",
    "replica_s": "replica_s",
}
"""Further columns of a cell with several servers, and their paths."""

UNTIMED_COLUMNS = (
    *("requests", *HITS, "evicted_blocks", "reused_blocks"),
    *("reuse_ratio_block", "reuse_ratio_token", "reuse_ratio_request"),
)

SHARES = {"share_of_optimum": "hit_blocks", "reuse_share_of_optimum": "reused_blocks"}
"""The columns of shares of the optimum, with the blocks that each compares."""

HIDDEN = "shares"
"""The column of a journal that tables do not have: what parts of the requests add."""

RESULTS: dict[Mode, tuple[str, ...]] = {
    "simulate": (*TIMED_COLUMNS, *CLUSTER_COLUMNS, HIDDEN),
    "compare": (*UNTIMED_COLUMNS, HIDDEN),
}
"""The columns of the result of a cell, by mode."""


COUNTS = (
    *("requests", "completed", "rejected", "step_count", "loaded_tokens", "lost_tokens"),
    *("retried", "pool_active_peak", "max_model_len"),
)
"""Columns of whole numbers, beside those of blocks and preemptions."""


def type_of(column: str) -> str:
    """Return the type of a column, as `data_frame` takes it, that has no value in any row."""
    if column == "saturated":
        return "bool"
    if column in COUNTS or column.endswith("_blocks") or column.startswith("preemptions_"):
        return "int"
    figures = (*TIMED_COLUMNS, *CLUSTER_COLUMNS, *UNTIMED_COLUMNS, *SHARES)
    return "float" if column in figures or column.startswith("usd_") else "str"


@attrs.frozen
class Task:
    """A cell to run, and its digest."""

    digest: str
    cell: RunConfig

    def run(self, known: WorkloadCache) -> dict[str, Any]:
        """Return the columns of the result.

        Raises:
            KvcoreError: the cell has another digest in this process.
        """
        cell = CellRun(self.cell, known)
        self.check(cell.digest)
        return self.columns(cell)

    def columns(self, cell: CellRun) -> dict[str, Any]:
        """Run the cell of the task, and return the columns of the result."""
        return cell.run()

    def check(self, digest: str) -> None:
        """Raise KvcoreError if `digest`, computed in this process, is not that of the task."""
        if digest != self.digest:
            msg = (
                "this process would run another cell: a file, a plugin or kvcore itself has "
                "changed since it was named, or is not the same on this machine"
            )
            raise KvcoreError(msg)


@attrs.frozen
class Outcome:
    """The result of a task, or the reason of its failure.

    Attributes:
        digest: digest of the task.
        result: the columns of the result; None if the task failed.
        error: the reason of a failure.
        wall_s: seconds that the task took.
        notes: what its workload says of the requests that were read, and which of them are
            longer than the positions of the model, after its name.
    """

    digest: str
    result: dict[str, Any] | None
    error: str | None = None
    wall_s: float = 0.0
    notes: Sequence[str] = ()


class WorkloadCache:
    """The plugins, open workloads and digests that the cells of one process share.

    A workload is opened once, and read once where its requests take little memory: those of
    the latest are held. Else each cell reads it again, and memory holds none of its requests,
    except the future that Belady's algorithm needs or the traffic of a fleet.

    Attributes:
        plugins: the installed plugins.
        file: returns the digest of a file, which is computed once.
        told: the notes on the run of the latest cell, such as prompts without positions, or
            a pool that keeps more than its model needs.
    """

    def __init__(self) -> None:
        self.plugins = Plugins()
        self.told: list[str] = []
        self._workloads: dict[tuple[object, ...], KeptWorkload] = {}
        self._digests: dict[tuple[object, ...], str] = {}
        self.file = cache(file_digest)
        self._kept: dict[object, tuple[object, Any]] = {}

    def parts(self, cell: RunConfig) -> RunParts:
        """Return the parts of a cell, with copies of plugins that are given as instances.

        Raises:
            InputError, PluginError: a part cannot be built; names the option.
        """
        key = _workload_key(cell)
        workload = self._workloads.get(key)
        cell = for_several_runs(cell)
        parts: RunParts = cell.build(self.plugins, workload=workload, naming="{}: ".format)
        if workload is None:
            for other in self._workloads.values():
                other.release()
            self._workloads[key] = parts.workload = KeptWorkload(parts.workload)
        return parts

    def hold(self, cell: RunConfig) -> None:
        """Read the workload of a cell, for forks of this process, unless it takes much memory.

        Does nothing if it cannot be read: the run of the cell says why.
        """
        with suppress(*FAILURES):
            cast("KeptWorkload", self.parts(cell).workload).hold()

    def notes(self, cell: RunConfig) -> list[str]:
        """Return the notes on the workload of the latest cell that was run, after its name."""
        workload = self._workloads[_workload_key(cell)]
        return notes_of(workload) + [f"{workload.name}: {note}" for note in self.told]

    def digest(self, parts: RunParts) -> str:
        """Return the digest of a workload, which is computed once."""
        key = _workload_key(parts.config)
        return self._digests.get(key) or self._digests.setdefault(key, parts.workload.digest)

    def sessions(self, parts: RunParts) -> Mapping[int | str, int]:
        """Return the groups of the sessions of a workload (`session_groups`), read once."""
        return self.kept(parts, session_groups)

    def lookups(self, parts: RunParts) -> tuple[Sequence[int], Sequence[int]]:
        """Return the blocks that each request looks up, and its group of `sessions`, if any.

        The workload is read once. Without a clock two of its requests may have one id.
        """
        geometry, sessions = parts.geometry, self.sessions(parts)

        def lookups(workload: Workload) -> tuple[Sequence[int], Sequence[int]]:
            blocks, groups = array("q"), array("q")
            for request in workload:
                blocks.append(geometry.lay_out(request)[4])
                if sessions:
                    groups.append(sessions[request.id])
            return blocks, groups

        return self.kept(parts, lookups, geometry.accounting, geometry.block_size)

    def future(self, parts: RunParts) -> Future:
        """Return the future of a workload."""
        geometry = parts.geometry

        def future(workload: Workload) -> Future:
            return Future.read(workload, geometry)

        return self.kept(parts, future, geometry.accounting, geometry.block_size)

    def kept(self, parts: RunParts, read: Callable[[Workload], T], *more: object) -> T:
        """Return `read(workload)`; the latest of each `read` is kept, `more` is in its key."""
        what, key = read.__qualname__, (self.digest(parts), *more)
        if self._kept.get(what, (None,))[0] != key:
            self._kept[what] = key, read(parts.workload)
        kept: T = self._kept[what][1]
        return kept


def _workload_key(cell: RunConfig) -> tuple[object, ...]:
    workload = cell.workload
    named = workload if isinstance(workload, Workload) else str(workload)
    return named, cell.seed, cell.limit, cell.window


class CellRun:
    """One cell with its parts, for one run.

    Attributes:
        parts: its parts.
        eviction: the eviction policy, or the optimum.
        cache: the cache; None for the optimum, which needs none.

    Raises:
        InputError, PluginError: a part cannot be built; names the option.
    """

    def __init__(self, cell: RunConfig, known: WorkloadCache) -> None:
        self._known = known
        self.parts = parts = known.parts(cell)
        self.eviction: EvictionPolicy | Belady
        self.cache: ServedCache | None = None
        if not cell.timed and _built(cell.eviction).name in Belady.names:
            self.eviction = _optimum(parts)
        else:
            self.cache = parts.served_cache()
            self.eviction = self.cache.eviction

    @property
    def row(self) -> dict[str, Any]:
        """The axes of the cell in the form of a table: text, numbers, true or false."""
        parts, cell = self.parts, self.parts.config
        row: dict[str, Any] = {name: getattr(cell, name) for name in axes_of(cell.mode)}
        row |= {name: text for name, value in row.items() if (text := _named(value))}
        row["tier"] = tiers_text(tuple(map(_built, cell.tier)))
        del row["memory"]
        if cell.window is not None:
            row["window"] = window_text(cast("Any", cell.window))
        if cell.timed:
            row["slo"] = slo_text(cast("SLO", cell.slo))
            row["replicas"] = named_replicas(row["replicas"])
            row["fail"] = "; ".join(row["fail"])
        else:
            row["accounting"] = parts.geometry.accounting
        blocks = parts.blocks + parts.null_blocks
        return row | {
            "model": parts.model.name,
            "block_size": parts.geometry.block_size,
            "blocks": blocks,
            "pool_bytes": blocks * parts.deployment.bytes_per_block,
        }

    @property
    def digest(self) -> str:
        """The BLAKE2b digest of everything that the result depends on, as canonical JSON.

        That is the code of kvcore, the digest of the workload, the model, the sizes, and for
        every plugin its name, its options and its code with all that it imports: an edited
        policy is another policy. Files that plugins read count by their content.
        """
        text = orjson.dumps(self._description(), option=orjson.OPT_SORT_KEYS)
        return hashlib.blake2b(text, digest_size=DIGEST_BYTES).hexdigest()

    def check(self) -> None:
        """Refuse parts that contradict each other, as the run does before its first request.

        Raises:
            InputError: the run would be refused. What fails otherwise is left to it.
        """
        if self.parts.config.timed:
            try:
                self.parts.run(requests=(), residency=False)
            except InputError:
                raise
            except FAILURES:
                pass

    def run(self) -> dict[str, Any]:
        """Return the columns of the result."""
        timed = self.parts.config.timed
        return self.columns(self.simulated()) if timed else self._replayed()

    def columns(self, result: Reported) -> dict[str, Any]:
        """Return the columns of the result of `simulated`."""
        self._known.told = told_of_run(self.parts, result.log)
        summary, paths = result.summary(), TIMED_COLUMNS | CLUSTER_COLUMNS
        columns = {column: _at(summary, path) for column, path in paths.items()}
        return columns | {HIDDEN: _shares(result, self._known.sessions(self.parts))}

    def simulated(self) -> Reported:
        """Simulate the cell, which has a clock; return the result of the run."""
        result: Reported = self.parts.run(residency=False)
        return result

    def _replayed(self) -> dict[str, Any]:
        parts = self.parts
        note = "" if parts.config.memory is None else parts.deployment.layout.pool_note
        self._known.told = [note] if note else []
        if self.cache is None:
            future = self._known.future(parts)
            optimum = cast("Belady", self.eviction)
            size = parts.geometry.block_size
            hits, evicted = optimum.hits(future, parts.blocks)
            stats, found = future.stats(hits, size), hits
            if parts.tier_blocks:
                found, _ = Belady(bypass=True).hits(future, parts.blocks + parts.tier_blocks)
            reused = future.stats(found, size)
        else:
            tiers, loaded = self.cache.tiers, array("q")
            hits = hits_of(parts.workload, cast("KVCache", self.cache), loaded)
            found = array("q", map(sum, zip(hits, loaded, strict=True))) if tiers else hits
            stats = self.cache.stats
            reused = stats if tiers is None else tiers.hit_stats()
            evicted = self.cache.evicted_blocks
        return {
            "requests": stats.requests,
            "lookup_blocks": stats.lookup_blocks,
            "hit_blocks": stats.hit_blocks,
            **{f"hit_ratio_{unit}": ratio for unit, ratio in stats.ratios().items()},
            "evicted_blocks": evicted,
            "reused_blocks": reused.hit_blocks,
            **{f"reuse_ratio_{unit}": ratio for unit, ratio in reused.ratios().items()},
            HIDDEN: {
                "hit_ratio_block": sums(hits, *self._known.lookups(parts)),
                "reuse_ratio_block": sums(found, *self._known.lookups(parts)),
            },
        }

    def _description(self) -> dict[str, Any]:
        parts, cell, cache = self.parts, self.parts.config, self.cache
        prefix = parts.built("prefix") if cache is None else cache.prefix
        retention = None if cache is None else cache.retention
        tiers = parts.tiers()
        below = (*tiers, *(tier.eviction for tier in tiers))
        rules = parts.rules if parts.rules.decides() else None
        checkpoint = (
            None
            if cell.checkpoint == option_default("checkpoint")
            else parts.built("checkpoint")
        )
        scheduler, latency = (
            (parts.scheduler(), parts.latency()) if cell.timed else (None, None)
        )
        drafter = None if cell.drafter is None else parts.built("drafter")
        served = scheduler, latency, drafter, rules, checkpoint
        plugins = (self.eviction, prefix, retention, parts.codec, *served, *below)
        described: dict[str, Any] = {
            "kvcore": kvcore_digest(),
            "mode": cell.mode,
            "workload": {"name": parts.workload.name, "digest": self._known.digest(parts)},
            "count": parts.geometry.accounting,
            "key_tokens": parts.geometry.key_tokens,
            "block_size": parts.geometry.block_size,
            "blocks": parts.blocks,
            # With the codec: how many blocks a tier of so many bytes has.
            "model": parts.model.as_dict(),
            "devices": parts.deployment.devices,
            "recompute": attrs.asdict(cast("Any", parts.recompute)),
            "plugins": [self._described(plugin) for plugin in plugins if plugin is not None],
        }
        if latency is not None:
            described |= {
                "latency": latency.coefficients(),
                "batching": parts.batching.as_dict(complete=True),
                "rate_scale": cell.rate_scale,
                "slo": slo_field(cast("SLO", cell.slo)),
            }
        if parts.many:
            described["cluster"] = self._cluster(cast("ClusterParts", parts))
        return described

    def _cluster(self, parts: ClusterParts) -> dict[str, Any]:
        """Return everything about several servers that the result depends on."""
        alone: dict[str, Any] = {
            "replicas": 1,
            "fail": (),
            "autoscale": None,
            "disaggregate": None,
        }
        configs = [(n, group.config.changed(**alone)) for n, group in parts.groups]
        return {
            "replicas": [[n, CellRun(config, self._known).digest] for n, config in configs],
            "router": self._described(parts.router()),
            "view": str(parts.view()),
            "fail": [str(failure) for failure in parts.failures],
            "autoscale": parts.config.autoscale,
            **({} if parts.split is None else {"disaggregate": str(parts.split)}),
        }

    def _described(self, plugin: Plugin | Belady) -> dict[str, Any]:
        """Return the name of a plugin, its options, and the digests of its code."""
        cls: type = type(plugin)
        return {
            "name": plugin.name,
            "options": {name: self._content(value) for name, value in plugin.options().items()},
            "code": class_digests(cls),
        }

    def _content(self, value: Any) -> Any:
        """Return an option as a JSON value; for a file, the digest of its content."""
        is_file = isinstance(value, Path) and value.is_file()
        return self._known.file(value) if is_file else plain(value)


class CellRunner:
    """The function that runs one task after another in one process."""

    def __init__(self, known: WorkloadCache | None = None) -> None:
        self._known = known or WorkloadCache()

    def __call__(self, task: Task) -> Outcome:
        """Run a task; an exception becomes its outcome, so that other tasks continue."""
        begin, self._known.told = perf_counter(), []
        try:
            result = task.run(self._known)
        except FAILURES as error:  # It is reported, and the sweep fails in the end.
            return Outcome(task.digest, None, _reason(error))
        wall_s, notes = round(perf_counter() - begin, 6), self._known.notes(task.cell)
        return Outcome(task.digest, result, wall_s=wall_s, notes=notes)


def _optimum(parts: RunParts) -> Belady:
    """Return the optimum of a cell; raise InputError if it bounds nothing there."""
    given = parts.config.eviction
    try:
        optimum = Belady.from_text(given.options) if isinstance(given, Spec) else given()
    except InputError as error:
        msg = f"eviction: {error}"
        raise InputError(msg) from error
    if parts.geometry.accounting != "keys":
        accounting = parts.geometry.accounting
        msg = f"accounting: the optimum is known in `keys` alone, not in {accounting!r}"
        raise InputError(msg)
    prefix = parts.built("prefix").name
    if prefix != SHARING:
        msg = f"prefix: the optimum is a bound for {SHARING!r} alone, not for {prefix!r}"
        raise InputError(msg)
    return optimum


def named_replicas(replicas: int | Sequence[Mapping[str, Any]]) -> int | str:
    """Return replicas as a table has them, their plugins by name."""
    if isinstance(replicas, int):
        return replicas
    return replicas_text([
        {name: _named(value) or value for name, value in table.items()} for table in replicas
    ])  # fmt: skip


def _named(value: object) -> str | None:
    """Return the text of a plugin, as on the command line; None for any other value.

    Raises:
        PluginError: it is a plugin without a name.
    """
    value = _built(value)
    if isinstance(value, Plugin):
        check_name(value)
        value = spec_of(value)
    if isinstance(value, Spec):
        return str(value)
    return value.name if isinstance(value, type) and issubclass(value, Plugin) else None


def _built(value: Any) -> Any:
    """Return the plugin that a function builds; any other value as it is."""
    return value() if callable(value) and not isinstance(value, type | Plugin) else value


def refuse_namesakes(axis: str, values: Sequence[object]) -> None:
    """Raise InputError if values of an axis are plugins of one text and different classes.

    A table would have rows that cannot be told apart.
    """
    kind, plugins = kind_of(axis), installed()

    def class_of(value: Any) -> type:
        value = _built(value)
        if isinstance(value, Spec):
            return Belady if value.name in Belady.names else plugins.get(kind, value.name)
        return value if isinstance(value, type) else type(value)

    named: dict[str, tuple[object, ...]] = {}
    for value in values:
        parts = value if isinstance(value, tuple) else (value,)  # tiers
        texts = [text for part in parts if (text := _named(part))]
        if not texts or len(texts) < len(parts):
            continue
        for first, second in zip(named.setdefault(",".join(texts), parts), parts, strict=True):
            if first != second and class_of(first) is not class_of(second):
                msg = (
                    f"{axis}: two values are named {_named(first)!r}, "
                    f"{qualified(class_of(first))} and {qualified(class_of(second))}: give one "
                    "of the classes another name"
                )
                raise InputError(msg)


def file_plugins(kind: str, values: Sequence[object]) -> dict[str, str]:
    """Return the names in tables of the plugins in files among `values`, by their texts.

    That is the name of the class, with options; if another value has it too, the path.
    """
    names = {text: text for value in values if (text := _named(value))}
    specs = [value for value in values if isinstance(value, Spec) and ".py:" in value.name]
    for spec in specs:
        names[str(spec)] = str(Spec(Plugins().get(kind, spec.name).name, spec.options))
    counts = Counter(names.values())
    for spec in specs:
        if counts[names[str(spec)]] > 1:
            names[str(spec)] = str(Spec(spec.name.removesuffix(":"), spec.options))
    return {str(spec): names[str(spec)] for spec in specs}


def _at(document: Any, path: str) -> Any:
    """Return the value at a dotted path; None if a part of the path is missing."""
    for name in path.split("."):
        document = None if document is None else document.get(name)
    return document


def _reason(error: Exception | SystemExit) -> str:
    """Return why a cell failed; for an error that kvcore does not raise itself, also where."""
    if isinstance(error, KvcoreError):
        return str(error)
    *_, frame = extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {frame.name} ({frame.lineno}): {error}"


def _shares(result: Reported, sessions: Mapping[int | str, int]) -> dict[str, Parts | None]:
    """Return what parts of the requests add to the figures of a simulation.

    The parts are groups of sessions, or stretches of time if there are no `sessions`.
    """
    log = result.log
    order = sorted(range(len(log.ids)), key=list(log.arrival).__getitem__)
    names = ("prompt", "admitted", "hit", "loaded", "arrival", "first_token", "verdict")
    prompts, admitted, hits, loaded, arrival, first, verdict = (
        [values[row] for row in order] for values in (list(getattr(log, n)) for n in names)
    )
    # A request that is rejected before it is admitted looks nothing up.
    prompts = [tokens * (at >= 0) for tokens, at in zip(prompts, admitted, strict=True)]
    ids = list(log.ids)
    groups = [sessions[ids[row]] for row in order] if sessions else []
    waits = [max(0, end - begin) / NS_PER_S for begin, end in zip(arrival, first, strict=True)]
    waits = [wait if end >= 0 else 0.0 for wait, end in zip(waits, first, strict=True)]
    reused = [hit + more for hit, more in zip(hits, loaded, strict=True)]
    met, judged = [v == MET for v in verdict], result.goodput is not None
    return {
        "hit_ratio_token": sums(hits, prompts, groups),
        "reuse_ratio_token": sums(reused, prompts, groups),
        "ttft_s_mean": sums(waits, [end >= 0 for end in first], groups),
        "goodput": sums(met, judged * result.simulated_s, groups),
    }
