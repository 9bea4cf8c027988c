"""Autoscaling: what a planner is told, and the replicas that start and stop for it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvcore.cluster.planner import Demand, Phase, Planner, seconds_ns
from kvcore.cluster.planner import Server as Capability
from kvcore.cluster.replica import Server
from kvcore.request import SLO
from kvcore.units import NS_PER_S


@attrs.frozen
class Change:
    """A replica that a planner starts or stops.

    Attributes:
        at: when it was decided, ns.
        replica: its number.
        up: whether it starts; if not, it is sent no more requests, and stops when it has
            ended those it has.
    """

    at: int
    replica: int
    up: bool


class Autoscaler:
    """The replicas of a pool, as a planner wants them.

    Args:
        planner: the planner, not in use.
        servers: the replicas that may be up, by number.
        slo: what the requests expect.
        phase: what the replicas do.

    Attributes:
        interval: ns between two decisions.
        start_up: ns until a replica that starts is up.
        changes: what was decided, in order.
        rented: ns for which replicas were paid for, start-up and drain included.
    """

    def __init__(
        self,
        planner: Planner,
        servers: Sequence[Server],
        slo: SLO | None,
        phase: Phase = "both",
    ) -> None:
        planner.bind()
        self.planner = planner
        self.interval, self.start_up = (
            seconds_ns(planner.interval),
            seconds_ns(planner.start_up),
        )
        self.changes: list[Change] = []
        self.rented = 0
        self._servers = {server.number: server for server in servers}
        self._slo = slo or SLO()
        self._phase: Phase = phase
        self._since = dict.fromkeys(sorted(self._servers)[: self.first], 0)
        self._most = min(planner.most or len(servers), len(servers))
        self._calm_until = 0
        # Of this interval: requests, prompt tokens, hits and lookups before it, load.
        self._requests = self._tokens = 0
        self._in_flight = self._load = 0
        self._looked_up = 0, 0
        self._rows = {number: (server.loop, 0) for number, server in self._servers.items()}

    @property
    def first(self) -> int:
        """The number of replicas that are up at the start."""
        planner = self.planner
        return min(planner.start or planner.least, len(self._servers))

    @property
    def numbers(self) -> list[int]:
        """The replicas of the pool."""
        return list(self._servers)

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
        able = Capability(
            sample.latency,
            sample.cache.pool.blocks * sample.cache.geometry.block_size,
            sample.batcher.batching.max_seqs,
        )
        wanted = self.planner.wanted(demand, have, able, self._slo, self._phase)
        wanted = min(max(wanted, self.planner.least), self._most)
        if wanted < have and now < self._calm_until:
            return []
        changes = [
            *(Change(now, number, up=True) for number in self._idle()[: max(wanted - have, 0)]),
            *(
                Change(now, number, up=False)
                for number in self._least()[: max(have - wanted, 0)]
            ),
        ]
        for change in changes:
            if change.up:
                self._since[change.replica] = now
            else:
                # Paid for until it has ended its requests.
                self._servers[change.replica].draining = self._since.pop(change.replica)
        if changes:
            self._calm_until = now + seconds_ns(self.planner.cool_down)
        self.changes += changes
        return changes

    def stopped(self, server: Server, now: int) -> None:
        """Called when a replica that was to stop has ended its requests."""
        assert server.draining is not None
        self.rented += now - server.draining

    def end(self, now: int) -> None:
        """Called at the end of the run: the replicas that are up were paid for until then."""
        self.rented += sum(now - since for since in self._since.values())

    def _idle(self) -> list[int]:
        """Return the replicas that are off, by number."""
        return [
            number
            for number, server in sorted(self._servers.items())
            if number not in self._since and server.draining is None
        ]

    def _least(self) -> list[int]:
        """Return the replicas that are up, those with the fewest requests first."""
        up = [number for number in self._since if self._servers[number].up]
        return sorted(up, key=lambda number: (len(self._servers[number].sent), -number))

    def _demand(self) -> Demand:
        """Return what came since the last call, and forget it."""
        outputs: list[int] = []
        times: list[float] = []
        for number, server in self._servers.items():
            loop, row = self._rows[number]
            for each in server.lives[server.lives.index(loop) :]:
                log = each.log
                for at in range(row if each is loop else 0, len(log.ids)):
                    if log.finish[at] < 0:
                        continue
                    outputs.append(log.output[at])
                    if self._phase == "decode":
                        if log.output[at] > 1:
                            took = log.finish[at] - log.first_token[at]
                            times.append(took / (log.output[at] - 1) / NS_PER_S)
                    elif log.first_token[at] >= 0:
                        times.append((log.first_token[at] - log.arrival[at]) / NS_PER_S)
            self._rows[number] = server.loop, len(server.loop.log.ids)
        stats = [each.cache.stats for server in self._servers.values() for each in server.lives]
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
