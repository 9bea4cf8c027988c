"""What a cache and the server above it call of the tiers below, which are a package."""

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
    """A load of blocks into the private blocks of a sequence, from one tier or several."""

    @property
    def seq(self) -> Holder:
        """The sequence."""

    @property
    def ready(self) -> int:
        """The time (ns) at which all blocks can be used."""

    @property
    def resumed(self) -> bool:
        """Whether it is for a preempted request that returns."""


class LowerTier(Protocol):
    """A tier in use."""

    @property
    def tier(self) -> Plugin:
        """The plugin, with its options."""

    @property
    def tree(self) -> SpanTree:
        """The directory of its blocks."""

    def park(self, seq: Holder, tokens: int, now: int) -> None:
        """Write the private blocks of a preempted sequence with `tokens` tokens."""


class LowerTiers(Protocol):
    """The tiers below a cache."""

    @property
    def levels(self) -> Sequence[LowerTier]:
        """The tiers, nearest first."""

    def load(
        self, seq: Holder, now: int, prefill_ns: PrefillTime, *, resumed: bool = False
    ) -> TierLoad | None:
        """Start to load blocks that `seq`, just opened, did not hit; None: none are loaded."""

    def prefetch(
        self, request: Request, now: int, arrival: int, prefill_ns: PrefillTime, reserve: int
    ) -> TierLoad | None:
        """Start to load blocks of `request`, which arrives at `arrival` (ns).

        They go into blocks that are free or evictable, of which `reserve` must stay.
        """

    def finish(self, load: Any, now: int) -> int:
        """Commit the blocks of a load of these tiers; return the computed tokens of `seq`."""

    def can_swap(
        self, seq: Holder, tokens: int, now: int, prefill_ns: PrefillTime
    ) -> LowerTier | None:
        """Return the tier that can park `seq` faster than its tokens are computed again."""

    def record_residency(self) -> None:
        """Start to measure how long blocks stay in each tier."""

    def hit_stats(self) -> CacheStats:
        """Return the statistics of the cache with the hits of all tiers."""

    def as_dict(self) -> list[dict[str, Any]]:
        """Return the JSON object of each tier."""

    def check_integrity(self) -> None:
        """Check the invariants of every tier. Raises AssertionError."""
