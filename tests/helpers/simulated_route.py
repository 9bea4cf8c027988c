"""`kvcore route` in a simulated world: events drawn from a seed, and what must hold after each.

Nothing here looks at a clock, a socket or a random number of the system: a list of events
always has the same outcome, so that `shortest` can leave out events of a failing list.
"""

import asyncio
import errno
import io
import json
import signal
from collections import Counter
from contextlib import contextmanager, redirect_stderr, suppress
from itertools import count
from random import Random
from unittest import mock

import attrs
from aiohttp import connector
from helpers.simulated_http import SCRIPTS, Client, Upstream, request_bytes
from helpers.simulated_loop import InlineExecutor, SimulatedLoop

from kvcore import Request, files
from kvcore.errors import StorageError
from kvcore.request import block_keys
from kvcore.trace import read_events
from kvcore.trace.keyed import KeyedNames
from kvcore_events.formats import encode
from kvcore_events.model import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvcore_events.sequencer import BatchSequencer, Delivery, Gap, Restart
from kvcore_online import fleet as fleets
from kvcore_online.proxy import Proxy, _run
from kvcore_online.route_config import RouteConfig

MOST_WAITING = 1 << 19
"""Bytes that may wait at an end of a connection."""

LAST_SECONDS = 30.0
"""Time in which all must have ended after the signal."""


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


@attrs.frozen
class Script:
    """A server follows another script from now on."""

    time: float
    server: int
    script: str


@attrs.frozen
class Switch:
    """A server goes down, gets lost, is sick, or is up again."""

    time: float
    server: int
    state: str


@attrs.frozen
class Disk:
    """The disk has room for so many bytes from now on."""

    time: float
    room: int


@attrs.frozen
class Look:
    """The unfinished trace is read, as after the process was killed."""

    time: float


@attrs.frozen
class Publish:
    """A server publishes an event about a block; the batch may be lost, damaged or repeated."""

    time: float
    server: int
    event: str
    block: int
    fate: str


@attrs.frozen
class Signal:
    """The process gets SIGTERM."""

    time: float


@attrs.frozen(kw_only=True)
class World:
    """What is drawn once for a run.

    Attributes:
        seed: seed of the network.
        servers: number of servers.
        router: name of the router.
        traced: whether a trace is written.
        follows: whether the router follows KV events.
        options: options of the proxy.
        events: what happens, in order of time.
    """

    seed: int
    servers: int
    router: str
    traced: bool
    follows: bool
    options: dict
    events: tuple


def draw(seed):
    """Return the world of a seed."""
    random = Random(seed)
    servers, follows = random.choice([1, 2, 2, 3]), random.random() < 0.25
    calm = random.random() < 0.2
    events, seconds = [], random.choice([2.0, 5.0, 10.0])
    for _ in range(random.choice([3, 6, 12])):
        time = round(random.uniform(0, seconds), 2)
        plain = calm or random.random() < 0.6
        manner = "plain" if plain else random.choice(
            ["leave", "leave", "half-close", "slow send", "stop", "slow read"]
        )  # fmt: skip
        events.append(
            Ask(
                time,
                random.random() < 0.5,
                random.choice("abc"),
                random.choice([10, 100, 100, 1_000, 70_000 if not calm else 10]),
                random.choice([1, 1, 1, 2, 3]),
                manner,
                0.0 if plain else random.choice([0.0, 0.01, 0.5, 5.0]),
            )
        )
    if not calm:
        for _ in range(random.choice([0, 2, 5])):
            time, server = round(random.uniform(0, seconds), 2), random.randrange(servers)
            events.append(Script(time, server, random.choice(SCRIPTS)))
        for _ in range(random.choice([0, 0, 1, 3])):
            time, server = round(random.uniform(0, seconds), 2), random.randrange(servers)
            state = random.choice(["down", "lost", "sick", "up"])
            events.append(Switch(time, server, state))
            back = time + random.choice([0.1, 1.0, 3.0])
            events.append(Switch(round(back, 2), server, "up"))
        if random.random() < 0.2:
            events.append(Disk(round(random.uniform(0, seconds), 2), random.choice([0, 300])))
        if random.random() < 0.5:
            events.append(Signal(round(random.uniform(0, seconds), 2)))
            if random.random() < 0.3:
                events.append(Signal(round(events[-1].time + random.choice([0.0, 1.0]), 2)))
    if follows:
        for _ in range(random.choice([3, 10])):
            events.append(
                Publish(
                    round(random.uniform(0, seconds), 2),
                    random.randrange(servers),
                    random.choice(["stored", "stored", "stored", "removed", "cleared"]),
                    random.randrange(3),
                    random.choice(["", "", "", "lost", "damaged", "repeated", "restarted"]),
                )
            )
    traced = random.random() < 0.5
    if traced:
        events.append(Look(round(random.uniform(0, seconds + 2), 2)))
    options = {
        "retries": random.choice([0, 1, 3]),
        "failures": random.choice([1, 3]),
        "concurrency": 1_000 if calm else random.choice([1, 2, 1_000]),
    }
    events.sort(key=lambda event: event.time)
    return World(
        seed=seed,
        servers=servers,
        router=random.choice(["round-robin", "prefix-affinity"]),
        traced=traced,
        follows=follows,
        options=options,
        events=tuple(events),
    )


class SimulatedEvents(fleets.FollowedEvents):
    """A view that gets the items of simulated publishers, on the loop in place of threads."""

    def start(self):
        """Start without threads."""

    async def stop(self):
        """Stop without threads."""

    async def deliver(self, number, item):
        """Apply an item as the thread of a server does."""
        await self._apply(number, *self._decoded(number, item))


class Publisher:
    """The KV events of a server, and what the router must know of them."""

    def __init__(self, number):
        """Start with an empty cache."""
        self.number, self.known, self.stored = number, Counter(), set()
        self.exact = True
        self._sequence, self._sequencer = 0, BatchSequencer(0)

    def items(self, event):
        """Return what a subscriber gets of an event."""
        block = event.block
        match event.event:
            case "stored":
                made = BlockStored(
                    hashes=(block,), tokens=(block,) * 16, block_size=16, medium="GPU"
                )
            case "removed":
                made = BlockRemoved(hashes=(block,), medium="GPU")
            case _:
                made = AllBlocksCleared()
        if event.fate == "restarted":
            self._sequence = 0
        payload, number = encode(EventBatch(ts=1.0, events=(made,))), self._sequence
        self._sequence += 1
        if event.fate == "lost":
            return
        if event.fate == "damaged":
            payload = payload[: len(payload) // 2]
        for _ in range(2 if event.fate == "repeated" else 1):
            for item in self._sequencer.receive(number, payload):
                if item is None:
                    continue
                if isinstance(item, Gap) or event.fate == "damaged":
                    self.exact = False
                elif isinstance(item, Restart):
                    self.known.clear()
                    self.exact = True
                elif isinstance(item, Delivery):
                    self._learn(event, block)
                yield item

    def _learn(self, event, block):
        self.stored.add(block)
        if event.event == "stored":
            self.known[block] += 1
        elif event.event == "removed":
            self.known[block] = max(0, self.known[block] - 1)
        else:
            self.known.clear()
            self.exact = True


@attrs.define
class Asked:
    """A request of a client: its name, what was asked, and by which client."""

    name: str
    ask: Ask
    client: Client
    place: int


class Simulation:
    """A proxy, its servers and clients in a simulated world.

    Args:
        world: what happens.
        folder: where the trace is written.

    Attributes:
        counts: what has come out, to see that nothing of it is rare.
    """

    def __init__(self, world, folder):
        """Make the loop and the servers."""
        self.world, self.folder = world, folder
        self.loop = SimulatedLoop(Random(world.seed))
        self.asked, self.clients, self.counts = [], [], Counter()
        self.proxy = self.error = None
        self.signals, self.full, self._room = [], False, None
        self._good_since = [0.0] * world.servers
        self._bad = [[] for _ in range(world.servers)]

    def run(self):
        """Let all happen; raise AssertionError if something does not hold."""
        loop, path = self.loop, self.folder / "day.jsonl"
        options = {"trace": path, "trace_key": self._key()} if self.world.traced else {}
        if self.world.follows:
            options |= {"view": "events"}
        printed = io.StringIO()
        asyncio.set_event_loop(loop)
        try:
            with self._outside(), redirect_stderr(printed):
                calls = count()
                self.servers = [
                    Upstream(loop, place, calls) for place in range(self.world.servers)
                ]
                self.publishers = [Publisher(place) for place in range(self.world.servers)]
                replicas = [
                    {
                        "url": f"http://127.0.0.1:{server.port}",
                        "kv_events": f"tcp://127.0.0.1:{9000 + server.number}",
                    }
                    for server in self.servers
                ]
                config = RouteConfig.of(
                    replicas,
                    port=0,
                    router=self.world.router,
                    first_byte_timeout=2,
                    between_timeout=1,
                    client_timeout=3,
                    shutdown_timeout=3,
                    health_interval=0.5,
                    connect_timeout=0.5,
                    answer=80_000,
                    body=60_000,
                    **options,
                    **self.world.options,
                )
                self.config = config
                loop.run_until_complete(self._all(config))
                self._check_nothing_runs()
        finally:
            asyncio.set_event_loop(None)
            loop.close()
        self.printed = printed.getvalue()
        assert "Traceback" not in self.printed, self.printed
        assert len(self.printed.splitlines()) < 60, self.printed
        self._check_answers()
        self._check_trace(path)
        return self

    def _key(self):
        path = self.folder / "key"
        path.write_bytes(b"k" * 32)
        return path

    @contextmanager
    def _outside(self):
        """Replace what the proxy would get from the system."""
        write = files.AtomicFile.write
        simulation = self

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

        with (
            mock.patch.object(files.AtomicFile, "write", limited),
            mock.patch.object(fleets, "FollowedEvents", SimulatedEvents),
            mock.patch.object(connector, "monotonic", self.loop.time),
            mock.patch("concurrent.futures.ThreadPoolExecutor", InlineExecutor),
        ):
            yield

    async def _all(self, config):
        self.proxy = Proxy(config, self.loop.now_ns)
        self.loop.after_step = self._check_step
        running = self.loop.create_task(_run(self.proxy, lambda _: None))
        await asyncio.sleep(0)
        while not self.proxy.url and not running.done():
            await asyncio.sleep(0.01)
        began = self.loop.time()
        self.port = int(self.proxy.url.rpartition(":")[2])
        tasks = []
        for event in self.world.events:
            await asyncio.sleep(max(0.0, began + event.time - self.loop.time()))
            handle = getattr(self, f"_{type(event).__name__.lower()}")
            task = handle(event)
            if task is not None:
                tasks.append(task)
        await asyncio.sleep(0.1)
        if not self.signals:
            await self._quiet()
            self._signal(None)
        async with asyncio.timeout(LAST_SECONDS):
            with suppress(StorageError):
                await running
        self.error = running.exception()
        # What clients and servers still do is not the proxy's.
        for server in self.servers:
            server.close()
        for task in tasks:
            await task
        await asyncio.sleep(10)

    async def _quiet(self):
        """Wait until all clients have their answers, as they must in bounded time."""
        until = self.loop.time() + 60
        while any(client.closed is None for client in self.clients):
            assert self.loop.time() < until, "a client waits without end"
            await asyncio.sleep(0.1)

    # Events.

    def _ask(self, event):
        requests, number = [], len(self.clients)
        client = Client(self.loop, requests, event.manner, event.seconds)
        for place in range(event.copies):
            name = f"{number}.{place}"
            text = (event.text * event.size)[: event.size] + name
            document = {"prompt": text, "max_tokens": 3, "user": name}
            document |= {"stream": True} if event.stream else {}
            requests.append(request_bytes(document, name, chunked=number % 5 == 4))
            self.asked.append(Asked(name, event, client, place))
        client = Client(self.loop, requests, event.manner, event.seconds)
        for asked in self.asked[-event.copies :]:
            asked.client = client
        client.began = self.loop.time()
        self.clients.append(client)
        return self.loop.create_task(client.connect(self.port))

    def _script(self, event):
        self.servers[event.server].script = event.script
        self._bad[event.server].append(self.loop.time())

    def _switch(self, event):
        self.servers[event.server].switch(event.state)
        self._bad[event.server].append(self.loop.time())

    def _disk(self, event):
        self._room = event.room

    def _signal(self, event):
        del event
        self.signals.append(self.loop.time())
        self.loop.signal(signal.SIGTERM)

    def _publish(self, event):
        if not self.world.follows or self.signals:
            return None
        publisher = self.publishers[event.server]
        view, items = self.proxy.fleet.dispatcher.view, list(publisher.items(event))

        async def deliver():
            for item in items:
                await view.deliver(event.server, item)

        return self.loop.create_task(deliver())

    def _look(self, event):
        """Check that the unfinished trace has all requests that ended a second ago."""
        del event
        if self.signals or self.full or not self.world.traced:
            return
        *lines, _ = (self.folder / "day.jsonl.part").read_bytes().split(b"\n")
        found = {
            line.get("session")
            for line in map(json.loads, lines)
            if line["event"] == "REQUEST"
        }
        now = self.loop.time()
        if any(client.closed is None or client.closed > now - 1.2 for client in self.clients):
            return
        self.counts["looks"] += 1
        assert found >= self._logged(), "a request that has ended is not in the file"

    # Checks.

    def _check_step(self):
        """Check what must hold after each step of the loop."""
        loop, proxy = self.loop, self.proxy
        for transport in loop.transports:
            assert transport.largest <= MOST_WAITING, "too many bytes wait"
        open_attempts = 0
        for server in proxy.fleet.servers:
            open_attempts += len(server.attempts)
            assert len(server.attempts) == server.replica.requests
        assert 0 <= proxy._busy <= self.config.concurrency
        assert open_attempts <= proxy._busy
        log = proxy.fleet.log
        assert log is None or len(log._flights) <= len(self.asked)

    def _check_nothing_runs(self):
        loop = self.loop
        assert not asyncio.all_tasks(loop), asyncio.all_tasks(loop)
        assert not loop.transports, "a connection is open"
        assert not loop.listeners, "a listener is open"
        left = [timer for timer in loop.timers() if "kvcore" in repr(timer)]
        assert not left, left
        assert self.proxy._busy == 0
        fleet = self.proxy.fleet
        metrics = fleet.metrics
        for server in fleet.servers:
            assert not server.attempts
            assert metrics.in_flight.labels(server.options.name)._value.get() == 0
        if self.world.follows and len(self.signals) == 1:
            self._check_view()

    def _check_view(self):
        """Check that the router knows the blocks that the servers have told it."""
        view = self.proxy.fleet.dispatcher.view
        for publisher in self.publishers:
            for block in range(3):
                keys = block_keys([block] * 16, 16)
                request = Request(id=0, prompt_tokens=16, key_tokens=16, keys=keys)
                known = publisher.number in view.find(request, 0)
                if publisher.exact and not self._bad[publisher.number]:
                    assert known == (publisher.known[block] > 0), (publisher.number, block)
                assert not known or block in publisher.stored

    def _check_answers(self):
        """Check that each request has one answer, of one call of one server."""
        calls = {}
        for server in self.servers:
            for call in server.received:
                calls.setdefault(call.session, []).append(call)
        answers_by_client = {id(client): client.answers() for client in self.clients}
        answered = 0
        for asked in self.asked:
            client, tried = asked.client, sorted(
                calls.pop(asked.name, []), key=lambda call: call.number
            )  # fmt: skip
            found = answers_by_client[id(client)]
            assert len(found) <= asked.ask.copies, "more answers than requests"
            servers = [call.server for call in tried]
            assert len(set(servers)) == len(servers), "sent twice to one server"
            assert len(servers) <= self.config.retries + 1
            answer = found[asked.place] if asked.place < len(found) else None
            if answer is None or not answer.ended:
                self._check_no_answer(asked, answer, tried)
            if answer is not None:
                answered += 1
                self.counts[answer.status] += 1
                self._check_answer(asked, answer, tried)
        assert not calls, "a server got a request that nobody has sent"
        total = sum(
            sample.value
            for metric in self.proxy.fleet.metrics.requests.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        )
        assert total >= answered, "an answer was not counted"
        assert total <= len(self.asked), "a request was counted twice"

    def _check_no_answer(self, asked, answer, tried):
        """Check that a request without a whole answer has a client or a signal to blame."""
        client = asked.client
        self.counts["no answer"] += 1
        assert client.closed is not None
        before = client.answers()[: asked.place]
        ends = any(each.headers.get("connection") == "close" for each in before)
        if asked.ask.manner != "plain" or ends:
            return
        assert self.signals, f"{asked.name} has no answer"
        late = client.closed >= self.signals[0] - 0.5
        assert late, f"{asked.name} has no answer"
        del tried, answer

    def _check_answer(self, asked, answer, tried):
        body, status = answer.body, answer.status
        if asked.ask.size > self.config.body:
            assert status in (413, 503, 408), status
            assert not tried
            return
        if "x-kvcore-replica" not in answer.headers:
            if answer.ended:
                error = json.loads(body)["error"]
                assert status == error["code"]
                assert status in (503, 408), (status, error)
                if status == 503 and asked.ask.manner == "plain":
                    self._check_refused(asked, tried, error["message"])
            return
        where = int(answer.headers["x-kvcore-replica"].rpartition(":")[2]) - 8001
        assert tried, "an answer of no server"
        last = tried[-1]
        assert last.server == where, "an answer of another server"
        if status != 200:
            assert status == 500, status
            return
        documents = [body]
        if answer.headers["content-type"] == "text/event-stream":
            documents = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
        places, ends = [], False
        for document in documents:
            assert not ends, "an event after the end"
            if document == b"[DONE]":
                ends = True
                continue
            try:
                document = json.loads(document)
            except ValueError:
                assert not answer.ended, "a cut event in a whole answer"
                continue
            if "error" in document:
                self.counts["broken"] += 1
                ends = True
                continue
            assert "usage" not in document or not asked.ask.stream, "a usage that nobody wants"
            for choice in document.get("choices", []):
                name, server, number, place, _ = choice["text"].split("|")
                assert name == asked.name, "the answer to another request"
                assert (int(server), int(number)) == (last.server, last.number)
                places.append(int(place))
        assert places == list(range(len(places))), "parts of a stream are missing"

    def _check_refused(self, asked, tried, message):
        """Check that no server could have answered a request that was refused."""
        if self.signals and asked.client.closed >= self.signals[0]:
            return
        if self.world.options["concurrency"] < 1_000:
            return
        began, ended = asked.client.began - 4, asked.client.closed
        if self.config.retries < self.world.servers - 1:
            return
        for place, times in enumerate(self._bad):
            changes = [time for time in times if time <= ended]
            if not changes and self.servers[place].script in ("answer", "slow", "pieces"):
                msg = f"{asked.name} refused ({message}), though server {place} is well"
                raise AssertionError(msg)
        del began, tried

    def _logged(self):
        """Return the hashed names of the requests that must be in the trace."""
        names = KeyedNames.of(self._key())
        logged = set()
        for asked in self.asked:
            answers = asked.client.answers()
            if asked.place < len(answers):
                answer = answers[asked.place]
                served = answer.status == 200 and "x-kvcore-replica" in answer.headers
                if served and answer.ended:
                    logged.add(names.name("session", asked.name))
        return logged

    def _check_trace(self, path):
        """Check that the trace has each request once, and all that were answered."""
        if not self.world.traced:
            assert self.error is None
            return
        part = path.with_name("day.jsonl.part")
        if self.full:
            self.counts["full"] += 1
            assert isinstance(self.error, StorageError), self.error
            assert not path.exists()
            return
        assert self.error is None, self.error
        assert not part.exists()
        sessions = Counter()
        for event in read_events(path):
            if type(event).__name__ == "Request":
                sessions[event.session] += 1
        assert not sessions or max(sessions.values()) == 1, "a request is logged twice"
        assert set(sessions) >= self._logged(), "an answered request is not logged"
        names = KeyedNames.of(self._key())
        assert set(sessions) <= {names.name("session", asked.name) for asked in self.asked}
        self.counts["logged"] += len(sessions)


def failure(world, folder):
    """Run a world; return the AssertionError or other error in it, or None."""
    for path in folder.glob("day.jsonl*"):
        path.unlink()
    try:
        Simulation(world, folder).run()
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
