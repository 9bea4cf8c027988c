"""An event loop without a clock, sockets and signals of the system: all are simulated.

Time jumps to the next timer once nothing is left to do. Connections are pairs of `Transport`s
in memory; their bytes arrive in pieces, later, as the loop's random numbers say. The socket
objects that clients of asyncio make beforehand stand for a connection, and are never connected.
"""

import asyncio
import errno
import os
import threading
from concurrent.futures import Executor, Future
from random import Random

HIGH = 1 << 16
"""Bytes that a transport takes before it asks its protocol to pause, as in asyncio."""


class IdleLoopError(Exception):
    """Raised if all wait for something that will never happen."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop by a simulated clock, with a simulated network.

    Attributes:
        random: decides on the pieces in which bytes arrive, and on their delays.
        listeners: factories of protocols by port.
        unreachable: ports at which attempts to connect are never answered.
        transports: all transports that are open.
        errors: what the loop's exception handler was called with.
        after_step: called after each step of the loop.
    """

    def __init__(self, random):
        """Start at a time that is not 0, with an empty network."""
        super().__init__()
        self._selector = self
        self._now = 1000.0
        self._clock_resolution = 1e-9
        self._signal_handlers = {}
        self._sockets = {}
        self._ports = iter(range(40_000, 60_000))
        self.random = random
        self.listeners, self.unreachable, self.transports = {}, set(), set()
        self.after_step = None
        self.steps = 0

    # The clock.

    def time(self):
        """Return the simulated time in seconds."""
        return self._now

    def now_ns(self):
        """Return the simulated time in ns."""
        return round(self._now * 1e9)

    def select(self, timeout):
        """Move the clock to the next timer; there are no events of the system."""
        if timeout is None:
            msg = "all wait for what will never happen"
            raise IdleLoopError(msg)
        if timeout > 0:
            self._now = max(self._now, self._scheduled[0].when())
        return []

    def _process_events(self, events):
        del events

    def _write_to_self(self):
        pass

    def _run_once(self):
        super()._run_once()
        self.steps += 1
        if self.after_step is not None:
            self.after_step()

    def timers(self):
        """Return the timers that are not cancelled."""
        return [timer for timer in self._scheduled if not timer.cancelled()]

    async def shutdown_default_executor(self, timeout=None):  # noqa: ASYNC109 - as asyncio
        """Do nothing: there is no executor."""

    def run_in_executor(self, executor, func, *args):
        """Call a function at once; if it returns a task in place of a thread, wait for that."""
        del executor

        async def called():
            result = func(*args)
            return await result if asyncio.isfuture(result) else result

        return self.create_task(called())

    # Signals.

    def add_signal_handler(self, number, callback, *args):
        """Store what is called upon a signal."""
        self._signal_handlers[number] = (callback, args)

    def remove_signal_handler(self, number):
        """Forget what is called upon a signal."""
        return self._signal_handlers.pop(number, None) is not None

    def signal(self, number):
        """Send a signal; return True if it has a handler."""
        assert threading.current_thread() is threading.main_thread()
        callback, args = self._signal_handlers.get(number, (None, ()))
        if callback is not None:
            self.call_soon(callback, *args)
        return callback is not None

    # The network.

    async def create_server(self, protocol_factory, host=None, port=None, **_):
        """Listen at a port; 0 takes a free one."""
        del host
        port = port or next(self._ports)
        if port in self.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self.listeners[port] = protocol_factory
        return SimulatedServer(self, port)

    async def sock_connect(self, sock, address):
        """Connect a socket to the listener at an address, some time later."""
        port = address[1]
        await asyncio.sleep(self.random.choice([0.0, 0.001, 0.02]))
        while port in self.unreachable:  # noqa: ASYNC110 - no event says when
            await asyncio.sleep(3600)
        if port not in self.listeners:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        self._sockets[sock] = port

    async def create_connection(
        self, protocol_factory, host=None, port=None, *, sock=None, **_
    ):
        """Connect a protocol to the listener at a port, or to that of a socket."""
        del host
        if sock is not None:
            port = self._sockets.pop(sock)
            sock.close()
        if port not in self.listeners:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        near, far = (Transport(self, Random(self.random.random())) for _ in range(2))
        near.peer, far.peer = far, near
        protocol = protocol_factory()
        far.begin(self.listeners[port]())
        near.begin(protocol)
        return near, protocol


class InlineExecutor(Executor):
    """A pool of threads without threads: each call is made at once."""

    def __init__(self, *_):
        """Start without threads."""

    def submit(self, func, /, *args, **options):
        """Call a function, and return its result as a future."""
        future = Future()
        try:
            future.set_result(func(*args, **options))
        except Exception as error:  # noqa: BLE001 - passed on
            future.set_exception(error)
        return future


class SimulatedServer:
    """A listener of a simulated network."""

    def __init__(self, loop, port):
        """Store the port."""
        self._loop, self._port = loop, port
        self.sockets = (self,)

    def getsockname(self):
        """Return the address."""
        return ("127.0.0.1", self._port)

    def close(self):
        """Stop listening."""
        self._loop.listeners.pop(self._port, None)


class Transport(asyncio.Transport):
    """One end of a connection in memory.

    Bytes that are written wait here until the protocol at the other end reads; they arrive in
    pieces of any size. The end of a stream and an aborted connection are told after them.

    Attributes:
        peer: the other end.
        largest: largest number of bytes that have waited here.
    """

    def __init__(self, loop, random):
        """Start without a protocol."""
        super().__init__({"peername": ("127.0.0.1", 9), "sockname": ("127.0.0.1", 8)})
        # Of its own, so that the order in which connections are closed does not matter.
        self._loop, self._random = loop, random
        self._protocol = self.peer = None
        self._waiting = bytearray()
        self._reads, self._closing, self._lost, self._ends = True, False, False, False
        self._paused = self._pumping = False
        self.largest = 0
        self._high, self._low = HIGH, HIGH // 4

    def begin(self, protocol):
        """Connect a protocol."""
        self._protocol = protocol
        self._loop.transports.add(self)
        protocol.connection_made(self)

    # What a protocol calls.

    def set_protocol(self, protocol):
        """Replace the protocol."""
        self._protocol = protocol

    def get_protocol(self):
        """Return the protocol."""
        return self._protocol

    def is_closing(self):
        """Return True once the transport closes or is closed."""
        return self._closing

    def is_reading(self):
        """Return True if the protocol takes bytes."""
        return self._reads and not self._closing

    def pause_reading(self):
        """Stop the bytes of the other end."""
        self._reads = False

    def resume_reading(self):
        """Let the bytes of the other end come."""
        self._reads = True
        if self.peer is not None:
            self.peer.pump_soon()

    def set_write_buffer_limits(self, high=None, low=None):
        """Set the numbers of waiting bytes at which the protocol pauses and goes on."""
        self._high = HIGH if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self):
        """Return the number of waiting bytes."""
        return len(self._waiting)

    def write(self, data):
        """Send bytes."""
        assert not self._ends, "bytes after the end"
        if self._closing or not data:
            return
        self._waiting += data
        self.largest = max(self.largest, len(self._waiting))
        if not self._paused and len(self._waiting) > self._high:
            self._paused = True
            self._protocol.pause_writing()
        self.pump_soon()

    def can_write_eof(self):
        """Return True."""
        return True

    def write_eof(self):
        """End the stream of bytes, and go on to read."""
        if not self._ends and not self._closing:
            self._ends = True
            self.pump_soon()

    def close(self):
        """Close the connection once the waiting bytes have arrived."""
        if not self._closing:
            self._closing = True
            self.pump_soon()

    def abort(self):
        """Close the connection at once; waiting bytes are lost."""
        self._waiting.clear()
        self._closing = True
        self._lose(None)
        if self.peer is not None:
            self._loop.call_soon(self.peer.reset)

    # What happens later.

    def pump_soon(self):
        """Let a piece of the waiting bytes arrive soon."""
        if not self._pumping and not self._lost:
            self._pumping = True
            random = self._random
            if random.random() < 0.1:
                self._loop.call_later(random.choice([0.001, 0.01, 0.05]), self._pump)
            else:
                self._loop.call_soon(self._pump)

    def _pump(self):
        self._pumping = False
        if self._lost:
            return
        peer = self.peer
        if self._waiting:
            if peer._closing:  # what arrives at a closed end is answered by a reset
                self.reset()
                return
            if not peer._reads:
                return
            most = len(self._waiting)
            whole = self._random.random() < 0.8
            size = most if whole else self._random.randint(1, most)
            piece = bytes(self._waiting[:size])
            del self._waiting[:size]
            if self._paused and len(self._waiting) <= self._low:
                self._paused = False
                self._protocol.resume_writing()
            peer._protocol.data_received(piece)
            if self._waiting or self._ends or self._closing:
                self.pump_soon()
            return
        if self._closing:
            self._lose(None)
            peer.end()
        elif self._ends:
            peer.end()

    def end(self):
        """Tell the protocol that the other end sends no more."""
        if not self._closing and not self._lost:
            if not self._reads:  # as of a socket: the end is seen when it is read
                self._loop.call_later(0.05, self.end)
            elif not self._protocol.eof_received():
                self.close()

    def reset(self):
        """Tell the protocol that the other end has aborted the connection."""
        self._waiting.clear()
        self._closing = True
        self._lose(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))

    def _lose(self, error):
        if not self._lost:
            self._lost = True
            self._loop.transports.discard(self)
            self._loop.call_soon(self._protocol.connection_lost, error)
