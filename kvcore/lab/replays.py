"""Replays of one workload under many policies and sizes, here or in several processes."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import Any, TypeAlias

import attrs

from kvcore.cache import KVCache
from kvcore.cache.geometry import Geometry
from kvcore.cache.stats import CacheStats
from kvcore.errors import InputError, PluginError
from kvcore.lab.untimed import replay
from kvcore.model import PrefillCost
from kvcore.policy import EvictionPolicy, Workload

Entry: TypeAlias = tuple[EvictionPolicy, int]
"""A policy that has served no cache yet, and the blocks of its pool."""


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
            PluginError: a process died.
        """
        if jobs == 1 or len(entries) < 2:  # noqa: PLR2004
            for place, (policy, blocks) in enumerate(entries):
                yield place, self.run(policy, blocks)
            return
        parcels = [(self._packed(policy), blocks) for policy, blocks in entries]
        with _processes(min(jobs, len(entries))) as executor:
            with _uninterrupted():
                places = {
                    executor.submit(_unpacked_run, *parcel): place
                    for place, parcel in enumerate(parcels)
                }
            for done in as_completed(places):
                yield places[done], _result(done)

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


def _unpacked_run(parcel: bytes, blocks: int) -> CacheStats:
    """Run in a worker what `Replays._packed` packed."""
    try:
        replays, policy = pickle.loads(parcel)  # noqa: S301 - of the parent's making
    except Exception as error:
        msg = (
            f"the workload or a policy cannot be read by another process ({error}): use one job"
        )
        raise InputError(msg) from error
    stats: CacheStats = replays.run(policy, blocks)
    return stats


def _result(done: Future[CacheStats]) -> CacheStats:
    try:
        return done.result()
    except BrokenProcessPool as error:
        msg = (
            "a process that replayed the workload died: a crash, or more memory than there "
            "is; fewer jobs need less"
        )
        raise PluginError(msg) from error


@contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Start processes on demand; end them all with the body, however that ends."""
    others = set(active_children())
    executor = ProcessPoolExecutor(jobs, get_context("spawn"), _begin)
    try:
        yield executor
    except BaseException:
        for worker in set(active_children()) - others:
            worker.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block Ctrl-C, for processes born in the body as well: it is for the parent alone."""
    before: Any = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """Prepare a worker: what it prints is no result, and it does not outlive its parent."""
    os.dup2(2, 1)
    Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
