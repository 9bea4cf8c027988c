"""Cells in processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing

import attrs

from kvcore.errors import InputError
from kvcore.lab.sweeping.bench import Bench, Outcome, Task
from kvcore.lab.workers import Death, cpus, work_all


@attrs.frozen
class Processes:
    """Runs tasks in processes of this machine.

    A worker that dies takes its own task along and no other; that is begun anew, a few
    times, before it counts as failed.

    Attributes:
        jobs: how many processes; None: one for each CPU that this one may use.

    Raises:
        InputError: fewer than one.
    """

    jobs: int | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse to run nowhere."""
        if self.jobs is not None and self.jobs < 1:
            msg = f"jobs={self.jobs}: give at least 1 process"
            raise InputError(msg)

    def run(self, tasks: Iterable[Task]) -> Generator[Outcome]:
        """Yield the outcomes of `tasks` as they come. No process outlives the generator."""
        jobs = cpus() if self.jobs is None else self.jobs
        with closing(work_all(_bench, tasks, jobs)) as done:
            for task, outcome in done:
                if isinstance(outcome, Death):
                    yield Outcome(task.digest, None, str(outcome))
                else:
                    yield outcome


def _bench() -> Callable[[Task], Outcome]:
    """Return what a worker does."""
    return Bench().attempt
