"""The prefix-cache contract: which cached blocks a new prompt can use again."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Keys
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import attrs

from kvcore.cache.eviction import EvictionPolicy
from kvcore.cache.recorder import Recorder
from kvcore.cache.span import Span, SpanGeometry
from kvcore.plugins.base import Plugin
from kvcore.request import Key

if TYPE_CHECKING:
    from kvcore.cache.pool import CountingPool
    from kvcore.cache.residency import Residency
    from kvcore.cache.sequence import Sequence


Match: TypeAlias = tuple[Span, int, int, Span | None]
"""(deepest span matched, blocks matched, those of them unpinned, expired span met)."""


@attrs.define(slots=False, eq=False)
class PrefixCache(Plugin):
    """Owns the spans and their pins; `KVCache` is pool, sequences and trace around it.

    All positions and sizes are in blocks, times in nanoseconds. `KVCache` checks that
    there is room before it calls `open` or `evict`, so those need not.

    Attributes:
        cached, unpinned: blocks in spans, and those of them that no sequence pins.
        evicted, expired_blocks: blocks evicted for room, and dropped as expired, so far.
        pool, eviction, geometry, trace: what it works with, set by `attach`.
        residency: who is told of hits and evictions; None: nobody.
    """

    kind: ClassVar[str] = "prefix"

    cached: int = attrs.field(init=False, default=0, repr=False)
    unpinned: int = attrs.field(init=False, default=0, repr=False)
    evicted: int = attrs.field(init=False, default=0, repr=False)
    expired_blocks: int = attrs.field(init=False, default=0, repr=False)
    residency: Residency | None = attrs.field(init=False, default=None, repr=False)

    def attach(
        self,
        pool: CountingPool,
        eviction: EvictionPolicy,
        geometry: SpanGeometry,
        trace: Recorder | None,
    ) -> None:
        """Learn the pool, the eviction policy, the shape of spans, and the trace."""
        self.pool = pool
        self.eviction = eviction
        self.geometry = geometry
        self.trace = trace

    @abstractmethod
    def probe(self, keys: Keys[Key], limit: int, now: int) -> Match:
        """Find the longest cached prefix of `keys`, at most `limit` blocks. Pure."""

    @abstractmethod
    def open(self, seq: Sequence, match: Match, now: int) -> None:
        """Drop what expired, pin the matched path for `seq`, set `seq.span`."""

    @abstractmethod
    def hit(self, seq: Sequence, now: int, *, again: bool) -> None:
        """Count the access. Called once the admission can no longer fail.

        `again` says that a preempted request found its own blocks: no reuse.
        """

    @abstractmethod
    def undo(self, seq: Sequence, match: Match, now: int) -> None:
        """Take `open` back: unpin, and join what it split."""

    def extend(self, seq: Sequence, blocks: int) -> None:
        """Learn that `seq` got `blocks` more private blocks. Nothing, unless overridden."""

    @abstractmethod
    def commit(self, seq: Sequence, upto: int, now: int) -> None:
        """Make the private blocks of `seq` before position `upto` shareable."""

    @abstractmethod
    def close(self, seq: Sequence, now: int) -> None:
        """Unpin the path of `seq`."""

    @abstractmethod
    def fork(self, seq: Sequence, child: Sequence) -> None:
        """Pin the path of `seq` once more, for `child`: no access, no hit."""

    @abstractmethod
    def evict(self, blocks: int, requester: int | str, now: int) -> array[int] | None:
        """Evict exactly `blocks` blocks, victim by victim, each from its tail.

        Returns their ids in the order in which they leave; None where the pool counts.

        Raises:
            PolicyError: the policy raised, or its answer was no unpinned leaf. What was
                evicted before stands, and is free.
        """

    @abstractmethod
    def spans(self) -> Iterator[Span]:
        """Yield every cached span, parents before children."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError, saying which numbers disagree, if an invariant is broken."""
