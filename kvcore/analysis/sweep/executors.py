"""Where the cells of a sweep are run: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from socket import create_connection
from typing import Any
from uuid import uuid4

import attrs

from kvcore.analysis.sweep.runner import CellRunner, Outcome, Task
from kvcore.analysis.workers import ATTEMPTS, WorkerDied, queue_of, work_all
from kvcore.errors import InputError, PluginError
from kvcore.extras import import_extra
from kvcore.host import cpus

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
    """Raise OSError if `host:port` does not answer: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


def attempt(sweep: str, folder: str, task: Task) -> Outcome:
    """Run a task: what a worker of Ray does. Paths in it are relative to `folder`."""
    with suppress(OSError):
        os.chdir(folder)
    return _runner(sweep).attempt(task)


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

    When a worker dies, the tasks that were running are begun anew, each alone; one whose
    workers die a few times counts as failed.

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
        with closing(work_all(_local_runner, tasks, jobs)) as done:
            for task, outcome in done:
                if isinstance(outcome, WorkerDied):
                    yield Outcome(task.digest, None, str(outcome))
                else:
                    yield outcome


def _local_runner() -> Callable[[Task], Outcome]:
    """Return what a worker does."""
    return CellRunner().attempt


@attrs.frozen
class ThisProcess:
    """Runs tasks one after another in this process."""

    def run(self, tasks: Iterable[Task]) -> Generator[Outcome]:
        """Yield the outcomes of `tasks` as they come."""
        runner, tasks = CellRunner(), queue_of(tasks)
        while tasks:
            yield runner.attempt(tasks.popleft())


def executor_named(text: str, jobs: int | None = None) -> Processes | RayCluster:
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
