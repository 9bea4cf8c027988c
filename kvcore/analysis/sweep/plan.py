"""Run a sweep: every cell of a grid, each run once, whatever happens in between."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from typing import Any, Protocol, Self, TypeAlias

import attrs

from kvcore.analysis.belady import Belady
from kvcore.analysis.sweep.executors import Processes
from kvcore.analysis.sweep.grid import CLUSTER as OF_CLUSTER
from kvcore.analysis.sweep.grid import PART, Grid, axes_of
from kvcore.analysis.sweep.journal import Journal
from kvcore.analysis.sweep.runner import (
    CLUSTER,
    RESULTS,
    CellRun,
    Outcome,
    Task,
    WorkloadCache,
)
from kvcore.notebook import Shown, data_frame
from kvcore.progress import Progress, silent

Row: TypeAlias = dict[str, Any]
"""A row of the results, by the names of its columns."""


class Executor(Protocol):
    """The machines on which cells are run."""

    def run(self, tasks: Iterable[Task]) -> Generator[Outcome]:
        """Yield the outcomes of `tasks` as they come, one for each."""


@attrs.frozen
class Plan:
    """The cells of a grid, each of which can be run.

    Attributes:
        grid: what was asked for.
        tasks: one a cell, in the grid's order.
        rows: the axes of each cell.
    """

    grid: Grid
    tasks: list[Task]
    rows: list[Row]

    @classmethod
    def of(cls, grid: Grid) -> Self:
        """Build the parts of every cell once, and name the cell.

        Reads each workload for its digest; runs nothing.

        Raises:
            InputError, PluginError: a cell that cannot be; names the option.
        """
        known = WorkloadCache()
        tasks, rows = [], []
        for config in grid:
            cell = CellRun(config, known)
            tasks.append(Task(cell.digest, config))
            left_out = set(PART) - grid.axes.keys()
            rows.append({k: value for k, value in cell.row.items() if k not in left_out})
        return cls(grid, tasks, rows)


@attrs.frozen
class Sweep(Shown):
    """The result of a sweep.

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

    def to_frame(self) -> Any:
        """Return a polars DataFrame of the rows.

        Raises:
            PluginError: polars is not installed.
        """
        return data_frame(self.rows, "`sweep.rows`")


def sweep(
    plan: Plan,
    journal: Journal,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Run the cells of `plan` that `journal` does not have.

    Each is written to the journal when it is finished. Cells that come to the same are run
    once; a cell that lacks a column in the journal is run again. Memory grows with the
    cells, not with the requests.

    Args:
        plan: the cells.
        journal: the finished cells; open.
        executor: where to run; None: `Processes()`.
        progress: is given the number of finished cells; None: nothing is.

    Raises:
        PluginError: the executor cannot work here.
        StorageError: the journal cannot be written.
    """
    axes = {task.digest: row for task, row in zip(plan.tasks, plan.rows, strict=True)}
    columns = dict.fromkeys(RESULTS[plan.grid.mode])
    known = {
        digest: result
        for digest, result in journal.results.items()
        if result.keys() == columns.keys()
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
    shown = columns if plan.grid.axes.keys() & set(OF_CLUSTER) else columns.keys() - CLUSTER
    rows = [
        row | {name: known.get(task.digest, columns)[name] for name in columns if name in shown}
        for task, row in zip(plan.tasks, plan.rows, strict=True)
    ]
    if plan.grid.mode == "compare":
        _add_shares(rows)
    for task, row in zip(plan.tasks, rows, strict=True):
        row["error"] = errors.get(task.digest)
    return Sweep(plan.grid, rows, len(axes) - len(missing), len(missing))


def _add_shares(rows: list[Row]) -> None:
    """Add each row's share of what the optimum hits where all but the policy is the same."""
    axes = [name for name in axes_of("compare") if name not in ("eviction", "memory")]

    def contest(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in axes)

    best = {contest(row): row["hit_blocks"] for row in rows if row["eviction"] in Belady.names}
    for row in rows:
        most, hits = best.get(contest(row)), row["hit_blocks"]
        row["share_of_optimum"] = None if not most or hits is None else hits / most
