"""What replicas have cached, as the KV events tell that they publish over ZMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from threading import Thread

from kvcore.cluster.views import EventsView
from kvcore.kv_events.block_tracker import BlockTracker
from kvcore.kv_events.formats import decode
from kvcore.kv_events.model import BlockRemoved, BlockStored, DecodeError, Event, Hash
from kvcore.kv_events.sequencer import Delivery, Gap, Restart, StreamItem
from kvcore.kv_events.subscriber import Server, Subscriber
from kvcore.request import block_keys


class _Told:
    """Keys of the blocks that one server has reported so far.

    A block's key is that of its tokens and its parent, whatever hash its server gives it. Those
    of adapters, images or salts are left out: the tokens of a prompt do not tell of them.
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
        """Return the keys of all blocks that it does not have any more. O(all blocks)."""
        return self.gone(list(self._keys))

    def gone(self, hashes: Sequence[Hash]) -> list[bytes]:
        """Return the keys of those of `hashes` that it does not have any more."""
        gone = [value for value in hashes if not self.tracker.holds(value)]
        keys = (self._keys.pop(value, None) for value in gone)
        return [key for key in keys if key is not None]


class FollowedEvents(EventsView):
    """Follows the events of the servers, for prompts whose tokens are known.

    Memory grows with the blocks that they have.

    Args:
        servers: that publish, by the number of their replica.
        block_size: tokens in a block of each, and of a key of the requests.
        clock: returns the time, ns.
    """

    def __init__(
        self, servers: Sequence[Server], block_size: int, clock: Callable[[], int]
    ) -> None:
        super().__init__()
        self._block_size, self._clock = block_size, clock
        self._servers = servers
        self._lives = [_Told(block_size) for _ in servers]
        self._subscribers: list[Subscriber] = []
        self._threads: list[Thread] = []

    def lost(self, replica: int, now: int) -> None:
        """Remove what a replica held: the replica reports anew what it stores."""
        super().lost(replica, now)
        self._lives[replica] = _Told(self._block_size)

    def start(self) -> None:
        """Follow the events, in a thread for each server; the running loop applies them.

        Raises:
            InputError: an address that cannot be connected to.
            PluginError: pyzmq is not installed.
        """
        loop = asyncio.get_running_loop()
        for number, server in enumerate(self._servers):
            self._subscribers.append(Subscriber(server))
            thread = Thread(target=self._follow, args=(number, loop), daemon=True)
            self._threads.append(thread)
            thread.start()

    async def stop(self) -> None:
        """Disconnect."""
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
        told, now = self._lives[number], self._clock()
        restarts = told.tracker.restarts
        if isinstance(item, Restart):
            told.tracker.restart(item.rank)
        elif isinstance(item, Gap):
            told.tracker.record_gap(item.rank, item.first, item.batches)
        elif isinstance(item, Delivery):
            try:
                batch = decode(item.payload)
            except DecodeError:
                return
            if told.tracker.apply(batch, item.sequence, item.rank):
                for event in batch.events:
                    self._take(number, event, now)
        if told.tracker.restarts > restarts:
            self.removed(number, told.removed(), now)
        self.catch_up(now)

    def _take(self, number: int, event: Event, now: int) -> None:
        told = self._lives[number]
        if isinstance(event, BlockStored):
            self.stored(number, told.stored(event), now)
        elif isinstance(event, BlockRemoved):
            self.removed(number, told.gone(event.hashes), now)
        else:
            self.removed(number, told.removed(), now)
