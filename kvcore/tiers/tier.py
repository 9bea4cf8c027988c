"""The tier contract: storage for K/V outside the pool, and the cost of moving it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import attrs

from kvcore.cache.eviction import EvictionPolicy
from kvcore.errors import InputError
from kvcore.plugins.base import Plugin
from kvcore.plugins.options import spec_of
from kvcore.request import Key
from kvcore.units import NS_PER_S, parse_bytes, picoseconds


def _bytes(value: int | str) -> int:
    """Return a number of bytes; text may have a unit."""
    return parse_bytes(value) if isinstance(value, str) else value


def _positive(_: object, option: attrs.Attribute[Any], value: object) -> None:
    if type(value) is not int or value < 1:
        what = "bytes a second" if option.name.endswith("bandwidth") else "bytes"
        msg = f"{option.name}={value!r}: give {what}, 1 or more, such as 64GiB"
        raise InputError(msg)


def bandwidth(default: int | str) -> Any:
    """Return an option of bytes a second, which may be text with a unit, such as `25GB`."""
    return attrs.field(default=default, converter=_bytes, validator=_positive)


WriteRule: TypeAlias = int | Literal["evict", "through"]
"""When a block is written into a tier: see `Tier.write`."""


@attrs.define(eq=False, kw_only=True)
class Tier(Plugin):
    """A memory in which blocks of the cache may rest: of the host, on a disk, of a server.

    A tier is a cache of its own. It has slots, each as large as a block in all layers; it
    knows which blocks are in them by their keys; and an eviction policy, of the same kind as
    that of the pool, decides what leaves when it is full. It is reached by one link, on which
    all that moves in or out waits for its turn.

    A subclass names itself, gives the options the defaults of what it stands for, and opens
    the `store` that keeps the bytes in a run on tensors. A simulation never calls `open`.

    Attributes:
        memory: its capacity in bytes; as text with a unit, such as `64GiB`.
        eviction: its eviction policy: a name with at most one option, a class or an instance.
        write: what moves down into it. `evict`: blocks that the level above evicts; `through`:
            all that the level above stores, at once; n: what n requests have hit above.
        keep: `inclusive`: what is loaded stays; `exclusive`: it leaves, but for blocks that
            others rest below.
        load: whether what it holds is loaded by `cost`, if that is faster than to compute it
            again, `always`, or `never`.
        read_bandwidth, write_bandwidth: bytes a second of its link, towards the pool and
            from it; as text with a unit, such as `25GB`.
        latency: seconds from the end of a transfer to when its data can be used.
        max_wait: seconds that a write may wait for its turn. One that would wait longer is
            not done, so that writes never queue up without bound.
        call_timeout: seconds that a call of the store may take in a run on tensors. After that
            the run goes on without what it was to write or to read.
        per_device: whether each GPU has a link of its own, so that bandwidths add up.
        parks: whether it takes the K/V of preempted sequences.

    Raises:
        InputError: a size, a rate or a time that cannot be.
    """

    kind: ClassVar[str] = "tier"
    per_device: ClassVar[bool] = False
    parks: ClassVar[bool] = False

    memory: int | str = attrs.field(converter=_bytes, validator=_positive)
    eviction: str | EvictionPolicy | type[EvictionPolicy] = "lru"
    write: WriteRule = "evict"
    keep: Literal["inclusive", "exclusive"] = "inclusive"
    load: Literal["cost", "always", "never"] = "cost"
    read_bandwidth: int | str = bandwidth("25GB")
    write_bandwidth: int | str = bandwidth("25GB")
    latency: float = 1e-5
    max_wait: float = 1.0
    call_timeout: float = 10.0

    def __attrs_post_init__(self) -> None:
        """Check the rules and the times."""
        for name, choices in (
            ("keep", ("inclusive", "exclusive")),
            ("load", ("cost", "always", "never")),
        ):
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
        """Return how many slots of `slot_bytes` bytes it has.

        Raises:
            InputError: not even one.
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
        """Return what keeps the bytes of `slots` slots in a run on tensors.

        `identity` says whose K/V it is: model, weights, layout, and how tokens became keys.
        What was kept under another identity is not to be used.

        Raises:
            InputError: the tier is for simulations alone (unless overridden), or cannot be
                had: it is in use by another process, or not reachable.
            StorageError: there is too little room for it.
        """
        del slots, slot_bytes, identity
        msg = f"tier {self.name!r} keeps no bytes: it is for simulations alone"
        raise InputError(msg)


@attrs.frozen
class StoredBlock:
    """A block in a slot of a tier: whose K/V it is.

    Attributes:
        slot: its place in the tier, from 0 on.
        position: its place in the prompt, in blocks.
        key: the block key that covers it.
        chain: 16 bytes that stand for all keys up to and with its own, and its position: equal
            ones mean equal text, whichever workload it came from.
        parent: the `chain` of the block before it; empty for the first of a prompt.
    """

    slot: int
    position: int
    key: Key
    chain: bytes
    parent: bytes


class TierStore(ABC):
    """Keeps the bytes of blocks in slots. Called by one thread at a time.

    Data is `[blocks, slot_bytes]`, contiguous, unsigned bytes. A method may raise OSError, or
    take too long: the run then goes on without the blocks, and counts them.

    A store answers for what it returns: blocks whose bytes or whose `chain` are not those that
    were written are reported as wrong, never returned as right.

    Attributes:
        memory: the slots, `[slots, slot_bytes]`, if they lie in memory of this process and stay
            where they are until `close`; None: they do not. A run that can copy between them
            and its pool does so, and calls `close` alone: no thread, no time-out, no checks.
    """

    memory: memoryview | None = None

    @abstractmethod
    def write(self, blocks: Sequence[StoredBlock], data: memoryview) -> None:
        """Keep `data`, the bytes of `blocks`. What was in their slots before is gone.

        A block is there once its bytes are, whole: a process that is killed leaves no half.
        """

    @abstractmethod
    def read(self, blocks: Sequence[StoredBlock], into: memoryview) -> int:
        """Read the bytes of `blocks` into `into`; return how many of the first are right."""

    def drop(self, slots: Sequence[int]) -> None:
        """Called when `slots` are freed. Does nothing unless overridden."""
        del slots

    def recover(self) -> Iterable[StoredBlock]:
        """Yield the blocks that an earlier run has left, in any order; none by default."""
        return ()

    def present(self, blocks: Sequence[StoredBlock]) -> int:
        """Return how many of the first `blocks` are still there. All unless overridden.

        Called at every admission that finds blocks here, for stores from which blocks may go
        by themselves; `read` may still find less.
        """
        return len(blocks)

    def close(self) -> None:  # noqa: B027
        """Release all resources. Does nothing unless overridden."""


class Link:
    """The link of a tier: transfers take their turn, in the order in which they are asked for.

    A transfer holds the link for its bytes over the bandwidth of its direction, in whole
    nanoseconds, rounded up; its data can be used `latency` later.

    Attributes:
        free_at: when (ns) all that is queued has passed.
        read_bytes, written_bytes: what has been asked for so far.
        busy_ns: how long that holds the link.
    """

    __slots__ = (
        "_latency", "_read", "_write", "busy_ns", "free_at", "read_bytes", "written_bytes",
    )  # fmt: skip

    def __init__(self, read_bandwidth: int, write_bandwidth: int, latency: float) -> None:
        """Store bytes a second each way, and the latency in seconds."""
        self._read, self._write = read_bandwidth, write_bandwidth
        self._latency = round(latency * NS_PER_S)
        self.free_at = self.read_bytes = self.written_bytes = self.busy_ns = 0

    def wait(self, now: int) -> int:
        """Return the ns that a transfer asked for at `now` waits for its turn."""
        return max(0, self.free_at - now)

    def load_ns(self, size: int, now: int) -> int:
        """Return the ns from `now` until `size` bytes would be loaded. Changes nothing."""
        return self.wait(now) - (-size * NS_PER_S // self._read) + self._latency

    def store_ns(self, size: int, now: int) -> int:
        """Return the ns from `now` until `size` bytes would be stored. Changes nothing."""
        return self.wait(now) - (-size * NS_PER_S // self._write) + self._latency

    def load(self, size: int, now: int) -> int:
        """Queue a load of `size` bytes; return when (ns) its data can be used."""
        self.read_bytes += size
        return self._queue(-(-size * NS_PER_S // self._read), now)

    def store(self, size: int, now: int) -> int:
        """Queue a write of `size` bytes; return when (ns) its data can be used."""
        self.written_bytes += size
        return self._queue(-(-size * NS_PER_S // self._write), now)

    def _queue(self, held: int, now: int) -> int:
        self.busy_ns += held
        self.free_at = max(self.free_at, now) + held
        return self.free_at + self._latency


class InstantLink(Link):
    """A link on which nothing takes time, for replays without a clock. It counts bytes."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(1, 1, 0)

    def load_ns(self, size: int, now: int) -> int:
        """Return 0."""
        del size, now
        return 0

    def _queue(self, held: int, now: int) -> int:
        del held
        return now
