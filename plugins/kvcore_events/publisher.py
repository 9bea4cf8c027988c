"""A publisher of KV events over ZMQ as in engines: live to subscribers, and as replays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvcore_events.subscriber import (
    END,
    SEQUENCE_BYTES,
    Endpoint,
    number,
    rank_address,
    using,
)

if TYPE_CHECKING:
    import zmq

__all__ = ["Publisher"]


BUFFER, BUFFER_BYTES = 10_000, 1 << 28
"""Batches that a publisher keeps for replays, and their bytes: prompts may be long."""

_REQUEST_FRAMES = 3
_SUBSCRIBED = b"\x01"
_QUEUE, _LINGER_MS = 1_000, 5_000
_RETRY_SECONDS, _POLL_SECONDS = 0.01, 0.1
_LATE_READS = 8
"""Reads once the time to serve is over, for what has come by then: a flood has no end."""


class Publisher(Endpoint):
    """A publisher of batches over ZMQ, in the frames of vLLM, SGLang and TensorRT-LLM.

    Live batches go to every subscriber. `publish` waits for slow ones and drops no batch, or
    drops those of a subscriber with 1,000 batches unread, which finds a gap. Requests for
    replays are answered by `serve`, and by other methods while they wait, on the thread of the
    caller. Use it in a `with` block; closing waits up to five seconds for queued batches, and
    for no replay.

    Args:
        address: address of the PUB socket, such as `tcp://*:5557`.
        replay: address of the ROUTER socket for replays; None: no replays.
        topic: first frame of every batch.
        buffer: number of batches kept for replays, which have at most 256 MiB together; and
            most that a client may leave unread.
        waits: whether `publish` waits for slow subscribers.
        context: a ZMQ context of your own (for `inproc` addresses), which stays open.

    Attributes:
        address, replay: the bound addresses, with the port that was chosen for `*`.
        subscribers: number of connected subscribers.

    Raises:
        InputError: a socket cannot be bound to its address.
        PluginError: pyzmq is not installed.
    """

    def __init__(
        self,
        address: str,
        replay: str | None = None,
        *,
        topic: str = "",
        buffer: int = BUFFER,
        waits: bool = True,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        """Bind the sockets."""
        super().__init__(context)
        self._topic = topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._buffer, self._kept_bytes = buffer, 0
        self._next = 0
        self._sockets: list[Any] = []
        self.subscribers = 0
        try:
            # XPUB is a PUB that also receives subscriptions.
            self._live, self.address = self._bound(self._zmq.XPUB, address, _QUEUE, _LINGER_MS)
            self._live.xpub_verboser, self._live.xpub_nodrop = True, waits
            self._router: Any = None
            self.replay = replay
            if replay is not None:
                # One replay and its end fit into the queue of a client. None is waited for at
                # the end: for a client that has left that could take for ever.
                self._router, self.replay = self._bound(self._zmq.ROUTER, replay, buffer + 1, 0)
                self._router.router_mandatory = True  # an error tells of what does not fit
        except BaseException:
            self.close()
            raise

    def publish(self, payload: bytes) -> int:
        """Send a batch to all subscribers; return its number."""
        self.serve(0)
        sequence = self._next
        frame = sequence.to_bytes(SEQUENCE_BYTES, "big")
        self._kept.append((frame, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._buffer or self._kept_bytes > BUFFER_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._next += 1
        while True:
            try:
                self._live.send_multipart([self._topic, frame, payload], self._zmq.NOBLOCK)
            except self._zmq.Again:
                self.serve(_RETRY_SECONDS)
            else:
                return sequence

    def skip(self, batches: int) -> None:
        """Skip the numbers of lost batches: subscribers find a gap."""
        self._next += batches

    def serve_all(self, payloads: Iterable[bytes]) -> int:
        """Wait for a subscriber, publish all, and answer replays until the last one leaves.

        Returns the number of published batches.
        """
        while not self.wait_for(1, _POLL_SECONDS):
            pass
        sent = sum(1 for _ in map(self.publish, payloads))
        while self.subscribers:
            self.serve(_POLL_SECONDS)
        return sent

    def serve(self, seconds: float) -> None:
        """Answer requests for replays, and count subscribers, for `seconds`."""
        self._until(seconds, lambda: False)

    def wait_for(self, subscribers: int, seconds: float) -> bool:
        """Serve for up to `seconds`; return True once `subscribers` are connected."""
        return self._until(seconds, lambda: self.subscribers >= subscribers)

    def close(self) -> None:
        """Send the queued messages, and unbind."""
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()
        if not self._lent:
            self._context.term()

    def _bound(self, kind: int, address: str, queue: int, linger: int) -> tuple[Any, str]:
        """Return a bound socket, which closes within `linger` ms, and its address."""
        first_address = rank_address(address, 0)
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.sndhwm, socket.linger, socket.ipv6 = queue, linger, "[" in first_address
        with using(first_address, "publish at"):
            socket.bind(first_address)
        self._poller.register(socket, self._zmq.POLLIN)
        return socket, socket.last_endpoint.decode().rstrip("\0")

    def _until(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Serve until `done` returns True, or for `seconds`; return True if it did."""
        deadline, late = monotonic() + seconds, 0
        while not done():
            left = max(0.0, deadline - monotonic())
            ready = self._poller.poll(left * 1000)
            late += not left
            if not left and (not ready or late > _LATE_READS):
                return False
            for socket, _ in ready:
                frames = socket.recv_multipart()
                if socket is self._live:
                    change = 1 if frames[0].startswith(_SUBSCRIBED) else -1
                    self.subscribers = max(0, self.subscribers + change)
                else:
                    self._answer(frames)
        return True

    def _answer(self, request: list[bytes]) -> None:
        """Send the kept batches from the requested number on; ignore other messages.

        What a client leaves unread ends its replay, without an end: it asks again.
        """
        if len(request) != _REQUEST_FRAMES or number(request[2]) is None:
            return
        who, _, start = request
        kept = (
            [self._topic, frame, payload] for frame, payload in self._kept if frame >= start
        )
        with suppress(self._zmq.ZMQError):  # its queue is full, or it has disconnected
            for frames in chain(kept, [[b"", END, b""]]):
                self._router.send_multipart([who, b"", *frames], self._zmq.NOBLOCK)
