"""The calls of a cache that serving makes: what `KVCache` and those of packages have in common.

`KVCache` keeps all tokens in all layers. Other caches serve models whose layers keep different
things; a `LayerPlan` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from kvcore.cache.checkpoint import CheckpointPolicy
    from kvcore.cache.eviction import EvictionPolicy
    from kvcore.cache.layout import BlockLayout
    from kvcore.cache.pins import ClientPins
    from kvcore.cache.pool import CountingPool
    from kvcore.cache.prefix import PrefixIndex
    from kvcore.cache.recorder import Recorder
    from kvcore.cache.residency import CacheStats
    from kvcore.cache.retention import RetentionPolicy
    from kvcore.cache.sequence import Sequence as CacheSequence
    from kvcore.cache.tiers import LowerTiers
    from kvcore.request import Key, Request


class ServedCache(Protocol):
    """Blocks that are shared, reused and evicted, as batcher, loop and result see them.

    Sequences are opened, extended and closed by the allocator that goes with the cache. The
    other attributes and methods are described in `KVCache`.
    """

    @property
    def grouped(self) -> bool:
        """Whether its layers have block tables of their own, and there are no spans.

        Blocks are allocated chunk by chunk, and named by the allocator when they fill.
        """

    @property
    def allocator(self) -> Any:
        """Makes its allocator from batch and limits of a run; None: `DecodeAllocator` does."""

    @property
    def pool(self) -> CountingPool:
        """The blocks."""

    @property
    def geometry(self) -> BlockLayout:
        """The layout of prompts in blocks."""

    @property
    def eviction(self) -> EvictionPolicy:
        """The eviction policy."""

    @property
    def prefix(self) -> PrefixIndex | None:
        """The index of cached blocks; None: there is none."""

    @property
    def retention(self) -> RetentionPolicy | None:
        """The policy that drops tokens; None: all are kept."""

    @property
    def checkpoint(self) -> CheckpointPolicy | None:
        """The policy of where windows and states are kept; None: there are none."""

    @property
    def tiers(self) -> LowerTiers | None:
        """The tiers below the pool; None: there are none."""

    @property
    def trace(self) -> Recorder | None:
        """The recorder of every decision; None: there is none."""

    @property
    def pins(self) -> ClientPins | None:
        """The pins of clients; None: there are none."""

    @property
    def stats(self) -> CacheStats:
        """Counts of lookups and hits so far."""

    @property
    def sequences(self) -> Mapping[int, CacheSequence]:
        """The open sequences by id."""

    @property
    def forgets(self) -> bool:
        """Whether a running sequence may hold fewer tokens than it has."""

    @property
    def available_blocks(self) -> int:
        """Number of blocks that are free or can be evicted."""

    @property
    def unpinned_blocks(self) -> int:
        """Number of blocks that can be evicted."""

    @property
    def evicted_blocks(self) -> int:
        """Number of blocks that have left the cache so far."""

    def probe(self, request: Request, now: int | None, target: int | None = None) -> int:
        """Return how many blocks of `request` would hit."""

    def announce(self, request: Request, now: int) -> None:
        """Called when `request` has arrived."""

    def disown(self, request: Request) -> None:
        """Drop the record of `request`, which has ended or goes on elsewhere."""

    def commit(self, seq: Any, tokens: int, now: int | None) -> None:
        """Count `tokens` more tokens as computed."""

    def publish(self, seq: Any, tokens: int, now: int) -> None:
        """Share the blocks that the next `tokens` tokens will fill."""

    def keep_generated(self, seq: Any, tokens: int, now: int) -> None:
        """Share the generated blocks that `tokens` tokens fill."""

    def settle(self, seq: Any, tokens: int) -> None:
        """Set the length of the text of `seq` to `tokens`."""

    def append_keys(self, seq: Any, keys: Sequence[Key]) -> None:
        """Append the keys of generated blocks."""

    def make_room(self, blocks: int, now: int) -> bool:
        """Return True if `blocks` blocks are or can be made available."""

    def check_integrity(self) -> None:
        """Check every invariant."""

    def record_residency(self) -> Any:
        """Start to record how long blocks stay."""

    def residency_by_tier(self) -> dict[str, Any] | None:
        """Return how long blocks stayed; None: unknown."""


def held_blocks(cache: ServedCache) -> int:
    """Return how many blocks running requests hold: all that are neither free nor evictable."""
    # Not by `available_blocks`, which has the slots of windows in it: they are fewer.
    return cache.pool.blocks - cache.pool.free_blocks - cache.unpinned_blocks


class LayerPlan(Protocol):
    """How the memory of a model is divided among layers that keep different things.

    `Rules.layer_plan` returns it.

    Attributes:
        where: where these layers are kept, for messages.
        takes_tiers: whether there may be tiers below the pool.
        bytes_per_block: bytes of a block, and of what goes with it, on all devices together.
    """

    where: ClassVar[str]
    takes_tiers: ClassVar[bool]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block."""

    def check_keys(self, model: str, key_tokens: int) -> None:
        """Raise InputError if keys of `key_tokens` tokens do not fit blocks of `model`."""

    def cache(
        self,
        blocks: int,
        *,
        eviction: EvictionPolicy,
        prefix: PrefixIndex,
        recompute: Callable[[int, int], float] | None,
        checkpoint: CheckpointPolicy,
        key_tokens: int,
        trace: Recorder | None,
    ) -> ServedCache:
        """Return a cache of `blocks` blocks, whose other arguments are those of a `KVCache`."""

    def as_dict(self, blocks: int, checkpoint: CheckpointPolicy) -> dict[str, Any]:
        """Return the plan for JSON, under its name among the fields of a configuration."""
