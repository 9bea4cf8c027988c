"""Replays of one workload under many policies and sizes, here or in several processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TypeAlias

import attrs

from kvcore.cache import KVCache
from kvcore.cache.geometry import Geometry
from kvcore.cache.stats import CacheStats
from kvcore.errors import InputError, PluginError
from kvcore.lab.untimed import replay
from kvcore.lab.workers import Death, work_all
from kvcore.model import PrefillCost
from kvcore.policy import EvictionPolicy, Workload

Entry: TypeAlias = tuple[EvictionPolicy, int]
"""A policy that has served no cache yet, and the blocks of its pool."""

Task: TypeAlias = tuple[int, bytes, int]
"""The place of an entry, its policy as another process can have it, and the blocks."""


@attrs.frozen
class Replays:
    """Replays a workload, serial and untimed, each time in a cache of its own.

    Attributes:
        workload: where the requests come from.
        count, block_size: how blocks are counted, and a block's tokens.
        recompute: what it costs to compute a block again.
    """

    workload: Workload
    count: str
    block_size: int
    recompute: PrefillCost

    @property
    def geometry(self) -> Geometry:
        """How requests lie in blocks."""
        return Geometry(self.count, self.block_size, self.workload.key_tokens)

    def cache(self, policy: EvictionPolicy | None, blocks: int) -> KVCache:
        """Return a cache that shares by prefix; no policy is LRU."""
        return KVCache(
            blocks,
            self.block_size,
            eviction=policy,
            count=self.count,
            key_tokens=self.workload.key_tokens,
            recompute=self.recompute,
        )

    def run(self, policy: EvictionPolicy, blocks: int) -> CacheStats:
        """Replay under `policy` in a pool of `blocks` blocks."""
        return replay(self.workload, self.cache(policy, blocks))

    def run_all(
        self, entries: Sequence[Entry], jobs: int = 1
    ) -> Iterator[tuple[int, CacheStats]]:
        """Yield (place in `entries`, statistics) of each replay, as they are done.

        With several `jobs` they run in so many processes, none of which outlives the
        generator. What they come to is the same.

        Raises:
            InputError: as for `replay`, or a workload or policy that cannot be sent to
                another process.
            PolicyError: a policy failed.
            PluginError: the processes of a replay died.
        """
        if jobs == 1 or len(entries) < 2:  # noqa: PLR2004
            for place, (policy, blocks) in enumerate(entries):
                yield place, self.run(policy, blocks)
            return
        tasks = [
            (place, self._packed(policy), blocks)
            for place, (policy, blocks) in enumerate(entries)
        ]
        with closing(work_all(_replaying, tasks, jobs)) as done:
            for (place, _, blocks), outcome in done:
                if isinstance(outcome, Death):
                    msg = (
                        f"the replay of {self.workload.name} with {blocks} blocks failed: "
                        f"{outcome}"
                    )
                    raise PluginError(msg)
                if isinstance(outcome, Exception):
                    raise outcome
                yield place, outcome

    def _packed(self, policy: EvictionPolicy) -> bytes:
        try:
            return pickle.dumps((self, policy))
        except Exception as error:
            msg = (
                f"workload {self.workload.name!r} with policy {policy.name!r} cannot be sent "
                f"to another process ({error}): define their classes at the top of a module, "
                "or use one job"
            )
            raise InputError(msg) from error


def _replaying() -> Callable[[Task], CacheStats | Exception]:
    """Return what a worker does."""
    return _attempt


def _attempt(task: Task) -> CacheStats | Exception:
    """Run what `Replays._packed` packed; what it raises is the outcome."""
    _, parcel, blocks = task
    try:
        replays, policy = pickle.loads(parcel)  # noqa: S301 - of the parent's making
    except Exception as error:  # noqa: BLE001 - whatever the classes do
        return InputError(
            f"the workload or a policy cannot be read by another process ({error}): use one job"
        )
    try:
        stats: CacheStats = replays.run(policy, blocks)
    except Exception as error:  # noqa: BLE001 - raised again by the parent
        return error
    return stats
