"""What replicas have cached, as their KV events tell."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from threading import Thread
from typing import Any, ClassVar

from kvcore.cluster import PrefixView
from kvcore.kv_events.block_tracker import BlockTracker
from kvcore.kv_events.formats import decode
from kvcore.kv_events.model import BlockRemoved, BlockStored, DecodeError, Event, Hash
from kvcore.kv_events.sequencer import Delivery, Gap, Restart, StreamItem
from kvcore.kv_events.subscriber import Server, Subscriber
from kvcore.request import Request, TextRequest

_Place = tuple[Hash | None, Any]
"""A block by its parent and its tokens."""


class _Held:
    """The blocks of one replica, found by their tokens. Memory grows with them."""

    def __init__(self) -> None:
        self._tracker = BlockTracker()
        self._hashes: dict[_Place, Hash] = {}
        self._places: dict[Hash, _Place] = {}

    def apply(self, item: StreamItem) -> None:
        """Apply the next item of its stream."""
        if isinstance(item, Restart):
            self._tracker.restart(item.rank)
            self._prune()
        elif isinstance(item, Gap):
            self._tracker.record_gap(item.rank, item.first, item.batches)
        elif isinstance(item, Delivery):
            try:
                batch = decode(item.payload)
            except DecodeError:
                return
            restarts = self._tracker.restarts
            if self._tracker.apply(batch, item.sequence, item.rank):
                if self._tracker.restarts > restarts:
                    self._prune()
                for event in batch.events:
                    self._index(event)

    def tokens(self, tokens: Sequence[int], block_size: int) -> int:
        """Return how many of the first tokens of a prompt are in blocks that it has."""
        parent, end = None, 0
        while end + block_size <= len(tokens):
            block = tuple(tokens[end : end + block_size])
            parent = self._hashes.get((parent, block))
            if parent is None:
                break
            end += block_size
        return end

    def _index(self, event: Event) -> None:
        if isinstance(event, BlockStored):
            # Others are for an adapter or an image, which the tokens do not tell.
            if event.lora_id is not None or event.lora_name or any(event.extra_keys or ()):
                return
            for block in event.blocks():
                place = block.parent, block.content
                if isinstance(block.content, tuple) and block.hash not in self._places:
                    self._hashes[place] = block.hash
                    self._places[block.hash] = place
        elif isinstance(event, BlockRemoved):
            for value in event.hashes:
                if value in self._places and not self._tracker.holds(value):
                    self._forget(value)
        else:
            self._prune()

    def _prune(self) -> None:
        """Forget all blocks that it does not have any more."""
        for value in [each for each in self._places if not self._tracker.holds(each)]:
            self._forget(value)

    def _forget(self, value: Hash) -> None:
        place = self._places.pop(value)
        if self._hashes.get(place) == value:
            del self._hashes[place]


class EventView(PrefixView):
    """Knows what the replicas tell over ZMQ, of prompts whose tokens are known.

    Args:
        servers: that publish, by the number of their replica.
        block_sizes: tokens in a block of each.
    """

    wants_events: ClassVar[bool] = True

    def __init__(self, servers: Sequence[Server], block_sizes: Sequence[int]) -> None:
        self._block_sizes = block_sizes
        self._held = [_Held() for _ in servers]
        self._subscribers = [Subscriber(server) for server in servers]
        self._threads: list[Thread] = []

    def find(self, request: Request, now: int) -> Mapping[int, int]:
        """Return the tokens of the prompt that each replica has. O(blocks found)."""
        del now
        if not isinstance(request, TextRequest):
            return {}
        sizes = enumerate(self._block_sizes)
        found = {at: self._held[at].tokens(request.tokens, size) for at, size in sizes}
        return {number: tokens for number, tokens in found.items() if tokens}

    def lost(self, replica: int, now: int) -> None:
        """Forget what it had: it tells again what it stores."""
        del now
        self._held[replica] = _Held()

    def start(self) -> None:
        """Follow the events, in a thread for each server; the running loop applies them."""
        loop = asyncio.get_running_loop()
        for number in range(len(self._held)):
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
        self._held[number].apply(item)
