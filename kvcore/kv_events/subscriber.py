"""The numbered batches of one publisher, each once and in order, or told to be missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from hashlib import blake2b
from importlib import import_module
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import attrs
from attrs.validators import ge, gt

from kvcore.errors import InputError, PluginError
from kvcore.units import format_seconds

if TYPE_CHECKING:
    import zmq


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


SEQUENCE_BYTES = 8


END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""The number that says that a replay is over."""


_ADDRESS = re.compile(
    r"(tcp)://(?:[^\s:]+|\[[^\s\]]+\]):(\d+|\*)|(?:ipc|inproc)://\S+", re.ASCII
)


_HIGHEST_PORT = 65_535


def load_zmq() -> Any:
    """Import pyzmq. Raises PluginError if it is not installed."""
    try:
        return import_module("zmq")
    except ImportError as error:
        msg = f"KV events over a network need pyzmq ({error}): pip install 'kvcore[events]'"
        raise PluginError(msg) from error


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
    """Return the address of a rank to connect to: likewise, but it must name a host.

    Raises:
        InputError: as `rank_address`, or `*`, which only a server can listen at.
    """
    if address.startswith("tcp://*:"):
        port = address.removeprefix("tcp://*:")
        msg = f"address {address!r}: '*' is no host; name the server's: tcp://127.0.0.1:{port}"
        raise InputError(msg)
    return rank_address(address, rank)


@contextmanager
def using(address: str, what: str) -> Iterator[None]:
    """Turn a ZMQ error of the body, which would `what` the address, into an InputError."""
    try:
        yield
    except load_zmq().ZMQError as error:
        msg = f"cannot {what} {address}: {error.strerror or error}"
        raise InputError(msg) from error


def number(frame: bytes) -> int | None:
    """Read the frame that has a batch's number; None if it is no number of a batch."""
    if len(frame) != SEQUENCE_BYTES or frame[0] >= 0x80:  # noqa: PLR2004 - negative: END
        return None
    return int.from_bytes(frame, "big")


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
