"""The expansion of the lines of a trace to the events that they stand for.

In schema 2 a GROW stands for the EVICT and ALLOC lines of many blocks, and an ALLOC leaves out
the blocks that the EVICT lines before it have. Expanded, the lines are those of schema 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import UNSET

from kvcore.cache.recorder import growth
from kvcore.trace import events
from kvcore.trace.events import Alloc, Event, Evict, violated
from kvcore.trace.fields import Runs


class Expansion:
    """Expands the lines of one trace, in order."""

    def __init__(self) -> None:
        self._is_old = False  # whether no line stands for others
        # The blocks of EVICT lines since the last other line with blocks.
        self._evicted: list[Runs] = []
        self._methods: dict[type[Event], Callable[[Any], Sequence[Event] | None]] = {
            events.Header: self._header,
            **dict.fromkeys((Evict, events.Drop), self._evict),
            Alloc: self._alloc,
            **dict.fromkeys((events.Free, events.Compact), self._forget),
            events.Grow: self._grow,
        }

    def expand(self, event: Event) -> Sequence[Event]:
        """Return the events that a line stands for, which are numbered from that of the line.

        Raises:
            ViolationError: the line cannot be expanded.
        """
        method = self._methods.get(event.__class__)
        return (method and method(event)) or (event,)

    def _header(self, event: events.Header) -> None:
        self._is_old = event.schema == 1 or bool(event.cache_groups)

    def _evict(self, event: Evict | events.Drop) -> None:
        self._evicted.append(event.runs)

    def _forget(self, event: Event) -> None:
        self._evicted = []

    def _alloc(self, event: Alloc) -> None:
        """Add the blocks that were evicted for the sequence."""
        evicted, self._evicted = self._evicted, []
        if event.evicted is UNSET:
            return
        blocks = sum(abs(count) for runs in evicted for _, count in runs)
        if self._is_old or blocks != event.evicted:
            violated(f"{event.evicted} evicted blocks; {blocks} in the lines before it")
        event.runs, event.evicted = join_runs([event.runs, *evicted]), UNSET

    def _grow(self, event: events.Grow) -> Sequence[Event]:
        """Return the ALLOC of each block, and before it EVICT if it was a victim's."""
        victims, requesters = event.victims or (), event.requesters or ()
        blocks = sum(blocks for _, blocks, _, _ in victims)
        if self._is_old:
            violated("there is none in schema 1, and none of cache groups")
        if blocks != len(requesters) or blocks > len(event.grown):
            violated(f"{len(requesters)} requests evict {blocks} of {len(event.grown)} blocks")
        expanded: list[Event] = []
        n, last, by, replica = event.n, event.t, event.by or "", event.replica
        for (t, seq, first, block), victim in growth(event.grown, victims, requesters):
            if t < last:
                violated(f"time goes back, from {last} to {t} ns")
            last, runs = t, [(block, 1)]
            if victim is not None:
                span, hits, accessed, requester = victim
                if accessed > t:
                    violated(f"span {span} leaves at {t} ns, before its last access")
                evict = Evict(
                    n, t, span, runs, by, requester, t - accessed, hits, "capacity", "cache",
                    replica=replica,
                )  # fmt: skip
                expanded.append(evict)
                n += 1
            expanded.append(Alloc(n=n, t=t, replica=replica, seq=seq, first=first, runs=runs))
            n += 1
        return expanded


def join_runs(parts: Iterable[Runs]) -> Runs:
    """Return the runs of the ids of all `parts`, each of them runs of `encode_runs`."""
    joined: Runs = []
    for part in parts:
        if joined and part:
            first, count = joined[-1]
            then, more = part[0]
            step = then - first if count == 1 else 1 if count > 0 else -1
            # A run of the next part goes on, unless it turns.
            if (
                step in (1, -1)
                and then == first + (count if step > 0 else -abs(count))
                and (more == 1 or (more > 0) == (step > 0))
            ):
                joined[-1] = first, step * (abs(count) + abs(more))
                part = part[1:]  # noqa: PLW2901
        joined += part
    return joined
