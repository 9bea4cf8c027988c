"""KV events of a server: the blocks that its cache stores and removes, published at once."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Sequence
from time import time

from kvcore.cache import KVCache, Span
from kvcore.cache.tree import Watcher
from kvcore.request import Key, Request, TextRequest
from kvcore.serving.job import Job
from kvcore_engine.tokens import TokenStream
from kvcore_events.formats import encode
from kvcore_events.model import BlockRemoved, BlockStored, EventBatch
from kvcore_events.publisher import Publisher
from kvcore_online.supervision import Messages

MEDIUM = "GPU"
_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 5.0
_QUEUED = 10_000
"""Batches that wait to be published; further ones are dropped and counted: a gap."""


class StoredBlocks:
    """Publishes stored and removed blocks of a cache, with their tokens, as vLLM does.

    It is the watcher of the cache's tree, called on the engine's thread. A thread of its own
    sends events and answers replays, so that no subscriber delays the engine.

    Args:
        cache: the cache, which is empty; each of its blocks has one key.
        publisher: the publisher; from `start` on only the thread uses it.

    Attributes:
        dropped: number of batches that were not sent, mostly since replays took too long.
    """

    def __init__(self, cache: KVCache, publisher: Publisher) -> None:
        self.dropped = 0
        self._size = cache.geometry.block_size
        self._publisher = publisher
        self._below: Watcher | None = cache.tree.watcher
        cache.tree.watcher = self
        # Tokens of stored keys and of those of open requests, whose number is counted by key.
        self._tokens: dict[Key, tuple[int, ...]] = {}
        self._open: Counter[Key] = Counter()
        self._generated: dict[int | str, list[Key]] = {}
        self._stored: set[Key] = set()
        # Salts by the key of the first block.
        self._salts: dict[Key, str] = {}
        # Each with the number of batches that were dropped just before it.
        self._batches: queue.Queue[tuple[int, EventBatch]] = queue.Queue(_QUEUED)
        self._lost = 0
        self._messages = Messages()
        self._ends = threading.Event()
        self._thread = threading.Thread(
            target=self._publish, name="kvcore-kv-events", daemon=True
        )

    def start(self) -> None:
        """Start publishing."""
        self._thread.start()

    def close(self) -> None:
        """Publish remaining events, and stop; wait at most 5 s for that."""
        self._ends.set()
        self._thread.join(_PATIENCE_SECONDS)
        if not self._thread.is_alive():
            self._publisher.close()

    def opened(self, request: TextRequest) -> None:
        """Remember the tokens of a prompt."""
        size, tokens = self._size, request.tokens
        for index, key in enumerate(request.keys):
            self._open[key] += 1
            if key not in self._tokens:
                self._remember(key, index, tokens[index * size : (index + 1) * size], request)

    def generated(self, job: Job, keys: Sequence[Key], stream: TokenStream) -> None:
        """Remember the tokens of blocks that `job` has generated."""
        first = job.request.prompt_tokens // self._size + len(job.named_keys)
        self._generated.setdefault(job.request.id, []).extend(keys)
        for index, key in enumerate(keys, first):
            self._open[key] += 1
            if key not in self._tokens:
                ids = stream.token_ids(index * self._size, (index + 1) * self._size)
                self._remember(key, index, ids, job.request)

    def closed(self, request: TextRequest) -> None:
        """Called when a request closes; forgets those of its tokens that are not stored."""
        for key in (*request.keys, *self._generated.pop(request.id, ())):
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]
                if key not in self._stored:
                    self._forget(key)

    # Callbacks of the tree.

    def stored(self, span: Span, blocks: int, now: int) -> None:
        """Publish that the last `blocks` blocks of `span` were stored."""
        keys = span.path_keys[span.end - blocks : span.end]
        tokens = [token for key in keys for token in self._tokens.get(key, ())]
        self._stored.update(keys)
        before = span.end - blocks
        self._put(
            BlockStored(
                hashes=tuple(map(_hash, keys)),
                parent=_hash(span.path_keys[before - 1]) if before else None,
                tokens=tuple(tokens) if len(tokens) == blocks * self._size else None,
                block_size=self._size,
                medium=MEDIUM,
                extra_keys=self._extra(keys) if not before else None,
            )
        )
        if self._below is not None:
            self._below.stored(span, blocks, now)

    def hit(self, span: Span, now: int) -> None:
        """Pass a hit on to the tiers."""
        if self._below is not None:
            self._below.hit(span, now)

    def leaving(self, span: Span, blocks: int, now: int, reason: str) -> None:
        """Publish that the last `blocks` blocks of `span` are removed."""
        keys = span.path_keys[span.end - blocks : span.end]
        for key in keys:
            self._stored.discard(key)
            if key not in self._open:
                self._forget(key)
        self._put(BlockRemoved(hashes=tuple(map(_hash, keys)), medium=MEDIUM))
        if self._below is not None:
            self._below.leaving(span, blocks, now, reason)

    def _remember(self, key: Key, index: int, ids: Sequence[int], request: Request) -> None:
        self._tokens[key] = tuple(ids)
        if request.salt is not None and not index:
            self._salts[key] = request.salt

    def _forget(self, key: Key) -> None:
        self._tokens.pop(key, None)
        self._salts.pop(key, None)

    def _extra(self, keys: Sequence[Key]) -> tuple[tuple[str] | None, ...] | None:
        """Return the salt of a prompt's first block as vLLM reports it; None without a salt."""
        salt = self._salts.get(keys[0])
        return None if salt is None else ((salt,), *[None] * (len(keys) - 1))

    def _put(self, event: BlockStored | BlockRemoved) -> None:
        try:
            self._batches.put_nowait((self._lost, EventBatch(time(), (event,))))
            self._lost = 0
        except queue.Full:
            self._lost += 1
            self.dropped += 1

    def _publish(self) -> None:
        """Send batches until the end; one that cannot be sent is lost, and a gap."""
        while True:
            try:
                if not self._publish_next():
                    return
            except Exception as error:  # noqa: BLE001 - else nobody would see that it has ended
                self._messages.warn(f"KV events are not published: {error!r}", "KV events")
                self._ends.wait(_POLL_SECONDS)

    def _publish_next(self) -> bool:
        """Send the next batch, or answer replays; return False at the end."""
        publisher = self._publisher
        try:
            lost, batch = self._batches.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if self._ends.is_set():
                return False
            publisher.serve(0)
        else:
            publisher.skip(lost)
            try:
                publisher.publish(encode(batch, check=False))
            except Exception:
                self.dropped += 1
                publisher.skip(1)
                raise
        return True


def _hash(key: Key) -> int:
    """Return the 64-bit hash of a block, the last bits of its key."""
    return int.from_bytes(key[-8:], "big") if isinstance(key, bytes) else int(str(key), 16)
