"""Waiting jobs in the order of the scheduler, whose calls are checked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

from kvcore.cache import EvictionPolicy, LazyHeap
from kvcore.errors import PolicyError, shorten
from kvcore.plugins import FAILURES, find_override, policy_error, wrong_answer
from kvcore.plugins.base import has_no_order, raise_policy_error
from kvcore.serving.job import PAUSED, Job
from kvcore.serving.scheduler import LoopState, Scheduler, StepPlan

_HEARD: Final = ("queued", "admitted", "finished", "withdrawn")
"""The methods by which a scheduler hears of events."""


class CheckedScheduler:
    """Calls a scheduler, checks its answers, and reports its exceptions as its own.

    Attributes:
        scheduler: the scheduler.
        preemptive: whether a waiting job may take the slot of a running one.
        ranks: whether it orders jobs by `priority` alone; False: it overrides `plan`.
        changes: whether it overrides `changes_at`.
        heard: the methods that it overrides of those by which it hears of events.
    """

    __slots__ = ("changes", "heard", "preemptive", "ranks", "scheduler")

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.preemptive = scheduler.preemptive
        self.ranks = find_override(scheduler, "plan") is None
        self.changes = find_override(scheduler, "changes_at") is not None
        methods = {name: find_override(scheduler, name) for name in _HEARD}
        self.heard = {name: method for name, method in methods.items() if method is not None}

    def tell(self, event: str, job: Job, now: int) -> None:
        """Call the method for an event of `job`, if the scheduler overrides it.

        Raises:
            PolicyError: the scheduler failed.
        """
        method = self.heard.get(event)
        if method is not None:
            self.call(event, method, job, now)

    def call(
        self, method: str, function: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Call a function of the scheduler, or one that compares its answers.

        Raises:
            PolicyError: the function failed; the error names `method`.
        """
        try:
            return function(*arguments, **options)
        except FAILURES as error:
            raise_policy_error(self.scheduler, method, error)

    def priority(self, job: Job, now: int) -> Any:
        """Return the priority of `job` at this moment.

        Raises:
            PolicyError: the scheduler failed, or its answer has no place in an order.
        """
        try:
            priority = self.scheduler.priority(job, now)
            unordered = has_no_order(priority)
        except FAILURES as error:
            raise_policy_error(self.scheduler, "priority", error)
        if unordered:
            hint = ": is a `return` missing?" if priority is None else ""
            why = f"{priority!r}, which has no place in an order{hint}"
            raise wrong_answer(self.scheduler, f"priority() of {job!r}", why)
        return priority

    def changes_at(self, job: Job, now: int) -> int | None:
        """Return when (ns) the priority of `job` changes by itself; None: it does not.

        Raises:
            PolicyError: the scheduler failed, or its answer is no time after `now`.
        """
        due = self.call("changes_at", self.scheduler.changes_at, job, now)
        if due is not None and (type(due) is not int or due <= now):
            why = f"{due!r} at {now} ns: give whole ns after that, or None"
            raise wrong_answer(self.scheduler, f"changes_at() of {job!r}", why)
        return due

    def plan(self, state: LoopState) -> StepPlan:
        """Return the plan of the scheduler.

        Raises:
            PolicyError: the scheduler failed, or returned no plan.
        """
        plan = self.call("plan", self.scheduler.plan, state)
        if not isinstance(plan, StepPlan):
            name, got = self.scheduler.name, shorten(repr(plan))
            msg = f"scheduler plugin {name!r}: plan() returned {got}, which is no StepPlan"
            raise PolicyError(msg)
        return plan

    def planned(self, jobs: Iterable[Job]) -> Iterator[Any]:
        """Yield the entries of a plan, which the scheduler may choose one after the other.

        Raises:
            PolicyError: the scheduler failed.
        """
        entries = self.call("plan", iter, jobs)  # and its own end: None may be an entry
        while (entry := self.call("plan", next, entries, entries)) is not entries:
            yield entry


Entry: TypeAlias = tuple[Any, bool, int, Job]
"""(rank, whether it holds no blocks, order of arrival, the job): the sort key of the queue."""


class WaitingQueue(LazyHeap[Job]):
    """Waiting jobs: a heap by rank, and the order in which they queued up.

    Among equals jobs that hold blocks go first, then those that arrived first. Ranks that do
    not compare are a failure of the scheduler. The eviction policies that define `on_queued` or
    `on_dequeued`, of the pool or of tiers, are called.

    Attributes:
        entries: the jobs, in the order in which they queued up, the preempted ones first, and
            their places in the heap.
    """

    __slots__ = ("_on_dequeued", "_on_queued", "_scheduler", "entries")

    def __init__(self, scheduler: CheckedScheduler, *evictions: EvictionPolicy) -> None:
        super().__init__()
        self._entries = self.entries = OrderedDict[Job, Entry]()
        self._scheduler = scheduler
        self._on_queued, self._on_dequeued = (
            [
                (policy, method)
                for policy in evictions
                if (method := find_override(policy, name)) is not None
            ]
            for name in ("on_queued", "on_dequeued")
        )

    def enter(self, job: Job, now: int, *, front: bool = False) -> None:
        """Add `job` by its rank, or update its rank.

        `front` puts it at the front of the order of entry, which `Scheduler.plan` sees; the
        heap goes by rank alone.
        """
        if self._on_queued and job not in self.entries:
            for policy, on_queued in self._on_queued:
                try:
                    on_queued(job.known_request(), now, front=front)
                except FAILURES as error:
                    raise policy_error(policy, "on_queued", error) from error
        try:
            self.push((job.rank, job.stage != PAUSED, job.serial, job))
        except FAILURES as error:
            raise_policy_error(self._scheduler.scheduler, "priority", error)
        if front:
            self.entries.move_to_end(job, last=False)

    def head(self) -> Job | None:
        """Return the first job in rank; None without jobs."""
        try:
            return self.first_entry()[-1] if self.entries else None
        except FAILURES as error:
            raise_policy_error(self._scheduler.scheduler, "priority", error)

    def remove(self, job: Job, now: int) -> None:
        """Remove `job`."""
        del self.entries[job]
        for policy, on_dequeued in self._on_dequeued:
            try:
                on_dequeued(job.known_request(), now)
            except FAILURES as error:
                raise policy_error(policy, "on_dequeued", error) from error
