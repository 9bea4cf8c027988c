"""The numbered batches of one publisher, each once and in order, or told to be missing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from hashlib import blake2b
from typing import TypeAlias

import attrs

GONE = "the publisher does not have them any more"
UNASKED = "there is no replay address to ask for them"


@attrs.frozen
class Delivery:
    """A batch as it came over the wire.

    Attributes:
        rank: of its publisher among those that are listened to.
        sequence: its number in this life of its publisher, from 0.
        payload: its bytes.
        replayed: whether it was asked for, rather than heard live.
    """

    rank: int
    sequence: int
    payload: bytes
    replayed: bool = False


@attrs.frozen
class Gap:
    """The batches `first` to `last` of a publisher, both included, are lost, and why."""

    rank: int
    first: int
    last: int
    reason: str

    @property
    def batches(self) -> int:
        """How many are lost."""
        return self.last - self.first + 1

    def __str__(self) -> str:
        """Say so."""
        which = (
            f"batch {self.first} is"
            if self.batches == 1
            else (f"batches {self.first} to {self.last} are")
        )
        return f"rank {self.rank}: {which} lost: {self.reason}"


@attrs.frozen
class Restart:
    """A publisher that had come to `expected` counts from 0 again, and is at `sequence`."""

    rank: int
    expected: int
    sequence: int

    def __str__(self) -> str:
        """Say so."""
        return (
            f"rank {self.rank}: the publisher started again: batch {self.sequence} came "
            f"where {self.expected} was next"
        )


@attrs.frozen
class Garbage:
    """A message that is no batch was skipped, and why."""

    rank: int
    reason: str

    def __str__(self) -> str:
        """Say so."""
        return f"rank {self.rank}: a message was skipped: {self.reason}"


Item: TypeAlias = Delivery | Gap | Restart | Garbage
"""What a subscriber hears, in order."""

Replay: TypeAlias = Callable[[int], Generator[tuple[int, bytes | None], None, None]]
"""Yields (number, payload) of the kept batches from a number on; a payload of None is of a
batch that nobody here asked for. Raises `Unanswered` if the answer breaks off."""


class Unanswered(Exception):
    """A replay was asked for, and its end did not come; says who did not answer."""


class Ordering:
    """Follows one publisher: finds gaps, has them filled, and lets nothing through twice.

    A live batch whose number is too high shows that some are missing: a replay is asked
    for, from the last one had, whose bytes tell whether the publisher is still the same. A
    number that was had already is of a publisher that has started again, unless a replay
    brought the same bytes a moment before. Without a replay, a publisher that started again
    and has overtaken its old numbers before it is heard looks as if there were a gap.

    Memory: 16 bytes for each batch of the last replay, until a later one comes live.

    Args:
        rank: what its items are said to be of.
        replay: asks the publisher; None: it cannot be asked.
    """

    def __init__(self, rank: int, replay: Replay | None = None) -> None:
        """Expect batch 0."""
        self._rank = rank
        self._replay = replay
        self._begin()

    def doubt(self) -> None:
        """Take note that the connection was lost: what comes next may be of a new life."""
        self._doubtful = True

    def live(self, sequence: int, payload: bytes) -> Iterator[Item]:
        """Take a batch that came by itself; yield what is known now."""
        if sequence < self._expected:
            if self._replayed.pop(sequence, None) == _digest(payload):
                return
            yield self._restart(sequence)
        reason = UNASKED
        if self._replay is not None and (sequence > self._expected or self._doubtful):
            # Only now: a new life that is behind the old one has nothing to compare with.
            self._doubtful = False
            reason = yield from self.catch_up()
            if sequence < self._expected:
                self._replayed.pop(sequence, None)
                return
        if sequence > self._expected:
            yield Gap(self._rank, self._expected, sequence - 1, reason)
        self._replayed.clear()
        self._had(sequence, _digest(payload))
        yield Delivery(self._rank, sequence, payload)

    def catch_up(self) -> Generator[Item, None, str]:
        """Ask for all that the publisher keeps from here on; yield what comes of it.

        Returns why batches that are missing afterwards are. Where an answer has a hole in
        the middle, as if it came faster than it could be queued, it is asked for again.
        """
        if self._replay is None:
            return UNASKED
        try:
            asking = yield from self._ask(self._replay, max(0, self._expected - 1))
            while asking:
                asking = yield from self._ask(self._replay, self._expected)
        except Unanswered as error:
            return str(error)
        return GONE

    def _ask(self, replay: Replay, start: int) -> Generator[Item, None, bool]:
        """Ask once; return whether to ask again, which is so only if something came."""
        fresh = True
        with closing(replay(start)) as answer:
            for sequence, payload in answer:
                digest = None if payload is None else _digest(payload)
                if sequence < self._expected:
                    if digest != self._last and sequence == start:
                        yield self._restart(sequence)
                        return True
                    fresh = fresh and sequence != start
                    continue
                if sequence > self._expected:
                    if not fresh:
                        return True
                    yield Gap(self._rank, self._expected, sequence - 1, GONE)
                fresh = False
                self._had(sequence, digest)
                if payload is not None and digest is not None:
                    self._replayed[sequence] = digest
                    yield Delivery(self._rank, sequence, payload, replayed=True)
        return False

    def _begin(self) -> None:
        self._expected = 0
        self._doubtful = False
        self._last: bytes | None = None
        self._replayed: dict[int, bytes] = {}

    def _had(self, sequence: int, digest: bytes | None) -> None:
        self._expected, self._last = sequence + 1, digest

    def _restart(self, sequence: int) -> Restart:
        """Begin anew, and return what says so."""
        restart = Restart(self._rank, self._expected, sequence)
        self._begin()
        return restart


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()
