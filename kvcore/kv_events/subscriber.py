"""Subscribing to KV events over ZMQ: each publisher's batches once, in order, with its gaps."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from hashlib import blake2b
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import attrs
from attrs.validators import ge, gt

from kvcore.errors import InputError
from kvcore.extras import import_extra
from kvcore.units import format_seconds

if TYPE_CHECKING:
    import zmq


NOT_KEPT = "the publisher does not have them any more"

NO_REPLAY = "there is no replay address to ask for them"


@attrs.frozen
class Delivery:
    """A batch as it came over the wire.

    Attributes:
        rank: of its publisher.
        sequence: its number since its publisher started, from 0.
        payload: its bytes.
        replayed: whether it came from a replay, not live.
    """

    rank: int
    sequence: int
    payload: bytes
    replayed: bool = False


@attrs.frozen
class Gap:
    """The batches `first` to `last` of a publisher, both included, are lost, for a reason."""

    rank: int
    first: int
    last: int
    reason: str

    @property
    def batches(self) -> int:
        """Return how many are lost."""
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
    """A publisher whose next batch was `expected` counts from 0 again, and is at `sequence`."""

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
    """A message that is no batch was skipped, for a reason."""

    rank: int
    reason: str

    def __str__(self) -> str:
        """Return a sentence for people."""
        return f"rank {self.rank}: a message was skipped: {self.reason}"


StreamItem: TypeAlias = Delivery | Gap | Restart | InvalidMessage
"""An item that a subscriber yields."""

Replay: TypeAlias = Callable[[int], Generator[tuple[int, bytes | None], None, None]]
"""Yields (number, payload) of the batches that a publisher keeps, from a number on.

The payload is None for topics that were not subscribed to. Raises `ReplayFailed` if the answer
breaks off."""


class ReplayFailed(Exception):
    """A replay did not come to its end; the message says who did not answer."""


class BatchSequencer:
    """The batches of one publisher in order and once, with its gaps and restarts.

    A live batch whose number is too high shows that some are missing: the publisher is asked
    for a replay from the last batch received on, whose bytes tell whether it has restarted. A
    number that was received already is that of a publisher that has restarted, unless a replay
    brought the same bytes a moment before. Without a replay, a publisher that restarted and has
    passed its old numbers before its first batch is received looks as if there were a gap.

    Memory: 16 bytes for each batch of the last replay, until a later one comes live.

    Args:
        rank: of the publisher, for the items.
        replay: asks the publisher for batches; None: it cannot be asked.
    """

    def __init__(self, rank: int, replay: Replay | None = None) -> None:
        """Expect batch 0."""
        self._rank = rank
        self._replay = replay
        self._begin()

    def mark_disconnected(self) -> None:
        """Record that the connection was lost: the publisher may have restarted."""
        self._disconnected = True

    def receive(self, sequence: int, payload: bytes) -> Iterator[StreamItem]:
        """Yield what a live batch shows: gaps, replayed batches, a restart, and itself."""
        if sequence < self._expected:
            if self._replayed.pop(sequence, None) == _digest(payload):
                return
            yield self._restart(sequence)
        reason = NO_REPLAY
        if self._replay is not None and (sequence > self._expected or self._disconnected):
            # Only now: a restarted publisher that is behind its old numbers has no batch to
            # compare with the last one received.
            self._disconnected = False
            reason = yield from self.catch_up()
            if sequence < self._expected:
                self._replayed.pop(sequence, None)
                return
        if sequence > self._expected:
            yield Gap(self._rank, self._expected, sequence - 1, reason)
        self._replayed.clear()
        self._advance(sequence, _digest(payload))
        yield Delivery(self._rank, sequence, payload)

    def catch_up(self) -> Generator[StreamItem, None, str]:
        """Ask for all batches that the publisher keeps from here on; yield what comes.

        Returns why batches that are missing afterwards are. An answer with a hole in its
        middle, which came faster than it could be queued, is asked for again.
        """
        if self._replay is None:
            return NO_REPLAY
        try:
            again = yield from self._ask(self._replay, max(0, self._expected - 1))
            while again:
                again = yield from self._ask(self._replay, self._expected)
        except ReplayFailed as error:
            return str(error)
        return NOT_KEPT

    def _ask(self, replay: Replay, start: int) -> Generator[StreamItem, None, bool]:
        """Ask once; return whether to ask again, which is so only if a batch came."""
        first = True
        with closing(replay(start)) as answer:
            for sequence, payload in answer:
                digest = None if payload is None else _digest(payload)
                if sequence < self._expected:
                    if digest != self._last and sequence == start:
                        yield self._restart(sequence)
                        return True
                    first = first and sequence != start
                    continue
                if sequence > self._expected:
                    if not first:
                        return True
                    yield Gap(self._rank, self._expected, sequence - 1, NOT_KEPT)
                first = False
                self._advance(sequence, digest)
                if payload is not None and digest is not None:
                    self._replayed[sequence] = digest
                    yield Delivery(self._rank, sequence, payload, replayed=True)
        return False

    def _begin(self) -> None:
        self._expected = 0
        self._disconnected = False
        self._last: bytes | None = None
        self._replayed: dict[int, bytes] = {}

    def _advance(self, sequence: int, digest: bytes | None) -> None:
        self._expected, self._last = sequence + 1, digest

    def _restart(self, sequence: int) -> Restart:
        """Expect batch 0 again; return the item that reports it."""
        restart = Restart(self._rank, self._expected, sequence)
        self._begin()
        return restart


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()


SEQUENCE_BYTES = 8

END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""The number that ends a replay."""

_ADDRESS = re.compile(
    r"(tcp)://(?:[^\s:]+|\[[^\s\]]+\]):(\d+|\*)|(?:ipc|inproc)://\S+", re.ASCII
)

_HIGHEST_PORT = 65_535


def load_zmq() -> Any:
    """Import pyzmq. Raises PluginError if it is not installed."""
    return import_extra("zmq", "KV events over a network need pyzmq", "events")


def rank_address(address: str, rank: int) -> str:
    """Return the address of a data-parallel rank, as the engines derive it from rank 0's.

    The port of `tcp://host:port` grows by the rank; other addresses get `_dp` and the rank.

    Raises:
        InputError: not an address of ZMQ, or a port beyond 65535.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        msg = (
            f"address {address!r}: expected one such as tcp://127.0.0.1:5557 "
            "(or ipc://PATH, inproc://NAME)"
        )
        raise InputError(msg)
    if match[1] is None:
        return f"{address}_dp{rank}" if rank else address
    if match[2] == "*":
        if not rank:
            return address
        msg = f"address {address!r}: rank {rank} needs a port to count from"
        raise InputError(msg)
    port = int(match[2]) + rank
    if port > _HIGHEST_PORT:
        which = f"rank {rank} would have port {port}" if rank else f"there is no port {port}"
        msg = f"address {address!r}: {which}; the highest is {_HIGHEST_PORT}"
        raise InputError(msg)
    return f"{address[: match.start(2)]}{port}"


def host_address(address: str, rank: int) -> str:
    """Return the address of a rank to connect to, which must name a host.

    Raises:
        InputError: as for `rank_address`; or the host is `*`, which only servers can bind to.
    """
    if address.startswith("tcp://*:"):
        port = address.removeprefix("tcp://*:")
        msg = f"address {address!r}: '*' is no host; name the server's: tcp://127.0.0.1:{port}"
        raise InputError(msg)
    return rank_address(address, rank)


@contextmanager
def using(address: str, what: str) -> Iterator[None]:
    """Raise a ZMQ error of the body as an InputError: cannot `what` the address."""
    try:
        yield
    except load_zmq().ZMQError as error:
        msg = f"cannot {what} {address}: {error.strerror or error}"
        raise InputError(msg) from error


def number(frame: bytes) -> int | None:
    """Return the number of a batch from its frame; None if the frame is no such number."""
    if len(frame) != SEQUENCE_BYTES or frame[0] >= 0x80:  # noqa: PLR2004 - negative: END
        return None
    return int.from_bytes(frame, "big")


class Endpoint(ABC):
    """One end of a stream of KV events: sockets of one ZMQ context, closed by a `with` block.

    A given context is not closed.
    """

    def __init__(self, context: zmq.Context[Any] | None) -> None:
        """Store the context, or make one."""
        self._zmq = load_zmq()
        self._lent = context is not None
        self._context = self._zmq.Context() if context is None else context
        self._poller = self._zmq.Poller()

    @abstractmethod
    def close(self) -> None:
        """Close the sockets, and the context unless it was given."""

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the sockets."""
        self.close()


_FRAMES = 3

_REPLAY_FRAMES = (3, 4)

_SLICE_MS = _FIRST_RETRY_MS = 100


@attrs.frozen(kw_only=True)
class Server:
    """A server that publishes KV events, and how long to wait for it.

    Attributes:
        address: of the PUB socket of rank 0, such as `tcp://127.0.0.1:5557`.
        replay: address of its ROUTER socket, which sends batches again; None: it has none.
        topic: prefix of the topics to subscribe to; empty: all.
        ranks: number of data-parallel ranks, each a publisher at the next port.
        replay_timeout: seconds to wait for the next batch of a replay.
        reconnect: most seconds between two tries to connect again; the first comes after
            a tenth of a second, each next one after twice as long.
        heartbeat: seconds between two signs of life; three missed end a connection.
        queue: batches to hold for each rank while the reader is busy; further ones are
            dropped, and found missing. 0: without limit.

    Raises:
        InputError: an address is not one of ZMQ (from `Subscriber`).
    """

    address: str
    replay: str | None = None
    topic: str = ""
    ranks: int = attrs.field(default=1, validator=ge(1))
    replay_timeout: float = attrs.field(default=5.0, validator=gt(0))
    reconnect: float = attrs.field(default=5.0, validator=gt(0))
    heartbeat: float = attrs.field(default=10.0, validator=gt(0))
    queue: int = attrs.field(default=100_000, validator=ge(0))


@attrs.frozen
class _Stream:
    """One rank of the server; `losses` is a socket on which ZMQ reports lost connections."""

    rank: int
    sequencer: BatchSequencer
    losses: Any


class Subscriber(Endpoint):
    """A connection to the KV events that vLLM, SGLang or TensorRT-LLM publish over ZMQ.

    A batch is three frames: topic, number (8 bytes, big-endian, from 0), payload. Missing
    batches are asked for at the ROUTER socket, which sends those that it keeps (10,000, as
    a rule) from a number on, and a batch of number -1 at their end. All that it keeps is asked
    for at the beginning, too: what was stored before the subscription.

    Use it in a `with` block. Only `stop` may be called from another thread.

    Args:
        server: to listen to.
        context: a ZMQ context of your own (for `inproc` addresses), which stays open.

    Attributes:
        stopped: whether `stop` was called.

    Raises:
        InputError: an address that cannot be connected to.
        PluginError: pyzmq is not installed.

    Source: the publishers of vLLM 0.33 (`vllm/distributed/kv_events.py`), SGLang 0.5.23 and
    TensorRT-LLM (`_torch/pyexecutor/kv_cache_events.py`).
    """

    def __init__(self, server: Server, context: zmq.Context[Any] | None = None) -> None:
        """Connect to every rank, without waiting for an answer."""
        self._server = server
        super().__init__(context)
        self._streams: dict[Any, _Stream] = {}
        self.stopped = self._begun = False
        try:
            for rank in range(server.ranks):
                self._connect(rank)
        except BaseException:
            self.close()
            raise

    def items(self, seconds: float | None = None) -> Generator[StreamItem, None, None]:
        """Yield batches, gaps and restarts, in order of each publisher.

        Ends at `stop` or after `seconds`; another call continues there. Waits without using
        the processor.
        """
        deadline = None if seconds is None else monotonic() + seconds
        if not self._begun:
            self._begun = True
            for stream in self._streams.values():
                yield from stream.sequencer.catch_up()
        while not self.stopped:
            left = _SLICE_MS if deadline is None else (deadline - monotonic()) * 1000
            if left <= 0:
                return
            for socket, _ in self._poller.poll(min(left, _SLICE_MS)):
                yield from self._received(socket)

    def stop(self) -> None:
        """End `items` within a tenth of a second. May be called by a signal handler."""
        self.stopped = True

    def close(self) -> None:
        """Disconnect."""
        for socket, stream in self._streams.items():
            socket.disable_monitor()
            stream.losses.close(linger=0)
            socket.close(linger=0)
        self._streams.clear()
        if not self._lent:
            self._context.destroy(linger=0)

    def _connect(self, rank: int) -> None:
        address = host_address(self._server.address, rank)
        replay = None
        if self._server.replay is not None:
            at = host_address(self._server.replay, rank)
            replay = partial(self._replay, at)
        socket = self._context.socket(self._zmq.SUB)
        losses = socket.get_monitor_socket(self._zmq.EVENT_DISCONNECTED)
        self._streams[socket] = _Stream(rank, BatchSequencer(rank, replay), losses)
        socket.rcvhwm = self._server.queue
        self._set_timeouts(socket, address)
        socket.subscribe(self._server.topic)
        with using(address, "listen to"):
            socket.connect(address)
        self._poller.register(socket, self._zmq.POLLIN)

    def _set_timeouts(self, socket: Any, address: str) -> None:
        """Set when a socket connects again, and when it gives up a silent connection."""
        # Only then: with it, `localhost` might mean ::1, where no engine listens.
        socket.ipv6 = "[" in address
        most = max(1, int(self._server.reconnect * 1000))
        socket.reconnect_ivl, socket.reconnect_ivl_max = min(_FIRST_RETRY_MS, most), most
        beat = max(1, int(self._server.heartbeat * 1000))
        socket.heartbeat_ivl, socket.heartbeat_timeout = beat, 3 * beat

    def _received(self, socket: Any) -> Iterator[StreamItem]:
        rank, sequencer, losses = attrs.astuple(self._streams[socket], recurse=False)
        while losses.poll(0):
            losses.recv_multipart()
            sequencer.mark_disconnected()
        frames = socket.recv_multipart()
        if len(frames) != _FRAMES:
            wanted = "expected 3 frames (topic, number, payload)"
            yield InvalidMessage(rank, f"{wanted}, got {len(frames)}")
            return
        sequence = number(frames[1])
        if sequence is None:
            wanted = f"expected a number of {SEQUENCE_BYTES} bytes from 0 on"
            yield InvalidMessage(rank, f"{wanted}, got {_shown(frames[1])}")
            return
        yield from sequencer.receive(sequence, frames[2])

    def _replay(
        self, address: str, start: int
    ) -> Generator[tuple[int, bytes | None], None, None]:
        """Ask for the batches from `start` on; yield them as a `Replay` does.

        Each request has a socket of its own, so that no late answer is taken for another's.
        """
        with closing(self._context.socket(self._zmq.DEALER)) as socket:
            socket.linger = 0
            # The publisher drops what it cannot send at once.
            socket.rcvhwm = 0
            self._set_timeouts(socket, address)
            with using(address, "ask for a replay at"):
                socket.connect(address)
            socket.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")])
            while (frames := self._next_message(socket, address))[-2:-1] != [END]:
                sequence = number(frames[-2]) if len(frames) in _REPLAY_FRAMES else None
                if sequence is None:
                    msg = f"{address} answered with something that is no batch"
                    raise ReplayFailed(msg)
                # Older servers leave the topic out.
                topic = frames[1] if len(frames) == max(_REPLAY_FRAMES) else b""
                wanted = not topic or topic.startswith(self._server.topic.encode())
                yield sequence, frames[-1] if wanted else None

    def _next_message(self, socket: Any, address: str) -> list[bytes]:
        """Return the next message of a replay. Raises ReplayFailed if there is none in time."""
        deadline = monotonic() + self._server.replay_timeout
        while not self.stopped and (left := deadline - monotonic()) > 0:
            if socket.poll(min(left * 1000, _SLICE_MS)):
                answer: list[bytes] = socket.recv_multipart()
                return answer
        took = format_seconds(self._server.replay_timeout)
        msg = (
            "listening was stopped"
            if self.stopped
            else f"no answer from {address} within {took}"
        )
        raise ReplayFailed(msg)


def _shown(frame: bytes) -> str:
    """Return a frame in hexadecimal, cut to eight bytes."""
    few = frame[:SEQUENCE_BYTES].hex()
    return f"{len(frame)} bytes {few}..." if len(frame) > SEQUENCE_BYTES else f"{few or 'none'}"
