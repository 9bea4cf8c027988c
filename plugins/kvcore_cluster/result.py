"""The result of a cluster: that of all its requests, and of each replica."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, chain, islice
from typing import Any

import attrs

from kvcore.cache.residency import CacheStats
from kvcore.request import SLO
from kvcore.serving.job import DecodeSteps, Job
from kvcore.serving.result import SCHEMA, HitRatio, Reported, Result, hit_fields
from kvcore.serving.router import Router
from kvcore.serving.stats import RunLog
from kvcore.units import NS_PER_S, PS_PER_S
from kvcore_cluster.cluster import Cluster
from kvcore_cluster.planner import Change
from kvcore_plugins.load import Offered, Saturation, finished_work, offered_by, saturation_of

__all__ = ["ClusterResult"]


def _column() -> array[int]:
    return array("q")


@attrs.frozen
class Share:
    """Balance of a quantity between replicas.

    Attributes:
        most: the largest amount over the mean: 1 if all are equal.
        variation: the coefficient of variation: standard deviation over the mean.
    """

    most: float
    variation: float

    @classmethod
    def from_amounts(cls, amounts: Sequence[float]) -> Share | None:
        """Return the balance of `amounts`; None if they are all 0."""
        mean = sum(amounts) / len(amounts)
        if not mean:
            return None
        deviation = (sum((amount - mean) ** 2 for amount in amounts) / len(amounts)) ** 0.5
        return cls(max(amounts) / mean, deviation / mean)


@attrs.define
class Transfers:
    """The K/V transfers, one row per request, in order of arrival.

    Attributes:
        ids: ids of the requests.
        source, target: replicas that prefill and decode.
        ended, opened, done: when the prefill had ended, when the decode replica had allocated
            the blocks, and when the K/V was there, ns.
        blocks, reused, size: blocks moved, blocks that were there already, and bytes moved.
    """

    ids: list[int | str] = attrs.field(factory=list)
    source: array[int] = attrs.field(factory=_column)
    target: array[int] = attrs.field(factory=_column)
    ended: array[int] = attrs.field(factory=_column)
    opened: array[int] = attrs.field(factory=_column)
    done: array[int] = attrs.field(factory=_column)
    blocks: array[int] = attrs.field(factory=_column)
    reused: array[int] = attrs.field(factory=_column)
    size: array[int] = attrs.field(factory=_column)


@attrs.frozen
class Phases:
    """Results of split phases.

    Attributes:
        split: the split as text.
        pools: the replicas of each pool.
        transfers: the K/V transfers.
        links: ns for which each link was in use, by `out N` or `into N` for replica N.
        moved_bytes: all bytes moved, also for requests that were lost later.
    """

    split: str
    pools: Mapping[str, Sequence[int]]
    transfers: Transfers
    links: Mapping[str, int]
    moved_bytes: int


@attrs.frozen(slots=False, eq=False, repr=False)
class ClusterResult(Reported):
    """The result of a cluster. Fields that one server has too are named as in `Result`.

    Attributes:
        log: one row a request, in the order in which they ended.
        replica: by row, the replica that served the request last; -1: no replica got it.
        lives: by replica, the result of each of its lives: it has one more life than it has
            failed, or was stopped by a planner.
        router: the router.
        retried: how often a request was served again because its replica had failed.
        wall_s: seconds the run took on this machine; all else is the same on every one.
        changes: the decisions of a planner, in order.
        rented_ns: by replica, the time for which it was starting up, up, or ending its last
            requests; None: without a planner all are up.
        phases: the pools of split phases, and the transfers between them.
    """

    replica: Sequence[int] = attrs.field(repr=False)
    lives: Sequence[Sequence[Result]] = attrs.field(repr=False)
    router: Router
    retried: int
    wall_s: float = 0.0
    changes: Sequence[Change] = attrs.field(default=(), repr=False)
    rented_ns: Sequence[int] | None = None
    phases: Phases | None = None

    @cached_property
    def stats(self) -> CacheStats:
        """The counts of the caches of all replicas."""
        return CacheStats.sum(loop.cache.stats for loop in chain.from_iterable(self.lives))

    @cached_property
    def reuse_ratio(self) -> HitRatio:
        """Hit ratio that counts blocks loaded from tiers as hits."""
        caches = [loop.cache for loop in chain.from_iterable(self.lives)]
        stats = CacheStats.sum(
            c.stats if c.tiers is None else c.tiers.hit_stats() for c in caches
        )
        return HitRatio(**stats.ratios())

    @cached_property
    def offered_load(self) -> float | None:
        """The least seconds of work that arrived a second and replica; None: unknown.

        For one replica this is `offered_load`; for several, the mean over replicas and time.
        """
        if self.log.drafts is not None:
            return None
        work = sum(offered_by(loop).work for loop in chain.from_iterable(self.lives))
        came = array("q", chain.from_iterable(part for part, *_ in finished_work(self.log)))
        span = max(came, default=0) - min(came, default=0)
        return Offered(Fraction(work), len(came), span).load(len(self.lives))

    @cached_property
    def saturation(self) -> Saturation | None:
        """Whether requests queued up for as long as they came; None if that is unknown."""
        max_seqs = sum(lives[-1].batching.max_seqs for lives in self.lives)
        return saturation_of(self.log, max_seqs, self.offered_load)

    @cached_property
    def hit_ratio(self) -> HitRatio:
        """Hit ratio of all replicas by block, by token and by request."""
        return HitRatio(**self.stats.ratios())

    @cached_property
    def busy_s(self) -> list[float]:
        """Seconds in which each replica ran steps."""
        return [sum(loop.log.busy_ps for loop in lives) / PS_PER_S for lives in self.lives]

    @property
    def replica_s(self) -> float:
        """Total seconds for which replicas were paid for."""
        if self.rented_ns is not None:
            return sum(self.rented_ns) / NS_PER_S
        return len(self.lives) * self.simulated_s

    @cached_property
    def served(self) -> list[int]:
        """Requests that each replica has served."""
        return [
            sum(len(loop.log.ids) - len(loop.log.reasons) for loop in lives)
            for lives in self.lives
        ]

    def request_parts(self) -> Iterator[dict[str, list[Any]]]:
        """Yield `requests` with their `replica`, some rows at a time."""
        replicas = iter(self.replica)
        for part in super().request_parts():
            ids = part["id"]
            yield {"id": ids, "replica": list(islice(replicas, len(ids))), **part}

    def summary(self) -> dict[str, Any]:
        """Return the numbers of the run as JSON has them."""
        log = self.log
        replicas = [self._replica(replica) for replica in range(len(self.lives))]
        shares = {
            "requests": Share.from_amounts(self.served),
            "busy": Share.from_amounts(self.busy_s),
        }
        return {
            "schema": SCHEMA,
            **self.outcome_fields(),
            "offered_load": self.offered_load,
            "saturation": None if self.saturation is None else self.saturation.as_dict(),
            "steps": log.steps,
            "wall_s": self.wall_s,
            "evicted_blocks": sum(row["evicted_blocks"] for row in replicas),
            "hit": hit_fields(self.stats),
            "lost_tokens": self.stats.lost_tokens,
            "loaded_tokens": sum(log.loaded),
            "reuse_ratio": self.reuse_ratio._asdict(),
            "retried": self.retried,
            "replica_s": self.replica_s,
            "changes": [
                {"t_s": change.at / NS_PER_S, "replica": change.replica, "up": change.up}
                for change in self.changes
            ],
            "imbalance": {
                name: None if share is None else attrs.asdict(share)
                for name, share in shares.items()
            },
            "replicas": replicas,
            **({} if log.drafts is None else {"drafts": log.drafts.as_dict()}),
            **({} if self.phases is None else {"phases": self._phases(self.phases)}),
        }

    def _phases(self, phases: Phases) -> dict[str, Any]:
        """Return the numbers of split phases."""
        span = self.simulated_s
        rows, links = phases.transfers, phases.links
        waits = [done - ended for done, ended in zip(rows.done, rows.ended, strict=True)]
        busy = [ns / NS_PER_S / span if span else None for ns in links.values()]
        pools = {
            name: {
                "replicas": len(numbers),
                "requests": sum(self.served[number] for number in numbers),
                "busy": sum(self.busy_s[number] for number in numbers) / span / len(numbers)
                if span and numbers
                else None,
            }
            for name, numbers in phases.pools.items()
        }
        return {
            "split": phases.split,
            "transfers": len(rows.ids),
            "moved_blocks": sum(rows.blocks),
            "reused_blocks": sum(rows.reused),
            "moved_bytes": phases.moved_bytes,
            "gap_s": sum(waits) / len(waits) / NS_PER_S if waits else None,
            "links": dict(zip(links, busy, strict=True)),
            "pools": pools,
        }

    def _replica(self, replica: int) -> dict[str, Any]:
        """Return the numbers of a replica, over all its lives."""
        lives = self.lives[replica]
        span = self.simulated_s
        return {
            "replica": replica,
            "blocks": lives[-1].cache.pool.blocks,
            "requests": self.served[replica],
            "busy": self.busy_s[replica] / span if span else None,
            "steps": sum(loop.log.steps for loop in lives),
            # A planner ends lives too, and beside one no replica fails.
            "failures": len(lives) - 1 if self.rented_ns is None else 0,
            "ttft_s": self._mean_ttft_s[replica],
            "hit": hit_fields(CacheStats.sum(loop.cache.stats for loop in lives)),
            "evicted_blocks": sum(loop.cache.evicted_blocks for loop in lives),
        }

    @cached_property
    def _mean_ttft_s(self) -> list[float | None]:
        """The mean time to first token by replica; None without one."""
        sums, counts = [0] * len(self.lives), [0] * len(self.lives)
        for number, came, first in zip(
            self.replica, self.log.arrival, self.log.first_token, strict=True
        ):
            if first >= 0:
                sums[number] += first - came
                counts[number] += 1
        return [
            ns / count / NS_PER_S if count else None
            for ns, count in zip(sums, counts, strict=True)
        ]


_ROW_BITS = 40


def merge_logs(
    logs: Sequence[tuple[int, RunLog, Collection[int]]], cluster: Cluster, slo: SLO | None
) -> tuple[RunLog, list[int]]:
    """Return the rows of all replicas in one log, by when they ended, and their replicas.

    Args:
        logs: each with the number of its replica, and the rows to leave out, whose requests
            are in the log of another replica.
        cluster: has the requests that its router refused.
        slo: the SLO of requests without one of their own.
    """
    turned_away = RunLog(0, slo)
    for arrival, request, why in cluster.refused:
        job = Job(request, 0, arrival, DecodeSteps(), 0, request.slo or slo)
        turned_away.rejected(job, why)
    logs = [*logs, (-1, turned_away, ())]
    # Rows are numbered over all logs. Each is sorted as one integer of its time and number:
    # tuples would take four times the memory.
    starts = list(accumulate((len(log.ids) for _, log, _ in logs), initial=0))
    order = sorted(
        (end << _ROW_BITS) + start + row
        for start, (_, log, handed) in zip(starts, logs, strict=False)
        for row, end in enumerate(map(max, log.finish, log.arrival))
        if row not in handed
    )
    rows = array("q", (entry & ((1 << _ROW_BITS) - 1) for entry in order))
    del order
    merged = RunLog(sum(log.pool.blocks for _, log, _ in logs), slo)
    for name, target in merged.columns().items():
        column = list(chain.from_iterable(log.columns()[name] for _, log, _ in logs))
        target.extend(map(column.__getitem__, rows))
    reasons = {
        start + row: why
        for start, (_, log, _) in zip(starts, logs, strict=False)
        for row, why in log.reasons.items()
    }
    if reasons:
        merged.reasons = {
            index: reasons[row] for index, row in enumerate(rows) if row in reasons
        }
    merged.last_start = cluster.arrivals.last_start
    for _, log, _ in logs:
        merged.itl.merge(log.itl)
        merged.steps += log.steps
        merged.busy_ps += log.busy_ps
        merged.own_slos += log.own_slos
        if log.drafts is not None:
            merged.drafts = merged.drafts.plus(log.drafts) if merged.drafts else log.drafts
    replica_of = list(chain.from_iterable([number] * len(log.ids) for number, log, _ in logs))
    return merged, list(map(replica_of.__getitem__, rows))
