"""The batches of one publisher of KV events: each once, in order, with gaps and restarts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from hashlib import blake2b
from typing import TypeAlias

import attrs

__all__ = ["Delivery", "Gap", "InvalidMessage", "Restart"]

NOT_KEPT = "the publisher does not have them any more"

NO_REPLAY = "there is no replay address to ask for them"


@attrs.frozen
class Delivery:
    """A batch as it was received.

    Attributes:
        rank: rank of its publisher.
        sequence: its number since the start of its publisher, from 0.
        payload: its bytes.
        replayed: whether it is from a replay, and not live.
    """

    rank: int
    sequence: int
    payload: bytes
    replayed: bool = False


@attrs.frozen
class Gap:
    """The batches `first` to `last` of a publisher, both included, are lost."""

    rank: int
    first: int
    last: int
    reason: str

    @property
    def batches(self) -> int:
        """Return the number of lost batches."""
        return self.last - self.first + 1

    def __str__(self) -> str:
        """Return a sentence for people."""
        which = (
            f"batch {self.first} is"
            if self.batches == 1
            else f"batches {self.first} to {self.last} are"
        )
        return f"rank {self.rank}: {which} lost: {self.reason}"


@attrs.frozen
class Restart:
    """A publisher has restarted: batch `sequence` came where `expected` was next."""

    rank: int
    expected: int
    sequence: int

    def __str__(self) -> str:
        """Return a sentence for people."""
        return (
            f"rank {self.rank}: the publisher started again: batch {self.sequence} came "
            f"where {self.expected} was next"
        )


@attrs.frozen
class InvalidMessage:
    """A message that is no batch was skipped."""

    rank: int
    reason: str

    def __str__(self) -> str:
        """Return a sentence for people."""
        return f"rank {self.rank}: a message was skipped: {self.reason}"


StreamItem: TypeAlias = Delivery | Gap | Restart | InvalidMessage
"""An item that a subscriber yields."""

Replay: TypeAlias = Callable[[int], Generator[tuple[int, bytes | None] | None, None, None]]
"""A request for the batches that a publisher keeps, from a number on.

Yields (number, payload) of each batch; the payload is None for topics without a subscription.
Yields None now and then while it waits. Raises `ReplayFailed` if the answer breaks off."""

MOST_REPLAYED = 100_000
"""Number of replayed batches that are recognised if they also come live."""


class ReplayFailed(Exception):
    """A replay did not come to its end; the message names the address."""


class BatchSequencer:
    """The batches of one publisher in order and once, with its gaps and restarts.

    If the number of a live batch is too high, batches are missing: a replay is requested from
    the last received batch on. If the replayed bytes of that batch differ, the publisher has
    restarted. It has also restarted if the number of a live batch is too low, unless a replay
    had the same bytes before. Without replays, a publisher that restarts and passes its old
    numbers before its first batch is received is reported as a gap.

    Live batches may wait for long. So a replay is used only if the publisher still keeps the
    live batch that shows the loss, with the same bytes: else it keeps none before it, or has
    restarted since. And no batch is reported as lost that may still come live.

    Memory: 200 bytes for each of the last 100,000 batches of a replay, until a later batch
    comes live.

    Args:
        rank: rank of the publisher, for the items.
        replay: requests batches from the publisher; None: there is no replay.
    """

    def __init__(self, rank: int, replay: Replay | None = None) -> None:
        """Expect batch 0."""
        self._rank = rank
        self._replay = replay
        self._begin()

    def mark_disconnected(self) -> None:
        """Record that the connection was lost: the publisher may have restarted."""
        self._disconnected = True

    def receive(self, sequence: int, payload: bytes) -> Iterator[StreamItem | None]:
        """Yield a live batch, after the gaps, replayed batches or restart that it shows.

        Yields None as `catch_up` does, while it waits for a replay.
        """
        if sequence < self._expected:
            if self._replayed.pop(sequence, None) == _digest(payload):
                return
            yield self._restart(sequence)
        reason = NO_REPLAY
        if self._replay is not None and (sequence > self._expected or self._disconnected):
            # Only now: a restarted publisher that is behind its old numbers has no batch to
            # compare with the last one received.
            self._disconnected = False
            try:
                kept = yield from _first(self._replay(sequence))
            except ReplayFailed as error:
                kept, reason = None, str(error)
            else:
                reason = NOT_KEPT
            if kept == (sequence, payload):
                reason = yield from self.catch_up(lambda: sequence)
            if sequence < self._expected:
                self._replayed.pop(sequence, None)
                return
        if sequence > self._expected:
            yield self._gap(sequence - 1, reason)
        self._replayed.clear()
        self._advance(sequence, _digest(payload))
        yield Delivery(self._rank, sequence, payload)

    def catch_up(
        self, waiting: Callable[[], int | None] = lambda: None
    ) -> Generator[StreamItem | None, None, str]:
        """Request the batches that the publisher keeps from here on; yield them.

        `waiting` returns the number of the next live batch, if one waits: from it on none is
        reported as lost.

        Yields None now and then while it waits, and for each batch of an answer that yields
        nothing else, of which there may be any number: who reads can end there. Returns the
        reason for the batches that are still missing. An answer with a hole, or one that
        breaks off, came faster than it could be queued: the request is repeated as long as
        batches come.
        """
        if self._replay is None:
            return NO_REPLAY
        start, again = max(0, self._expected - 1), True
        while again:
            before = self._expected
            try:
                again = yield from self._ask(self._replay, start, waiting)
            except ReplayFailed as error:
                if self._expected <= before:
                    return str(error)
            start = self._expected
        return NOT_KEPT

    def _ask(
        self, replay: Replay, start: int, waiting: Callable[[], int | None]
    ) -> Generator[StreamItem | None, None, bool]:
        """Request a replay once; return True, for another request, only if a batch came."""
        # `passed`: the batch before has yielded nothing, and has left its queue by now.
        first, passed = True, False
        with closing(replay(start)) as answer:
            for answered in answer:
                if passed or answered is None:
                    passed = False
                    yield None
                if answered is None:
                    continue
                sequence, payload = answered
                digest = None if payload is None else _digest(payload)
                if sequence < self._expected:
                    if digest != self._last and sequence == start:
                        yield self._restart(sequence)
                        return True
                    first = first and sequence != start
                    passed = True
                    continue
                if sequence > self._expected:
                    if not first:
                        return True
                    live = waiting()
                    if live is not None and live < sequence:
                        return False
                    yield self._gap(sequence - 1, NOT_KEPT)
                first = False
                self._advance(sequence, digest)
                if payload is None or digest is None:
                    passed = True
                    continue
                self._remember(sequence, digest)
                yield Delivery(self._rank, sequence, payload, replayed=True)
        return False

    def _remember(self, sequence: int, digest: bytes) -> None:
        """Record the digest of a replayed batch, to recognise it if it also comes live."""
        self._replayed[sequence] = digest
        if len(self._replayed) > MOST_REPLAYED:
            self._replayed.popitem(last=False)

    def _begin(self) -> None:
        self._expected = 0
        self._disconnected = False
        self._last: bytes | None = None
        self._replayed: OrderedDict[int, bytes] = OrderedDict()

    def _advance(self, sequence: int, digest: bytes | None) -> None:
        self._expected, self._last = sequence + 1, digest

    def _gap(self, last: int, reason: str) -> Gap:
        """Expect the batch after `last`; return the item that reports those up to it lost."""
        gap = Gap(self._rank, self._expected, last, reason)
        self._expected = last + 1
        return gap

    def _restart(self, sequence: int) -> Restart:
        """Expect batch 0 again; return the item that reports it."""
        restart = Restart(self._rank, self._expected, sequence)
        self._begin()
        return restart


def _first(
    answer: Generator[tuple[int, bytes | None] | None, None, None],
) -> Generator[None, None, tuple[int, bytes | None] | None]:
    """Return the first batch of a replay; None: there is none. Yields None while it waits."""
    with closing(answer):
        for answered in answer:
            if answered is not None:
                return answered
            yield None
    return None


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()
