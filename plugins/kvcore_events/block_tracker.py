"""The resident blocks of a stream of KV events, and contradictions in the stream."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from kvcore import InputError
from kvcore.progress import Tick, ticked, unseen
from kvcore.units import INT64_LIMIT, NS_PER_S
from kvcore_events.model import (
    AllBlocksCleared,
    Block,
    BlockRemoved,
    BlockStored,
    BlockUpdated,
    Event,
    EventBatch,
    Hash,
    PagesStored,
    UnparsedEvent,
    level_medium,
)
from kvcore_events.recording import (
    SCHEMA,
    Lost,
    Received,
    RecordingReader,
    Restarted,
    Skipped,
    unparsed_reasons,
)

__all__ = ["Anomaly", "BlockLocation", "BlockTracker", "RecordingReport", "check_recording"]

Publisher: TypeAlias = int | str | None

REUSED = "REUSED"
"""The `origin`, in engines that report it, of a stored run that was cached already."""

FIRST_TIER = {None, "GPU", "LEVEL_0", "device"}

MAX_EXAMPLES = 20

MOST_TIERS = 16
"""Largest number of tiers of a group of layers: a removal may be of a block in any of them."""

KINDS = {
    "unread": "events that cannot be read",
    "unknown_parent": "runs whose parent was never stored, or is gone",
    "never_stored": "removals of blocks that were not there",
    "collision": "hashes stored with another parent or other tokens than before",
    "repeated": "hashes that an event has twice",
}
"""What is counted, by kind of anomaly."""


@attrs.frozen
class BlockLocation:
    """A place where a block is resident: publisher, rank, group of layers, and tier."""

    publisher: Publisher
    dp_rank: int | None
    group: int | None
    medium: str | None


@attrs.frozen
class Anomaly:
    """An event that contradicts those before it, or cannot be parsed.

    Attributes:
        kind: one of `KINDS`.
        where: number of the batch, and of the event in it.
        what: the block, or the reason.
    """

    kind: str
    where: str
    what: str


@attrs.define
class _Progress:
    """The next number of a publisher's stream, and the latest time in it."""

    next: int | None = None
    time: int | None = None


@attrs.define(eq=False)
class _Group:
    """The resident blocks of a group of layers, where a hash has one meaning.

    Attributes:
        known: parent and content of each block.
        counts: how often each block is stored, by tier.
    """

    known: dict[Hash, tuple[Hash | None, Any]] = attrs.field(factory=dict)
    counts: dict[str | None, dict[Hash, int]] = attrs.field(factory=dict)

    def tier(self, medium: str | None) -> dict[Hash, int] | None:
        """Return the counts of a tier; None: it would be one too many."""
        if medium not in self.counts and len(self.counts) == MOST_TIERS:
            return None
        return self.counts.setdefault(medium, {})

    def tiers_of(self, value: Hash) -> list[str | None]:
        """Return the tiers that have a block."""
        return [medium for medium, blocks in self.counts.items() if value in blocks]

    def remove(self, value: Hash, medium: str | None) -> bool:
        """Remove a block once from a tier; return True if it has left that."""
        blocks = self.counts[medium]
        blocks[value] -= 1
        if blocks[value]:
            return False
        del blocks[value]
        self.leave_if_empty(medium)
        if not self.tiers_of(value):
            del self.known[value]
        return True

    def leave_if_empty(self, medium: str | None) -> None:
        """Forget a tier that has no blocks: it is none of the `MOST_TIERS`."""
        if not self.counts[medium]:
            del self.counts[medium]


_TOO_MANY_TIERS = f"blocks of a group are in more than {MOST_TIERS} tiers"

_Groups: TypeAlias = dict[int | None, _Group]


def _size(groups: _Groups) -> int:
    return sum(len(blocks) for group in groups.values() for blocks in group.counts.values())


def publisher_of(batch: EventBatch, publisher: Publisher) -> Publisher:
    """Return the publisher of a batch: that of the transport, or else its `source` or rank."""
    if publisher is None:
        publisher = batch.dp_rank if batch.source is None else batch.source
    return publisher


class BatchNumbers:
    """The numbers of batches in a stream: which come again, and which are missing.

    A batch with a number below the next one is a replay, also if it fills a gap, unless its
    time is later than that of all batches before: then the publisher has restarted. A gap or
    a restart with the publisher None may be that of any.

    Attributes:
        replayed: number of batches that came again.
        restarts: number of restarts of publishers; `starts`: how often each may have done so.
        gaps: publisher, first missing number, and number of batches, of each gap.
    """

    def __init__(self) -> None:
        """Expect any number of each publisher."""
        self.replayed = self.restarts = 0
        self.starts: Counter[Publisher] = Counter()
        self.gaps: list[tuple[Publisher, int, int]] = []
        self._publishers: dict[Publisher, _Progress] = {}

    def advance(
        self, batch: EventBatch, seq: int | None, publisher: Publisher
    ) -> tuple[bool, int | None, Publisher]:
        """Take the next batch; return whether it is new, its number and its publisher.

        `seq` and `publisher` are those of the transport; if they are None, those of the batch
        (`seq`, and `source` or `dp_rank`) take their place.
        """
        seq, time = batch.seq if seq is None else seq, batch.time
        publisher = publisher_of(batch, publisher)
        state = self._publishers.setdefault(publisher, _Progress())
        if seq is None:
            return True, None, publisher
        if state.next is not None and seq < state.next:
            if time is None or state.time is None or time <= state.time:
                self.replayed += 1
                return False, seq, publisher
            self.restart(publisher)
            state = self._publishers[publisher]
        if state.next is not None and seq > state.next:
            self.gaps.append((publisher, state.next, seq - state.next))
        state.next = seq + 1
        if time is not None:
            state.time = time if state.time is None else max(time, state.time)
        return True, seq, publisher

    def record_gap(self, publisher: Publisher, first: int, count: int) -> None:
        """Record that `count` batches from number `first` on are lost."""
        self.gaps.append((publisher, first, count))
        self._expect(publisher, first + count)

    def restart(self, publisher: Publisher) -> None:
        """Expect the first batch of a publisher that has restarted."""
        self.restarts += 1
        for name in self._expect(publisher, 0):
            self._publishers[name].time = None
            self.starts[name] += 1

    def _expect(self, publisher: Publisher, number: int) -> Iterable[Publisher]:
        """Expect a number next, or any if it may be of one of several publishers."""
        names = list(self._publishers) if publisher is None else [publisher]
        for name in names or [None]:
            state = self._publishers.setdefault(name, _Progress())
            state.next = number if len(names) <= 1 else None
        return names

    @property
    def missing(self) -> int:
        """Return the number of batches known to be lost."""
        return sum(count for _, _, count in self.gaps)


class StoredRuns(BatchNumbers):
    """One reading of a recording: the runs in it, and the parts that it finds to be missing.

    Args:
        path: the recording.
        group: number of the group of layers whose runs are read.

    Attributes:
        breaks: number of gaps, restarts and messages that were no batch, by publisher.
        messages: number of messages that were no batch.
        events: number of events that cannot be read.
        runs: number of runs that continue a request whose beginning is missing.
        cut: a note on where the recording is cut; empty if it is whole.
        begin: the time of the earliest batch from the first one on (ns): 0 or less.
    """

    def __init__(self, path: Path, group: int) -> None:
        """Read nothing yet."""
        super().__init__()
        self._path, self._group = path, group
        self.breaks: Counter[Publisher] = Counter()
        self.messages = self.events = self.runs = self.begin = 0
        self.cut: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[tuple[BlockStored | PagesStored, int, Any, tuple[int, int]]]:
        """Yield the runs stored in the first tier and the group; count what lacks.

        With each come its time in ns, its stream (the publisher, the source, the rank, and its
        restarts), and the numbers of gaps and restarts before it, of its publisher and of none
        that is named. If all are of other groups, that is an InputError.
        """
        groups: set[int] = set()
        for item, now in self.timed():
            stream = self._take(item)
            if stream is None or not isinstance(item, Received):
                continue
            for event in item.batch.events:
                if not isinstance(event, (BlockStored, PagesStored)):
                    continue
                groups.add(self._group if event.group is None else event.group)
                tiers = {block.medium for block in event.blocks()}
                if event.group in (None, self._group) and tiers <= FIRST_TIER:
                    yield event, now, stream, (self.breaks[item.publisher], self.breaks[None])

        if groups and self._group not in groups:
            others = ", ".join(map(str, sorted(groups)))
            msg = (
                f"{self._path}: no blocks are of the 'group' {self._group}; there are: {others}"
            )
            raise InputError(msg)

    def timed(self) -> Iterator[tuple[Received | Lost | Restarted | Skipped, int]]:
        """Yield the items of the recording, with the time from its first batch on, in ns.

        The times of a publisher never fall. Those of several do where a recording has history:
        that of one publisher after another's.
        """
        reader = RecordingReader(self._path)
        first, now, latest = None, 0, 0
        times: dict[Any, int] = {}
        for item in reader:
            if isinstance(item, Received):
                publisher = publisher_of(item.batch, item.publisher)
                now, time = times.get(publisher, now), item.batch.time
                if time is not None:
                    first = time if first is None else first
                    now = max(times.get(publisher, time - first), time - first)
                    times[publisher] = now
                self.begin, latest = min(self.begin, now), max(latest, now)
            if (span := latest - self.begin) >= INT64_LIMIT:
                msg = (
                    f"{self._path}:{reader.line}: this batch makes the recording one of "
                    f"{span // NS_PER_S} s, which is further than nanoseconds of 63 bits reach"
                )
                raise InputError(msg)
            yield item, now
        if reader.cut_reason:
            self.cut = (f"the recording is cut, and read up to there: {reader.cut_reason}",)

    def times(self) -> list[int]:
        """Return the recorded times of the batches that have one (ns)."""
        items = (item for item, _ in self.timed() if isinstance(item, Received))
        return [item.batch.time for item in items if item.batch.time is not None]

    def _take(self, item: Received | Lost | Restarted | Skipped) -> tuple[Any, ...] | None:
        """Count what an item says or shows to be missing; return the stream of a new batch."""
        stream = None
        before = self.restarts + len(self.gaps) + self.messages
        match item:
            case Received(batch, seq, publisher):
                new, _, name = self.advance(batch, seq, publisher)
                if new:
                    self.events += len(unparsed_reasons(batch))
                    stream = publisher, batch.source, batch.dp_rank, self.starts[name]
            case Lost(publisher=publisher, first=first, count=count):
                self.record_gap(publisher, first, count)
            case Restarted(publisher=publisher):
                self.restart(publisher)
            case _:
                self.messages += 1
        after = self.restarts + len(self.gaps) + self.messages
        self.breaks[item.publisher] += after - before
        return stream

    @property
    def notes(self) -> list[str]:
        """A note on each kind of what is missing."""
        missing, gaps = self.missing, len(self.gaps)
        notes = {
            f"lost batches: {missing:,} (gaps: {gaps:,}); requests in them are "
            "missing": missing,
            f"messages left out, which were no batch: {self.messages:,}": self.messages,
            f"events left out, which cannot be read: {self.events:,}": self.events,
            f"runs of blocks left out, whose request began before the recording or in what is "
            f"missing: {self.runs:,}": self.runs,
        }
        return [note for note, count in notes.items() if count]


class BlockTracker(BatchNumbers):
    """The blocks that are resident after batches, applied in the order of their publication.

    A hash may be stored several times at one location: it is resident until it was removed as
    often. In full-report mode, in which an engine also reports reused blocks, a second store
    is a reuse; so it is in an event with the `origin` `REUSED`.

    A replay is ignored, as `BatchNumbers` knows one. Blocks of a publisher that has restarted
    are dropped. After a gap the tracker may differ from the engine.

    Memory grows with the resident blocks; an event costs O(its blocks), and one that drops all
    blocks of a rank or of a publisher costs O(those), however many others there are.

    Attributes:
        full: whether the stream is in full-report mode.
        batches, events: number of applied batches, and of their events by class.
        stored: number of stored blocks that were not resident at their location.
        removed: number of blocks that were resident, and no longer are after a removal.
        stored_again, reused: number of stored blocks that were resident at their location,
            without and with full reports.
        moved: number of blocks that changed their tier.
        cleared, forgotten: number of blocks dropped by a clear, and by a restart.
        replayed, restarts, gaps: number of ignored batches, and others as in `BatchNumbers`.
        anomalies: number of anomalies by kind; `examples` has the first 20.
    """

    def __init__(self, *, full: bool = False) -> None:
        """Start without resident blocks."""
        super().__init__()
        self.full = full
        self.batches = self.stored = self.removed = self.stored_again = self.reused = 0
        self.moved = self.cleared = self.forgotten = 0
        self.events: Counter[str] = Counter()
        self.anomalies = dict.fromkeys(KINDS, 0)
        self.examples: list[Anomaly] = []
        # By publisher, rank and group of layers.
        self._groups: dict[Publisher, dict[int | None, _Groups]] = {}
        # In how many groups a hash is resident.
        self._held: dict[Hash, int] = {}

    def apply(
        self, batch: EventBatch, seq: int | None = None, publisher: Publisher = None
    ) -> bool:
        """Apply the next batch, as in `advance`; return False if it is a replay."""
        new, seq, publisher = self.advance(batch, seq, publisher)
        if not new:
            return False
        batch_number = self.batches if seq is None else seq
        self.batches += 1
        for index, event in enumerate(batch.events):
            self.events[type(event).__name__] += 1
            where = f"batch {batch_number}, event {index}"
            self._apply_event(event, publisher, batch.dp_rank, where)
        return True

    def restart(self, publisher: Publisher) -> None:
        """Drop the blocks of a publisher that has restarted, and expect its first batch."""
        for name in list(self._groups) if publisher is None else [publisher]:
            for groups in self._groups.pop(name, {}).values():
                self.forgotten += self._drop(groups)
        super().restart(publisher)

    def resident(self) -> dict[BlockLocation, dict[Hash, int]]:
        """Return how often each hash is resident, by location; a copy."""
        return {
            BlockLocation(publisher, rank, name, medium): dict(blocks)
            for publisher, ranks in self._groups.items()
            for rank, groups in ranks.items()
            for name, group in groups.items()
            for medium, blocks in group.counts.items()
            if blocks
        }

    def holds(self, value: Hash) -> bool:
        """Return True if a hash is resident anywhere. O(1)."""
        return value in self._held

    def _apply_event(
        self, event: Event, publisher: Publisher, rank: int | None, where: str
    ) -> None:
        ranks = self._groups.setdefault(publisher, {})
        groups = ranks.setdefault(rank, {})
        match event:
            case BlockStored() | PagesStored():
                reuse = self.full or event.more.get("origin") == REUSED
                group = groups.setdefault(event.group, _Group())
                self._store(list(event.blocks()), group, where, reuse=reuse)
            case BlockRemoved():
                self._remove(event, groups.get(event.group) or _Group(), where)
            case AllBlocksCleared():
                self.cleared += self._drop(groups)
                groups.clear()
            case BlockUpdated(level=(old, new)):
                group = groups.get(event.group) or _Group()
                self._move(event.hash, group, (old, new), where)
            case UnparsedEvent():
                self._note("unread", where, event.reason)
        name = getattr(event, "group", None)
        if name in groups and not groups[name].known:
            del groups[name]
        if not groups:
            del ranks[rank]

    def _drop(self, groups: _Groups) -> int:
        """Forget all blocks of some groups; return how many they are, in all tiers."""
        for group in groups.values():
            for value in group.known:
                self._leave(value)
        return _size(groups)

    def _leave(self, value: Hash) -> None:
        """Record that a hash is resident in a group less."""
        self._held[value] -= 1
        if not self._held[value]:
            del self._held[value]

    def _store(self, blocks: list[Block], group: _Group, where: str, *, reuse: bool) -> None:
        known = group.known
        if blocks and (parent := blocks[0].parent) is not None and parent not in known:
            self._note("unknown_parent", where, f"parent {hash_text(parent)}")
        seen: set[Hash] = set()
        for block in blocks:
            if block.hash in seen:
                self._note("repeated", where, f"block {hash_text(block.hash)}")
            seen.add(block.hash)
            counts = group.tier(block.medium)
            if counts is None:
                self._note("unread", where, _TOO_MANY_TIERS)
                continue
            self._check_meaning(known, block, where)
            count = counts.get(block.hash, 0)
            if count and reuse:
                self.reused += 1
                continue
            self.stored += not count
            self.stored_again += count > 0
            counts[block.hash] = count + 1

    def _check_meaning(
        self, known: dict[Hash, tuple[Hash | None, Any]], block: Block, where: str
    ) -> None:
        """Compare the parent and the content of a block with those its hash had before."""
        if block.hash not in known:
            self._held[block.hash] = self._held.get(block.hash, 0) + 1
        parent, content = known.setdefault(block.hash, (block.parent, block.content))
        if parent != block.parent:
            what = f"parent {hash_text(block.parent)}, before {hash_text(parent)}"
        elif None not in (content, block.content) and content != block.content:
            what = "other tokens than before"
        else:
            if content is None:  # tokens that were unknown are those of this block
                known[block.hash] = parent, block.content
            return
        self._note("collision", where, f"block {hash_text(block.hash)}: {what}")

    def _remove(self, event: BlockRemoved, group: _Group, where: str) -> None:
        for value in event.hashes:
            tiers, medium = group.tiers_of(value), event.medium
            if tiers and medium is None and None not in tiers:
                medium = tiers[0]
            if medium in tiers:
                self.removed += group.remove(value, medium)
                if value not in group.known:
                    self._leave(value)
            else:
                self._note("never_stored", where, f"block {hash_text(value)}")

    def _move(self, value: Hash, group: _Group, levels: tuple[int, int], where: str) -> None:
        source, target = map(level_medium, levels)
        if source not in group.tiers_of(value):
            self._note("never_stored", where, f"block {hash_text(value)} in {source}")
            return
        if source == target:  # an update of the priority alone
            return
        counts = group.tier(target)
        if counts is None:
            self._note("unread", where, _TOO_MANY_TIERS)
            return
        counts[value] = counts.get(value, 0) + group.counts[source].pop(value)
        group.leave_if_empty(source)
        self.moved += 1

    def _note(self, kind: str, where: str, what: str) -> None:
        self.anomalies[kind] += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(Anomaly(kind, where, what))


def hash_text(value: Hash | None) -> str:
    """Return a hash as a message shows it: bytes in hexadecimal."""
    return value.hex() if isinstance(value, bytes) else str(value)


TELLS = (
    "These events tell which blocks were stored and removed, and in which order. They do not "
    "tell who looked up what: a request that found its blocks leaves no event. So they can "
    "be checked and shown, but not run again under another policy, unless the engine "
    "reported every use (kv-events:path=FILE,lookups=full) or a log of its requests is "
    "joined (kv-events:path=FILE,requests=LOG)."
)


@attrs.frozen
class RecordingReport:
    """The contents of a recording, up to its end or its cut.

    Attributes:
        file: the path.
        format, engine: format and engine in the recording; `engine` may be None.
        complete: whether nothing is missing at the end.
        cut_reason: where and how the file ends, if it is incomplete.
        batches, events: number of batches, and of events by class.
        blocks: number of blocks `stored`, `removed`, `stored_again`, `reused`, `moved`,
            `cleared` and `forgotten`, as in `BlockTracker`.
        resident: number of different blocks of each publisher, rank and group of layers at the
            end, added up by medium; `-`: unknown.
        restarts, replayed, garbage: number of restarts of publishers, of replayed batches, and
            of messages that were no batch.
        gaps, missing: publisher, first number and count of each gap; number of batches in all.
        anomalies: number of anomalies by kind; `examples` has the first 20.
        tells: sentences on what such a stream can and cannot show, and on where this one may be
            wrong.
    """

    file: str
    format: str
    engine: str | None
    complete: bool
    cut_reason: str | None
    batches: int
    events: dict[str, int]
    blocks: dict[str, int]
    resident: dict[str, int]
    restarts: int
    replayed: int
    garbage: int
    gaps: list[dict[str, Any]]
    missing: int
    anomalies: dict[str, int]
    examples: list[Anomaly]
    tells: str

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object, with the schema number."""
        fields = attrs.asdict(self)
        del fields["cut_reason"]
        return {"schema": SCHEMA, **fields}


def check_recording(
    file: str | os.PathLike[str], *, full: bool = False, tick: Tick = unseen
) -> RecordingReport:
    """Read a recording; report its resident blocks and its contradictions.

    With `full`, the engine was in full-report mode: blocks that are stored again were reused.
    `tick` is called with the number of bytes read. Files of TensorRT-LLM's events and of
    Dynamo's router events, one a line, are read too.

    Raises:
        InputError: the file cannot be opened.
        TraceError: it is no recording, or a line is damaged: file, line, reason.
    """
    reader = RecordingReader(file)
    tracker, invalid = BlockTracker(full=full), 0
    for item in ticked(reader, tick):
        match item:
            case Received(batch, seq, publisher):
                tracker.apply(batch, seq, publisher)
            case Lost(publisher=publisher, first=first, count=count):
                tracker.record_gap(publisher, first, count)
            case Restarted(publisher=publisher):
                tracker.restart(publisher)
            case Skipped():
                invalid += 1
    counts = ("stored", "removed", "stored_again", "reused", "moved", "cleared", "forgotten")
    resident: Counter[str] = Counter()
    for location, blocks in tracker.resident().items():
        resident[location.medium or "-"] += len(blocks)
    return RecordingReport(
        file=str(reader.file),
        format=reader.header.get("format", "none"),
        engine=reader.header.get("engine"),
        complete=reader.complete,
        cut_reason=reader.cut_reason,
        batches=tracker.batches,
        events=dict(tracker.events),
        blocks={name: getattr(tracker, name) for name in counts},
        resident=dict(resident),
        restarts=tracker.restarts,
        replayed=tracker.replayed,
        garbage=invalid,
        gaps=[
            {"publisher": publisher, "first": first, "count": count}
            for publisher, first, count in tracker.gaps
        ],
        missing=tracker.missing,
        anomalies=dict(tracker.anomalies),
        examples=list(tracker.examples),
        tells=_tells(tracker, invalid),
    )


def _tells(tracker: BlockTracker, invalid: int) -> str:
    sentences = [TELLS]
    lost = tracker.missing + invalid
    if lost:
        sentences.append(
            f"{lost} batches are missing or unreadable: the others say what is resident."
        )
    if tracker.anomalies["unknown_parent"] or tracker.anomalies["never_stored"]:
        sentences.append(
            "Some blocks were stored before it begins, or in what is missing: the counts of "
            f"{KINDS['unknown_parent']} and {KINDS['never_stored']} say how much of that shows."
        )
    if tracker.anomalies["collision"]:
        sentences.append(
            "Some hashes stand for different blocks: hits on them would be wrong answers, or "
            "the hashes are not chained."
        )
    return " ".join(sentences)
