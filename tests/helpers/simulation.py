"""Simulations of servers: events drawn from a seed, and what must hold after each of them.

Nothing looks at a clock, a socket, a thread or a random number of the system: a list of events
always has the same outcome, so that `shortest` can leave out events of one that fails.
"""

import asyncio
import errno
import io
import json
import signal
from collections import Counter
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from random import Random
from unittest import mock

import attrs
from aiohttp import connector
from helpers.simulated_http import Client, request_bytes
from helpers.simulated_loop import InlineExecutor, SimulatedLoop

from kvcore import files
from kvcore.errors import KvcoreError

MOST_WAITING = 1 << 19
"""Bytes that may wait at an end of a connection."""

MOST_LINES = 60
"""Lines that may be printed."""

QUIET_SECONDS = 60.0
"""Time in which the last client has its answer."""

LAST_SECONDS = 30.0
"""Time in which all must have ended after the first signal."""

AT_ONCE_SECONDS = 1.0
"""Time in which all must have ended after a second signal."""

MANNERS = ("leave", "leave", "half-close", "slow send", "stop", "slow read")
"""Manners of clients that are no plain ones, of which some are more frequent."""


@attrs.frozen
class Ask:
    """A client sends `copies` requests on a connection, in some manner (see `Client`)."""

    time: float
    stream: bool = False
    text: str = "a"
    size: int = 10
    copies: int = 1
    manner: str = "plain"
    seconds: float = 0.0
    options: dict = attrs.field(factory=dict)


@attrs.frozen
class Disk:
    """The disk has room for so many bytes from now on."""

    time: float
    room: int


@attrs.frozen
class Signal:
    """The process gets SIGTERM."""

    time: float


@attrs.define(eq=False)
class Asked:
    """A request: its name, the event, the client, and its place on the client's connection."""

    name: str
    ask: Ask
    client: Client
    place: int

    def answer(self):
        """Return its answer, which may be cut; None: there is none."""
        answers = self.client.answers()
        return answers[self.place] if self.place < len(answers) else None


class Simulation:
    """A server and its clients in a simulated world.

    A subclass makes the server, handles its own events in methods of their names, and has
    further checks.

    Args:
        world: what happens: `seed`, `events` and what the subclass needs.
        folder: where the trace is written.

    Attributes:
        asked: all requests, in the order in which they were sent.
        signals: times of the signals.
        full: whether a write has failed.
        error: the error with which the server has ended, or None.
        counts: what has come out, to see that nothing of it is rare.
    """

    def __init__(self, world, folder):
        """Make the loop."""
        self.world, self.path = world, folder / "day.jsonl"
        self.loop = SimulatedLoop(Random(world.seed))
        self.asked, self.clients, self.tasks, self.counts = [], [], [], Counter()
        self.signals, self.full, self._room, self.error = [], False, None, None

    # What a subclass has.

    def start(self):
        """Return the server, and a coroutine that runs it to its end."""
        raise NotImplementedError

    def outside(self, stack):
        """Replace further things that the server would get from the system."""

    def document(self, ask, name):
        """Return the body of a request."""
        raise NotImplementedError

    def end(self):
        """End what is not the server's."""

    def check_step(self):
        """Check what must hold after each step of the loop."""

    def check_end(self):
        """Check what must hold when the server has ended."""

    def check_answer(self, asked, answer):
        """Check an answer of any status, which may be cut."""
        raise NotImplementedError

    # The run.

    def run(self):
        """Let all happen; raise AssertionError if something does not hold. Returns itself."""
        printed = io.StringIO()
        asyncio.set_event_loop(self.loop)
        try:
            with self._outside(), redirect_stderr(printed):
                self.loop.run_until_complete(self._all())
                self._check_nothing_runs()
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()
        text = printed.getvalue()
        assert "Traceback" not in text, text
        assert len(text.splitlines()) < MOST_LINES, text
        for asked in self.asked:
            self._check_one(asked)
        self.check_end()
        return self

    @contextmanager
    def _outside(self):
        """Replace what a server gets from the system: time, threads, and the disk."""
        write, simulation = files.AtomicFile.write, self

        def limited(file, data):
            with files.storage_errors(file._what):
                room = simulation._room
                if room is not None:
                    if not room:
                        simulation.full = True
                        raise OSError(errno.ENOSPC, "No space left on device")
                    data = memoryview(data)[:room]
                    simulation._room = room - len(data)
            return write(file, data)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(files.AtomicFile, "write", limited))
            stack.enter_context(mock.patch.object(connector, "monotonic", self.loop.time))
            threads = mock.patch("concurrent.futures.ThreadPoolExecutor", InlineExecutor)
            stack.enter_context(threads)
            self.outside(stack)
            yield

    async def _all(self):
        server, running = self.start()
        running, ended = self.loop.create_task(running), []
        running.add_done_callback(lambda _: ended.append(self.loop.time()))
        while not server.url and not running.done():  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.01)
        self.loop.after_step = self._check_step
        self.port, began = int(server.url.rpartition(":")[2]), self.loop.time()
        for event in self.world.events:
            await asyncio.sleep(max(0.0, began + event.time - self.loop.time()))
            getattr(self, f"on_{type(event).__name__.lower()}")(event)
        await asyncio.sleep(0.1)
        if not self.signals:
            await self._quiet()
            self.on_signal(None)
        async with asyncio.timeout(LAST_SECONDS):
            with suppress(KvcoreError):
                await running
        # Two at once may be one that a wrapper of the command has passed on.
        if len(self.signals) > 1 and self.signals[1] > self.signals[0] + 0.1:
            assert ended[0] < self.signals[1] + AT_ONCE_SECONDS, (
                "a second signal does not end it"
            )
        self.error = running.exception()
        self.end()
        for task in self.tasks:
            await task
        await asyncio.sleep(10)

    async def _quiet(self):
        """Wait until all clients have their answers."""
        until = self.loop.time() + QUIET_SECONDS
        while any(client.closed is None for client in self.clients):
            assert self.loop.time() < until, "a client waits without end"
            await asyncio.sleep(0.1)

    def on_ask(self, event):
        """Let a client send requests."""
        number, requests = len(self.clients), []
        client = Client(self.loop, requests, event.manner, event.seconds)
        for index in range(event.copies):
            name = f"{number}.{index}"
            body = json.dumps(self.document(event, name)).encode()
            requests.append(request_bytes(body, name, chunked=number % 5 == 4))
            self.asked.append(Asked(name, event, client, index))
        client.began = self.loop.time()
        self.clients.append(client)
        self.tasks.append(self.loop.create_task(client.connect(self.port)))

    def on_disk(self, event):
        """Limit what can be written."""
        self._room = event.room

    def on_signal(self, event):
        """Send SIGTERM to the process."""
        del event
        self.signals.append(self.loop.time())
        self.loop.signal(signal.SIGTERM)

    # Checks.

    def _check_step(self):
        for transport in self.loop.transports:
            assert transport.largest <= MOST_WAITING, "too many bytes wait"
        self.check_step()

    def _check_nothing_runs(self):
        loop = self.loop
        assert not asyncio.all_tasks(loop), asyncio.all_tasks(loop)
        assert not loop.transports, "a connection is open"
        assert not loop.listeners, "a listener is open"
        left = [timer for timer in loop.timers() if "kvcore" in repr(timer)]
        assert not left, left

    def _check_one(self, asked):
        """Check that a request has one whole answer, or a client or a signal to blame."""
        client, answers = asked.client, asked.client.answers()
        assert len(answers) <= asked.ask.copies, "more answers than requests"
        answer = asked.answer()
        if answer is not None:
            self.counts[answer.status] += 1
            self.check_answer(asked, answer)
        if answer is not None and answer.ended:
            return
        self.counts["no answer"] += 1
        assert client.closed is not None, f"{asked.name} waits"
        ends = any(
            answer.headers.get("connection") == "close" for answer in answers[: asked.place]
        )
        if asked.ask.manner == "plain" and not ends:
            ended = self.signals and client.closed >= self.signals[0] - 0.5
            assert ended or self.error is not None, f"{asked.name} has no answer"


def failure(simulation, world, folder):
    """Run a world; return the error in it, or None."""
    for path in folder.glob("day.jsonl*"):
        path.unlink()
    try:
        simulation(world, folder).run()
    except Exception as error:  # noqa: BLE001 - any is a failure
        return error
    return None


def shortest(world, fails):
    """Return a world with as few events as can be, of which `fails` still returns True."""
    events = list(world.events)
    size = max(1, len(events) // 2)
    while size:
        place = 0
        while place < len(events):
            fewer = events[:place] + events[place + size :]
            if fails(attrs.evolve(world, events=tuple(fewer))):
                events = fewer
            else:
                place += size
        size //= 2
    return attrs.evolve(world, events=tuple(events))


def check(simulation, draw, seed, folder):
    """Run the world of a seed, and return its counts.

    Raises AssertionError with the shortest form of the world if something does not hold.
    """
    for path in folder.glob("day.jsonl*"):
        path.unlink()
    try:
        return simulation(draw(seed), folder).run().counts
    except Exception as first:  # noqa: BLE001 - any is a failure
        error = first
    world = shortest(
        draw(seed), lambda fewer: type(failure(simulation, fewer, folder)) is type(error)
    )
    error = failure(simulation, world, folder)
    events = "\n".join(f"    {event}" for event in world.events)
    about = attrs.evolve(world, events=())
    msg = f"seed {seed}: {type(error).__name__}: {error}\n{about}, with\n{events}"
    raise AssertionError(msg) from error
