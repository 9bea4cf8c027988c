"""What a stream of KV events says is resident, and what in it cannot be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

from kvcore.kv_events.model import (
    AllBlocksCleared,
    Batch,
    Block,
    BlockRemoved,
    BlockStored,
    BlockUpdated,
    Event,
    Hash,
    PagesStored,
    Unread,
    level_medium,
)

Publisher: TypeAlias = int | str | None


Scope: TypeAlias = tuple[Publisher, int | None, int | None]
"""Within which a hash has one meaning: publisher, rank, and group of layers."""


REUSED = "REUSED"
"""The `origin` of a run that was there already, in engines that say it."""


FEW = 20
"""How many anomalies are kept with their places; all are counted."""


@attrs.frozen
class Place:
    """Where a block can be: which publisher's, of which rank and group of layers, and tier."""

    publisher: Publisher
    dp_rank: int | None
    group: int | None
    medium: str | None


@attrs.frozen
class Anomaly:
    """Something in a stream that cannot be, or cannot be understood.

    `kind` is one of `KINDS`; `where` names the batch and the event, `what` the block or the
    reason.
    """

    kind: str
    where: str
    what: str


KINDS = {
    "unread": "events that cannot be read",
    "unknown_parent": "runs whose parent was never stored, or is gone",
    "never_stored": "removals of blocks that were not there",
    "collision": "hashes stored with another parent or other tokens than before",
    "repeated": "hashes that an event has twice",
}


@attrs.define
class _Publisher:
    """How far a publisher's stream has been followed."""

    next: int | None = None
    time: int | None = None


class Ledger:
    """Follows batches in the order in which they were published.

    A hash may be stored several times in one place and removed as often: it is resident
    until it was removed as often as it was stored. In full-report mode, where an engine
    stores again what a request reused, a second store is a reuse instead; so it is where an
    event says that its `origin` is `REUSED`.

    A number that was passed already is of a batch that was replayed, and ignored, unless its
    batch has a later time than any before it: then the publisher has restarted, and what
    it held is forgotten. Numbers that are left out are a gap: what is resident after one is
    what the stream says, not what is so.

    Memory grows with resident blocks; O(blocks of an event) each.

    Attributes:
        full: whether the stream is in full-report mode.
        batches, events: how many were followed, `events` by kind.
        stored, removed: blocks, those that were there already or were not there left out.
        stored_again, reused: blocks stored where they were, without and with full reports.
        moved: blocks that changed their tier.
        cleared: blocks that a clear dropped; `forgotten`: those a restart did.
        replayed: batches ignored, since they had come before.
        restarts: of publishers.
        gaps: publisher, first number missing, and how many, of each gap.
        anomalies: how many of each kind there were; `examples` has the first with places.
    """

    def __init__(self, *, full: bool = False) -> None:
        """Start with nothing resident."""
        self.full = full
        self.batches = self.stored = self.removed = self.stored_again = self.reused = 0
        self.moved = self.cleared = self.forgotten = self.replayed = self.restarts = 0
        self.events: Counter[str] = Counter()
        self.gaps: list[tuple[Publisher, int, int]] = []
        self.anomalies = dict.fromkeys(KINDS, 0)
        self.examples: list[Anomaly] = []
        self._places: dict[Place, dict[Hash, int]] = {}
        self._known: dict[Scope, dict[Hash, tuple[Hash | None, Any]]] = {}
        self._publishers: dict[Publisher, _Publisher] = {}

    def follow(self, batch: Batch, seq: int | None = None, publisher: Publisher = None) -> bool:
        """Take in the next batch; say whether it was new.

        `seq` and `publisher` are the transport's; without them, what the batch says itself
        (`seq`, and `source` or `dp_rank`).
        """
        seq = batch.seq if seq is None else seq
        if publisher is None:
            publisher = batch.dp_rank if batch.source is None else batch.source
        if seq is not None and not self._advance(publisher, seq, batch.time):
            self.replayed += 1
            return False
        number = self.batches if seq is None else seq
        self.batches += 1
        for place, event in enumerate(batch.events):
            self.events[type(event).__name__] += 1
            self._take(event, (publisher, batch.dp_rank), f"batch {number}, event {place}")
        return True

    def miss(self, publisher: Publisher, first: int, count: int) -> None:
        """Take in that `count` batches from number `first` on are lost."""
        self.gaps.append((publisher, first, count))
        self._publishers.setdefault(publisher, _Publisher()).next = first + count

    def restart(self, publisher: Publisher) -> None:
        """Take in that a publisher began anew: what it held is forgotten."""
        self.restarts += 1
        self.forgotten += self._drop(lambda place: place.publisher == publisher)
        self._publishers.pop(publisher, None)

    def resident(self) -> dict[Place, dict[Hash, int]]:
        """Return how often each hash is resident, by place; a copy."""
        return {place: dict(blocks) for place, blocks in self._places.items() if blocks}

    @property
    def missing(self) -> int:
        """Batches known to be lost."""
        return sum(count for _, _, count in self.gaps)

    def _advance(self, publisher: Publisher, seq: int, time: int | None) -> bool:
        """Note a batch's number; say whether it is new."""
        state = self._publishers.setdefault(publisher, _Publisher())
        if state.next is not None and seq < state.next:
            if time is None or state.time is None or time <= state.time:
                return False
            self.restart(publisher)
            state = self._publishers[publisher] = _Publisher(next=0)
        if state.next is not None and seq > state.next:
            self.gaps.append((publisher, state.next, seq - state.next))
        state.next = seq + 1
        if time is not None:
            state.time = time if state.time is None else max(time, state.time)
        return True

    def _take(self, event: Event, whose: tuple[Publisher, int | None], where: str) -> None:
        match event:
            case BlockStored() | PagesStored():
                reuse = self.full or event.more.get("origin") == REUSED
                self._store(list(event.blocks()), (*whose, event.group), where, reuse=reuse)
            case BlockRemoved():
                self._remove(event, (*whose, event.group), where)
            case AllBlocksCleared():
                self.cleared += self._drop(lambda p: (p.publisher, p.dp_rank) == whose)
            case BlockUpdated(level=(old, new)):
                self._move(event.hash, (*whose, event.group), (old, new), where)
            case Unread():
                self._note("unread", where, event.reason)

    def _store(self, blocks: list[Block], scope: Scope, where: str, *, reuse: bool) -> None:
        known = self._known.setdefault(scope, {})
        if blocks and (parent := blocks[0].parent) is not None and parent not in known:
            self._note("unknown_parent", where, f"parent {named(parent)}")
        seen: set[Hash] = set()
        for block in blocks:
            if block.hash in seen:
                self._note("repeated", where, f"block {named(block.hash)}")
            seen.add(block.hash)
            self._check(known, block, where)
            there = self._places.setdefault(Place(*scope, block.medium), {})
            count = there.get(block.hash, 0)
            if count and reuse:
                self.reused += 1
                continue
            self.stored += not count
            self.stored_again += count > 0
            there[block.hash] = count + 1

    def _check(
        self, known: dict[Hash, tuple[Hash | None, Any]], block: Block, where: str
    ) -> None:
        """Compare a block with what is known of its hash."""
        parent, content = known.setdefault(block.hash, (block.parent, block.content))
        if parent != block.parent:
            what = f"parent {named(block.parent)}, before {named(parent)}"
        elif None not in (content, block.content) and content != block.content:
            what = "other tokens than before"
        else:
            return
        self._note("collision", where, f"block {named(block.hash)}: {what}")

    def _remove(self, event: BlockRemoved, scope: Scope, where: str) -> None:
        for value in event.hashes:
            place = self._find(value, scope, event.medium)
            if place is None:
                self._note("never_stored", where, f"block {named(value)}")
            else:
                self.removed += self._decrease(place, value)

    def _find(self, value: Hash, scope: Scope, medium: str | None) -> Place | None:
        """Return where a block is; without a medium, the first place that has it."""
        exact = Place(*scope, medium)
        if value in self._places.get(exact, {}):
            return exact
        return None if medium is not None else self._anywhere(value, scope)

    def _anywhere(self, value: Hash, scope: Scope) -> Place | None:
        places = (
            place
            for place, blocks in self._places.items()
            if value in blocks and (place.publisher, place.dp_rank, place.group) == scope
        )
        return next(places, None)

    def _decrease(self, place: Place, value: Hash) -> bool:
        """Take a block out once; say whether it is gone from there."""
        blocks = self._places[place]
        blocks[value] -= 1
        if blocks[value]:
            return False
        del blocks[value]
        scope = (place.publisher, place.dp_rank, place.group)
        if self._anywhere(value, scope) is None:
            self._known[scope].pop(value, None)
        return True

    def _move(self, value: Hash, scope: Scope, levels: tuple[int, int], where: str) -> None:
        source, target = (Place(*scope, level_medium(level)) for level in levels)
        if value not in self._places.get(source, {}):
            self._note("never_stored", where, f"block {named(value)} in {source.medium}")
            return
        there = self._places.setdefault(target, {})
        there[value] = there.get(value, 0) + self._places[source].pop(value)
        self.moved += 1

    def _drop(self, wanted: Callable[[Place], bool]) -> int:
        """Forget all blocks in the places that are wanted; return how many there were."""
        places = [place for place in self._places if wanted(place)]
        for place in places:
            self._known.pop((place.publisher, place.dp_rank, place.group), None)
        return sum(len(self._places.pop(place)) for place in places)

    def _note(self, kind: str, where: str, what: str) -> None:
        self.anomalies[kind] += 1
        if len(self.examples) < FEW:
            self.examples.append(Anomaly(kind, where, what))


def named(value: Hash | None) -> str:
    """Return a hash as a message has it: bytes in hexadecimal."""
    return value.hex() if isinstance(value, bytes) else str(value)


def blocks_by_medium(ledger: Ledger) -> dict[str, int]:
    """Return how many different blocks are resident in each tier, `-` where none is told."""
    counts: Counter[str] = Counter()
    for place, blocks in ledger.resident().items():
        counts[place.medium or "-"] += len(blocks)
    return dict(counts)
