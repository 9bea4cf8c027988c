"""The tiers of a traced run: their blocks and links, rebuilt from the lines alone."""

from __future__ import annotations

from typing import Any

import attrs

from kvcore.trace import events
from kvcore.trace.events import violated
from kvcore.units import INT64_LIMIT, NS_PER_S
from kvcore.untrusted import MOST_TIER_KEYS
from kvcore_replay.state.layout import TracedPrompt, count_known


class TierDirectory:
    """Number of blocks of each key in a tier, where no block lies without those before it.

    The blocks of a prompt are found by a bisection over its keys, which are chained. The number
    of stored keys that continue a key is kept as well: a block that others continue stays.
    """

    def __init__(self, ratio: int) -> None:
        """Start empty; a key stands for `ratio` blocks."""
        self._ratio = ratio
        self._blocks: dict[Any, int] = {}
        self._next: dict[Any, int] = {}

    def __len__(self) -> int:
        """Return the number of keys with blocks in the tier."""
        return len(self._blocks)

    def match(self, keys: list[Any]) -> int:
        """Return the number of blocks of a prompt in the tier, from the first. O(log keys)."""
        known = count_known(keys, self._blocks)
        return (known - 1) * self._ratio + self._blocks[keys[known - 1]] if known else 0

    def store(self, keys: list[Any], first: int, end: int) -> None:
        """Add the blocks `[first, end)` of a prompt. O(keys of them).

        Raises:
            ViolationError: they do not continue the stored blocks of the prompt.
        """
        ratio, here = self._ratio, self.match(keys)
        if here != first:
            violated(f"{here} blocks of the prompt are there already, so {first} is not next")
        low, high = first // ratio, (end - 1) // ratio
        for index in range(-(-first // ratio), high + 1):
            if index:
                before = keys[index - 1]
                self._next[before] = self._next.get(before, 0) + 1
        self._blocks.update(dict.fromkeys(keys[low:high], ratio))
        self._blocks[keys[high]] = end - high * ratio

    def remove(self, keys: list[Any], first: int, end: int) -> None:
        """Remove the blocks `[first, end)` of a prompt, which no stored block may continue.

        Raises:
            ViolationError: they are not stored, or others continue them.
        """
        ratio, blocks, after = self._ratio, self._blocks, self._next
        low, high = first // ratio, (end - 1) // ratio
        lowest = -(-first // ratio)
        if blocks.get(keys[high], 0) != end - high * ratio or after.get(keys[high]):
            violated(f"the blocks up to {end} are not the end of a path that is there")
        for index in range(high, lowest - 1, -1):
            if after.get(keys[index]):
                violated(f"what comes after block {index * ratio} of the prompt is there still")
            del blocks[keys[index]]
            if index:
                before = keys[index - 1]
                after[before] -= 1
                if not after[before]:
                    del after[before]
        if lowest > low:
            if after.get(keys[low]):
                violated(f"what comes after block {first} of the prompt is there still")
            blocks[keys[low]] = first - low * ratio


@attrs.define(eq=False)
class TracedTier:
    """A tier after the lines so far.

    Attributes:
        record: its fields in HEADER.
        above: the tier from which blocks come down; None: the pool.
        read, write: bandwidth of its link in bytes a second, for loads and for stores.
        latency: latency of its link in ns.
        directory: the blocks that requests can find in it.
        untimed: whether the run had no clock, so that every transfer was done at once.
        group_bytes: by cache group, the bytes that are moved of a block; empty: there is one.
        parked: the blocks `[first, end)` of preempted sequences, by request.
        used: slots in use.
        free_at: time in ns at which the queue of its link is empty.
        recovered: number of blocks that were in it from the start.
        stored, loads, loaded: number of blocks stored in it, of finished loads from it, and of
            their blocks.
        dropped: number of blocks that left it, by reason.
        read_bytes, written_bytes, busy_ns: bytes that its link carried, and ns that it took.
    """

    record: events.TierRecord
    above: str | None
    read: int
    write: int
    latency: int
    directory: TierDirectory
    untimed: bool
    group_bytes: list[int] = attrs.field(factory=list)
    parked: dict[int | str, tuple[int, int]] = attrs.field(factory=dict)
    used: int = 0
    free_at: int = 0
    recovered: int = 0
    stored: int = 0
    loads: int = 0
    loaded: int = 0
    dropped: dict[str, int] = attrs.field(factory=dict)
    read_bytes: int = 0
    written_bytes: int = 0
    busy_ns: int = 0

    @property
    def name(self) -> str:
        """The name of the tier in trace lines."""
        return self.record.tier

    @property
    def parked_blocks(self) -> int:
        """Blocks of preempted sequences."""
        return sum(end - first for first, end in self.parked.values())

    def size_of(self, event: events.Offload | events.LoadStart) -> int:
        """Return the bytes that a transfer moves."""
        group = event.group
        size = self.group_bytes[group] if isinstance(group, int) else self.record.slot_bytes
        return event.blocks * size

    def load_ns(self, blocks: int, now: int) -> int | None:
        """Return the ns from `now` until blocks would be loaded; None: the tier loads none.

        Without a clock no transfer waits for another.
        """
        if self.record.options.get("load") == "never":
            return None
        wait = max(self.free_at - now, 0)
        size = blocks * self.record.slot_bytes
        return wait + self._held(size, write=False) + self.latency

    def done_at(self, size: int, now: int, *, write: bool) -> int:
        """Return the time in ns at which bytes are usable that join the queue at `now`."""
        if self.untimed:
            return now
        return max(self.free_at, now) + self._held(size, write=write) + self.latency

    def queue(self, size: int, now: int, *, write: bool) -> None:
        """Add bytes to the queue of the link."""
        duration = self._held(size, write=write)
        if not self.untimed:
            self.busy_ns += duration
            self.free_at = max(self.free_at, now) + duration
        if write:
            self.written_bytes += size
        else:
            self.read_bytes += size

    def _held(self, size: int, *, write: bool) -> int:
        """Return the ns that the link takes for bytes."""
        return -(-size * NS_PER_S // (self.write if write else self.read))

    def as_dict(self, loading: int) -> dict[str, Any]:
        """Return its counts for JSON; `loading` blocks are on their way from it."""
        return {
            "tier": self.name,
            "slots": self.record.slots,
            "used_blocks": self.used,
            "parked_blocks": self.parked_blocks,
            "loading_blocks": loading,
            "recovered_blocks": self.recovered,
            "stored_blocks": self.stored,
            "loads": self.loads,
            "loaded_blocks": self.loaded,
            "dropped_blocks": dict(self.dropped),
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "link_busy_s": self.busy_ns / NS_PER_S,
        }


class TracedTiers:
    """All tiers of a trace, nearest first by name, and the loads from them.

    Attributes:
        levels: the tiers by name.
        loads: the LOAD_START lines without a LOAD so far, by sequence.
    """

    def __init__(self, header: events.Header, ratio: int) -> None:
        """Start with the empty tiers that HEADER gives; a key stands for `ratio` blocks.

        Raises:
            ValueError: a tier of HEADER cannot be.
        """
        self.levels: dict[str, TracedTier] = {}
        self.loads: dict[int, list[events.LoadStart]] = {}
        above = None
        for record in header.tiers or []:
            if record.tier in self.levels:
                msg = f"two tiers are called {record.tier!r}"
                raise ValueError(msg)
            directory = TierDirectory(ratio)
            self.levels[record.tier] = TracedTier(
                record, above, *_link(record), directory, header.mode == "untimed"
            )
            above = record.tier

    def tier(self, name: str) -> TracedTier:
        """Return the tier of that name.

        Raises:
            ViolationError: there is none.
        """
        known = ", ".join(self.levels)
        return self.levels.get(name) or violated(f"no tier is {name!r}; there are: {known}")

    def found(self, prompt: TracedPrompt, hit: int) -> list[tuple[TracedTier, int, int]]:
        """Return the blocks `[first, end)` of a prompt beyond `hit` in each tier, in order."""
        parts = []
        for tier in self.levels.values():
            end = min(tier.directory.match(prompt.keys), prompt.limit)
            if end > hit:
                parts.append((tier, hit, end))
                hit = end
        return parts

    def as_dict(self) -> list[dict[str, Any]]:
        """Return the counts of each tier, nearest first, for JSON."""
        loading = dict.fromkeys(self.levels, 0)
        for starts in self.loads.values():
            for start in starts:
                loading[start.tier] += start.blocks
        return [tier.as_dict(loading[name]) for name, tier in self.levels.items()]

    def recover(self, event: events.Recover) -> None:
        """Apply RECOVER. O(keys)."""
        tier, end = self.tier(event.tier), event.first + event.blocks
        self._store(tier, event.keys, event.first, end)
        tier.used += event.blocks
        tier.recovered += event.blocks

    def offload(self, event: events.Offload, keys: list[Any]) -> None:
        """Apply OFFLOAD of a prompt with these `keys`. O(keys)."""
        tier = self.tier(event.tier)
        first, end = event.first, event.first + event.blocks
        if event.parked:
            tier.parked[event.request] = first, end
        else:
            self._store(tier, keys, first, end)
        tier.used += event.blocks
        tier.stored += event.blocks
        tier.queue(tier.size_of(event), event.t, write=True)

    def load_start(self, event: events.LoadStart) -> None:
        """Apply LOAD_START."""
        tier = self.tier(event.tier)
        tier.queue(tier.size_of(event), event.t, write=False)
        self.loads.setdefault(event.seq, []).append(event)

    def load(self, event: events.Load) -> None:
        """Apply LOAD."""
        tier, waiting = self.tier(event.tier), self.loads[event.seq]
        if waiting[0].request != event.request:
            violated(f"sequence {event.seq} is not of request {event.request!r}")
        del waiting[0]
        if not waiting:
            del self.loads[event.seq]
        tier.loads += 1
        tier.loaded += event.blocks

    def drop(self, event: events.Discard, keys: list[Any]) -> None:
        """Apply DROP of a prompt with these `keys`. O(keys)."""
        tier = self.tier(event.tier)
        first, end = event.first, event.first + event.blocks
        if event.reason == "parked":
            if tier.parked.pop(event.request, None) != (first, end):
                violated(f"request {event.request!r} has not parked blocks {first} to {end}")
        else:
            tier.directory.remove(keys, first, end)
        tier.used -= event.blocks
        tier.dropped[event.reason] = tier.dropped.get(event.reason, 0) + event.blocks

    def _store(self, tier: TracedTier, keys: list[Any], first: int, end: int) -> None:
        tier.directory.store(keys, first, end)
        if sum(len(level.directory) for level in self.levels.values()) > MOST_TIER_KEYS:
            violated(f"tiers hold more than {MOST_TIER_KEYS:,} keys, which is the most")


def _link(record: events.TierRecord) -> tuple[int, int, int]:
    """Return bytes a second each way, and the latency in ns, of a tier's link."""
    rates = [record.options.get(f"{direction}_bandwidth") for direction in ("read", "write")]
    latency: Any = record.options.get("latency")
    known = [rate for rate in rates if type(rate) is int and rate > 0]
    is_time = type(latency) in (int, float) and 0 <= latency * NS_PER_S < INT64_LIMIT
    if len(known) < len(rates) or not is_time:
        msg = (
            f"tier {record.tier!r} has the bandwidths {rates} and the latency {latency!r}: "
            "its link is not known"
        )
        raise ValueError(msg)
    read, write = (rate * record.devices for rate in known)
    return read, write, round(float(latency) * NS_PER_S)
