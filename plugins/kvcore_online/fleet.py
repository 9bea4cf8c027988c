"""The servers behind the proxy: their health, their load, and the choice of one."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event as Flag
from threading import Thread
from typing import TYPE_CHECKING, Any

import attrs

from kvcore.errors import InputError, PolicyError, StorageError, TraceError, shorten
from kvcore.plugins import Plugins, describe, resolve
from kvcore.plugins.options import Spec
from kvcore.request import block_keys
from kvcore.serving.router import Replica, Router
from kvcore.units import NS_PER_S
from kvcore.untrusted import LONGEST_METRICS
from kvcore_cluster.dispatcher import Dispatcher, PrefixView, is_crowded
from kvcore_cluster.views import EventsView, SentIndex, parse_view
from kvcore_events.block_tracker import BlockTracker
from kvcore_events.formats import decode
from kvcore_events.model import (
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Hash,
    UnparsedEvent,
)
from kvcore_events.sequencer import Delivery, Gap, Restart, StreamItem
from kvcore_events.subscriber import Server, Subscriber
from kvcore_online.route_config import RouteConfig, Upstream
from kvcore_online.supervision import LOG, PAUSE_SECONDS, Messages, supervised, warn
from kvcore_online.traffic import Flight, Metrics, TrafficLog
from kvcore_plugins.traces.keyed import KeyedNames

if TYPE_CHECKING:
    from aiohttp import ClientSession

_USAGE = re.compile(
    rb"^(?:vllm:|kvcore_)kv_cache_usage_perc(?:\{[^}\n]*\})? (\S+)$", re.MULTILINE
)

WATCHED = 100
"""Requests a server after which it is looked at how they were spread."""

PART_KEYS = 1 << 12
"""Largest number of keys of blocks that are applied at a time: about 1 ms."""

MOST_BLOCKS = 1 << 20
"""Entries of the router's own index, if no option gives another number: some 300 MB."""


class _ReportedBlocks:
    """Keys of the blocks that one server has reported so far.

    The key of a block is computed from its tokens and its parent, whatever hash its server
    gives it. Blocks of adapters, images or salts are left out: their tokens alone do not name
    their content.

    Args:
        block_size: number of tokens in a block.
        ignored: called with what is wrong with an event that tells nothing of a cache: its
            blocks have another size, or no token ids, or it cannot be read.
    """

    def __init__(
        self, block_size: int, ignored: Callable[[str], None] = lambda _: None
    ) -> None:
        self.tracker = BlockTracker()
        self._block_size, self._ignored = block_size, ignored
        self._keys: dict[Hash, bytes] = {}

    def changes(
        self, item: StreamItem, batch: EventBatch | None
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Yield what the next item changes: keys now stored, and keys gone.

        Args:
            item: the item of the stream.
            batch: the batch in it, if it has one.
        """
        tracker, restarts = self.tracker, self.tracker.restarts
        events: tuple[Event, ...] = ()
        if isinstance(item, Restart):
            tracker.restart(item.rank)
        elif (
            isinstance(item, Delivery)
            and batch
            and tracker.apply(batch, item.sequence, item.rank)
        ):
            events = batch.events
        tracker.gaps.clear()  # they are counted as they come, and would be kept for ever
        unclear = tracker.restarts > restarts
        for event in events:
            if isinstance(event, BlockStored):
                yield self.stored(event), []
            elif isinstance(event, BlockRemoved):
                yield [], self.gone(event.hashes)
            else:
                unclear = True
                if isinstance(event, UnparsedEvent):
                    self._ignored(shorten(event.reason))
        # Once for all events of the batch: it looks at all blocks.
        if unclear:
            yield [], self.gone(list(self._keys))

    def stored(self, event: BlockStored) -> list[bytes]:
        """Return the keys of blocks that were stored."""
        if event.lora_id is not None or event.lora_name or any(event.extra_keys or ()):
            return []
        tokens, size = event.tokens or (), self._block_size
        sized, whole = event.block_size == size, len(tokens) == size * len(event.hashes)
        if not (sized and whole and all(type(t) is int and t >= 0 for t in tokens)):
            self._ignored(
                "blocks without token ids" if sized else f"blocks of {event.block_size} tokens"
            )
            return []
        parent = None if event.parent is None else self._keys.get(event.parent)
        if event.parent is not None and parent is None:
            return []
        keys = block_keys(tokens, size, parent=parent)  # type: ignore[arg-type]  # checked
        self._keys.update(zip(event.hashes, keys, strict=True))
        return keys

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
        lost_batches: called with the number of a replica, and how many batches are lost.
        failed: called with the number of a replica whose follower has failed.
        ignored: called with the number of a replica, and what is wrong with an event of it.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        block_size: int,
        clock: Callable[[], int],
        lost_batches: Callable[[int, int], None],
        failed: Callable[[int], None],
        ignored: Callable[[int, str], None],
    ) -> None:
        super().__init__()
        self._block_size, self._clock = block_size, clock
        self._lost_batches, self._failed, self._ignored = lost_batches, failed, ignored
        self._messages = Messages()
        self._stopping = Flag()
        self._servers = servers
        self._lives = [self._life(number) for number in range(len(servers))]
        self._subscribers: list[Subscriber] = []
        self._threads: list[Thread] = []

    def lost(self, replica: int, now: int) -> None:
        """Remove all blocks of a replica, which reports them again when it stores them."""
        super().lost(replica, now)
        self._lives[replica] = self._life(replica)

    def _life(self, number: int) -> _ReportedBlocks:
        """Return the empty cache of a replica."""
        return _ReportedBlocks(self._block_size, partial(self._ignored, number))

    def start(self) -> None:
        """Follow the events in a thread for each server; the running loop applies them.

        Raises:
            InputError: an address is invalid.
            PluginError: pyzmq is not installed.
        """
        loop = asyncio.get_running_loop()
        for index, server in enumerate(self._servers):
            self._subscribers.append(Subscriber(server))
            thread = Thread(target=self._follow, args=(index, loop), daemon=True)
            self._threads.append(thread)
            thread.start()

    async def stop(self) -> None:
        """Disconnect from all servers."""
        self._stopping.set()
        for subscriber in self._subscribers:
            subscriber.stop()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _follow(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        """Apply what a server publishes until `stop`; after an error, from an empty cache."""
        subscriber: Subscriber | None = self._subscribers[number]
        while subscriber is not None:
            try:
                with subscriber:
                    for item in subscriber.items():
                        self._read(number, item, loop)
            except Exception as error:  # noqa: BLE001 - else nobody would see that it has ended
                what = f"the follower of replica {number}"
                self._messages.warn(f"{what} failed, and starts again: {error!r}", what)
                self._failed(number)
                asyncio.run_coroutine_threadsafe(self._forget(number), loop).result()
            subscriber = self._reconnected(number)

    def _reconnected(self, number: int) -> Subscriber | None:
        """Return a new subscription to a server, once it can be made; None after `stop`."""
        while not self._stopping.wait(PAUSE_SECONDS):
            try:
                self._subscribers[number] = subscriber = Subscriber(self._servers[number])
            except InputError as error:
                self._messages.warn(str(error))
                continue
            if self._stopping.is_set():
                subscriber.stop()  # `stop` may have seen the one before
            return subscriber
        return None

    def _read(self, number: int, item: StreamItem, loop: asyncio.AbstractEventLoop) -> None:
        """Find what an item changes here, and wait until the loop has applied it part by part.

        So what is not applied yet stays within ZMQ's bounds, and a large batch delays no
        request.
        """
        for part in self._parts(number, item):
            if self._stopping.is_set():
                return
            asyncio.run_coroutine_threadsafe(self._apply(*part), loop).result()

    def _parts(
        self, number: int, item: StreamItem
    ) -> Iterator[tuple[int, _ReportedBlocks, list[bytes], list[bytes]]]:
        """Yield what an item changes in parts, each the arguments of `_apply`."""
        life = self._lives[number]
        for stored, gone in life.changes(*self._decoded(number, item)):
            for begin in range(0, max(len(stored), len(gone)), PART_KEYS):
                part = slice(begin, begin + PART_KEYS)
                yield number, life, stored[part], gone[part]

    def _decoded(self, number: int, item: StreamItem) -> tuple[StreamItem, EventBatch | None]:
        """Return an item and the batch in it; a gap in place of one that cannot be read."""
        batch = None
        if isinstance(item, Delivery):
            try:
                batch = decode(item.payload)
            except TraceError as error:
                why = f"it cannot be read: {error}"
                self._messages.warn(
                    f"replica {number}: batch {item.sequence}: {why}", f"unread {number}"
                )
                item = Gap(item.rank, item.sequence, item.sequence, why)
        if isinstance(item, Gap):
            self._lost_batches(number, item.batches)
        return item, batch

    async def _forget(self, number: int) -> None:
        self.lost(number, self._clock())

    async def _apply(
        self, number: int, life: _ReportedBlocks, stored: list[bytes], gone: list[bytes]
    ) -> None:
        """Record that a server has stored blocks, and has others no longer."""
        if life is self._lives[number]:  # else all its blocks were lost meanwhile
            now = self._clock()
            self.stored(number, stored, now)
            self.removed(number, gone, now)
            self.catch_up(now)


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
        clock: returns the time in ns.

    Attributes:
        log: the trace; None: there is none, or the disk has ended it.
        log_error: the error of the disk that has ended the trace.

    Raises:
        InputError, PluginError: the router or the view cannot be built.
    """

    def __init__(self, config: RouteConfig, clock: Callable[[], int]) -> None:
        self._config = config
        self._clock, self._began = clock, clock()
        self.metrics = Metrics()
        self._messages = Messages()
        self._sent: list[LiveServer] = []
        router = _router(config)
        self.servers = [
            LiveServer(
                upstream,
                Replica(index, upstream.blocks, upstream.block_size, upstream.max_seqs),
            )
            for index, upstream in enumerate(config.replicas)
        ]
        told = self._lost_batches, self._restarted, self._ignored_event
        self._view = _view(config, self.now, *told)
        self.dispatcher = Dispatcher(
            router, [server.replica for server in self.servers], self._view
        )
        self.log: TrafficLog | None = None
        self.log_error: StorageError | None = None
        if config.trace is not None:
            replicas = self.dispatcher.replicas
            routing = {"view": config.view}
            self.log = TrafficLog(
                config.trace,
                describe(router),
                routing,
                replicas,
                config.key_tokens,
                KeyedNames.from_file(config.trace_key),
                self._unlogged,
            )

    def now(self) -> int:
        """Return the time since the start in ns."""
        return self._clock() - self._began

    async def watch(self, session: ClientSession) -> None:
        """Check all servers at the interval of the options, until cancelled."""
        jobs: dict[str, Callable[[], Awaitable[None]]] = {
            f"the check of {server.options.name}": partial(self._watch, server, session)
            for server in self.servers
        }
        jobs["the flush of the trace"] = self._sync
        async with asyncio.TaskGroup() as tasks:
            for what, job in jobs.items():
                failed = partial(self.metrics.restarts.labels(what).inc)
                tasks.create_task(supervised(what, job, failed))

    async def check(self, server: LiveServer, session: ClientSession) -> None:
        """Query the health of a server, and if it is up its cache usage."""
        healthy = False
        with suppress(Exception):  # any error is the server's
            async with (
                asyncio.timeout(self._config.connect_timeout),
                session.get(f"{server.options.url}/health", allow_redirects=False) as answer,
            ):
                healthy = answer.status == 200  # noqa: PLR2004
        if not healthy:
            self.failed(server)
            return
        server.failures = 0
        if not server.replica.up:
            self._join(server)
        try:
            server.usage = await self._usage(server, session)
        except Exception as error:  # noqa: BLE001 - any error is the server's, which serves
            server.usage = 0.0
            name = server.options.name
            told = f"{name}: its cache usage is unknown, and counts as 0: /metrics"
            self._messages.warn(f"{told}: {shorten(repr(error))}", f"usage {name}")

    async def _usage(self, server: LiveServer, session: ClientSession) -> float:
        """Return the share of a server's blocks in use; 0 if its metrics do not have it.

        Raises:
            Exception: any, if the metrics cannot be read.
        """
        async with (
            asyncio.timeout(self._config.connect_timeout),
            session.get(f"{server.options.url}/metrics", allow_redirects=False) as answer,
        ):
            if answer.status != 200:  # noqa: PLR2004
                msg = f"status {answer.status}"
                raise TraceError(msg)
            text = bytearray()
            async for part in answer.content.iter_any():
                text += part
                if len(text) >= LONGEST_METRICS:
                    break
        shares = list(map(float, _USAGE.findall(text)))  # of each engine
        usage = sum(shares) / len(shares) if shares else 0.0
        return usage if 0 <= usage <= 1 else 0.0

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
        """Write to the trace; if the disk is full, the proxy goes on without it."""
        log = self.log
        if log is not None:
            try:
                write(log)
            except StorageError as error:
                self.log, self.log_error = None, error
                try:
                    log.file.give_up(error)
                except StorageError as kept:
                    self.log_error = kept
                warn(f"{self.log_error}; the proxy goes on without a trace")

    def rotate(self) -> None:
        """Close the trace, and begin the next one: what has come so far can be read."""

        def write(log: TrafficLog) -> None:
            try:
                log.rotate(self.now())
            except InputError as error:
                raise StorageError(str(error)) from error

        self._write(write)

    def _unlogged(self, error: InputError) -> None:
        """Count a request that cannot be written to the trace, which goes on without it."""
        self.metrics.unlogged.inc()
        self._messages.warn(f"a request is left out of the trace: {error}", "unlogged")

    def _lost_batches(self, replica: int, batches: int) -> None:
        self.metrics.lost_batches.labels(self.servers[replica].options.name).inc(batches)

    def _ignored_event(self, replica: int, found: str) -> None:
        """Count and tell of a KV event that says nothing of keys that requests have."""
        name = self.servers[replica].options.name
        self.metrics.ignored_events.labels(name).inc()
        needed = f"blocks of {self._config.key_tokens} tokens with their ids"
        self._messages.warn(
            f"{name}: KV events are ignored ({found}): the router needs {needed}; "
            "give the block size of the servers as block_size and key_tokens",
            f"ignored {name}",
        )

    def _restarted(self, replica: int) -> None:
        name = self.servers[replica].options.name
        self.metrics.restarts.labels(f"the follower of {name}").inc()

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
        self._watch_balance(server)
        name = server.options.name
        self.metrics.in_flight.labels(name).inc()
        self.metrics.prompt_tokens.labels(name).inc(flight.request.prompt_tokens)
        self.metrics.hit_tokens.labels(name).inc(hits)
        return attempt

    def _watch_balance(self, server: LiveServer) -> None:
        """Tell, seldom, that one server gets nearly all requests while others are up."""
        sent, up = self._sent, len(self.dispatcher.up)
        sent.append(server)
        if len(sent) < WATCHED * up:
            return
        busiest, most = Counter(sent).most_common(1)[0]
        if is_crowded(most * up / len(sent), up):
            name, router = busiest.options.name, self.dispatcher.router.name
            self._messages.warn(
                f"{name} got {most:,} of the last {len(sent):,} requests while {up} servers "
                f"are up: {router} follows what is cached there. If it is overloaded, take a "
                "router that counts load, such as lmetric",
                f"crowded {name}",
            )
        sent.clear()

    def first_byte(self, attempt: Attempt, began: int) -> None:
        """Count an attempt whose answer began at `began` (ns), and can be passed on."""
        flight, server = attempt.flight, attempt.server
        server.failures = 0
        seconds = (began - flight.request.arrival) / NS_PER_S
        self.metrics.first_byte.labels(server.options.name).observe(seconds)
        if attempt.open:
            with self._router_warnings():
                self.dispatcher.first_token(flight.request, server.replica, self.now())

    def end(self, attempt: Attempt) -> None:
        """Count an attempt that has ended; a second call does nothing."""
        if attempt.open:
            attempt.open = False
            server = attempt.server
            server.attempts.discard(attempt)
            self.metrics.in_flight.labels(server.options.name).dec()
            with self._router_warnings():
                self.dispatcher.ended(attempt.flight.request, server.replica, self.now())

    @contextmanager
    def _router_warnings(self) -> Iterator[None]:
        """Print errors of the router in calls without a result, in place of raising them."""
        try:
            yield
        except PolicyError as error:
            self._messages.failed(error)

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
            self.log.file.discard()
            self.log = None

    async def stop(self) -> None:
        """Close the trace, whatever a follower still does, and all subscriptions."""
        self._write(lambda log: log.close(self.now()))
        self.log = None  # a signal may ask to rotate it yet
        if isinstance(self._view, FollowedEvents):
            await self._view.stop()

    async def _watch(self, server: LiveServer, session: ClientSession) -> None:
        while True:
            await asyncio.sleep(self._config.health_interval)
            await self.check(server, session)

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._write(lambda log: log.sync(self.now()))

    def _join(self, server: LiveServer) -> None:
        LOG.info("%s is up", server.options.name)
        self.metrics.up.labels(server.options.name).set(1)
        with self._router_warnings():
            self.dispatcher.joined(server.replica, self.now())

    def _leave(self, server: LiveServer) -> None:
        warn(f"{server.options.name} is down")
        self.metrics.up.labels(server.options.name).set(0)
        for attempt in list(server.attempts):
            self.end(attempt)
            if attempt.deadline is not None and not attempt.deadline.expired():
                # No byte has arrived: the request goes to another server at once.
                attempt.deadline.reschedule(asyncio.get_running_loop().time())
        with self._router_warnings():
            self.dispatcher.left(server.replica, self.now())


def _router(config: RouteConfig) -> Router:
    named: Any = config.router
    if isinstance(named, Spec) and config.seed is not None:
        named = Plugins().build("router", named, {"seed": config.seed})
    router: Router = resolve("router", named)
    return router


def _view(
    config: RouteConfig,
    clock: Callable[[], int],
    lost_batches: Callable[[int, int], None],
    failed: Callable[[int], None],
    ignored: Callable[[int, str], None],
) -> PrefixView:
    if config.view == "events":
        servers = [
            Server(address=upstream.kv_events or "", replay=upstream.kv_replay)
            for upstream in config.replicas
        ]
        told = lost_batches, failed, ignored
        return FollowedEvents(servers, config.key_tokens, clock, *told)
    view = parse_view(config.view, ("index", "events"))
    if not isinstance(view, SentIndex):
        msg = f"view: {config.view!r}: events that servers publish have no options here"
        raise InputError(msg)
    if view.blocks is None:
        view.blocks = MOST_BLOCKS
    return view
