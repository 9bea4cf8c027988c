"""The contract of tiers, which store K/V outside the pool, and what a cache calls of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, get_args

import attrs

from kvcore.cache.eviction import EvictionPolicy
from kvcore.cache.residency import CacheStats, Residency
from kvcore.cache.sequence import Sequence as Holder
from kvcore.errors import InputError
from kvcore.plugins.base import Plugin
from kvcore.plugins.options import spec_of
from kvcore.request import Key, Request
from kvcore.units import parse_bytes, picoseconds


def _bytes(value: int | str) -> int:
    """Return a number of bytes; text may have a unit."""
    return parse_bytes(value) if isinstance(value, str) else value


def _amount(wanted: str, default: Any = attrs.NOTHING) -> Any:
    """Return an option of bytes, 1 or more; `wanted` says in its error what to give."""

    def check(_: object, option: attrs.Attribute[Any], value: object) -> None:
        if type(value) is not int or value < 1:
            msg = f"{option.name}={value!r}: give {wanted}"
            raise InputError(msg)

    return attrs.field(default=default, converter=_bytes, validator=check)


def bandwidth(default: int | str) -> Any:
    """Return an option of bytes a second, which may be text with a unit, such as `25GB`."""
    return _amount("bytes a second, 1 or more, such as 25GB", default)


WriteRule: TypeAlias = int | Literal["evict", "through"]
"""The condition for writing a block into a tier: see `Tier.write`."""

KeepRule: TypeAlias = Literal["inclusive", "exclusive"]
LoadRule: TypeAlias = Literal["cost", "always", "never"]


@attrs.define(eq=False, kw_only=True)
class Tier(Plugin):
    """A memory for blocks outside the pool: of the host, on a disk, of a server.

    A tier is a cache of its own. It has slots, each as large as a block in all layers, a
    directory of the keys of the blocks in them, and an eviction policy of the same kind as
    that of the pool. All transfers to and from it share one link, and take turns on it.

    A subclass sets `name` and the defaults of the options, and overrides `open`, which returns
    the store of the bytes in a run on tensors. A simulation never calls `open`.

    Attributes:
        memory: its capacity in bytes; as text with a unit, such as `64GiB`.
        eviction: its eviction policy: a name with at most one option, a class or an instance.
        write: which blocks of the level above are written into it. `evict`: evicted ones;
            `through`: stored ones, at once; a number n: those that n requests have hit.
        keep: whether blocks stay after they were loaded (`inclusive`) or are dropped, except
            those that other cached blocks continue (`exclusive`).
        load: when its blocks are loaded: if that is faster than computing them (`cost`),
            `always`, or `never`.
        read_bandwidth, write_bandwidth: bytes a second of its link, towards the pool and
            from it; as text with a unit, such as `25GB`.
        latency: seconds from the end of a transfer until its data can be used.
        max_wait: seconds that a write may wait for its turn. A write that would wait longer is
            skipped, so the queue of writes is bounded.
        call_timeout: seconds that a call of the store may take in a run on tensors. After that
            the run continues without the blocks of the call.
        per_device: whether each GPU has a link of its own, so that bandwidths add up.
        parks: whether private blocks of preempted sequences can be written into it.

    Raises:
        InputError: a size, a rate or a time is out of range.
    """

    kind: ClassVar[str] = "tier"
    per_device: ClassVar[bool] = False
    parks: ClassVar[bool] = False

    memory: int | str = _amount("bytes, 1 or more, such as 64GiB")
    eviction: str | EvictionPolicy | type[EvictionPolicy] = "lru"
    write: WriteRule = "evict"
    keep: KeepRule = "inclusive"
    load: LoadRule = "cost"
    read_bandwidth: int | str = bandwidth("25GB")
    write_bandwidth: int | str = bandwidth("25GB")
    latency: float = 1e-5
    max_wait: float = 1.0
    call_timeout: float = 10.0

    def __attrs_post_init__(self) -> None:
        """Check the rules and the times."""
        for name, choices in (("keep", get_args(KeepRule)), ("load", get_args(LoadRule))):
            if getattr(self, name) not in choices:
                msg = f"{name}={getattr(self, name)!r} is not known; there are: "
                raise InputError(msg + ", ".join(choices))
        if self.write not in ("evict", "through") and (
            type(self.write) is not int or self.write < 1
        ):
            msg = f"write={self.write!r}: give evict, through, or a number of uses from 1 on"
            raise InputError(msg)
        for name in ("latency", "max_wait", "call_timeout"):
            picoseconds(getattr(self, name), name)

    def options(self) -> dict[str, Any]:
        """Return the options, the eviction policy as text."""
        options = super().options()
        if isinstance(self.eviction, EvictionPolicy):
            options["eviction"] = str(spec_of(self.eviction))
        elif isinstance(self.eviction, type):
            options["eviction"] = self.eviction.name
        return options

    def slots(self, slot_bytes: int) -> int:
        """Return the number of slots of `slot_bytes` bytes each.

        Raises:
            InputError: the memory is smaller than a slot.
        """
        slots = int(self.memory) // slot_bytes
        if slots < 1:
            msg = (
                f"tier {self.name!r} has memory={self.memory}, less than a block, which takes "
                f"{slot_bytes} bytes in all layers: give it more"
            )
            raise InputError(msg)
        return slots

    def open(self, slots: int, slot_bytes: int, identity: bytes) -> TierStore:
        """Return the store of the bytes of `slots` slots in a run on tensors.

        `identity` identifies the K/V: model, weights, layout, and the derivation of keys from
        tokens. Blocks that were stored with another identity must not be read.

        Raises:
            InputError: the tier is for simulations alone (the default), in use by another
                process, or not reachable.
            StorageError: there is too little room for the slots.
        """
        del slots, slot_bytes, identity
        msg = f"tier {self.name!r} keeps no bytes: it is for simulations alone"
        raise InputError(msg)


@attrs.frozen
class StoredBlock:
    """A block in a slot of a tier.

    Attributes:
        slot: index of the slot, from 0 on.
        position: its position in the prompt, in blocks.
        key: the block key that covers it.
        chain: hash, 16 bytes, of all keys up to its own, and of its position: equal chains
            mean equal text, in all workloads.
        parent: the `chain` of the block before it; empty for the first block of a prompt.
    """

    slot: int
    position: int
    key: Key
    chain: bytes
    parent: bytes


class TierStore(ABC):
    """Keeps the bytes of blocks in slots. Called by one thread at a time.

    Data is `[blocks, slot_bytes]`, contiguous, unsigned bytes. A method may raise OSError, or
    take too long: the run then continues without the blocks, and counts them.

    A store checks the blocks that it reads: bytes or a `chain` that differ from the written
    ones are reported as damaged, and never returned as intact.

    Attributes:
        memory: the slots, `[slots, slot_bytes]`, if they lie in memory of this process and are
            not moved before `close`; else None. A run that can copy between this memory and
            its pool does so, and calls only `close`: without a thread, time-out and checks.
    """

    memory: memoryview | None = None

    @abstractmethod
    def write(self, blocks: Sequence[StoredBlock], data: memoryview) -> None:
        """Store `data`, the bytes of `blocks`, in place of the previous content of the slots.

        A block is stored as a whole or not at all, even if the process is killed. Copy what is
        kept: `data` is memory that the caller overwrites once the call has returned.
        """

    @abstractmethod
    def read(self, blocks: Sequence[StoredBlock], into: memoryview) -> int:
        """Read the bytes of `blocks` into `into`; return the number before a damaged one."""

    def drop(self, slots: Sequence[int]) -> None:
        """Called when `slots` are freed. The default does nothing."""
        del slots

    def recover(self) -> Iterable[StoredBlock]:
        """Yield the blocks of an earlier run, in any order. The default yields none."""
        return ()

    def present(self, blocks: Sequence[StoredBlock]) -> int:
        """Return the number of `blocks` before a missing one. The default returns all.

        Called at every admission that finds blocks here, for stores that may lose blocks;
        a later `read` may still find fewer.
        """
        return len(blocks)

    def close(self) -> None:  # noqa: B027
        """Release all resources. The default does nothing."""


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
    """A tier in use, with its eviction policy."""

    eviction: EvictionPolicy

    @property
    def tier(self) -> Plugin:
        """The plugin, with its options."""


class ParkingTier(LowerTier, Protocol):
    """A tier in use, in which preempted sequences can rest."""

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

    def computed(self, seq: Holder, now: int) -> None:
        """Called when a step has computed tokens of `seq`, and when `seq` closes.

        What it has published is computed by then: a plan closes what an earlier step ran.
        """

    def can_swap(
        self, seq: Holder, tokens: int, now: int, prefill_ns: PrefillTime
    ) -> ParkingTier | None:
        """Return the tier that parks `seq` in less time than computing it again takes."""

    def record_residency(self) -> None:
        """Start to measure how long blocks stay in each tier."""

    def residencies(self) -> Iterable[Residency | None]:
        """Return what is measured of each tier; None: nothing is."""

    def hit_stats(self) -> CacheStats:
        """Return the statistics of the cache with the hits of all tiers."""

    def as_dict(self) -> list[dict[str, Any]]:
        """Return the JSON object of each tier."""

    def check_integrity(self) -> None:
        """Check the invariants of every tier. Raises AssertionError."""
