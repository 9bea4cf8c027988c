"""Work done in processes of this machine, each of which may die without harm to the others."""

from __future__ import annotations

import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any, Generic, TypeAlias, TypeVar

import attrs

ATTEMPTS = 3
"""How often a task is begun whose worker dies: killed, or out of memory."""

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")

Work: TypeAlias = Callable[[], Callable[[Task], Outcome]]
"""A function of a module, called once in each worker, that returns what does its tasks."""

_spawn = get_context("spawn")


@attrs.frozen
class Death:
    """What came of a task whose workers died; as text, why that may be.

    Attributes:
        ended: how the last one ended.
    """

    ended: str

    def __str__(self) -> str:
        """Return it as a reason."""
        return (
            f"its worker died {ATTEMPTS} times, at last by {self.ended}: a crash, or more "
            "memory than there is (fewer --jobs need less)"
        )


class Worker(Generic[Task, Outcome]):
    """A process that does one task at a time."""

    def __init__(self, work: Work[Task, Outcome]) -> None:
        self.connection, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_serve, args=(theirs, work), daemon=True)
        # Ctrl-C is for the parent alone: workers are born with the signal blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # With no other copy of its end open, the pipe ends when the process does.
        theirs.close()

    def begin(self, number: int, task: Task) -> None:
        """Hand it a task. One that has died is noticed when its outcome is asked for."""
        self.number, self.task = number, task
        with suppress(OSError):
            self.connection.send(task)

    def outcome(self) -> Outcome | None:
        """Return the outcome of its task, which is there; None if it died instead."""
        try:
            outcome: Outcome = self.connection.recv()
        except (EOFError, OSError):
            return None
        return outcome

    def stop(self) -> str:
        """End it, if it has not ended; say how it did."""
        self._process.kill()
        self._process.join()
        self.connection.close()
        code = self._process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def work_all(
    work: Work[Task, Outcome], tasks: Iterable[Task], jobs: int
) -> Generator[tuple[Task, Outcome | Death]]:
    """Yield each of `tasks` with its outcome, which is not None, as they come.

    A worker that dies takes its own task along and no other; that is begun anew, a few
    times, before its outcome is `Death`. No process outlives the generator, or its parent.

    Args:
        work: what the workers do.
        tasks: what can be sent to them.
        jobs: processes at a time, at most.
    """
    waiting = deque(enumerate(tasks))
    deaths: Counter[int] = Counter()
    workers: dict[Any, Worker[Task, Outcome]] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                worker = Worker(work)
                workers[worker.connection] = worker
                worker.begin(*waiting.popleft())
            for connection in wait(list(workers)):
                worker = workers[connection]
                number, task, outcome = worker.number, worker.task, worker.outcome()
                if outcome is not None and waiting:
                    worker.begin(*waiting.popleft())
                else:
                    ended = worker.stop()
                    del workers[connection]
                if outcome is None:
                    deaths[number] += 1
                    if deaths[number] < ATTEMPTS:
                        waiting.append((number, task))
                        continue
                yield task, Death(ended) if outcome is None else outcome
    finally:
        for worker in workers.values():
            worker.stop()


def cpus() -> int:
    """Return how many CPUs this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _serve(connection: Connection, work: Work[Any, Any]) -> None:
    """Do the tasks that come, until no more do: the life of a worker."""
    Thread(target=_die_with_parent, daemon=True).start()
    # What a plugin prints is no part of the parent's results.
    os.dup2(2, 1)
    attempt = work()
    with suppress(EOFError, OSError):
        while True:
            connection.send(attempt(connection.recv()))


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
