"""The queue of jobs without a seat, in scheduler order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, TypeAlias

from kvcore.policy import EvictionPolicy, Job, broken, overridden
from kvcore.policy.job import PAUSED

Entry: TypeAlias = tuple[Any, bool, int, Job]

SLACK = 4
"""How many entries the heap may hold for each job that waits, before it is made anew."""


class Waiting:
    """Jobs without a seat: a heap by rank, and the order in which they queued up.

    Among equals those go first that hold blocks, then those that arrived first. An
    eviction policy that wants to know who waits is told.
    """

    __slots__ = ("_awaited", "_entries", "_eviction", "_heap", "_unawaited")

    def __init__(self, eviction: EvictionPolicy) -> None:
        """Start empty."""
        self._entries: OrderedDict[Job, Entry] = OrderedDict()
        self._heap: list[Entry] = []
        self._eviction = eviction
        self._awaited = overridden(eviction, "awaited")
        self._unawaited = overridden(eviction, "unawaited")

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Job]:
        """Yield the jobs in the order in which they queued up, the preempted ones first."""
        return iter(self._entries)

    def __contains__(self, job: object) -> bool:
        """Say whether `job` waits."""
        return job in self._entries

    def push(self, job: Job, now: int, *, front: bool = False) -> None:
        """Put `job` in by its rank, anew if it is there; at the front of the order of entry."""
        entry = (job.rank, job.stage != PAUSED, job.serial, job)
        if self._awaited is not None and job not in self._entries:
            try:
                self._awaited(job.request, now, front=front)
            except Exception as error:
                raise broken(self._eviction, "awaited", error) from error
        self._entries[job] = entry
        if front:
            self._entries.move_to_end(job, last=False)
        heap = self._heap
        heappush(heap, entry)
        if len(heap) > SLACK * (len(self._entries) + SLACK):
            heap[:] = self._entries.values()
            heapify(heap)

    def head(self) -> Job | None:
        """Return the first in rank."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[3]) is entry:
                return entry[3]
            heappop(heap)
        return None

    def remove(self, job: Job, now: int) -> None:
        """Take `job` out."""
        del self._entries[job]
        if self._unawaited is not None:
            try:
                self._unawaited(job.request, now)
            except Exception as error:
                raise broken(self._eviction, "unawaited", error) from error
