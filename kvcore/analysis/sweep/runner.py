"""A sweep: every cell of a grid, each run once, whatever happens in between."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from typing import Any, Protocol, Self, TypeAlias

import attrs

from kvcore.analysis.belady import Belady
from kvcore.analysis.sweep._parts import Parts, Shelf
from kvcore.analysis.sweep.executors import RESULTS, Outcome, Processes, RayCluster, Task
from kvcore.analysis.sweep.grid import Grid, Mode, axes_of
from kvcore.analysis.sweep.journal import Journal
from kvcore.errors import InputError
from kvcore.progress import Progress, silent

Row: TypeAlias = dict[str, Any]


BOUND = str(Belady.name)


class Executor(Protocol):
    """Where cells are run."""

    def run(self, tasks: Iterable[Task]) -> Generator[Outcome]:
        """Yield the outcomes of `tasks` as they come, one for each."""


@attrs.frozen
class Plan:
    """The cells of a grid, each of which can be run.

    Attributes:
        grid: what was asked for.
        tasks: one a cell, in the grid's order.
        rows: the axes of each.
    """

    grid: Grid
    tasks: list[Task]
    rows: list[Row]

    @classmethod
    def of(cls, grid: Grid) -> Self:
        """Build the parts of every cell once, and name it.

        Reads each workload for its digest; runs nothing.

        Raises:
            InputError, PluginError: a cell that cannot be; names the field.
        """
        shelf = Shelf()
        tasks, rows = [], []
        for cell in grid:
            parts = Parts(cell, shelf)
            if not isinstance(parts.eviction, Belady):
                parts.cache()
            tasks.append(Task(parts.digest, cell))
            rows.append(parts.row)
        return cls(grid, tasks, rows)


@attrs.frozen
class Sweep:
    """What a sweep came to.

    Attributes:
        grid: what was asked for.
        rows: one a cell, in the grid's order, all with the same columns: its axes, its
            result, and `error`, which says why it failed. The same on every machine, and
            however often the sweep was killed on the way.
        found: how many distinct cells the journal had already.
        ran: how many were run.
    """

    grid: Grid
    rows: list[Row]
    found: int
    ran: int

    @property
    def failed(self) -> list[Row]:
        """The rows of cells that failed."""
        return [row for row in self.rows if row["error"] is not None]


def sweep(
    plan: Plan,
    journal: Journal,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Run the cells of `plan` that `journal` does not have.

    Each is written down as it is finished. Cells that come to the same are run once; what
    lacks a column in the journal is run again. Memory grows with the cells, not with the
    requests.

    Args:
        plan: what to run.
        journal: where finished cells are; open.
        executor: where to run; None: `Processes()`.
        progress: is told how many cells are finished; None: nobody is.

    Raises:
        PluginError: the executor cannot work here.
        StorageError: the journal cannot be written.
    """
    axes = {task.digest: row for task, row in zip(plan.tasks, plan.rows, strict=True)}
    columns = set(RESULTS[plan.grid.mode])
    known = {
        digest: result for digest, result in journal.results.items() if result.keys() == columns
    }
    missing = {task.digest: task for task in plan.tasks if task.digest not in known}
    errors: dict[str, str] = {}
    with (
        (progress or silent)("sweeping", len(missing)) as tick,
        closing((executor or Processes()).run(missing.values())) as outcomes,
    ):
        for outcome in outcomes:
            digest = outcome.digest
            if outcome.result is None:
                errors[digest] = str(outcome.error)
            else:
                journal.add(digest, axes[digest], outcome.result, outcome.wall_s)
                known[digest] = outcome.result
            tick(1)
    rows = [
        row | _filled(plan.grid.mode, known.get(task.digest, {}))
        for task, row in zip(plan.tasks, plan.rows, strict=True)
    ]
    if plan.grid.mode == "compare":
        _add_shares(rows)
    for task, row in zip(plan.tasks, rows, strict=True):
        row["error"] = errors.get(task.digest)
    return Sweep(plan.grid, rows, len(axes) - len(missing), len(missing))


def executor_named(text: str, jobs: int | None = None) -> Executor:
    """Return the executor that `local`, `ray` or `ray:ADDRESS` names.

    Raises:
        InputError: another name, or no job.
    """
    name, _, address = text.partition(":")
    if text == "local":
        return Processes(jobs)
    if name == "ray":
        # `ray://host:port` is an address as a whole.
        return RayCluster(text if address.startswith("//") else address or "auto", jobs)
    msg = f"executor {text!r} is not known; there are: local, ray, ray:HOST:PORT"
    raise InputError(msg)


def _filled(mode: Mode, result: Row) -> Row:
    return {column: result.get(column) for column in RESULTS[mode]}


def _add_shares(rows: list[Row]) -> None:
    """Add each row's share of what the optimum hits where all but the policy is the same."""
    axes = [name for name in axes_of("compare") if name not in ("eviction", "memory")]

    def contest(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in axes)

    best = {contest(row): row["hit_blocks"] for row in rows if row["eviction"] == BOUND}
    for row in rows:
        most, hits = best.get(contest(row)), row["hit_blocks"]
        row["share_of_optimum"] = None if not most or hits is None else hits / most
