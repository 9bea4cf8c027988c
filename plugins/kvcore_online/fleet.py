"""The servers behind the proxy: their health, their load, and the choice of one."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import attrs

from kvcore.errors import InputError, KvcoreError, PolicyError, StorageError
from kvcore.plugins import Plugins, describe, resolve
from kvcore.plugins.options import Spec
from kvcore.request import block_keys
from kvcore.serving.router import Replica, Router
from kvcore.units import NS_PER_S
from kvcore_cluster.dispatcher import Dispatcher, PrefixView
from kvcore_cluster.views import EventsView, SentIndex, parse_view
from kvcore_events.block_tracker import BlockTracker
from kvcore_events.formats import decode
from kvcore_events.model import BlockRemoved, BlockStored, DecodeError, Event, Hash
from kvcore_events.sequencer import Delivery, Gap, Restart, StreamItem
from kvcore_events.subscriber import Server, Subscriber
from kvcore_online.route_config import RouteConfig, Upstream
from kvcore_online.traffic import Flight, Metrics, TrafficLog

if TYPE_CHECKING:
    from aiohttp import ClientSession

_USAGE = re.compile(
    rb"^(?:vllm:|kvcore_)kv_cache_usage_perc(?:\{[^}\n]*\})? (\S+)$", re.MULTILINE
)

MOST_BLOCKS = 1 << 20
"""Entries of the router's own index, if no option gives another number: some 300 MB."""

MOST_METRICS = 4 << 20
"""Bytes of the metrics of a server that are read."""


class _ReportedBlocks:
    """Keys of the blocks that one server has reported so far.

    The key of a block is computed from its tokens and its parent, whatever hash its server
    gives it. Blocks of adapters, images or salts are left out: their tokens alone do not name
    their content.
    """

    def __init__(self, block_size: int) -> None:
        self.tracker = BlockTracker()
        self._block_size = block_size
        self._keys: dict[Hash, bytes] = {}

    def stored(self, event: BlockStored) -> list[bytes]:
        """Return the keys of blocks that were stored."""
        if event.lora_id is not None or event.lora_name or any(event.extra_keys or ()):
            return []
        parent = None if event.parent is None else self._keys.get(event.parent)
        tokens, size = event.tokens or (), self._block_size
        unknown = event.parent is not None and parent is None
        if unknown or event.block_size != size or len(tokens) != size * len(event.hashes):
            return []
        if not all(type(token) is int and token >= 0 for token in tokens):
            return []
        keys = block_keys(tokens, size, parent=parent)  # type: ignore[arg-type]  # checked
        self._keys.update(zip(event.hashes, keys, strict=True))
        return keys

    def removed(self) -> list[bytes]:
        """Return the keys of all blocks that the server no longer has. O(all blocks)."""
        return self.gone(list(self._keys))

    def gone(self, hashes: Sequence[Hash]) -> list[bytes]:
        """Return the keys of `hashes` that the server no longer has."""
        gone = [value for value in hashes if not self.tracker.holds(value)]
        keys = (self._keys.pop(value, None) for value in gone)
        return [key for key in keys if key is not None]


class FollowedEvents(EventsView):
    """View of caches from the KV events of the servers, for prompts with known tokens.

    Memory grows with the number of blocks in the servers' caches.

    Args:
        servers: servers that publish, by the number of their replica.
        block_size: number of tokens in a block of each server, and in a key of the requests.
        clock: returns the time in ns.
    """

    def __init__(
        self, servers: Sequence[Server], block_size: int, clock: Callable[[], int]
    ) -> None:
        super().__init__()
        self._block_size, self._clock = block_size, clock
        self._servers = servers
        self._lives = [_ReportedBlocks(block_size) for _ in servers]
        self._subscribers: list[Subscriber] = []
        self._threads: list[Thread] = []

    def lost(self, replica: int, now: int) -> None:
        """Remove all blocks of a replica, which reports them again when it stores them."""
        super().lost(replica, now)
        self._lives[replica] = _ReportedBlocks(self._block_size)

    def start(self) -> None:
        """Follow the events in a thread for each server; the running loop applies them.

        Raises:
            InputError: an address is invalid.
            PluginError: pyzmq is not installed.
        """
        loop = asyncio.get_running_loop()
        for number, server in enumerate(self._servers):
            self._subscribers.append(Subscriber(server))
            thread = Thread(target=self._follow, args=(number, loop), daemon=True)
            self._threads.append(thread)
            thread.start()

    async def stop(self) -> None:
        """Disconnect from all servers."""
        for subscriber in self._subscribers:
            subscriber.stop()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _follow(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        with self._subscribers[number] as subscriber:
            for item in subscriber.items():
                # Waited for, so that what is not applied yet stays within ZMQ's bounds.
                asyncio.run_coroutine_threadsafe(self._apply(number, item), loop).result()

    async def _apply(self, number: int, item: StreamItem) -> None:
        """Apply the next item of a server's stream."""
        life, now = self._lives[number], self._clock()
        restarts = life.tracker.restarts
        if isinstance(item, Restart):
            life.tracker.restart(item.rank)
        elif isinstance(item, Gap):
            life.tracker.record_gap(item.rank, item.first, item.batches)
        elif isinstance(item, Delivery):
            try:
                batch = decode(item.payload)
            except DecodeError:
                return
            if life.tracker.apply(batch, item.sequence, item.rank):
                for event in batch.events:
                    self._take(number, event, now)
        if life.tracker.restarts > restarts:
            self.removed(number, life.removed(), now)
        self.catch_up(now)

    def _take(self, number: int, event: Event, now: int) -> None:
        life = self._lives[number]
        if isinstance(event, BlockStored):
            self.stored(number, life.stored(event), now)
        elif isinstance(event, BlockRemoved):
            self.removed(number, life.gone(event.hashes), now)
        else:
            self.removed(number, life.removed(), now)


@attrs.define(eq=False)
class LiveServer:
    """A server behind the proxy, and its state.

    Attributes:
        options: the options of the server.
        replica: the replica that the router sees.
        usage: share of its blocks in use, from its metrics.
        failures: number of failures in a row.
        attempts: its requests in flight.
    """

    options: Upstream
    replica: Replica
    usage: float = 0.0
    failures: int = 0
    attempts: set[Attempt] = attrs.field(factory=set)

    def __attrs_post_init__(self) -> None:
        """Connect the replica to the usage and prefill rate of this server."""
        rate = self.options.prefill_rate
        self.replica.connect(lambda: self.usage, lambda tokens, _: tokens / rate)


@attrs.define(eq=False)
class Attempt:
    """A request that was sent to a server.

    Attributes:
        flight: the request.
        server: the server.
        deadline: time-out of the first byte of the answer; None once that has come.
        open: whether the attempt counts as in flight.
    """

    flight: Flight
    server: LiveServer
    deadline: asyncio.Timeout | None = None
    open: bool = True


class Fleet:
    """Sends requests to the servers that the router picks, and checks the servers' health.

    Args:
        config: the options.

    Raises:
        InputError, PluginError: the router or the view cannot be built.
    """

    def __init__(self, config: RouteConfig) -> None:
        self._config = config
        self._began = monotonic_ns()
        self.metrics = Metrics()
        router = _router(config)
        self.servers = [
            LiveServer(each, Replica(at, each.blocks, each.block_size, each.max_seqs))
            for at, each in enumerate(config.replicas)
        ]
        self._view = _view(config, self.now)
        self.dispatcher = Dispatcher(
            router, [each.replica for each in self.servers], self._view
        )
        self.log: TrafficLog | None = None
        if config.trace is not None:
            replicas = self.dispatcher.replicas
            routing = {"view": config.view}
            self.log = TrafficLog(
                config.trace, describe(router), routing, replicas, config.key_tokens
            )

    def now(self) -> int:
        """Return the time since the start in ns."""
        return monotonic_ns() - self._began

    async def watch(self, session: ClientSession) -> None:
        """Check all servers at the interval of the options, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for server in self.servers:
                tasks.create_task(self._watch(server, session))
            tasks.create_task(self._sync())

    async def check(self, server: LiveServer, session: ClientSession) -> None:
        """Query the health and cache usage of a server."""
        try:
            async with asyncio.timeout(self._config.connect_timeout):
                async with session.get(
                    f"{server.options.url}/health", allow_redirects=False
                ) as answer:
                    healthy = answer.status == 200  # noqa: PLR2004
                if healthy and not server.replica.up:
                    server.failures = 0
                    self._join(server)
                async with session.get(
                    f"{server.options.url}/metrics", allow_redirects=False
                ) as answer:
                    if healthy and answer.status == 200:  # noqa: PLR2004
                        found = _USAGE.search(await answer.content.read(MOST_METRICS))
                        usage = float(found[1]) if found else 0.0
                        server.usage = usage if 0 <= usage <= 1 else 0.0
        except Exception:  # noqa: BLE001 - any error is the server's
            healthy = False
        if healthy:
            server.failures = 0
        else:
            self.failed(server)

    def failed(self, server: LiveServer) -> None:
        """Count a failure of a server, which is down after `failures` of them in a row."""
        server.failures += 1
        if server.replica.up and server.failures >= self._config.failures:
            self._leave(server)

    def begin(self, flight: Flight) -> None:
        """Record the arrival of a request."""
        if self.log is not None:
            self.log.begin(flight)

    def finish(self, flight: Flight) -> None:
        """Write a request that has ended to the trace."""
        self._write(lambda log: log.end(flight))

    def _write(self, write: Callable[[TrafficLog], None]) -> None:
        """Write to the trace; on errors, such as a full disk, the proxy goes on without it."""
        log = self.log
        if log is not None:
            try:
                write(log)
            except KvcoreError as error:
                self.log, why = None, error
                try:
                    log.give_up(error)
                except StorageError as kept:
                    why = kept
                warn(f"{why}; the proxy goes on without a trace")

    def send(self, flight: Flight, tried: Collection[int] = ()) -> Attempt | None:
        """Return an attempt at the server that the router picks; None if no server is left.

        Raises:
            PolicyError: the router failed.
        """
        now = self.now()
        replica = self.dispatcher.route(flight.request, now, tried)
        if replica is None:
            return None
        server, hits = self.servers[replica.number], replica.hit_tokens
        flight.routes.append((now, replica.number, hits))
        attempt = Attempt(flight, server)
        server.attempts.add(attempt)
        name = server.options.name
        self.metrics.in_flight.labels(name).inc()
        self.metrics.prompt_tokens.labels(name).inc(flight.request.prompt_tokens)
        self.metrics.hit_tokens.labels(name).inc(hits)
        return attempt

    def first_byte(self, attempt: Attempt) -> None:
        """Count an attempt whose answer has begun."""
        now, flight, server = self.now(), attempt.flight, attempt.server
        server.failures = 0
        seconds = (now - flight.request.arrival) / NS_PER_S
        self.metrics.first_byte.labels(server.options.name).observe(seconds)
        if attempt.open:
            self.dispatcher.first_token(flight.request, server.replica, now)

    def end(self, attempt: Attempt) -> None:
        """Count an attempt that has ended; a second call does nothing."""
        if attempt.open:
            attempt.open = False
            server = attempt.server
            server.attempts.discard(attempt)
            self.metrics.in_flight.labels(server.options.name).dec()
            with _router_warnings():
                self.dispatcher.ended(attempt.flight.request, server.replica, self.now())

    async def start(self, session: ClientSession) -> None:
        """Check which servers are up, and follow their events."""
        if isinstance(self._view, FollowedEvents):
            self._view.start()
        for server in self.servers:
            self.metrics.up.labels(server.options.name).set(0)
        await asyncio.gather(*(self.check(server, session) for server in self.servers))

    def discard(self) -> None:
        """Remove the trace."""
        if self.log is not None:
            self.log.discard()
            self.log = None

    async def stop(self) -> None:
        """Close all clients and subscriptions."""
        if isinstance(self._view, FollowedEvents):
            await self._view.stop()
        self._write(lambda log: log.close(self.now()))

    async def _watch(self, server: LiveServer, session: ClientSession) -> None:
        while True:
            await asyncio.sleep(self._config.health_interval)
            await self.check(server, session)

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._write(lambda log: log.sync(self.now()))

    def _join(self, server: LiveServer) -> None:
        warn(f"{server.options.name} is up")
        self.metrics.up.labels(server.options.name).set(1)
        with _router_warnings():
            self.dispatcher.joined(server.replica, self.now())

    def _leave(self, server: LiveServer) -> None:
        warn(f"{server.options.name} is down")
        self.metrics.up.labels(server.options.name).set(0)
        for attempt in list(server.attempts):
            self.end(attempt)
            if attempt.deadline is not None and not attempt.deadline.expired():
                # No byte has arrived: the request goes to another server at once.
                attempt.deadline.reschedule(asyncio.get_running_loop().time())
        with _router_warnings():
            self.dispatcher.left(server.replica, self.now())


def _router(config: RouteConfig) -> Router:
    given: Any = config.router
    if isinstance(given, Spec) and config.seed is not None:
        given = Plugins().build("router", given, {"seed": config.seed})
    router: Router = resolve("router", given)
    return router


def _view(config: RouteConfig, clock: Callable[[], int]) -> PrefixView:
    if config.view == "events":
        servers = [
            Server(address=each.kv_events or "", replay=each.kv_replay)
            for each in config.replicas
        ]
        return FollowedEvents(servers, config.key_tokens, clock)
    view = parse_view(config.view)
    if not isinstance(view, SentIndex):
        msg = f"view: {config.view!r} is for simulations; take index or events"
        raise InputError(msg)
    if view.blocks is None:
        view.blocks = MOST_BLOCKS
    return view


@contextmanager
def _router_warnings() -> Iterator[None]:
    """Print errors of the router in calls without a result, in place of raising them."""
    try:
        yield
    except PolicyError as error:
        warn(str(error))


def warn(sentence: str) -> None:
    """Print a sentence on stderr; do nothing if stderr is closed."""
    with suppress(OSError):
        sys.stderr.write(f"kvcore: {sentence}\n")
