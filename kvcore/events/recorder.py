"""From what a subscriber hears to a recording: decoded, written, counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from time import monotonic

import attrs

from kvcore.errors import TraceError
from kvcore.events.codecs import decode, encode
from kvcore.events.model import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    PagesStored,
    Unread,
)
from kvcore.events.ordering import Delivery, Gap, Garbage, Item, Restart
from kvcore.events.recording import RecordingWriter, unread
from kvcore.events.transport import Subscriber

FLUSH_SECONDS = 1.0
"""How often what is held back is handed on, for the case that the process is killed."""


@attrs.define
class Tally:
    """What was recorded so far.

    Attributes:
        batches: written; `replayed`: those of them that were asked for.
        stored, removed: blocks, in their events; a block that is stored twice counts twice.
        cleared: events that said that all blocks were dropped.
        unread: events that could not be read, kept as they were.
        gaps: in the numbers; `missing`: batches in them, and batches that are unreadable.
        restarts: of publishers.
        garbage: messages that were no batch.
    """

    batches: int = 0
    replayed: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    unread: int = 0
    gaps: int = 0
    missing: int = 0
    restarts: int = 0
    garbage: int = 0

    def add(self, batch: Batch) -> None:
        """Count a batch and its events."""
        self.batches += 1
        for event in batch.events:
            match event:
                case BlockStored(hashes=blocks) | PagesStored(pages=blocks):
                    self.stored += len(blocks)
                case BlockRemoved(hashes=hashes):
                    self.removed += len(hashes)
                case AllBlocksCleared():
                    self.cleared += 1
                case Unread():
                    self.unread += 1


def record(
    subscriber: Subscriber,
    writer: RecordingWriter,
    *,
    seconds: float | None = None,
    batches: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
    tick: Callable[[Tally], None] = lambda _: None,
) -> Tally:
    """Write what is heard until `subscriber.stop`, for `seconds`, or so many `batches`.

    A batch that cannot be decoded is written as a gap of one. The writer is left open.

    Args:
        subscriber: what hears.
        writer: what writes.
        seconds: to listen; None: without end.
        batches: to write; None: without end.
        tell: is called with a sentence for whatever is no batch, and for unread events.
        tick: is called with the tally after each item.

    Raises:
        PluginError: msgspec is not installed.
        StorageError: the disk is full.
    """
    encode(Batch(0.0, ()))  # Fails at once where msgspec is missing, not at the first batch.
    tally = Tally()
    end = math.inf if seconds is None else monotonic() + seconds
    while not subscriber.stopped and (left := end - monotonic()) > 0:
        with closing(subscriber.items(min(left, FLUSH_SECONDS))) as items:
            for item in items:
                for sentence in _write(item, writer, tally):
                    tell(sentence)
                tick(tally)
                if tally.batches == batches:
                    return tally
        writer.flush()
    return tally


def _write(item: Item, writer: RecordingWriter, tally: Tally) -> list[str]:
    """Write and count an item; return what there is to tell of it."""
    match item:
        case Delivery(rank, sequence, payload, replayed):
            try:
                batch = decode(payload)
            except TraceError as error:
                lost = Gap(rank, sequence, sequence, f"it cannot be read: {error}")
                return _write(lost, writer, tally)
            writer.batch(batch, seq=sequence, publisher=rank)
            tally.add(batch)
            tally.replayed += replayed
            where = f"rank {rank}: batch {sequence}: an event cannot be read"
            return [f"{where}: {reason}" for reason in unread(batch)]
        case Gap(rank, first, _, reason):
            writer.gap(first, item.batches, publisher=rank, why=reason)
            tally.gaps += 1
            tally.missing += item.batches
        case Restart(rank):
            writer.restart(publisher=rank)
            tally.restarts += 1
        case Garbage(rank, reason):
            writer.garbage(reason, publisher=rank)
            tally.garbage += 1
    return [str(item)]
