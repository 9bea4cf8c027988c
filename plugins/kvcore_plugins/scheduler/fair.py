"""Fairness between tenants: the virtual token counter."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from heapq import heapify, heappop, heappush, heapreplace
from math import isfinite, lcm
from numbers import Real
from typing import Any, ClassVar, TypeAlias

import attrs

from kvcore import InputError, Job, Scheduler
from kvcore.serving import LoopState, StepPlan

Tenant: TypeAlias = str | None


@attrs.define(slots=False, eq=False)
class Fair(Scheduler):
    """Serve the tenant first that was served least, and its jobs first come, first served.

    A tenant's counter grows by the weighted tokens that it is served: those of a prompt when
    the job is first admitted, an output token when it is generated. Tokens that hit count
    too; tokens that a preempted job computes again do not. The counter of a tenant that
    returns to the queue is raised to the lowest there, or, if the queue is empty, to that of
    the last tenant that left it: absence gives no credit. The counters of two tenants with
    waiting jobs then differ by at most a bound that does not grow with time, and no tenant
    starves.

    Counters are integers: both weights are scaled to whole numbers. A plan costs O(waiting
    tenants + running jobs).

    Options:
        prefill_weight, decode_weight: weights of a prompt token and of an output token.

    Source: Sheng et al., "Fairness in serving large language models", OSDI 2024,
    algorithm 2; its weights.
    """

    name: ClassVar[str] = "fair"

    prefill_weight: float = attrs.field(default=1.0)
    decode_weight: float = attrs.field(default=2.0)

    _weights: tuple[int, int] = attrs.field(init=False, default=(0, 0), repr=False)
    _counters: dict[Tenant, int] = attrs.field(init=False, factory=dict, repr=False)
    _queues: dict[Tenant, list[tuple[int, Job]]] = attrs.field(
        init=False, factory=dict, repr=False
    )
    _running: dict[Job, None] = attrs.field(init=False, factory=dict, repr=False)
    _left: Tenant = attrs.field(init=False, default=None, repr=False)
    _settled: int = attrs.field(init=False, default=-1, repr=False)

    @prefill_weight.validator
    @decode_weight.validator
    def _is_positive(self, attribute: attrs.Attribute[float], value: float) -> None:
        real = isinstance(value, Real) and not isinstance(value, bool)
        if not (real and isfinite(value) and value > 0):
            msg = f"fair: {attribute.name}={value!r} must be a positive number"
            raise InputError(msg)

    def __attrs_post_init__(self) -> None:
        """Scale both weights to integers."""
        prefill, decode = Fraction(self.prefill_weight), Fraction(self.decode_weight)
        scale = lcm(prefill.denominator, decode.denominator)
        self._weights = int(prefill * scale), int(decode * scale)

    def priority(self, job: Job, now: int) -> Any:
        """Return its tenant's counter: the tenant served most loses blocks first."""
        self._settle(now)
        return self._counters.get(job.request.tenant, 0)

    def queued(self, job: Job, now: int) -> None:
        """Append `job` to its tenant's queue; raise the counter of a tenant that returns."""
        self._settle(now)
        tenant, counters = job.request.tenant, self._counters
        preempted = job in self._running
        if preempted:
            self._charge(job)
            del self._running[job]
        elif tenant not in self._queues:
            others = self._queues or [self._left]
            lift = min(counters.get(other, 0) for other in others)
            counters[tenant] = max(counters.get(tenant, 0), lift)
        heappush(self._queues.setdefault(tenant, []), (job.serial, job))

    def admitted(self, job: Job, now: int) -> None:
        """Remove `job` from its tenant's queue, and charge its prompt once."""
        tenant = job.request.tenant
        heappop(self._queues[tenant])
        self._leave(tenant)
        if job.data is None:
            job.data = 0  # output tokens that are charged
            self._counters[tenant] += self._weights[0] * job.request.prompt_tokens
        self._running[job] = None

    def finished(self, job: Job, now: int) -> None:
        """Charge the last tokens of `job`."""
        self._charge(job)
        del self._running[job]

    def withdrawn(self, job: Job, now: int) -> None:
        """Remove `job` from its tenant's queue. O(jobs of the tenant that wait)."""
        tenant = job.request.tenant
        queue = self._queues[tenant]
        queue.remove((job.serial, job))
        heapify(queue)
        self._leave(tenant)

    def plan(self, state: LoopState) -> StepPlan:
        """Admit tenants in order of their counters, which each admission changes."""
        self._settled = -1
        self._settle(state.now)
        return StepPlan(self._by_counter())

    def _by_counter(self) -> Iterator[Job]:
        counters, queues = self._counters, self._queues
        turns = [(counters[tenant], queue[0][0], tenant) for tenant, queue in queues.items()]
        heapify(turns)
        while turns:
            tenant = turns[0][2]
            queue = queues[tenant]
            serial, job = queue[0]
            yield job
            # If this job was not admitted, no other one will be: the admissions have ended.
            if queue and queue[0][0] == serial:
                return
            if queue:
                heapreplace(turns, (counters[tenant], queue[0][0], tenant))
            else:
                heappop(turns)

    def _leave(self, tenant: Tenant) -> None:
        """Drop the queue of a tenant without waiting jobs."""
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._left = tenant

    def _settle(self, now: int) -> None:
        """Charge the tokens that running jobs have generated, once for each time."""
        if now != self._settled:
            self._settled = now
            for job in self._running:
                self._charge(job)

    def _charge(self, job: Job) -> None:
        generated = job.generated
        self._counters[job.request.tenant] += self._weights[1] * (generated - job.data)
        job.data = generated
