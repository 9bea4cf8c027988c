"""`kvcore route` in a simulated world: clients, servers, their KV events, the disk, signals."""

import json
from collections import Counter
from itertools import count
from math import inf
from random import Random
from unittest import mock

import attrs
from helpers.simulated_http import SCRIPTS, Upstream
from helpers.simulation import MANNERS, Ask, Disk, Signal, Simulation

from kvcore import Request, read_events
from kvcore.errors import StorageError
from kvcore.plugins import Plugins
from kvcore.plugins.options import Spec
from kvcore.request import block_keys
from kvcore_events.formats import encode
from kvcore_events.model import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvcore_events.sequencer import BatchSequencer, Delivery, Gap, Restart
from kvcore_online import fleet as fleets
from kvcore_online.proxy import Proxy, _run
from kvcore_online.route_config import RouteConfig
from kvcore_plugins.traces.keyed import KeyedNames

PLUGINS = Plugins()

MANY = 1_000
"""A limit of requests in flight that is never reached."""

GONE_SECONDS = 1.0
"""Time after which the proxy knows that a client has gone."""

BODY = 60_000
"""Largest size of a request."""


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


@attrs.frozen(kw_only=True)
class RouteWorld:
    """The options and events of a run.

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


def draw_route(seed):
    """Return the world of a seed."""
    random = Random(seed)
    servers, follows, calm = random.choice([1, 2, 2, 3]), random.random() < 0.25, seed % 5 == 0
    seconds = random.choice([2.0, 5.0, 10.0])

    def time():
        return round(random.uniform(0, seconds), 2)

    events = []
    for _ in range(random.choice([3, 6, 12])):
        plain = calm or random.random() < 0.6
        ask = Ask(
            time(),
            stream=random.random() < 0.5,
            text=random.choice("abc"),
            size=random.choice([10, 100, 100, 1_000, 10 if calm else 70_000]),
            copies=random.choice([1, 1, 1, 2, 3]),
            manner="plain" if plain else random.choice(MANNERS),
            seconds=random.choice([0.0, 0.01, 0.5, 5.0]),
        )
        events.append(ask)
    if not calm:
        events += [
            Script(time(), random.randrange(servers), random.choice(SCRIPTS))
            for _ in range(random.choice([0, 2, 5]))
        ]
        for _ in range(random.choice([0, 0, 1, 3])):
            state = random.choice(["down", "lost", "sick"])
            event = Switch(time(), random.randrange(servers), state)
            back = round(event.time + random.choice([0.1, 1.0, 3.0]), 2)
            events += [event, Switch(back, event.server, "up")]
        if random.random() < 0.2:
            events.append(Disk(time(), random.choice([0, 300])))
        if random.random() < 0.5:
            events.append(Signal(time()))
            if random.random() < 0.3:
                events.append(Signal(events[-1].time + random.choice([0.0, 1.0])))
    for _ in range(random.choice([3, 10]) if follows else 0):
        what = random.choice(["stored", "stored", "stored", "removed", "cleared"])
        fate = random.choice(["", "", "", "lost", "damaged", "repeated", "restarted"])
        server, block = random.randrange(servers), random.randrange(3)
        events.append(Publish(time(), server, what, block, fate))
    traced = random.random() < 0.5
    if traced:
        events.append(Look(time() + 2))
    options = {
        "retries": random.choice([0, 1, 3]),
        "failures": random.choice([1, 3]),
        "concurrency": MANY if calm else random.choice([1, 2, MANY]),
    }
    return RouteWorld(
        seed=seed,
        servers=servers,
        router=random.choice(["round-robin", "prefix-affinity"]),
        traced=traced,
        follows=follows,
        options=options,
        events=tuple(sorted(events, key=lambda event: event.time)),
    )


class SimulatedEvents(fleets.FollowedEvents):
    """A view that gets the items of simulated publishers, on the loop in place of threads."""

    def start(self):
        """Start without threads."""

    async def stop(self):
        """Stop without threads."""

    async def deliver(self, number, items):
        """Apply items as the thread of a server does."""
        for item in items:
            for part in self._parts(number, item):
                await self._apply(*part)


class Publisher:
    """The KV events of a server, and what the router must know of them.

    Attributes:
        known: how often each block is stored, by the events that have arrived.
        stored: all blocks that ever were.
        exact: whether nothing was lost since the last restart or clearing.
    """

    def __init__(self):
        """Start with an empty cache."""
        self.known, self.stored, self.exact = Counter(), set(), True
        self._sequence, self._sequencer = 0, BatchSequencer(0)

    def items(self, event):
        """Yield what a subscriber gets of an event."""
        made = {
            "stored": BlockStored(
                hashes=(event.block,), tokens=(event.block,) * 16, block_size=16, medium="GPU"
            ),
            "removed": BlockRemoved(hashes=(event.block,), medium="GPU"),
            "cleared": AllBlocksCleared(),
        }[event.event]
        if event.fate == "restarted":
            self._sequence = 0
        payload, number = encode(EventBatch(ts=1.0, events=(made,))), self._sequence
        self._sequence += 1
        if event.fate == "lost":
            return
        if event.fate == "damaged":
            payload = payload[: len(payload) // 2]
        for _ in range(2 if event.fate == "repeated" else 1):
            for item in filter(None, self._sequencer.receive(number, payload)):
                if isinstance(item, Restart):
                    self._forget()
                elif isinstance(item, Gap) or event.fate == "damaged":
                    self.exact = False
                elif isinstance(item, Delivery):
                    self._learn(event)
                yield item

    def _learn(self, event):
        self.stored.add(event.block)
        if event.event == "stored":
            self.known[event.block] += 1
        elif event.event == "removed":
            self.known[event.block] = max(0, self.known[event.block] - 1)
        else:
            self._forget()

    def _forget(self):
        self.known.clear()
        self.exact = True


class RouteSimulation(Simulation):
    """A proxy, its servers and clients."""

    def start(self):
        """Make the servers and the proxy."""
        world, calls = self.world, count()
        self.servers = [Upstream(self.loop, index, calls) for index in range(world.servers)]
        self.publishers = [Publisher() for _ in self.servers]
        # Times at which a server was told to be anything but well.
        self._changes = [[] for _ in self.servers]
        key = self.path.with_name("key")
        key.write_bytes(b"k" * 32)
        self.names = KeyedNames.from_file(key)
        options = {"trace": self.path, "trace_key": key} if world.traced else {}
        options |= {"view": "events"} if world.follows else {}
        replicas = [
            {"url": f"http://127.0.0.1:{server.port}", "kv_events": f"tcp://127.0.0.1:{index}"}
            for index, server in enumerate(self.servers, 9000)
        ]
        self.config = RouteConfig.from_options(
            replicas,
            port=0,
            router=PLUGINS.build("router", Spec(world.router), {"seed": 0}),
            first_byte_timeout=2,
            between_timeout=1,
            client_timeout=3,
            shutdown_timeout=3,
            health_interval=0.5,
            connect_timeout=0.5,
            answer=80_000,
            body=BODY,
            **options,
            **world.options,
        )
        self.proxy = Proxy(self.config, self.loop.now_ns)
        return self.proxy, _run(self.proxy, lambda _: None)

    def outside(self, stack):
        """Replace the threads that follow KV events."""
        stack.enter_context(mock.patch.object(fleets, "FollowedEvents", SimulatedEvents))

    def document(self, ask, name):
        """Return the body of a request."""
        text = (ask.text * ask.size)[: ask.size] + name
        body = {"prompt": text, "max_tokens": 3, "user": name}
        return body | ({"stream": True} if ask.stream else {})

    def end(self):
        """Let the servers end."""
        for server in self.servers:
            server.close()

    def on_script(self, event):
        """Give a server another script."""
        self.servers[event.server].script = event.script
        self._changes[event.server].append(self.loop.time())

    def on_switch(self, event):
        """Change the state of a server."""
        self.servers[event.server].switch(event.state)
        self._changes[event.server].append(self.loop.time())

    def on_publish(self, event):
        """Deliver what is left of an event to the router."""
        if self.world.follows and not self.signals:
            view = self.proxy.fleet.dispatcher.view
            items = list(self.publishers[event.server].items(event))
            self.tasks.append(self.loop.create_task(view.deliver(event.server, items)))

    def on_look(self, event):
        """Check that the unfinished trace has all requests that have ended a second ago."""
        del event
        now, last = self.loop.time(), [client.closed for client in self.clients]
        if self.signals or self.full or not self.world.traced or None in last:
            return
        if max(last, default=0.0) <= now - 1.2:
            *lines, _ = self.path.with_name("day.jsonl.part").read_bytes().split(b"\n")
            written = {json.loads(line).get("session") for line in lines}
            assert written >= self._served(), "a request that has ended is not in the file"
            self.counts["looks"] += 1

    # Checks.

    def check_step(self):
        """Check that the counts of requests agree."""
        proxy, attempts = self.proxy, 0
        for server in proxy.fleet.servers:
            attempts += len(server.attempts)
            assert len(server.attempts) == server.replica.requests
        assert attempts <= proxy._busy <= self.config.concurrency
        log = proxy.fleet.log
        assert log is None or len(log._flights) <= len(self.asked)

    def check_end(self):
        """Check counts, the trace, and the view of caches."""
        fleet, calls = self.proxy.fleet, Counter()
        assert self.proxy._busy == 0
        for server in fleet.servers:
            assert fleet.metrics.in_flight.labels(server.options.name)._value.get() == 0
        for server in self.servers:
            for call in server.received:
                calls[call.session] += 1
        assert set(calls) <= {asked.name for asked in self.asked}, "nobody has sent that"
        first_bytes = [
            fleet.metrics.first_byte.labels(server.options.name)._sum.get()
            for server in fleet.servers
        ]
        lives = sum(asked.client.closed - asked.client.began for asked in self.asked)
        most = lives + GONE_SECONDS * len(self.asked)
        assert 0 <= sum(first_bytes) <= most, "a first byte came at another time"
        answers = sum(asked.answer() is not None for asked in self.asked)
        (family,) = fleet.metrics.requests.collect()
        total = sum(sample.value for sample in family.samples if sample.name.endswith("_total"))
        assert answers <= total <= len(self.asked), "requests are not counted once each"
        self._check_trace()
        if self.world.follows and len(self.signals) == 1:
            self._check_view()

    def check_answer(self, asked, answer):
        """Check that an answer is that of one call of one server, or a refusal."""
        calls = [call for server in self.servers for call in server.received]
        tried = [call for call in calls if call.session == asked.name]
        servers = {call.server for call in tried}
        assert len(servers) == len(tried), "sent twice to one server"
        assert len(tried) <= self.config.retries + 1, "sent too often"
        if asked.ask.size > BODY:
            assert answer.status in (413, 503, 408), answer.status
            assert not tried
        elif "x-kvcore-replica" in answer.headers:
            self._check_passed_on(asked, answer, tried)
        elif answer.ended:
            error = json.loads(answer.body)["error"]
            assert answer.status == error["code"]
            assert answer.status in (503, 408), error
            if answer.status == 503:
                self._check_refused(asked, error["message"])

    def _check_passed_on(self, asked, answer, tried):
        """Check an answer that a server has made."""
        where = int(answer.headers["x-kvcore-replica"].rpartition(":")[2]) - 8001
        call = self._answered_call(asked, tried, where)
        # The bytes of a request that was given up may arrive after those of the next attempt.
        first = asked.client.first + 1.0
        assert all(each.time < first for each in tried), "sent again after its answer began"
        assert answer.status in (200, 500)
        if answer.status != 200 or call is None:
            return
        documents = [answer.body]
        if answer.headers["content-type"] == "text/event-stream":
            events = answer.body.split(b"\n\n")
            documents = [event.removeprefix(b"data: ") for event in events if event]
            if not answer.ended:
                documents = documents[:-1]  # the last may be cut
        parts = []
        for document in documents:
            assert not parts or parts[-1] is not None, "an event after the end"
            if document == b"[DONE]":
                parts.append(None)
                continue
            if documents == [answer.body] and not answer.ended:
                continue
            value = json.loads(document)
            if "error" in value:
                self.counts["broken"] += 1
                parts.append(None)
                continue
            for choice in value.get("choices", []):
                *about, part, _ = choice["text"].split("|")
                if self._answers_twice(where, call.time, call.number):
                    self.counts["twice"] += 1
                    return
                assert about == [asked.name, str(call.server), str(call.number)], "of another"
                parts.append(int(part))
            assert "usage" not in value or not asked.ask.stream, "a usage that nobody wants"
        parts = [part for part in parts if part is not None]
        assert parts == list(range(len(parts))), "parts of a stream are missing"

    def _answered_call(self, asked, tried, server):
        """Return the call that a server has answered.

        None: a second answer to the request before it came while it was on its way.
        """
        for call in tried:
            if call.server == server:
                return call
        came = min(asked.client.first, asked.client.closed)
        assert self._answers_twice(server, came), "an answer to nothing"
        self.counts["twice"] += 1
        return None

    def _answers_twice(self, server, time, number=inf):
        """Return True if a server answered a call before `number` twice, in 1 s before `time`.

        A second answer that comes after the next request was sent cannot be told from its own.
        """
        before = [call for call in self.servers[server].received if call.number < number]
        return any(call.script == "twice" and call.time > time - 1.0 for call in before)

    def _check_refused(self, asked, why):
        """Check that no server could have answered a request that was refused."""
        ended = asked.client.closed
        if (self.signals and ended >= self.signals[0]) or self.config.concurrency < MANY:
            return
        if self.config.retries >= self.world.servers - 1:
            for index, changes in enumerate(self._changes):
                changed = any(time <= ended for time in changes)
                assert changed, f"{asked.name}: {why}, though server {index} is well"

    def _served(self):
        """Return the hashed names of the requests that servers have answered."""
        answers = [(asked.name, asked.answer()) for asked in self.asked]
        return {
            self.names.name("session", name)
            for name, answer in answers
            if answer is not None
            and answer.ended
            and answer.status == 200
            and "x-kvcore-replica" in answer.headers
        }

    def _check_trace(self):
        """Check that the trace has each request once, and all that were answered."""
        part = self.path.with_name("day.jsonl.part")
        if self.full:
            self.counts["full"] += 1
            assert isinstance(self.error, StorageError), self.error
            assert not self.path.exists()
            return
        assert self.error is None, self.error
        assert not part.exists()
        if self.world.traced:
            names = (getattr(event, "session", None) for event in read_events(self.path))
            sessions = Counter(filter(None, names))
            assert max(sessions.values(), default=1) == 1, "a request is logged twice"
            assert set(sessions) >= self._served(), "an answered request is not logged"
            names = {self.names.name("session", asked.name) for asked in self.asked}
            assert set(sessions) <= names
            self.counts["logged"] += len(sessions)

    def _check_view(self):
        """Check that the router knows the blocks that the servers have reported."""
        view = self.proxy.fleet.dispatcher.view
        for index, publisher in enumerate(self.publishers):
            for block in range(3):
                keys = block_keys([block] * 16, 16)
                request = Request(id=0, prompt_tokens=16, key_tokens=16, keys=keys)
                known = index in view.find(request, 0)
                if publisher.exact and not self._changes[index]:
                    assert known == (publisher.known[block] > 0), (index, block)
                    self.counts["known" if known else "unknown"] += 1
                assert not known or block in publisher.stored
