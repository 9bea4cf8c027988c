"""Tasks on worker processes: a task whose worker dies is run again.

Calls are made by forks of this process where that is safe, on Linux and without other threads:
they have read already what it has read. Elsewhere a worker is a new process, and gets copies.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait as wait_for_process
from multiprocessing.process import BaseProcess
from threading import Thread, active_count, current_thread, main_thread
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import attrs

from kvcore.errors import InputError, PluginError
from kvcore.plugins import FAILURES

ATTEMPTS = 3
"""Number of times that a task is started if its worker dies: killed, or out of memory."""

TaskT = TypeVar("TaskT")

OutcomeT = TypeVar("OutcomeT")

Work: TypeAlias = Callable[[], Callable[[TaskT], OutcomeT]]
"""A function of a module, called once in each worker; returns the function of its tasks."""

Start: TypeAlias = Literal["fork", "spawn"]
"""How a worker starts: as a fork of this process, or as a new one."""


@attrs.frozen
class WorkerDied:
    """The outcome of a task whose workers died; its text names likely causes.

    Attributes:
        ended: the signal or the exit code with which the last worker ended.
    """

    ended: str

    def __str__(self) -> str:
        """Return the reason for which the task has no other outcome."""
        return (
            f"its worker died {ATTEMPTS} times, at last by {self.ended}: a crash, or more "
            "memory than there is (fewer jobs need less)"
        )


def work_all(
    work: Work[TaskT, OutcomeT],
    tasks: Iterable[TaskT],
    jobs: int,
    start: Start = "spawn",
) -> Generator[tuple[TaskT, OutcomeT | WorkerDied]]:
    """Yield each of `tasks` with its outcome, in the order in which they end.

    When a worker dies, the tasks that were running are run again, each alone, so that the task
    that kills its worker is known; after `ATTEMPTS` deaths its outcome is `WorkerDied`. No
    process outlives the generator, or its parent.

    Args:
        work: makes the function of the tasks in each worker.
        tasks: objects that can be pickled. A deque is emptied, and may grow meanwhile.
        jobs: the most processes at a time.
        start: how they start. With `fork`, `work` may be any function.
    """
    waiting = queue_of(tasks)
    suspects: deque[tuple[int, TaskT]] = deque()
    if start == "fork":
        gc.freeze()  # the collector of a fork would copy all memory that it looks at
    try:
        while waiting or suspects:
            queue, deaths, width = waiting, 1, jobs
            if suspects:
                before, suspect = suspects.popleft()
                queue, deaths, width = deque([suspect]), before + 1, 1
            with closing(_Pool(work, width, start)) as pool:
                for task, outcome in pool.run(queue):
                    if isinstance(outcome, WorkerDied) and deaths < ATTEMPTS:
                        suspects.append((deaths, task))
                    else:
                        yield task, outcome
    finally:
        if start == "fork":
            gc.unfreeze()


def check_jobs(jobs: int) -> None:
    """Raise InputError for a number of processes below 1."""
    if jobs < 1:
        msg = f"{jobs} jobs were asked for; give 1 or more"
        raise InputError(msg)


@attrs.frozen
class Call(Generic[OutcomeT]):
    """A call of a function, in this process or another one.

    Attributes:
        function: the function; a process that is no fork of this one needs it pickled.
        name: the call in error messages: `the replay of zipf with 9 blocks and policy 'lru'`.
    """

    function: Callable[[], OutcomeT]
    name: str


def call_all(calls: Sequence[Call[OutcomeT]], jobs: int) -> Iterator[tuple[int, OutcomeT]]:
    """Yield (place in `calls`, result) of each call, in the order in which they end.

    With several `jobs` the functions are called by that number of processes, none of which
    outlives the generator. The results are the same; they are pickled.

    Raises:
        InputError: a function cannot be sent to another process.
        PluginError: the processes of a call died.
        Exception: the first exception that a call has raised; from another process that cannot
            send it a PluginError with its text.
    """
    if jobs == 1 or len(calls) < 2:  # noqa: PLR2004
        for index, call in enumerate(calls):
            yield index, call.function()
        return
    with closing(_outcomes(calls, jobs)) as outcomes:
        for index, outcome in outcomes:
            if isinstance(outcome, WorkerDied):
                msg = f"{calls[index].name} failed: {outcome}"
                raise PluginError(msg)
            if isinstance(outcome, Exception):
                raise outcome
            yield index, outcome


def can_fork() -> bool:
    """Return True if a fork of this process is safe: no other thread may hold a lock."""
    return sys.platform == "linux" and active_count() == 1


def _outcomes(calls: Sequence[Call[Any]], jobs: int) -> Generator[tuple[int, Any]]:
    """Yield (place in `calls`, outcome) of each call, made by another process."""
    if can_fork():
        places = range(len(calls))
        yield from work_all(
            lambda: lambda index: _outcome(calls[index].function), places, jobs, "fork"
        )
        return
    packed = [(index, _packed(call)) for index, call in enumerate(calls)]
    with closing(work_all(_calling, packed, jobs)) as outcomes:
        for (index, _), outcome in outcomes:
            yield index, outcome


def _packed(call: Call[Any]) -> bytes:
    """Return the function of a call, pickled."""
    try:
        return pickle.dumps(call.function)
    except Exception as error:
        msg = (
            f"{call.name} cannot be sent to another process ({error}): define their classes "
            "at the top of a module, or use one job"
        )
        raise InputError(msg) from error


def _calling() -> Callable[[tuple[int, bytes]], Any]:
    """Return the function that makes packed calls; an exception is their outcome."""

    def call(task: tuple[int, bytes]) -> Any:
        try:
            function = pickle.loads(task[1])  # noqa: S301 - of the parent's making
        except FAILURES as error:  # whatever the classes do
            return InputError(
                "the workload or a policy cannot be read by another process "
                f"({error}): use one job"
            )
        return _outcome(function)

    return call


def _outcome(function: Callable[[], Any]) -> Any:
    """Call a function; an exception is its outcome, told in words if it cannot be sent."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - raised again by the parent
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301 - of this process's making
        except Exception:  # noqa: BLE001 - one whose class takes other arguments, for example
            return PluginError(f"{type(error).__name__}: {error}")
        return error


def queue_of(tasks: Iterable[TaskT]) -> deque[TaskT]:
    """Return `tasks` if it is a deque, so that tasks can be added to it; else a new deque."""
    return tasks if isinstance(tasks, deque) else deque(tasks)


class _Pool(Generic[TaskT, OutcomeT]):
    """Worker processes up to the death of one of them."""

    def __init__(self, work: Work[TaskT, OutcomeT], jobs: int, start: Start) -> None:
        self._jobs = jobs
        self._processes: set[BaseProcess] = set()
        self._executor = ProcessPoolExecutor(
            jobs, get_context(start), initializer=_begin, initargs=(work,)
        )

    def run(self, waiting: deque[TaskT]) -> Iterator[tuple[TaskT, OutcomeT | WorkerDied]]:
        """Yield (task, outcome) until no task waits, or a worker has died.

        The outcome of all tasks that were running then is `WorkerDied`.
        """
        running: dict[Future[OutcomeT], TaskT] = {}
        alive = True
        while running or (alive and waiting):
            while alive and waiting and len(running) < self._jobs:
                try:
                    future = self._submit(waiting[0])
                except BrokenProcessPool:  # a worker has died since it was last looked at
                    alive = False
                else:
                    running[future] = waiting.popleft()
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                task = running.pop(future)
                outcome: OutcomeT | WorkerDied
                try:
                    outcome = future.result()
                except BrokenProcessPool:
                    alive = False
                    outcome = WorkerDied(self._ended())
                yield task, outcome

    def close(self) -> None:
        """Kill all worker processes."""
        for process in self._processes:
            process.kill()
        self._executor.shutdown(cancel_futures=True)
        for process in self._processes:
            process.join()

    def _submit(self, task: TaskT) -> Future[OutcomeT]:
        before = set(active_children())
        # Ctrl-C is for the parent alone: workers start with the signal blocked.
        with _interrupts_delayed():
            try:
                future: Future[OutcomeT] = self._executor.submit(_run, task)
            finally:
                self._processes |= set(active_children()) - before
        return future

    def _ended(self) -> str:
        """Return the signal or exit code of the first worker that its pool did not end."""
        # The pool's thread waits for the workers. If this thread did too, the second of the two
        # would find no exit code, and the first might not have stored it yet.
        self._executor.shutdown()
        codes = [process.exitcode or 0 for process in self._processes]
        # The pool terminates the others when one has died.
        code = next((code for code in codes if code != -signal.SIGTERM), codes[0])
        if code >= 0:
            return f"exit code {code}"
        try:
            return signal.Signals(-code).name
        except ValueError:  # most real-time signals have no name
            return f"signal {-code}"


_ENDING = [s for s in signal.Signals if s.name in ("SIGTERM", "SIGHUP")]


@contextmanager
def _interrupts_delayed() -> Iterator[None]:
    """Delay signals that end verbs until the body ends; what it starts blocks SIGINT.

    If this thread blocks the signal, another thread gets it, and Python still raises the
    exception in the main thread. Raised while a worker starts, it would leave a worker that is
    not in its pool: that worker would wait for a task, and the interpreter for the worker; or
    it would read the end of a pipe from which it is to learn what to do.
    """
    caught: list[int] = []
    signals = (signal.SIGINT, *_ENDING) if current_thread() is main_thread() else ()
    # A default action ends the process, which takes its workers along.
    handlers = {n: handler for n in signals if callable(handler := signal.getsignal(n))}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    for signum in handlers:
        signal.signal(signum, lambda signum, _: caught.append(signum))
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if caught:
            signal.raise_signal(caught[0])


_task_function: list[Callable[[Any], Any]] = []
"""The function of the tasks, alone, if this process is a worker; else empty."""


def _begin(work: Work[Any, Any]) -> None:
    """Make this process a worker."""
    for sent in _ENDING:
        if callable(signal.getsignal(sent)):
            signal.signal(sent, signal.SIG_DFL)  # a fork has the handler of its parent
    Thread(target=_die_with_parent, daemon=True).start()
    # Output of plugins is no part of the parent's results.
    os.dup2(2, 1)
    _task_function.append(work())


def _run(task: Any) -> Any:
    return _task_function[0](task)


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait_for_process([parent.sentinel])
        os._exit(1)
