"""vLLM's CPU tier in the order of a kvcore policy: a class for `eviction_policy`.

The manager of the tier keeps its chunks, their transfers and their memory. It calls a
`CachePolicy` at each change, and for the chunks to evict. `KvcorePolicy` turns these calls into
calls of a `PolicyHost`, in the order that the host expects:

    prepare_store   on_store_miss, on_request_access   present chunks are pinned; a miss
                    evict                              victims
                    insert                             hits count; chunks are stored, pinned
    complete_store  mark_evictable                     chunks are unpinned
    prepare_load    mark_non_evictable, on_request_access   chunks are pinned; hits count
    complete_load   mark_evictable                     chunks are unpinned
    the end         on_request_finished                present chunks are used once more
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import attrs
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from kvcore import InputError, Request
from kvcore.request import DEFAULT_PRIORITY, KEY_BYTES
from kvcore_hosting import EngineRecorder, HostSettings, PolicyHost
from kvcore_hosting.host import Id
from kvcore_vllm.hints import read_hints

UNKNOWN_CHUNK_TOKENS = 256
"""Tokens of a chunk until a request shows where its first chunk ends."""


@attrs.define
class _Use:
    """The use of the tier by a request.

    Attributes:
        hints: its KV hints, as attributes of a request.
        request: the request, with the known chunks of its prompt.
        order: its chunks by their ends in the prompt; for each, the one before it in its group.
        missed: whether chunks are missing, and the policy was not called for them.
        counted: chunks whose hit has been counted.
    """

    hints: dict[str, Any]
    request: Request = attrs.field(init=False)
    order: dict[OffloadKey, OffloadKey | None] = attrs.Factory(dict)
    missed: bool = False
    counted: set[OffloadKey] = attrs.Factory(set)


class KvcorePolicy(CachePolicy):  # type: ignore[misc, unused-ignore]
    """Cache policy of vLLM's CPU tier that runs an eviction policy of kvcore.

    `KVCORE_EVICTION` names the policy. In each KV cache group, the parent of a chunk is the one
    before it in the prompt. A chunk in transfer, and the chunks before it, are not evicted.

    Attributes:
        clock: function that returns the time in ns.
        host: the host of the policy; made again when the first request shows the size of a
            chunk.
    """

    def __init__(self, cache_capacity: int) -> None:
        """Read the settings, so that a wrong one is an error at start."""
        super().__init__(cache_capacity)
        self.clock: Callable[[], int] = time.monotonic_ns
        self._settings = HostSettings.from_environment()
        if self._settings.build().expires_spans:
            msg = (
                f"KVCORE_EVICTION={self._settings.eviction!r} lets blocks expire, and vLLM's "
                "CPU tier hits whatever it holds: choose a policy without a time to live"
            )
            raise InputError(msg)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._using: ReqContext | None = None
        # The chunks that the present request hits, which are pinned.
        self._hits: list[OffloadKey] = []
        self._recording: _Recording | None = None
        self._start(UNKNOWN_CHUNK_TOKENS)

    def _start(self, tokens: int) -> None:
        """Create the host, for chunks of `tokens` tokens."""
        self._tokens = tokens
        policy = self._settings.build()
        policy.one_path = False
        self.host = PolicyHost(policy, self.cache_capacity, tokens, fallback=True)

    # Methods that the manager calls.

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Return the chunk, or None if it is not there."""
        return self._chunks.get(key)

    def insert(
        self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None
    ) -> None:
        """Store a chunk that is being written. vLLM 0.32 does not give the request."""
        self._count_hits()
        context = req_context or self._using
        use = None if context is None else self._use(context)
        parent = None if use is None else use.order.get(key)
        request = None if use is None else use.request.id
        self._chunks[key] = chunk
        now = self.clock()
        if self._recording is not None and use is not None:
            self._recording.inserted(use, key, now)
        priority, until = DEFAULT_PRIORITY, None
        if use is not None and use.request.retention:
            priority, until = _priority(use, self._end(context, key), now)
        self.host.stored(
            key, parent, now, request=request,
            priority=priority, priority_until=until,
        )  # fmt: skip
        if chunk.is_ready and not chunk.ref_cnt:
            self.mark_evictable(key)

    def remove(self, key: OffloadKey) -> None:
        """Drop a chunk whose transfer has failed."""
        self._let_go()
        del self._chunks[key]
        now = self.clock()
        self.host.dropped(key, now)
        if self._recording is not None:
            self._recording.dropped(key, now)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Count chunks as used, the first of the prompt last."""
        del req_context
        self._let_go()
        self._renew([key for key in keys if key in self.host])

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Record that a request misses chunks; the next call has its hits."""
        del keys
        self._let_go()
        self._use(req_context).missed = True

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Pin the chunks that a request hits, until there is room for those that it misses."""
        self._let_go()
        use = self._use(req_context)
        self._hits = [key for key in _sorted(keys, use) if key in self.host]
        for key in reversed(self._hits):
            self.host.pin(key)
        now = self.clock()
        if use.missed:
            self.host.missed(use.request, len(self._hits), now)
            use.missed = False
        if self._recording is not None:
            self._recording.opened(use, now)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Use the chunks of an ended request once more; count hits that were not counted."""
        del insertion_only_keys
        self._let_go()
        use, now = self._use(req_context), self.clock()
        for group in key_groups:
            path = [key for key in order_request_keys([group], req_context) if key in self.host]
            hits = [key for key in path if key in reused_keys and key not in use.counted]
            self._renew(path, hits, use)
        self.host.ended(use.request, now)
        if self._recording is not None:
            self._recording.closed(use, now)
        self._using = None

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Return `n` chunks to remove, or None if that many cannot be."""
        now = self.clock()
        requester = "" if self._using is None else self._using.req_id
        keys = self.host.victims(n, protected, now=now, requester=requester)
        if keys is None:
            return None
        if self._recording is not None:
            self._recording.evicted(keys)
        return [(key, self._chunks.pop(key)) for key in keys]

    def mark_evictable(self, key: OffloadKey) -> None:
        """Unpin a chunk: no transfer uses it any more."""
        self._let_go()
        now = self.clock()
        self.host.unpin(key, now)
        if self._recording is not None:
            self._recording.ready(key, now)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Pin a chunk: it is being loaded."""
        self._let_go()
        self.host.pin(key)

    def clear(self) -> None:
        """Drop all chunks, and the state of the policy."""
        self._chunks.clear()
        self._hits, self._using = [], None
        self.host.clear()
        if self._recording is not None:
            self._recording.cleared(self.clock())

    # Inside.

    def _use(self, context: ReqContext) -> _Use:
        """Return the use of the tier by a request, with all its present chunks."""
        self._using = context
        positions = context._offload_key_positions  # noqa: SLF001 - no method lists them
        use: _Use | None = context.get_state(_Use)
        if use is not None and len(use.order) == len(positions):
            return use
        if positions and not (self._chunks or (use and use.order)):
            self._begin(min(positions.values()))
        if use is None:
            use = _Use(read_hints(context.req_id, getattr(context, "kv_hints", None)))
            context.set_state(use)
        use.request = _request(context, positions, self._tokens, use.hints)
        last: dict[int, OffloadKey] = {}
        for key in sorted(positions, key=positions.__getitem__):
            group = get_offload_group_idx(key)
            use.order[key] = last.get(group)
            last[group] = key
        return use

    def _begin(self, tokens: int) -> None:
        """Start again with chunks of `tokens` tokens, if that is new; none is cached."""
        if tokens != self._tokens:
            self._start(tokens)
        if self._settings.trace is not None and self._recording is None:
            self._recording = _Recording(self._settings, self.host, tokens)

    def _end(self, context: ReqContext | None, key: OffloadKey) -> int:
        """Return the end of a chunk in its prompt, in tokens."""
        end = None if context is None else context.get_offload_key_position(key)
        return self._tokens if end is None else end

    def _count_hits(self) -> None:
        """Count the hits of the present request, for whose misses there is room now."""
        use = None if self._using is None else self._use(self._using)
        if use is None:
            return
        hits = [key for key in self._hits if key not in use.counted]
        if hits:
            use.counted.update(hits)
            now = self.clock()
            self.host.hit(hits, now, use.request.id)
            self._hint(hits, use, now)

    def _let_go(self) -> None:
        """Unpin the chunks that the last request has hit.

        Its new chunks are stored by now, and pin the chunks before them while they are written.
        So a prompt is released once, from its last chunk up, as a `KVCache` releases it.
        """
        if self._hits:
            self._count_hits()
            hits, self._hits = self._hits, []
            now = self.clock()
            for key in reversed(hits):
                self.host.unpin(key, now)

    def _renew(
        self,
        path: Sequence[OffloadKey],
        hits: Sequence[OffloadKey] = (),
        use: _Use | None = None,
    ) -> None:
        """Release the chunks of a prompt again, unless they are the latest in that order."""
        host, now = self.host, self.clock()
        if not hits and host.are_latest(path):
            return
        for key in reversed(path):
            host.pin(key)
        if hits and use is not None:
            host.hit(hits, now, use.request.id)
            self._hint(hits, use, now)
        for key in reversed(path):
            host.unpin(key, now)

    def _hint(self, hits: Sequence[OffloadKey], use: _Use, now: int) -> None:
        if use.request.retention:
            self.host.hinted(hits[-1], use.request, now)


def _sorted(keys: Iterable[OffloadKey], use: _Use) -> list[OffloadKey]:
    """Return `keys` in the order of their ends in the prompt."""
    order = {key: index for index, key in enumerate(use.order)}
    return sorted(keys, key=lambda key: order.get(key, len(order)))


def _priority(use: _Use, end: int, now: int) -> tuple[int, int | None]:
    """Return the highest priority that hints give a chunk with this end, and its limit."""
    start = end - use.request.key_tokens
    retained = [
        (hint.priority, hint.duration)
        for hint in use.request.retention
        if hint.start < end and (hint.end is None or hint.end > start)
    ]
    if not retained:
        return DEFAULT_PRIORITY, None
    priority, duration = max(
        retained, key=lambda entry: (entry[0], entry[1] is None, entry[1] or 0)
    )
    return priority, None if duration is None else now + duration


def _request(
    context: ReqContext, positions: dict[OffloadKey, int], tokens: int, hints: dict[str, Any]
) -> Request:
    """Return the request as a policy sees it, with the chunks of its first group."""
    groups = sorted({get_offload_group_idx(key) for key in positions})
    keys = [key for key in positions if get_offload_group_idx(key) == groups[0]]
    keys.sort(key=positions.__getitem__)
    return Request(
        id=context.req_id,
        prompt_tokens=max(positions.values(), default=0),
        keys=keys,
        key_tokens=tokens,
        **hints,
    )


class _Recording:
    """Records the decisions on the first KV cache group of the tier as a kvcore trace.

    A chunk of the tier is a block of the trace.
    """

    def __init__(self, settings: HostSettings, host: PolicyHost, tokens: int) -> None:
        from vllm import __version__  # noqa: PLC0415  (only where it is recorded)

        assert settings.trace is not None
        # The recording of the GPU pool of the same process has the name without a prefix.
        path = settings.trace.with_name(f"cpu-tier-{settings.trace.name}")
        self._host = host
        self._recorder = EngineRecorder(
            path, blocks=host.blocks, block_size=tokens, eviction=host.eviction,
            engine=f"vllm {__version__}, CPU tier", accounting="keys", duplicates=False,
        )  # fmt: skip
        self._table: dict[Id, int] = {}
        self._left: list[bytes] = []
        self._group: int | None = None
        self._writing: dict[OffloadKey, _Use] = {}

    def opened(self, use: _Use, now: int) -> None:
        """Record a new request, and its hits."""
        request = use.request
        if request.id in self._table:
            return
        hit = self._cached(use)
        keys = [_key(key) for key in request.keys]
        if keys:
            self._group = get_offload_group_idx(request.keys[0])
        self._recorder.request(attrs.evolve(request, keys=keys), now)
        self._recorder.opened(request.id, hit=hit, blocks=0, now=now)
        self._table[request.id] = hit

    def evicted(self, keys: Iterable[OffloadKey]) -> None:
        """Store the evicted keys until the chunk that needs their room is recorded."""
        self._left += [_key(key) for key in keys if self._records(key)]

    def inserted(self, use: _Use, key: OffloadKey, now: int) -> None:
        """Record room for a chunk, and the evictions for it."""
        self.opened(use, now)
        request = use.request
        index = request.keys.index(key) if key in request.keys else -1
        more = index + 1 - self._table[request.id]
        if more > 0:
            left, self._left = self._left, []
            self._recorder.extended(request.id, blocks=more, evicted=left, now=now)
            self._table[request.id] += more
            self._writing[key] = use

    def ready(self, key: OffloadKey, now: int) -> None:
        """Record that a chunk is written."""
        use = self._writing.pop(key, None)
        if use is not None and use.request.id in self._table:
            blocks_held = self._table[use.request.id]
            blocks = min(blocks_held, self._cached(use))
            self._recorder.committed(use.request.id, blocks=blocks, now=now)

    def dropped(self, key: OffloadKey, now: int) -> None:
        """Record that a chunk was lost, unless it was never written."""
        if self._writing.pop(key, None) is None and self._records(key):
            self._recorder.dropped(_key(key), now)

    def closed(self, use: _Use, now: int) -> None:
        """Record the end of a request."""
        if self._table.pop(use.request.id, None) is not None:
            self._recorder.closed(use.request.id, now, output=0)

    def cleared(self, now: int) -> None:
        """Record that all chunks were dropped."""
        self._left.clear()
        self._recorder.cleared(now)

    def _records(self, key: OffloadKey) -> bool:
        """Return True if a chunk is of the recorded group."""
        return bool(get_offload_group_idx(key) == self._group)

    def _cached(self, use: _Use) -> int:
        """Return the number of cached chunks of a prompt, from its first on."""
        return sum(1 for _ in takewhile(self._host.__contains__, use.request.keys))


def _key(key: OffloadKey) -> bytes:
    """Return the key of a chunk in a trace."""
    return blake2b(key, digest_size=KEY_BYTES).digest()
