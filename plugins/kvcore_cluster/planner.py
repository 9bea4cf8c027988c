"""Autoscaling: planners decide how many replicas a pool should have, once an interval.

`throughput` divides the load of the pool by the capacity of one replica within the SLO; `load`
compares latencies, predicted from the load by a regression, with the SLO, and adds or removes
one replica at a time. Hit ratios are those of the simulated caches; the planner of a real
deployment needs them as input.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import ceil, inf
from typing import ClassVar, Literal

import attrs
from attrs.validators import ge, gt, le, lt

from kvcore.errors import InputError
from kvcore.models.cost import attended_pairs
from kvcore.plugins.base import Plugin
from kvcore.plugins.options import instantiate, nearest, parse
from kvcore.request import SLO
from kvcore.serving.latency import LatencyModel, StepWork
from kvcore.units import INT64_LIMIT, NS_PER_S, PS_PER_S
from kvcore_cluster.replica import Server
from kvcore_cluster.trace import MOST_REPLICAS
from kvcore_plugins.bounds import bounded

Phase = Literal["both", "prefill", "decode"]
"""The work of the replicas of a pool."""

LONGEST_S = INT64_LIMIT // NS_PER_S
"""Seconds up to the end of the clock."""

_ERROR = "planner {name!r}: {option}={value}: give {what}"


@attrs.frozen
class Demand:
    """The load of a pool in an interval, and the latencies it saw.

    Attributes:
        seconds: length of the interval.
        requests: requests that came.
        prompt_tokens: mean prompt of these.
        output_tokens: mean output of the requests that ended.
        hit: share of the prompt tokens that hit.
        load: mean tokens in flight on a replica.
        latency: mean TTFT in seconds of a pool that prefills, else mean TPOT; None: no
            request has ended.
    """

    seconds: float
    requests: int
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    hit: float = 0.0
    load: float = 0.0
    latency: float | None = None


@attrs.frozen
class Profile:
    """The performance of one replica by its latency model, as a profile of an engine has it.

    Attributes:
        latency: its latency model.
        tokens: tokens that its pool holds.
        max_seqs: sequences that it runs at a time.
    """

    latency: LatencyModel
    tokens: int
    max_seqs: int

    def prefill_s(self, tokens: float) -> float:
        """Return the seconds to prefill `tokens` tokens in a step of their own."""
        count = max(ceil(tokens), 1)
        pairs = tuple(attended_pairs(0, count, window) for window in self.latency.windows)
        work = StepWork(count, pairs, 0, (0,) * len(pairs))
        return self.latency.duration(work) / PS_PER_S

    def prefill_rps(self, tokens: float, ttft_s: float | None) -> float:
        """Return how many prompts of `tokens` tokens a second it serves within `ttft_s`.

        The mean wait of an M/D/1 queue is R D^2 / (2 (1 - R D)), solved for the rate R at
        which prefill and wait take `ttft_s` together. If the prefill alone takes longer, no
        rate is low enough: the rate is then that of a replica that is always busy.
        """
        took = self.prefill_s(tokens)
        if ttft_s is None or ttft_s <= took:
            return 1 / took
        wait = ttft_s - took
        return 2 * wait / (took * (took + 2 * wait))

    def decode_rps(
        self, context: float, output: float, held: float, tpot_s: float | None
    ) -> float:
        """Return how many requests a second it decodes within `tpot_s`.

        The batch is the largest whose step takes at most `tpot_s`, and which the pool holds.

        Args:
            context: mean number of tokens that a sequence attends to.
            output: tokens that a sequence generates.
            held: tokens that a sequence holds in the end.
            tpot_s: seconds a token may take; None: as many as with the largest batch.
        """
        batch = max(min(self.max_seqs, int(self.tokens // max(held, 1))), 1)
        if tpot_s is not None:
            larger = range(2, batch + 1)
            batch = 1 + bisect_right(larger, tpot_s, key=lambda n: self._step_s(n, context))
        return batch / (max(output, 1.0) * self._step_s(batch, context))

    def _step_s(self, batch: int, context: float) -> float:
        windows = self.latency.windows
        attended = tuple(
            ceil(batch * (context if w is None else min(context, w))) for w in windows
        )
        work = StepWork(0, (0,) * len(windows), batch, attended)
        return self.latency.duration(work) / PS_PER_S


@attrs.define(eq=False, kw_only=True)
class Planner(Plugin):
    """Decides how many replicas a pool has.

    Attributes:
        least, most: bounds of the number of replicas; `most` 0: all that are given.
        start: replicas that are up at the start; 0: `least`.
        interval: seconds between two decisions.
        start_up: seconds until a new replica serves, with an empty cache.
        cool_down: seconds after a change in which none is removed.
    """

    kind: ClassVar[str] = "planner"

    least: int = 1
    most: int = 0
    start: int = 0
    interval: float = 180.0
    start_up: float = 60.0
    cool_down: float = 300.0

    def __attrs_post_init__(self) -> None:
        """Check the options.

        Raises:
            InputError: numbers that leave no replica, or no time.
        """
        if self.least < 1 or self.start < 0 or self.most < 0:
            msg = f"planner {self.name!r}: give a least of 1 or more replicas, and no negative"
            raise InputError(msg)
        if not self.least <= (self.start or self.least) <= (self.most or inf):
            msg = f"planner {self.name!r}: give least <= start <= most"
            raise InputError(msg)
        times = self.interval, self.start_up, self.cool_down
        # Each is whole nanoseconds of a clock that ends at 2^63.
        if self.interval * NS_PER_S < 1 or not all(0 <= time < LONGEST_S for time in times):
            msg = (
                f"planner {self.name!r}: give an interval above 0 s, in whole ns, no negative "
                "times, and none of 292 years"
            )
            raise InputError(msg)

    @abstractmethod
    def wanted(
        self, demand: Demand, replicas: int, profile: Profile, slo: SLO, phase: Phase
    ) -> int:
        """Return how many replicas the pool should have from now on.

        Args:
            demand: the load of the interval that has just ended.
            replicas: number of replicas of the pool, those that start up included.
            profile: the performance of one of them.
            slo: the SLO of the requests.
            phase: the work of the replicas.
        """


@attrs.define(eq=False, kw_only=True)
class ThroughputPlanner(Planner):
    """Plans the replicas that serve the rate of the last interval within the SLO.

    A pool that prefills needs rate / prefill rate of one replica, for the part of prompts that
    does not hit, and at least prefill time / TTFT of the SLO; one that decodes needs rate /
    decode rate at a context of the prompt and half of the output. One that does both needs
    the sum: a replica then divides its time between both. No replica is removed that decodes
    if requests came in the interval, and none has ended.

    Options:
        headroom: factor on the rate that is planned for.

    Source: the throughput mode of NVIDIA Dynamo's planner (core/throughput_scaling.py), whose
    rates come from a profile; here they are those of the latency model.
    """

    name: ClassVar[str] = "throughput"

    headroom: float = bounded(
        1.0, "a factor above 0, such as 1.2", gt(0), lt(inf), error=_ERROR
    )

    def wanted(
        self, demand: Demand, replicas: int, profile: Profile, slo: SLO, phase: Phase
    ) -> int:
        """Return the rate over that of one replica, times `headroom`, rounded up."""
        if not demand.requests:
            return self.least
        rate = demand.requests / demand.seconds * self.headroom
        need, floor = 0.0, 1
        if phase != "decode":
            ttft_s = None if slo.ttft_ns is None else slo.ttft_ns / NS_PER_S
            tokens = demand.prompt_tokens * (1 - demand.hit)
            need += rate / profile.prefill_rps(tokens, ttft_s)
            if ttft_s is not None:
                floor = ceil(profile.prefill_s(tokens) / ttft_s)
        if phase != "prefill" and demand.output_tokens > 1:
            tpot_s = None if slo.tpot_ns is None else slo.tpot_ns / NS_PER_S
            context = demand.prompt_tokens + demand.output_tokens / 2
            sequence_tokens = demand.prompt_tokens + demand.output_tokens
            need += rate / profile.decode_rps(
                context, demand.output_tokens, sequence_tokens, tpot_s
            )
        elif phase != "prefill" and demand.latency is None:
            floor = max(floor, replicas)  # Nothing is known of outputs: none has ended.
        return max(ceil(min(need, MOST_REPLICAS) - 1e-9), floor)


@attrs.define(eq=False, kw_only=True)
class LoadPlanner(Planner):
    """Adds a replica if the latency at this load exceeds the SLO; removes one if that is safe.

    Latency is predicted from the tokens in flight on a replica by a straight line, fitted by
    least squares to the last `memory` intervals. One replica is removed if the line predicts,
    for the load that the others then have, less than `margin` of the SLO.

    Options:
        memory: number of intervals that the line is fitted to.
        margin: share of the SLO.

    Source: the load mode of NVIDIA Dynamo's planner (core/load_scaling.py): linear regression,
    one replica an interval.
    """

    name: ClassVar[str] = "load"

    memory: int = bounded(20, "1 interval or more", ge(1), error=_ERROR)
    margin: float = bounded(0.8, "a share above 0, up to 1", gt(0), le(1), error=_ERROR)

    _samples: deque[tuple[float, float]] = attrs.field(factory=deque, init=False)

    def wanted(
        self, demand: Demand, replicas: int, profile: Profile, slo: SLO, phase: Phase
    ) -> int:
        """Return the present number of replicas, one more, or one less."""
        limit_ns = slo.tpot_ns if phase == "decode" else slo.ttft_ns
        if demand.latency is None or limit_ns is None:
            return replicas if demand.requests else max(replicas - 1, self.least)
        samples, limit_s = self._samples, limit_ns / NS_PER_S
        samples.append((demand.load, demand.latency))
        if len(samples) > self.memory:
            samples.popleft()
        intercept, slope = regression(samples)
        if intercept + slope * demand.load > limit_s:
            return replicas + 1
        if replicas > 1:
            fewer = demand.load * replicas / (replicas - 1)
            if intercept + slope * fewer < self.margin * limit_s:
                return replicas - 1
        return replicas


def regression(samples: deque[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope, not below 0, of the line of least squares."""
    count = len(samples)
    mean_x = sum(x for x, _ in samples) / count
    mean_y = sum(y for _, y in samples) / count
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    if not spread:
        # One load so far: latency is taken to grow in proportion to it.
        slope = mean_y / mean_x if mean_x else 0.0
    else:
        slope = max(sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread, 0.0)
    return mean_y - slope * mean_x, slope


PLANNERS: dict[str, type[Planner]] = {
    planner.name: planner for planner in (ThroughputPlanner, LoadPlanner)
}


def parse_planner(text: str) -> Planner:
    """Build a planner from text such as `throughput:interval=60,most=8`.

    Raises:
        InputError: another name, or an option that it cannot have.
    """
    specs = parse(text)
    if len(specs) != 1 or specs[0].name not in PLANNERS:
        names = ", ".join(PLANNERS)
        msg = f"{text!r} is no planner{nearest(text, PLANNERS)}; there are: {names}"
        raise InputError(msg)
    return instantiate(PLANNERS[specs[0].name], specs[0].options)


def check_planner(planner: Planner, pools: Sequence[int]) -> None:
    """Refuse a planner that is to have more replicas up than the largest pool has.

    The pools have one planner: a smaller one has all of its replicas up then.

    Raises:
        InputError: the planner has such a `least` or `start`.
    """
    largest = max(pools)
    for option, needed in (("least", planner.least), ("start", planner.start)):
        if needed > largest:
            there = "1 replica" if largest == 1 else f"{largest} replicas"
            pool = "" if len(pools) == 1 else ", the most of a pool"
            msg = (
                f"planner {planner.name!r}: {option}={needed} of {there}{pool}: give as many, "
                f"or a lower {option}"
            )
            raise InputError(msg)


def seconds_ns(seconds: float) -> int:
    """Return seconds as whole nanoseconds."""
    return round(seconds * NS_PER_S)


@attrs.frozen
class Change:
    """A replica that a planner starts or stops.

    Attributes:
        at: time of the decision, ns.
        replica: number of the replica.
        up: whether it starts; if not, it is sent no more requests, and stops when it has
            ended those in flight.
    """

    at: int
    replica: int
    up: bool


class Autoscaler:
    """Keeps the replicas of a pool at the number that a planner decides.

    Args:
        planner: the planner, not in use. If it is to have more up than there are, all are.
        servers: the replicas that may be up, by number.
        slo: the SLO of the requests.
        begin: when (ns) the first of them arrives, and the first interval begins.
        phase: the work of the replicas.

    Attributes:
        interval: ns between two decisions.
        start_up: ns until a replica that starts is up.
        changes: the changes so far, in order.
        rented: by replica of the pool, ns for which it was paid for, start-up and drain
            included.
    """

    def __init__(
        self,
        planner: Planner,
        servers: Sequence[Server],
        slo: SLO | None,
        begin: int,
        phase: Phase = "both",
    ) -> None:
        planner.bind()
        self.planner = planner
        self.interval = seconds_ns(planner.interval)
        self.start_up = seconds_ns(planner.start_up)
        self.changes: list[Change] = []
        self.rented = {server.number: 0 for server in servers}
        self._servers = {server.number: server for server in servers}
        self._slo = slo or SLO()
        self._phase: Phase = phase
        up = sorted(self._servers)[: planner.start or planner.least]
        self._since = dict.fromkeys(up, begin)
        self._most = min(planner.most or len(servers), len(servers))
        self._calm_until = 0
        # Of this interval: requests, prompt tokens, hits and lookups before it, load.
        self._requests = self._tokens = 0
        self._in_flight = self._load = 0
        self._looked_up = 0, 0
        self._rows = {number: (server.loop, 0) for number, server in self._servers.items()}

    @property
    def members(self) -> list[int]:
        """The replicas that are up or start up, by number."""
        return sorted(self._since)

    def sent(self, tokens: int) -> None:
        """Called when a request with a prompt of `tokens` tokens is sent to the pool."""
        self._requests += 1
        self._tokens += tokens
        self._in_flight += tokens
        self._load += self._in_flight

    def ended(self, tokens: int) -> None:
        """Called when a request with a prompt of `tokens` tokens has ended in the pool."""
        self._in_flight -= tokens

    def decide(self, now: int) -> list[Change]:
        """Return the replicas that the planner starts and stops at `now` (ns)."""
        demand = self._demand()
        have = len(self._since)
        sample = next(iter(self._servers.values())).loop
        profile = Profile(
            sample.executor.latency,
            sample.cache.pool.blocks * sample.cache.geometry.block_size,
            sample.batcher.batching.max_seqs,
        )
        wanted = self.planner.wanted(demand, have, profile, self._slo, self._phase)
        wanted = min(max(wanted, self.planner.least), self._most)
        if wanted < have and now < self._calm_until:
            return []
        more = wanted > have
        numbers = self._idle() if more else self._least()
        changes = [Change(now, number, more) for number in numbers[: abs(wanted - have)]]
        for change in changes:
            if change.up:
                self._since[change.replica] = now
            else:
                # It is paid for until it has ended its requests.
                self._servers[change.replica].draining = self._since.pop(change.replica)
        if changes:
            self._calm_until = now + seconds_ns(self.planner.cool_down)
        self.changes += changes
        return changes

    def stopped(self, server: Server, now: int) -> None:
        """Called when a replica that was to stop has ended its requests."""
        assert server.draining is not None
        self.rented[server.number] += now - server.draining

    def end(self, now: int) -> None:
        """Called at the end of the run: the replicas that are up were paid for until then."""
        for number, since in self._since.items():
            self.rented[number] += now - since

    def _idle(self) -> list[int]:
        """Return the replicas that are off, by number."""
        return [
            number
            for number, server in sorted(self._servers.items())
            if number not in self._since and server.draining is None
        ]

    def _least(self) -> list[int]:
        """Return the replicas that are up by number of requests, the fewest first."""
        up = [number for number in self._since if self._servers[number].up]
        return sorted(up, key=lambda number: (len(self._servers[number].sent), -number))

    def _demand(self) -> Demand:
        """Return the demand since the last call, and reset it."""
        outputs: list[int] = []
        times: list[float] = []
        for number, server in self._servers.items():
            loop, row = self._rows[number]
            for life in server.lives[server.lives.index(loop) :]:
                log = life.log
                for index in range(row if life is loop else 0, len(log.ids)):
                    if log.finish[index] < 0:
                        continue
                    outputs.append(log.output[index])
                    if self._phase == "decode":
                        if log.output[index] > 1:
                            took = log.finish[index] - log.first_token[index]
                            times.append(took / (log.output[index] - 1) / NS_PER_S)
                    elif log.first_token[index] >= 0:
                        times.append((log.first_token[index] - log.arrival[index]) / NS_PER_S)
            self._rows[number] = server.loop, len(server.loop.log.ids)
        stats = [life.cache.stats for server in self._servers.values() for life in server.lives]
        looked_up = sum(s.lookup_tokens for s in stats), sum(s.hit_tokens for s in stats)
        tokens, hits = (new - old for new, old in zip(looked_up, self._looked_up, strict=True))
        requests, up = self._requests, max(len(self._since), 1)
        demand = Demand(
            seconds=self.interval / NS_PER_S,
            requests=requests,
            prompt_tokens=self._tokens / requests if requests else 0.0,
            output_tokens=sum(outputs) / len(outputs) if outputs else 0.0,
            hit=hits / tokens if tokens else 0.0,
            load=self._load / requests / up if requests else 0.0,
            latency=sum(times) / len(times) if times else None,
        )
        self._looked_up = looked_up
        self._requests = self._tokens = self._load = 0
        return demand
