"""A subscription to KV events over ZMQ: batches once and in order, with the gaps."""

from __future__ import annotations

import math
import re
import socket as sockets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

import attrs
from attrs.validators import ge, gt, le

from kvcore.errors import InputError
from kvcore.lazy import import_extra
from kvcore.units import format_seconds
from kvcore_events.sequencer import (
    BatchSequencer,
    Gap,
    InvalidMessage,
    ReplayFailed,
    Restart,
    StreamItem,
)

if TYPE_CHECKING:
    import zmq

__all__ = ["Server", "Subscriber"]


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
    """Return the address of a rank for a client, which must name a host.

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


def resolve(address: str) -> None:
    """Raise InputError if the host of an address cannot be found: ZMQ would wait in silence."""
    if not address.startswith("tcp://"):
        return
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        sockets.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        msg = f"address {address!r}: the host {host!r} cannot be found: {reason}"
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

_MESSAGE_BYTES = 512
"""Memory of a message besides its frames."""

_ZMQ_QUEUE = 100
"""Messages that ZMQ may hold of a rank, and of a replay, until they are received."""

_LARGEST_MESSAGE = 1 << 28
"""Size of a message (bytes) above which ZMQ drops the connection; none is so large."""

_MOST_SECONDS = 32_767
"""Most seconds of a keep-alive in Linux, which refuses more, and of a pause."""

DRAIN_SECONDS = 5.0
_LAST_SECONDS = 0.5


@attrs.frozen(kw_only=True)
class Server:
    """The addresses of a server that publishes KV events, and the limits of a connection.

    Attributes:
        address: address of the PUB socket of rank 0, such as `tcp://127.0.0.1:5557`.
        replay: address of its ROUTER socket, for replays; None: it has none.
        topic: prefix of the topics to subscribe to; empty: all topics.
        ranks: number of data-parallel ranks, each a publisher at the next port.
        replay_timeout: seconds to wait for the next batch of a replay.
        reconnect: most seconds between two attempts to reconnect; the first attempt is after
            0.1 s, each next one after twice the time.
        heartbeat: seconds between two TCP keep-alive probes of a silent connection; it is
            closed after three without an answer. Not more than 32,767, as for `reconnect`.
        queue_bytes: most bytes of received batches that wait to be read, of all ranks
            together; further ones wait at the publisher, and are missing if it drops them.

    Raises:
        InputError: an address is not a ZMQ address (from `Subscriber`).
        ValueError: a number is outside its bounds.
    """

    address: str
    replay: str | None = None
    topic: str = ""
    ranks: int = attrs.field(default=1, validator=ge(1))
    replay_timeout: float = attrs.field(default=5.0, validator=gt(0))
    reconnect: float = attrs.field(default=5.0, validator=[gt(0), le(_MOST_SECONDS)])
    heartbeat: float = attrs.field(default=10.0, validator=[gt(0), le(_MOST_SECONDS)])
    queue_bytes: int = attrs.field(default=1 << 28, validator=gt(0))

    @queue_bytes.validator
    def _has_room(self, _attribute: object, size: int) -> None:
        if size < self.ranks:
            msg = f"queue_bytes={size}: give {self.ranks} or more, one for each rank"
            raise ValueError(msg)


class _Queue:
    """The received messages of a socket that were not read yet."""

    def __init__(self, socket: Any, room: int) -> None:
        """Start empty, with `room` bytes, which the last message may exceed."""
        self.socket = socket
        self.room = room
        self._messages: deque[list[bytes]] = deque()

    def __len__(self) -> int:
        """Return the number of messages."""
        return len(self._messages)

    @property
    def messages(self) -> int:
        """The number of messages that are none of a lost connection."""
        return sum(map(bool, self._messages))

    def __getitem__(self, index: int) -> list[bytes]:
        """Return the frames of a message; place 0 is the next."""
        return self._messages[index]

    def next_number(self) -> int | None:
        """Return the number of the next live batch, if one waits."""
        batches = (frames[1] for frames in self._messages if len(frames) == _FRAMES)
        return next((n for n in map(number, batches) if n is not None), None)

    def append(self, frames: list[bytes]) -> None:
        """Add a message."""
        self._messages.append(frames)
        self.room -= sum(map(len, frames)) + _MESSAGE_BYTES

    def pop(self) -> list[bytes]:
        """Remove the next message; return it."""
        frames = self._messages.popleft()
        self.room += sum(map(len, frames)) + _MESSAGE_BYTES
        return frames


@attrs.frozen
class _Stream:
    """One rank of the server; `losses` is a socket on which ZMQ reports lost connections."""

    rank: int
    sequencer: BatchSequencer
    queue: _Queue
    losses: Any


class Subscriber(Endpoint):
    """A connection to the KV events that vLLM, SGLang or TensorRT-LLM publish over ZMQ.

    A batch is three frames: topic, number (8 bytes, big-endian, from 0), payload. Missing
    batches are requested from the ROUTER socket. It sends the batches that it keeps, by
    default the last 10,000, from a number on, and a batch of number -1 at the end. The first
    request is for all of them: the batches from before the subscription.

    Use it in a `with` block. Only `stop` may be called from another thread.

    Args:
        server: the server.
        context: a ZMQ context of your own (for `inproc` addresses), which stays open.

    Attributes:
        stopped: whether `stop` was called.
        unread: number of received messages that `drain` has had no time for.

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
        self._streams: list[_Stream] = []
        self._replays: dict[int, _Queue] = {}
        self._items = self._run()
        self.stopped = self._draining = False
        self.unread = 0
        try:
            self._connect_all()
        except BaseException:
            self.close()
            raise

    def items(self, seconds: float | None = None) -> Generator[StreamItem, None, None]:
        """Yield batches, gaps and restarts, in order of each publisher.

        Ends at `stop` or after `seconds`, also while a replay goes on; another call continues
        there. Waits without using the processor.
        """
        deadline = math.inf if seconds is None else monotonic() + seconds
        while not self.stopped and monotonic() < deadline:
            item = next(self._items, None)
            if item is not None:
                yield item

    def drain(self, seconds: float = DRAIN_SECONDS) -> Generator[StreamItem, None, None]:
        """Stop; yield the received batches, for at most `seconds`.

        What is unread then came last from each publisher, so that it leaves no gap: `unread`
        counts it. Call it once, after the last call of `items`.
        """
        self.stop()
        self._receive_last()
        self._draining = True
        deadline, item = monotonic() + seconds, None
        for item in self._items:
            if item is not None:
                yield item
            # The batch that shows a gap or a restart comes after it.
            ended = not isinstance(item, Gap | Restart) and monotonic() >= deadline
            if ended or not any(self._queues()):
                break
        # The message of the last item is taken from its queue when the next is asked for.
        self.unread = sum(queue.messages for queue in self._queues()) - (item is not None)

    def stop(self) -> None:
        """End the iteration of `items` within 0.1 s. May be called by a signal handler."""
        self.stopped = True

    def close(self) -> None:
        """Disconnect."""
        self._items.close()
        for stream in self._streams:
            stream.queue.socket.disable_monitor()
            stream.losses.close(linger=0)
            stream.queue.socket.close(linger=0)
        self._streams.clear()
        if not self._lent:
            self._context.destroy(linger=0)

    def _connect_all(self) -> None:
        ranks = range(self._server.ranks)
        addresses = [host_address(self._server.address, rank) for rank in ranks]
        replays: list[str] = []
        if self._server.replay is not None:
            replays = [host_address(self._server.replay, rank) for rank in ranks]
        for address in (*addresses[:1], *replays[:1]):
            resolve(address)
        for rank, address in enumerate(addresses):
            with using(address, f"listen to rank {rank} at" if rank else "listen to"):
                self._connect(rank, address, replays[rank] if replays else None)

    def _connect(self, rank: int, address: str, replay: str | None) -> None:
        socket = self._context.socket(self._zmq.SUB)
        losses = socket.get_monitor_socket(self._zmq.EVENT_DISCONNECTED)
        ask = None if replay is None else partial(self._replay, rank, replay)
        queue = _Queue(socket, self._server.queue_bytes // self._server.ranks)
        self._streams.append(_Stream(rank, BatchSequencer(rank, ask), queue, losses))
        self._limit(socket, address)
        socket.subscribe(self._server.topic)
        socket.connect(address)
        self._poller.register(socket, self._zmq.POLLIN)

    def _limit(self, socket: Any, address: str) -> None:
        """Set the limits of a socket: its queue, its reconnects, its keep-alive."""
        socket.rcvhwm, socket.maxmsgsize = _ZMQ_QUEUE, _LARGEST_MESSAGE
        # Only for IPv6 addresses: else `localhost` might be ::1, where no engine listens.
        socket.ipv6 = "[" in address
        longest_ms = max(1, int(self._server.reconnect * 1000))
        socket.reconnect_ivl, socket.reconnect_ivl_max = (
            min(_FIRST_RETRY_MS, longest_ms),
            longest_ms,
        )
        # Not ZMQ's own heartbeats: they end a connection that waits for room, upon which libzmq
        # 4.3.5 may abort the process (its issue 3937).
        beat = math.ceil(self._server.heartbeat)
        socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, 3
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = beat

    def _run(self) -> Generator[StreamItem | None, None, None]:
        """Yield the items without end, and None at least each tenth of a second."""
        for stream in self._streams:
            self._receive()
            # A batch that waits shows what is missing before it, when it is read.
            if stream.queue.next_number() is None:
                yield from stream.sequencer.catch_up(stream.queue.next_number)
        while True:
            self._receive()
            waiting = [stream for stream in self._streams if stream.queue]
            if not waiting:
                yield None
                self._poller.poll(_SLICE_MS)
            for stream in waiting:
                yield from self._read(stream)
                stream.queue.pop()

    def _receive(self) -> None:
        """Receive waiting messages while there is room."""
        if self._draining:
            return
        for stream in self._streams:
            while stream.losses.poll(0):
                stream.losses.recv_multipart()
                stream.queue.append([])
        for queue in self._queues():
            while queue.room > 0 and self._take(queue):
                pass

    def _receive_last(self) -> None:
        """Receive all messages that ZMQ holds, and later ones for half a second."""
        deadline = monotonic() + _LAST_SECONDS
        while monotonic() < deadline and all(queue.room > 0 for queue in self._queues()):
            self._receive()
            if not self._poller.poll(_SLICE_MS):
                break
        for queue in self._queues():
            for _ in range(_ZMQ_QUEUE):
                if not self._take(queue):
                    break

    def _queues(self) -> list[_Queue]:
        return [*self._replays.values(), *(stream.queue for stream in self._streams)]

    def _take(self, queue: _Queue) -> bool:
        """Receive a message; return True if there was one."""
        try:
            queue.append(queue.socket.recv_multipart(self._zmq.NOBLOCK))
        except self._zmq.Again:
            return False
        return True

    def _read(self, stream: _Stream) -> Iterator[StreamItem | None]:
        """Yield the items of the next message; an empty one stands for a lost connection."""
        frames = stream.queue[0]
        if not frames:
            stream.sequencer.mark_disconnected()
            return
        if len(frames) != _FRAMES:
            wanted = "expected 3 frames (topic, number, payload)"
            yield InvalidMessage(stream.rank, f"{wanted}, got {len(frames)}")
            return
        sequence = number(frames[1])
        if sequence is None:
            wanted = f"expected a number of {SEQUENCE_BYTES} bytes from 0 on"
            yield InvalidMessage(stream.rank, f"{wanted}, got {_shown(frames[1])}")
            return
        yield from stream.sequencer.receive(sequence, frames[2])

    def _replay(
        self, rank: int, address: str, start: int
    ) -> Generator[tuple[int, bytes | None] | None, None, None]:
        """Request the batches from `start` on; yield them as a `Replay` does.

        Each request has a socket of its own, so that a late answer is not taken for another.
        """
        with closing(self._context.socket(self._zmq.DEALER)) as socket:
            socket.linger = 0
            self._limit(socket, address)
            with using(address, "ask for a replay at"):
                socket.connect(address)
            socket.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")])
            self._replays[rank] = queue = _Queue(socket, self._server.queue_bytes)
            try:
                yield from self._answer(queue, address)
            finally:
                del self._replays[rank]

    def _answer(
        self, queue: _Queue, address: str
    ) -> Generator[tuple[int, bytes | None] | None, None, None]:
        """Yield the batches of an answer. Raises ReplayFailed if the next is not in time."""
        deadline = monotonic() + self._server.replay_timeout
        while True:
            # The publisher drops batches of an answer that it cannot send at once.
            self._receive()
            if not queue:
                left = deadline - monotonic()
                if self._draining or left <= 0:
                    took = format_seconds(self._server.replay_timeout)
                    msg = f"no answer from {address} within {took}"
                    raise ReplayFailed("listening was stopped" if self._draining else msg)
                yield None
                queue.socket.poll(min(left * 1000, _SLICE_MS))
                continue
            frames = queue[0]
            if frames[-2:-1] == [END]:
                return
            sequence = number(frames[-2]) if len(frames) in _REPLAY_FRAMES else None
            if sequence is None:
                msg = f"{address} answered with something that is no batch"
                raise ReplayFailed(msg)
            # Older servers leave the topic out.
            topic = frames[1] if len(frames) == max(_REPLAY_FRAMES) else b""
            wanted = not topic or topic.startswith(self._server.topic.encode())
            yield sequence, frames[-1] if wanted else None
            queue.pop()
            deadline = monotonic() + self._server.replay_timeout


def _shown(frame: bytes) -> str:
    """Return a frame in hexadecimal, cut to eight bytes."""
    few = frame[:SEQUENCE_BYTES].hex()
    return f"{len(frame)} bytes {few}..." if len(frame) > SEQUENCE_BYTES else f"{few or 'none'}"
