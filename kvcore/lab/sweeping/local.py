"""Cells in processes of this machine, each of which may die without harm to the others."""

from __future__ import annotations

import os
import signal
from collections import Counter, deque
from collections.abc import Generator, Iterable
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from threading import Thread

import attrs

from kvcore.errors import InputError
from kvcore.lab.sweeping.bench import Bench, Outcome, Task

ATTEMPTS = 3
"""How often a cell is begun whose worker dies: killed, or out of memory."""

_spawn = get_context("spawn")


class Worker:
    """A process that runs one task at a time."""

    def __init__(self) -> None:
        self.connection, theirs = _spawn.Pipe()
        self.task: Task | None = None
        self._process = _spawn.Process(target=_work, args=(theirs,), daemon=True)
        # Ctrl-C is for the parent alone: workers are born with the signal blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # With no other copy of its end open, the pipe ends when the process does.
        theirs.close()

    def begin(self, task: Task) -> None:
        """Hand it a task. One that has died is noticed when its outcome is asked for."""
        self.task = task
        with suppress(OSError):
            self.connection.send(task)

    def outcome(self) -> Outcome | None:
        """Return the outcome of its task, which is there; None if it died instead."""
        try:
            outcome: Outcome = self.connection.recv()
        except (EOFError, OSError):
            return None
        self.task = None
        return outcome

    def stop(self) -> str:
        """End it, if it has not ended; say how it did."""
        self._process.kill()
        self._process.join()
        self.connection.close()
        code = self._process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


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
        waiting = deque(tasks)
        deaths: Counter[str] = Counter()
        jobs = _cpus() if self.jobs is None else self.jobs
        workers: dict[Connection, Worker] = {}
        try:
            while waiting or workers:
                while waiting and len(workers) < jobs:
                    worker = Worker()
                    workers[worker.connection] = worker
                    worker.begin(waiting.popleft())
                for connection in wait(list(workers)):
                    worker = workers[connection]  # type: ignore[index]
                    task, outcome = worker.task, worker.outcome()
                    assert task is not None
                    if outcome is not None and waiting:
                        worker.begin(waiting.popleft())
                    else:
                        ended = worker.stop()
                        del workers[connection]  # type: ignore[arg-type]
                    if outcome is None:
                        deaths[task.digest] += 1
                        if deaths[task.digest] < ATTEMPTS:
                            waiting.append(task)
                            continue
                        outcome = Outcome(task.digest, None, _death(ended))
                    yield outcome
        finally:
            for worker in workers.values():
                worker.stop()


def _cpus() -> int:
    """Return how many CPUs this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _death(ended: str) -> str:
    return (
        f"its worker died {ATTEMPTS} times, at last by {ended}: a crash, or more memory than "
        "there is (fewer --jobs need less)"
    )


def _work(connection: Connection) -> None:
    """Run the tasks that come, until no more do: the life of a worker."""
    Thread(target=_die_with_parent, daemon=True).start()
    # What a plugin prints is no part of the parent's results.
    os.dup2(2, 1)
    bench = Bench()
    with suppress(EOFError, OSError):
        while True:
            connection.send(bench.attempt(connection.recv()))


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
