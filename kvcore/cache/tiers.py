"""The protocol of the tiers below a cache, as the cache and the server call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from kvcore.cache.residency import CacheStats
from kvcore.cache.sequence import Sequence as Holder
from kvcore.cache.tree import SpanTree
from kvcore.plugins import Plugin
from kvcore.request import Request

PrefillTime: TypeAlias = Callable[[int, int], int]
"""Returns the ns to prefill n tokens after a context of c tokens."""


class TierLoad(Protocol):
    """A load of blocks into the private blocks of a sequence, from one tier or several.

    Attributes:
        seq: the sequence.
        ready: the time (ns) at which all blocks can be used.
        resumed: whether it is for a preempted request that returns.
    """

    seq: Holder
    ready: int
    resumed: bool


class LowerTier(Protocol):
    """A tier in use; `tree` is the directory of its blocks."""

    tree: SpanTree

    @property
    def tier(self) -> Plugin:
        """The plugin, with its options."""

    def park(self, seq: Holder, tokens: int, now: int) -> None:
        """Write the private blocks of a preempted sequence with `tokens` tokens."""


class LowerTiers(Protocol):
    """The tiers below a cache, nearest first."""

    @property
    def levels(self) -> Sequence[LowerTier]:
        """The tiers."""

    def load(
        self, seq: Holder, now: int, prefill_ns: PrefillTime, *, resumed: bool = False
    ) -> TierLoad | None:
        """Start to load blocks that `seq`, just opened, did not hit; None: none are loaded."""

    def prefetch(
        self, request: Request, now: int, arrival: int, prefill_ns: PrefillTime, reserve: int
    ) -> TierLoad | None:
        """Start to load blocks of a request that arrives at `arrival` (ns).

        Of the blocks of the pool that are free or evictable, `reserve` must stay.
        """

    def finish(self, load: Any, now: int) -> int:
        """Commit the blocks of a load of these tiers; return the computed tokens of `seq`."""

    def can_swap(
        self, seq: Holder, tokens: int, now: int, prefill_ns: PrefillTime
    ) -> LowerTier | None:
        """Return the tier that parks `seq` in less time than computing it again takes."""

    def record_residency(self) -> None:
        """Start to measure how long blocks stay in each tier."""

    def hit_stats(self) -> CacheStats:
        """Return the statistics of the cache with the hits of all tiers."""

    def as_dict(self) -> list[dict[str, Any]]:
        """Return the JSON object of each tier."""

    def check_integrity(self) -> None:
        """Check the invariants of every tier. Raises AssertionError."""
