"""One cell run: simulated under a clock, or replayed without one."""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from functools import lru_cache
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import create_connection
from threading import Thread
from time import perf_counter
from traceback import extract_tb
from typing import Any, Generic, TypeAlias, TypeVar
from uuid import uuid4

import attrs

from kvcore.analysis.belady import Optimum
from kvcore.analysis.replay import replay
from kvcore.analysis.sweep._parts import Parts, Shelf
from kvcore.analysis.sweep.grid import Cell, Mode
from kvcore.errors import InputError, KvcoreError, PluginError
from kvcore.serving import simulate

HITS = {
    "lookup_blocks": "lookup_blocks",
    "hit_blocks": "hit_blocks",
    "hit_ratio_block": "ratio.block",
    "hit_ratio_token": "ratio.token",
    "hit_ratio_request": "ratio.request",
}


TIMES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s")


SPREAD = ("mean", "p50", "p90", "p95", "p99")


TIMED = {
    **{name: name for name in ("requests", "completed", "rejected", "offered_load")},
    "simulated_s": "simulated_s",
    # `steps` is what they may hold.
    "step_count": "steps",
    **{f"{time}_{part}": f"{time}.{part}" for time in TIMES for part in SPREAD},
    "throughput_tokens_s": "throughput_tokens_s",
    "goodput": "goodput",
    "slo_met": "slo.met",
    "preemptions_pause": "preemptions.pause",
    "preemptions_recompute": "preemptions.recompute",
    "evicted_blocks": "evicted_blocks",
    **{name: f"hit.{path}" for name, path in HITS.items()},
    "lost_tokens": "lost_tokens",
    "pool_active_mean": "pool.active.mean",
    "pool_active_peak": "pool.active.peak",
}
"""Columns of a simulated cell, and where each is in the summary of its run."""


UNTIMED = ("requests", *HITS, "evicted_blocks")


RESULTS: dict[Mode, tuple[str, ...]] = {"simulate": tuple(TIMED), "compare": UNTIMED}
"""The columns that a cell's run fills, by mode."""


@attrs.frozen
class Task:
    """A cell to be run, and the digest that names it."""

    digest: str
    cell: Cell


@attrs.frozen
class Outcome:
    """What came of a task.

    Attributes:
        digest: of its cell.
        result: its columns; None if it failed.
        error: why it failed.
        wall_s: seconds it took.
    """

    digest: str
    result: dict[str, Any] | None
    error: str | None = None
    wall_s: float = 0.0


class Bench:
    """Runs one task after another in one process."""

    def __init__(self) -> None:
        self._shelf = Shelf()

    def attempt(self, task: Task) -> Outcome:
        """Run a task; what it raises is its outcome, so that the other cells go on."""
        begin = perf_counter()
        try:
            result = self._run(task)
        except Exception as error:  # noqa: BLE001 - told, and the sweep fails in the end
            return Outcome(task.digest, None, _reason(error))
        return Outcome(task.digest, result, wall_s=round(perf_counter() - begin, 6))

    def _run(self, task: Task) -> dict[str, Any]:
        parts = Parts(task.cell, self._shelf)
        if parts.digest != task.digest:
            msg = (
                "this process would run another cell: a file, a plugin or kvcore itself has "
                "changed since the sweep began, or is not the same on this machine"
            )
            raise KvcoreError(msg)
        return _timed(parts) if task.cell.mode == "simulate" else self._untimed(parts)

    def _untimed(self, parts: Parts) -> dict[str, Any]:
        if isinstance(parts.eviction, Optimum):
            future = self._shelf.future(parts.cell, parts.geometry)
            stats, evicted = parts.eviction.replay(
                future, parts.blocks, parts.geometry.block_size
            )
        else:
            cache = parts.cache()
            stats = replay(parts.workload, cache)
            evicted = cache.tree.evicted_blocks + cache.tree.expired_blocks
        return {
            "requests": stats.requests,
            "lookup_blocks": stats.lookup_blocks,
            "hit_blocks": stats.hit_blocks,
            **{f"hit_ratio_{unit}": ratio for unit, ratio in stats.ratios().items()},
            "evicted_blocks": evicted,
        }


def _timed(parts: Parts) -> dict[str, Any]:
    summary = simulate(
        parts.workload,
        cache=parts.cache(),
        scheduler=parts.scheduler,
        latency=parts.latency,
        batching=parts.batching,
        slo=parts.slo,
        rate_scale=parts.cell.rate_scale,
        residency=False,
    ).summary()
    return {column: _at(summary, path) for column, path in TIMED.items()}


def _at(document: Any, path: str) -> Any:
    """Return what is at a dotted path; None below what is None."""
    for name in path.split("."):
        document = None if document is None else document[name]
    return document


def _reason(error: Exception) -> str:
    """Say what failed; of what is no error of kvcore's making, where."""
    if isinstance(error, KvcoreError):
        return str(error)
    *_, frame = extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {frame.name} ({frame.lineno}): {error}"


CONNECT_SECONDS = 10.0


@attrs.frozen
class RayCluster:
    """Runs tasks on a Ray cluster that is there already.

    Its machines need kvcore, the plugins and the files of the workloads, at the same paths;
    what is not the same there is refused, cell by cell. A worker that dies takes its own
    task along and no other; Ray begins that anew.

    Attributes:
        address: `host:port` or `ray://host:port`; `auto`: the one on this machine, or that
            RAY_ADDRESS names; `local`: one that begins here and ends with the sweep.
        jobs: how many cells at a time, at most; None: as many as the cluster takes.

    Raises:
        InputError: no cell at a time.
        PluginError: Ray is not installed, or there is no cluster (from `run`).
    """

    address: str = "auto"
    jobs: int | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse to run nothing."""
        if self.jobs is not None and self.jobs < 1:
            msg = f"jobs={self.jobs}: give at least 1 cell at a time"
            raise InputError(msg)

    def run(self, tasks: Iterable[Task]) -> Generator[Outcome]:
        """Yield the outcomes of `tasks` as they come."""
        tasks = deque(tasks)
        if not tasks:
            return
        ray = _ray()
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
            for one in running:
                ray.cancel(one, force=True)
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
                "`ray start --head`, or say where one is with --executor ray:HOST:PORT; if it "
                "asks for a token, give that in RAY_AUTH_TOKEN"
            )
            raise PluginError(msg) from error


def _check_answers(address: str) -> None:
    """Raise OSError if nobody listens at `host:port`: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


def attempt(sweep: str, folder: str, task: Task) -> Outcome:
    """Run a task: what a worker of Ray does. Paths in it are relative to `folder`."""
    with suppress(OSError):
        os.chdir(folder)
    return _bench(sweep).attempt(task)


@lru_cache(maxsize=1)
def _bench(sweep: str) -> Bench:
    """Return the bench of this process, a new one for each sweep."""
    del sweep
    return Bench()


def _outcome(ray: Any, done: Any, task: Task) -> Outcome:
    try:
        outcome: Outcome = ray.get(done)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()
        return Outcome(
            task.digest, None, f"Ray gave it up: {reason[-1] if reason else error!r}"
        )
    return outcome


def _ray() -> Any:
    try:
        import ray  # noqa: PLC0415 - an extra, and slow
    except ImportError as error:
        msg = f"Ray cannot be imported ({error}): pip install 'kvcore[ray]'"
        raise PluginError(msg) from error
    return ray


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
        with closing(work_all(_local_bench, tasks, jobs)) as done:
            for task, outcome in done:
                if isinstance(outcome, Death):
                    yield Outcome(task.digest, None, str(outcome))
                else:
                    yield outcome


def _local_bench() -> Callable[[Task], Outcome]:
    """Return what a worker does."""
    return Bench().attempt


ATTEMPTS = 3
"""How often a task is begun whose worker dies: killed, or out of memory."""


TaskT = TypeVar("TaskT")


OutcomeT = TypeVar("OutcomeT")


Work: TypeAlias = Callable[[], Callable[[TaskT], OutcomeT]]
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


class Worker(Generic[TaskT, OutcomeT]):
    """A process that does one task at a time."""

    def __init__(self, work: Work[TaskT, OutcomeT]) -> None:
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

    def begin(self, number: int, task: TaskT) -> None:
        """Hand it a task. One that has died is noticed when its outcome is asked for."""
        self.number, self.task = number, task
        with suppress(OSError):
            self.connection.send(task)

    def outcome(self) -> OutcomeT | None:
        """Return the outcome of its task, which is there; None if it died instead."""
        try:
            outcome: OutcomeT = self.connection.recv()
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
    work: Work[TaskT, OutcomeT], tasks: Iterable[TaskT], jobs: int
) -> Generator[tuple[TaskT, OutcomeT | Death]]:
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
    workers: dict[Any, Worker[TaskT, OutcomeT]] = {}
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
