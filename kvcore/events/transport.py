"""Batches from a live server: a subscriber that finds gaps and asks for what it missed."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import attrs
from attrs.validators import ge, gt

from kvcore.events.ordering import Garbage, Item, Ordering, Unanswered
from kvcore.events.sockets import END, SEQUENCE_BYTES, host_address, load_zmq, number, using
from kvcore.units import format_seconds

if TYPE_CHECKING:
    import zmq

_FRAMES = 3
_REPLAY_FRAMES = (3, 4)
_SLICE_MS = _FIRST_RETRY_MS = 100


@attrs.frozen(kw_only=True)
class Server:
    """Where the batches come from, and how long to wait for what.

    Attributes:
        address: of the PUB socket of rank 0, such as `tcp://127.0.0.1:5557`.
        replay: of its ROUTER socket, which sends batches again; None: there is none.
        topic: listen to topics that begin so; empty: to all.
        ranks: publishers to listen to, each at the address of the one before it plus one.
        replay_timeout: seconds to wait for the next batch of a replay.
        reconnect: most seconds between two tries to connect again; the first comes after
            a tenth of a second, each next one after twice as long.
        heartbeat: seconds between two signs of life; three missed end a connection.
        queue: batches to hold, a rank, while the reader is busy; further ones are dropped,
            and found missing. 0: without limit.

    Raises:
        InputError: an address that is none (from `Subscriber`).
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
    """A publisher's rank, its batches in order, and a socket that tells lost connections."""

    rank: int
    ordering: Ordering
    losses: Any


class Subscriber:
    """Hears the KV events that vLLM, SGLang or TensorRT-LLM publish over ZMQ.

    A batch is three frames: topic, number (8 bytes, big-endian, from 0), payload. What is
    missing is asked for at the ROUTER socket, which sends the batches it keeps (10,000, as
    a rule) from a number on, and a batch of number -1 at their end. All it keeps is asked
    for at the beginning, too: what was stored before anyone listened.

    Use it in a `with` block. Only `stop` may be called from elsewhere.

    Args:
        server: what to listen to.
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
        """Connect to every rank. Does not wait for them."""
        self._server = server
        self._zmq = load_zmq()
        self._lent = context is not None
        self._context = self._zmq.Context() if context is None else context
        self._streams: dict[Any, _Stream] = {}
        self._poller = self._zmq.Poller()
        self.stopped = self._begun = False
        try:
            for rank in range(server.ranks):
                self._connect(rank)
        except BaseException:
            self.close()
            raise

    def items(self, seconds: float | None = None) -> Generator[Item, None, None]:
        """Yield what is heard, in order of each publisher, until `stop` or for `seconds`.

        Waits without using the processor. Another call goes on where this one ended.
        """
        deadline = None if seconds is None else monotonic() + seconds
        if not self._begun:
            self._begun = True
            for stream in self._streams.values():
                yield from stream.ordering.catch_up()
        while not self.stopped:
            left = _SLICE_MS if deadline is None else (deadline - monotonic()) * 1000
            if left <= 0:
                return
            for socket, _ in self._poller.poll(min(left, _SLICE_MS)):
                yield from self._heard(socket)

    def stop(self) -> None:
        """Let `items` end within a tenth of a second. May be called by a signal handler."""
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

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Disconnect."""
        self.close()

    def _connect(self, rank: int) -> None:
        address = host_address(self._server.address, rank)
        replay = None
        if self._server.replay is not None:
            at = host_address(self._server.replay, rank)
            replay = partial(self._replay, at)
        socket = self._context.socket(self._zmq.SUB)
        losses = socket.get_monitor_socket(self._zmq.EVENT_DISCONNECTED)
        self._streams[socket] = _Stream(rank, Ordering(rank, replay), losses)
        socket.rcvhwm = self._server.queue
        self._patient(socket, address)
        socket.subscribe(self._server.topic)
        with using(address, "listen to"):
            socket.connect(address)
        self._poller.register(socket, self._zmq.POLLIN)

    def _patient(self, socket: Any, address: str) -> None:
        """Set when to connect again, and when to give a silent connection up."""
        # Only then: with it, `localhost` might mean ::1, where no engine listens.
        socket.ipv6 = "[" in address
        most = max(1, int(self._server.reconnect * 1000))
        socket.reconnect_ivl, socket.reconnect_ivl_max = min(_FIRST_RETRY_MS, most), most
        beat = max(1, int(self._server.heartbeat * 1000))
        socket.heartbeat_ivl, socket.heartbeat_timeout = beat, 3 * beat

    def _heard(self, socket: Any) -> Iterator[Item]:
        rank, ordering, losses = attrs.astuple(self._streams[socket], recurse=False)
        while losses.poll(0):
            losses.recv_multipart()
            ordering.doubt()
        frames = socket.recv_multipart()
        if len(frames) != _FRAMES:
            wanted = "expected 3 frames (topic, number, payload)"
            yield Garbage(rank, f"{wanted}, got {len(frames)}")
            return
        sequence = number(frames[1])
        if sequence is None:
            wanted = f"expected a number of {SEQUENCE_BYTES} bytes from 0 on"
            yield Garbage(rank, f"{wanted}, got {_shown(frames[1])}")
            return
        yield from ordering.live(sequence, frames[2])

    def _replay(
        self, address: str, start: int
    ) -> Generator[tuple[int, bytes | None], None, None]:
        """Ask for the batches from `start` on: a `Replay`.

        Each question has a socket of its own, so that no late answer is taken for another's.
        """
        with closing(self._context.socket(self._zmq.DEALER)) as socket:
            socket.linger = 0
            # What the publisher cannot hand over at once it would drop.
            socket.rcvhwm = 0
            self._patient(socket, address)
            with using(address, "ask for a replay at"):
                socket.connect(address)
            socket.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")])
            while (frames := self._answer(socket, address))[-2:-1] != [END]:
                sequence = number(frames[-2]) if len(frames) in _REPLAY_FRAMES else None
                if sequence is None:
                    msg = f"{address} answered with something that is no batch"
                    raise Unanswered(msg)
                # Older servers leave the topic out.
                topic = frames[1] if len(frames) == max(_REPLAY_FRAMES) else b""
                wanted = not topic or topic.startswith(self._server.topic.encode())
                yield sequence, frames[-1] if wanted else None

    def _answer(self, socket: Any, address: str) -> list[bytes]:
        """Return the next message of a replay. Raises Unanswered if there is none in time."""
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
        raise Unanswered(msg)


def _shown(frame: bytes) -> str:
    """Return a frame in hexadecimal, cut to what fits in a message."""
    few = frame[:SEQUENCE_BYTES].hex()
    return f"{len(frame)} bytes {few}..." if len(frame) > SEQUENCE_BYTES else f"{few or 'none'}"
