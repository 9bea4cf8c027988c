"""Run a sweep: every cell of a grid once, in processes of this machine or on a Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from socket import create_connection
from typing import Any, Protocol, Self, TypeAlias
from uuid import uuid4

import attrs

from kvcore.errors import InputError, PluginError
from kvcore.lazy import import_extra
from kvcore.notebook import Shown, data_frame
from kvcore.progress import Progress, silent
from kvcore_lab.statistics import Parts
from kvcore_lab.sweep.cells import (
    CLUSTER_COLUMNS,
    HIDDEN,
    RESULTS,
    SHARES,
    CellRun,
    CellRunner,
    Outcome,
    Task,
    WorkloadCache,
    file_plugins,
    refuse_namesakes,
    type_of,
)
from kvcore_lab.sweep.grid import CLUSTER_AXES, PART, Grid, axes_of
from kvcore_lab.sweep.journal import Journal
from kvcore_lab.workers import ATTEMPTS, WorkerDied, can_fork, queue_of, work_all
from kvcore_plugins.host import cpus
from kvcore_replay.belady import Belady
from kvcore_replay.gpu_cost import COLUMNS as COSTS
from kvcore_replay.gpu_cost import read_gpu_prices, row_cost

Row: TypeAlias = dict[str, Any]
"""A row of the results, by the names of its columns."""


class Executor(Protocol):
    """Runs tasks, on this machine or others."""

    def run(self, tasks: Iterable[Task]) -> Generator[Outcome]:
        """Yield the outcome of each of `tasks`, in the order in which they end."""


CONNECT_SECONDS = 10.0


@attrs.frozen
class RayCluster:
    """Runs tasks on a Ray cluster that already runs.

    Its machines need kvcore, the plugins and the files of the workloads, at the same paths; a
    cell for which one of them differs fails. A worker that dies takes no other task with it;
    Ray starts its task again.

    Attributes:
        address: `host:port` or `ray://host:port`; `auto`: the cluster on this machine, or the
            one that RAY_ADDRESS names; `local`: a cluster that is started for the sweep.
        jobs: the most cells at a time; None: as many as the cluster takes.

    Raises:
        InputError: `jobs` is below 1.
        PluginError: Ray is not installed, or there is no cluster (from `run`).
    """

    address: str = "auto"
    jobs: int | None = None

    def __attrs_post_init__(self) -> None:
        """Check `jobs`."""
        if self.jobs is not None and self.jobs < 1:
            msg = f"jobs={self.jobs}: give at least 1 cell at a time"
            raise InputError(msg)

    def run(self, tasks: Iterable[Task]) -> Generator[Outcome]:
        """Yield the outcomes of `tasks`, in the order of their ends."""
        tasks = queue_of(tasks)
        if not tasks:
            return
        ray = import_extra("ray", "Ray cannot be imported", "ray")
        ours = not ray.is_initialized()
        if ours:
            self._connect(ray)
        remote = ray.remote(max_retries=ATTEMPTS - 1)(attempt)
        sweep, folder = uuid4().hex, str(Path.cwd())
        running: dict[Any, Task] = {}
        try:
            while tasks or running:
                while tasks and (self.jobs is None or len(running) < self.jobs):
                    task = tasks.popleft()
                    running[remote.remote(sweep, folder, task)] = task
                (done, *_), _ = ray.wait(list(running))
                yield _outcome(ray, done, running.pop(done))
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
            if ours:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        address = self.address
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS", address)
        try:
            _check_answers(address)
            ray.init(
                address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({"include_dashboard": False} if address == "local" else {}),
            )
        except (OSError, ImportError, ValueError, RuntimeError) as error:
            where = "on this machine" if address == "auto" else f"at {address}"
            reason = str(error).partition("\n")[0].rstrip(".")
            msg = (
                f"there is no Ray cluster {where} that lets us in ({reason}): start one with "
                "`ray start --head`, or say where one is with executor ray:HOST:PORT; if it "
                "asks for a token, give that in RAY_AUTH_TOKEN"
            )
            raise PluginError(msg) from error


def _check_answers(address: str) -> None:
    """Raise OSError if `host:port` does not answer: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


def attempt(sweep: str, folder: str, task: Task) -> Outcome:
    """Run a task in a worker of Ray. Paths in the task are relative to `folder`."""
    with suppress(OSError):
        os.chdir(folder)
    return _runner(sweep)(task)


@lru_cache(maxsize=1)
def _runner(sweep: str) -> CellRunner:
    """Return the runner of this process, a new one for each sweep."""
    del sweep
    return CellRunner()


def _outcome(ray: Any, done: Any, task: Task) -> Outcome:
    try:
        outcome: Outcome = ray.get(done)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()
        return Outcome(
            task.digest, None, f"Ray gave it up: {reason[-1] if reason else error!r}"
        )
    return outcome


@attrs.frozen
class Processes:
    """Runs tasks in processes of this machine.

    They are forks of this process where that is safe, so that none of them reads the workload
    of the first task again. When a worker dies, the tasks that were running are run again, each
    alone; a task whose workers die a few times has failed.

    Attributes:
        jobs: number of processes; None: one for each CPU that this process may use.
        known: the plugins and workloads of this process, which its forks share.

    Raises:
        InputError: `jobs` is below 1.
    """

    jobs: int | None = None
    known: WorkloadCache = attrs.field(factory=WorkloadCache, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        """Check `jobs`."""
        if self.jobs is not None and self.jobs < 1:
            msg = f"jobs={self.jobs}: give at least 1 process"
            raise InputError(msg)

    def run(self, tasks: Iterable[Task]) -> Generator[Outcome]:
        """Yield the outcomes of `tasks` in the order in which they end.

        No process outlives the generator.
        """
        jobs, tasks = cpus() if self.jobs is None else self.jobs, queue_of(tasks)
        results = work_all(CellRunner, tasks, jobs)
        if can_fork() and tasks:
            self.known.hold(tasks[0].cell)
            results = work_all(partial(CellRunner, self.known), tasks, jobs, "fork")
        with closing(results) as done:
            for task, outcome in done:
                if isinstance(outcome, WorkerDied):
                    yield Outcome(task.digest, None, str(outcome))
                else:
                    yield outcome


@attrs.frozen
class ThisProcess:
    """Runs tasks one after another in this process.

    Attributes:
        known: the plugins and workloads that all of them share.
    """

    known: WorkloadCache = attrs.field(factory=WorkloadCache, repr=False, eq=False)

    def run(self, tasks: Iterable[Task]) -> Generator[Outcome]:
        """Yield the outcomes of `tasks`, in their order."""
        runner, tasks = CellRunner(self.known), queue_of(tasks)
        while tasks:
            yield runner(tasks.popleft())


def known_to(executor: Executor) -> WorkloadCache:
    """Return the workloads that an executor shares with this process; else new ones."""
    if isinstance(executor, ThisProcess | Processes):
        return executor.known
    return WorkloadCache()


def executor_named(text: str, jobs: int | None = None) -> Processes | RayCluster:
    """Return the executor that `local`, `ray` or `ray:ADDRESS` names.

    Raises:
        InputError: another name, or `jobs` below 1.
    """
    name, _, address = text.partition(":")
    if text == "local":
        return Processes(jobs)
    if name == "ray":
        # `ray://host:port` is an address as a whole.
        return RayCluster(text if address.startswith("//") else address or "auto", jobs)
    msg = f"executor {text!r} is not known; there are: local, ray, ray:HOST:PORT"
    raise InputError(msg)


def executor_for(where: str | None, jobs: int | None) -> Executor:
    """Return `ThisProcess` for one local task at a time, otherwise as `executor_named`."""
    alone = jobs == 1 and where in (None, "local")
    return ThisProcess() if alone else executor_named(where or "local", jobs)


@attrs.frozen
class Plan:
    """The tasks of a grid: all its cells, checked.

    Attributes:
        grid: the grid.
        tasks: one per cell, in the order of the grid.
        rows: the axes of each cell.
    """

    grid: Grid
    tasks: list[Task]
    rows: list[Row]

    @classmethod
    def from_grid(cls, grid: Grid) -> Self:
        """Build the parts of every cell once, and compute its digest.

        Reads each workload for its digest; runs no cell but without its requests.

        Raises:
            InputError, PluginError: a cell is not valid, or two classes have one name; names
                the option.
        """
        known = WorkloadCache()
        tasks, rows = [], []
        for axis, values in grid.axes.items():
            refuse_namesakes(axis, values)
        left_out = set(PART) - grid.axes.keys()
        names = {axis: file_plugins(axis, values) for axis, values in grid.axes.items()}
        for config in grid:
            cell = CellRun(config, known)
            cell.check()
            tasks.append(Task(cell.digest, config))
            rows.append(
                {
                    axis: names.get(axis, {}).get(value, value)
                    for axis, value in cell.row.items()
                    if axis not in left_out
                }
            )
        return cls(grid, tasks, rows)


@attrs.frozen(repr=False)
class Sweep(Shown):
    """The result of a sweep.

    Attributes:
        grid: the grid.
        rows: one per cell, in the order of the grid, with equal columns: its axes, its result,
            and `error`, the reason of its failure. They are the same on every machine, and if
            the sweep was killed and resumed.
        found: number of distinct cells that the journal had before.
        ran: number of distinct cells that were run.
        shares: of each row, what parts of the requests add to its figures, and to what these
            are divided by; None of a row that failed; empty: unknown.
        notes: what the workloads of the cells that were run say of their requests.
    """

    grid: Grid
    rows: list[Row]
    found: int
    ran: int
    shares: Sequence[Mapping[str, Parts | None] | None] = ()
    notes: Sequence[str] = ()

    @property
    def failed(self) -> list[Row]:
        """The rows of cells that failed."""
        return [row for row in self.rows if row["error"] is not None]

    def to_frame(self) -> Any:
        """Return a polars DataFrame of the rows.

        Raises:
            PluginError: polars is not installed.
        """
        names = next(iter(self.rows), {})
        empty = {name for name in names if all(row[name] is None for row in self.rows)}
        return data_frame(self.rows, "`sweep.rows`", {name: type_of(name) for name in empty})


def sweep(
    plan: Plan,
    journal: Journal | None = None,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
    gpu_price: Mapping[str, float] | None = None,
) -> Sweep:
    """Run the cells of `plan` that `journal` does not have.

    A cell is written to the journal when it has ended. Cells with equal digests are run once; a
    cell that lacks a column in the journal is run again. Memory grows with the cells, not with
    the requests.

    Args:
        plan: the cells.
        journal: the finished cells; it is open. None: they are not kept.
        executor: runs the cells; None: `Processes()`.
        progress: shows the number of cells that have ended; None: no progress.
        gpu_price: dollars an hour by device, in place of those of `gpu_cost.PRICES`.

    Raises:
        InputError: a price that is none, or of no device.
        PluginError: the executor cannot be used here.
        StorageError: the journal cannot be written.
    """
    prices = read_gpu_prices(gpu_price)
    axes = {task.digest: row for task, row in zip(plan.tasks, plan.rows, strict=True)}
    columns = dict.fromkeys(RESULTS[plan.grid.mode])
    known = {
        digest: result
        for digest, result in (journal.results if journal else {}).items()
        if result.keys() == columns.keys()
    }
    missing = {task.digest: task for task in plan.tasks if task.digest not in known}
    errors: dict[str, str] = {}
    notes: dict[str, Sequence[str]] = {}
    with (
        (progress or silent)("sweeping", len(missing)) as tick,
        closing((executor or Processes()).run(missing.values())) as outcomes,
    ):
        for outcome in outcomes:
            digest = outcome.digest
            if outcome.result is None:
                errors[digest] = str(outcome.error)
            else:
                if journal is not None:
                    journal.add(digest, axes[digest], outcome.result, outcome.wall_s)
                known[digest] = outcome.result
            notes[digest] = outcome.notes
            tick(1)
    told = dict.fromkeys(chain.from_iterable(notes.get(digest, ()) for digest in axes))
    hidden = {HIDDEN, *(() if plan.grid.axes.keys() & set(CLUSTER_AXES) else CLUSTER_COLUMNS)}
    shown = [name for name in columns if name not in hidden]
    rows = []
    for task, row in zip(plan.tasks, plan.rows, strict=True):
        result = known.get(task.digest, columns)
        rows.append(row | {name: result[name] for name in shown})
        if plan.grid.mode == "simulate":
            cost = row_cost({**row, **result}, prices)
            rows[-1] |= dict.fromkeys(COSTS) if cost is None else cost.columns()
    if plan.grid.mode == "compare":
        _add_shares(rows)
    for task, row in zip(plan.tasks, rows, strict=True):
        row["error"] = errors.get(task.digest)
    parts = [known.get(task.digest, columns)[HIDDEN] for task in plan.tasks]
    return Sweep(plan.grid, rows, len(axes) - len(missing), len(missing), parts, [*told])


def _add_shares(rows: list[Row]) -> None:
    """Add to each row its shares of what the optimum hits and reuses in an equal cell."""
    axes = [name for name in axes_of("compare") if name not in ("eviction", "memory")]

    def contest(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in axes)

    optima = [row for row in rows if row["eviction"] in Belady.names]
    for share, blocks in SHARES.items():
        best = {contest(row): row[blocks] for row in optima}
        for row in rows:
            most, own = best.get(contest(row)), row[blocks]
            row[share] = None if not most or own is None else own / most
