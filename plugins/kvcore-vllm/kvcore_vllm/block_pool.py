"""vLLM's GPU block pool in the order of a kvcore policy: classes for `--scheduler-cls`.

vLLM builds its scheduler, cache manager and block pool itself. After that the manager and the
pool get subclasses of their classes, and the queue of free blocks is replaced: all decisions
stay vLLM's code, except for the choice of the block that is evicted next.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, NoReturn

import attrs
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.version import __version__

from kvcore import InputError, Request
from kvcore.cache.hints import priority_steps
from kvcore.plugins import find_override
from kvcore.request import DEFAULT_PRIORITY, KEY_BYTES
from kvcore.units import INT64_LIMIT
from kvcore_hosting import EngineRecorder, HostSettings, PolicyHost
from kvcore_vllm.hints import read_hints, short_name

# A child of vLLM's logger, whose lines a server prints.
_log = logging.getLogger("vllm.kvcore")

_GROUP_BYTES = 4
"""Bytes after a block's hash that name its group."""


class PolicyQueue:
    """Replaces vLLM's queue of free blocks by the order of a policy.

    Blocks without cached content are allocated first, the one freed last before others, as in
    vLLM; then victims of the policy; at last blocks that a reader has released and still reads.

    Attributes:
        num_free_blocks: number of blocks that are free, or cached and not in use.
        host: the host of the policy; its blocks are named by their ids.
        clock: function that returns the time in ns.
        requester: id of the request that allocates.
        left: keys of the evicted blocks, for a recording; None: there is no recording.
    """

    def __init__(self, pool: Any, host: PolicyHost, clock: Callable[[], int]) -> None:
        queue = pool.free_block_queue
        self.num_free_blocks: int = queue.num_free_blocks
        self.host = host
        self.clock = clock
        self.requester = ""
        self.left: list[bytes] | None = None
        self._blocks = pool.blocks
        self._empty = deque(queue.popleft_n(queue.num_free_blocks))
        self._read: deque[Any] = deque()

    def popleft(self) -> Any:
        """Return the next block."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Return the next `n` blocks; at least `n` are free."""
        self.num_free_blocks -= n
        empty, host = self._empty, self.host
        blocks = [empty.popleft() for _ in range(min(n, len(empty)))]
        if missing := n - len(blocks):
            count = min(missing, host.evictable)
            ids = host.victims(count, now=self.clock(), requester=self.requester) or []
            victims = [self._blocks[block] for block in ids]
            if len(ids) < missing:
                victims += self._last_resort(missing - len(ids))
            if self.left is not None:
                self.left += [_key(block.block_hash) for block in victims if block.block_hash]
            blocks += victims
        return blocks

    def _last_resort(self, n: int) -> list[Any]:
        """Return `n` blocks that are free for vLLM, and not evictable for the policy.

        They are read after their release, or have a block in use below them: a request has hit
        it below a duplicate of them. O(blocks).
        """
        blocks = [self._read.popleft() for _ in range(min(n, len(self._read)))]
        for block in self._blocks:
            if len(blocks) == n:
                break
            if not block.ref_cnt and block.block_id in self.host:
                self.host.dropped(block.block_id, self.clock(), "capacity")
                blocks.append(block)
        return blocks

    def prepend_n(self, blocks: list[Any]) -> None:
        """Free blocks without content; the first of them is allocated first."""
        self.num_free_blocks += len(blocks)
        self._empty.extendleft(reversed(blocks))

    def append(self, block: Any) -> None:
        """Free a block."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Free blocks, the deepest of a request first."""
        self.num_free_blocks += len(blocks)
        cached = [block.block_id for block in blocks if block.block_hash is not None]
        if len(cached) < len(blocks):
            self._read += [block for block in blocks if block.block_hash is None]
        self.host.unpin_run(cached, self.clock())

    def remove(self, block: Any) -> None:
        """Remove a block from the free queue: it is in use again."""
        self.num_free_blocks -= 1
        if block.block_id in self.host:
            self.host.pin(block.block_id)
        else:
            (self._empty if block in self._empty else self._read).remove(block)

    def lose(self, block: Any, reason: str = "gone") -> None:
        """Drop the content of a block, which can no longer be hit."""
        if block.block_id in self.host:
            self.host.dropped(block.block_id, self.clock(), reason)
            if not block.ref_cnt:
                self._empty.append(block)

    def clear(self) -> None:
        """Drop the content of all blocks; none is in use."""
        self.host.clear()
        self._read.clear()
        self._empty = deque(block for block in self._blocks if not block.is_null)

    def get_all_free_blocks(self) -> list[Any]:
        """Return the free blocks: those without content, and the others by number."""
        first = {block.block_id: block for block in self._empty}
        known = self._blocks
        rest = (block for block in known if not (block.ref_cnt or block.is_null))
        return [*first.values(), *(block for block in rest if block.block_id not in first)]

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        """Yield nothing: the victims of a policy are not known before it is called."""
        return iter(())


@attrs.define
class _Known:
    """A request of vLLM as policies see it, whether it waits, and whether it was admitted."""

    request: Request
    waits: bool = False
    admitted: bool = False


class HostedPool(BlockPool):  # type: ignore[misc, unused-ignore]
    """vLLM's block pool, which calls the host of a policy at each change of a block.

    Attributes:
        opening: the request that is being admitted, and whether for the first time.
        hits: the blocks that it hits.
        recorder: the recording of the decisions; None: there is none.
        named: number of recorded keys of each request.
        known: the requests that have not ended, by their ids.
        hears: whether the policy, or the recorder, reads the keys of requests.
    """

    opening: tuple[Request, bool] | None = None
    hits: Sequence[Any] = ()
    recorder: EngineRecorder | None = None
    named: dict[str, int]
    known: dict[str, _Known]
    hears = True

    def touch(self, blocks: Sequence[Any]) -> None:
        """Pin cached blocks, the deepest first, in the order of `PolicyHost.pin`."""
        super().touch(blocks[::-1])
        if self.opening is not None:
            self.hits = blocks

    def get_new_blocks(self, num_blocks: int) -> Any:
        """Allocate. The hits of an admission count after its evictions."""
        opening, queue, recorder = self.opening, self.free_block_queue, self.recorder
        if opening is not None:
            request, first = opening
            limit = min(len(request.keys), (request.prompt_tokens - 1) // request.key_tokens)
            if first and len(self.hits) < limit:
                queue.host.missed(request, len(self.hits), queue.clock())
        new = super().get_new_blocks(num_blocks)
        if opening is not None:
            self.opened(num_blocks)
        elif recorder is not None:
            evicted, queue.left = queue.left, []
            recorder.extended(
                queue.requester, blocks=num_blocks, evicted=evicted, now=queue.clock()
            )
        return new

    def opened(self, blocks: int = 0) -> None:
        """Count the hits of the admission, for which `blocks` were allocated."""
        if self.opening is None:
            return
        (request, first), hits = self.opening, self.hits
        self.opening, self.hits = None, ()
        queue = self.free_block_queue
        now = queue.clock()
        if hits:
            ids = [block.block_id for block in hits]
            queue.host.hit(ids, now, request.id, again=not first)
            queue.host.hinted(ids[-1], request, now)
        if self.recorder is not None:
            evicted, queue.left = queue.left, []
            self.recorder.opened(
                request.id, hit=len(hits), blocks=blocks, evicted=evicted, now=now
            )

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        *args: Any,
        **more: Any,
    ) -> None:
        """Cache the blocks of `request` that have become full."""
        super().cache_full_blocks(
            request, blocks, num_cached_blocks, num_full_blocks, *args, **more
        )
        queue, new = self.free_block_queue, slice(num_cached_blocks, num_full_blocks)
        name, now, hashes = request.request_id, queue.clock(), request.block_hashes
        ids = [block.block_id for block in blocks[new]]
        keys = [name[:KEY_BYTES] for name in hashes[new]]
        parent = blocks[num_cached_blocks - 1].block_id if num_cached_blocks else None
        tenant, known = short_name(request.cache_salt), self.known.get(name)
        if known is None or not known.request.retention:
            queue.host.stored_run(ids, parent, now, keys=keys, request=name, tenant=tenant)
        else:
            steps = priority_steps(known.request, self.hash_block_size)
            for index, block, key in zip(count(num_cached_blocks), ids, keys, strict=False):
                retained = [step[1:] for step in steps if index < step[0]]
                priority, duration = retained[0] if retained else (DEFAULT_PRIORITY, None)
                queue.host.stored(
                    block, parent, now, key=key, request=name, tenant=tenant, priority=priority,
                    priority_until=None if duration is None else now + duration,
                )  # fmt: skip
                parent = block
        if self.recorder is not None:
            named = self.named.get(name, request.num_prompt_tokens // self.hash_block_size)
            keys = [name[:KEY_BYTES] for name in hashes[named:num_full_blocks]]
            self.named[name] = named + len(keys)
            self.recorder.committed(name, blocks=num_full_blocks, now=now, keys=keys)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Drop the content of blocks, so that they can no longer be hit."""
        lost = [self.blocks[block] for block in block_ids]
        keys = [_key(block.block_hash) for block in lost if block.block_hash]
        super().evict_blocks(block_ids)
        queue = self.free_block_queue
        for block in lost:
            queue.lose(block)
        if self.recorder is not None:
            for key in keys:
                self.recorder.dropped(key, queue.clock())

    def move_block_hashes(self, src_block: Any, dst_block: Any) -> None:
        """Move the cached content of a block; to the policy it is new, without a parent."""
        super().move_block_hashes(src_block, dst_block)
        queue = self.free_block_queue
        queue.lose(src_block)
        if dst_block.block_hash is not None:
            key = _key(dst_block.block_hash)
            queue.host.stored(dst_block.block_id, None, queue.clock(), key=key)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached content, if no block is in use."""
        done: bool = super().reset_prefix_cache()
        if done:
            queue = self.free_block_queue
            queue.clear()
            if self.recorder is not None:
                self.recorder.cleared(queue.clock())
        return done


def _key(block_hash: bytes) -> bytes:
    """Return the key of a cached block, whose hash has the number of its group behind it."""
    return block_hash[:-_GROUP_BYTES][:KEY_BYTES]


class ExpiringPool(HostedPool):
    """A block pool for a policy with blocks that expire: expired blocks are no hits."""

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> Any:
        """Return the cached block of a hash; drop it and return None if it has expired."""
        blocks = super().get_cached_block(block_hash, kv_cache_group_ids)
        if not blocks:
            return blocks
        queue, block = self.free_block_queue, blocks[0]
        if not queue.host.expired(block.block_id, queue.clock()):
            return blocks
        for block_id in queue.host.branch(block.block_id):
            block = self.blocks[block_id]
            key = _key(block.block_hash)
            self._maybe_evict_cached_block(block)
            queue.lose(block, "expired")
            if self.recorder is not None:
                self.recorder.dropped(key, queue.clock(), "expired")
        return None


class HostedManager(KVCacheManager):  # type: ignore[misc, unused-ignore]
    """vLLM's cache manager, which calls the host of a policy at each change of a request.

    Attributes:
        known: the requests that have not ended, by their ids.
        tables: vLLM's blocks of each running request, by its id.
    """

    known: dict[str, _Known]
    tables: dict[str, list[Any]]

    def queued(self, request: Any, *, front: bool = False) -> None:
        """Called when a request enters the queue: at its end, or in front once preempted."""
        known, queue = self._know(request), self.block_pool.free_block_queue
        known.waits = True
        queue.host.queued(known.request, queue.clock(), front=front)

    def allocate_slots(self, request: Any, *args: Any, **more: Any) -> Any:
        """Allocate blocks for a request; the first ones admit it, if there is room."""
        pool, name = self.block_pool, request.request_id
        queue = pool.free_block_queue
        queue.requester = name
        if self.tables.get(name):
            return super().allocate_slots(request, *args, **more)
        known = self._know(request)
        queue.host.admitted(name)
        pool.opening, pool.hits = (known.request, not request.num_preemptions), ()
        new = super().allocate_slots(request, *args, **more)
        if new is not None:
            pool.opened()  # where nothing was allocated
            known.admitted = True
            self._dequeue(known)
        pool.opening = None
        return new

    def free(self, request: Any) -> None:
        """Release the blocks of a request that was preempted or has ended."""
        self._leave(request)
        super().free(request)

    def pop_blocks_for_free(self, request: Any) -> Any:
        """Return the blocks of a preempted or ended request, to be released later."""
        self._leave(request)
        return super().pop_blocks_for_free(request)

    def _know(self, request: Any) -> _Known:
        """Return the state of a request for policies; the first call records its arrival."""
        known = self.known.get(request.request_id)
        if known is None:
            pool = self.block_pool
            now = pool.free_block_queue.clock()
            known = _Known(kvcore_request(request, pool.hash_block_size, now, keys=pool.hears))
            self.known[request.request_id] = known
            if pool.recorder is not None:
                pool.recorder.request(known.request, now)
        return known

    def _dequeue(self, known: _Known) -> None:
        if known.waits:
            known.waits = False
            queue = self.block_pool.free_block_queue
            queue.host.dequeued(known.request, queue.clock())

    def _leave(self, request: Any) -> None:
        """Record that a request has ended or is preempted, before its blocks are released."""
        known = self.known.get(request.request_id)
        if known is None:
            return
        pool, queue = self.block_pool, self.block_pool.free_block_queue
        now, ended = queue.clock(), request.is_finished()
        if pool.recorder is not None and (ended or self.tables.get(request.request_id)):
            output = request.num_output_tokens if ended else None
            pool.recorder.closed(request.request_id, now, output=output)
            if ended:
                pool.named.pop(request.request_id, None)
        queue.host.forget(request.request_id)
        if ended:
            del self.known[request.request_id]
            self._dequeue(known)
            if known.admitted:
                queue.host.ended(known.request, now)


def kvcore_request(request: Any, block_size: int, now: int, *, keys: bool = True) -> Request:
    """Return a request of vLLM as policies see it. O(blocks of its prompt) with keys."""
    tokens = request.num_prompt_tokens
    hashes = request.block_hashes[: tokens // block_size] if keys else ()
    return Request(
        id=request.request_id,
        arrival=now,
        prompt_tokens=tokens,
        # `/inference/v1/generate` of vLLM takes any number of a client.
        output_tokens=min(request.max_tokens, INT64_LIMIT - 1),
        keys=[name[:KEY_BYTES] for name in hashes],
        key_tokens=block_size,
        salt=request.cache_salt,
        tenant=short_name(request.cache_salt),
        priority=-request.priority,  # vLLM serves the lowest first
        **{"session": short_name(request.session_id)}
        | read_hints(request.request_id, request.kv_hints),
    )


def host_blocks(
    manager: KVCacheManager,
    settings: HostSettings,
    clock: Callable[[], int] = time.monotonic_ns,
) -> PolicyHost:
    """Make the policy of `settings` choose the victims in the block pool of `manager`.

    Args:
        manager: vLLM's cache manager, which has not served a request.
        settings: the policy, and the path of the recording.
        clock: function that returns the time in ns.

    Returns:
        The host of the policy.

    Raises:
        InputError: the cache is not one group of full attention; says what to do.
    """
    pool = manager.block_pool
    kinds = [type(manager).__name__ for manager in manager.coordinator.single_type_managers]
    if not manager.enable_caching:
        _refuse("prefix caching is off", "with it (--enable-prefix-caching)")
    if kinds != [FullAttentionManager.__name__] or type(pool) is not BlockPool:
        why = f"the model's blocks are those of {', '.join(kinds) or 'no layer'}"
        _refuse(why, "with a model whose layers are all of full attention, in one group")
    if manager.coordinator.single_type_managers[0].block_size != pool.hash_block_size:
        _refuse("a block has several hashes", "with one block size (--block-size) for all")
    policy = settings.build()
    host = PolicyHost(policy, pool.num_gpu_blocks - 1, pool.hash_block_size, fallback=True)
    pool.free_block_queue = PolicyQueue(pool, host, clock)
    pool.__class__ = ExpiringPool if policy.expires_spans else HostedPool
    manager.__class__ = HostedManager
    manager.known = pool.known = {}
    hooks = "on_miss", "on_queued", "on_dequeued", "on_end"
    pool.hears = settings.trace is not None or any(
        find_override(policy, hook) for hook in hooks
    )
    manager.tables = manager.coordinator.single_type_managers[0].req_to_blocks
    if settings.trace is not None:
        pool.free_block_queue.left, pool.named = [], {}
        pool.recorder = EngineRecorder(
            settings.trace, blocks=host.blocks, block_size=pool.hash_block_size,
            eviction=policy, engine=f"vllm {__version__}",
        )  # fmt: skip
    _log.info("%s decides which of %d blocks are evicted", settings.eviction, host.blocks)
    return host


def _refuse(why: str, instead: str) -> NoReturn:
    msg = (
        f"kvcore cannot decide about this block pool: {why}. Start the server {instead}, or "
        "without --scheduler-cls: then vLLM's own order holds"
    )
    raise InputError(msg)


class _Hosted(VllmScheduler):  # type: ignore[misc, unused-ignore]
    """The common part of the scheduler classes."""

    synchronous = False

    def __init__(self, vllm_config: Any, *args: Any, **more: Any) -> None:
        """Create vLLM's scheduler, and host its block pool."""
        if vllm_config.scheduler_config.async_scheduling is self.synchronous:
            name, other = ("SyncScheduler", "Scheduler")[:: 1 if self.synchronous else -1]
            wanted = "asynchronously" if self.synchronous else "synchronously"
            msg = (
                f"kvcore_vllm.{name} cannot serve here: vLLM schedules {wanted}. "
                f"Start the server with --scheduler-cls kvcore_vllm.{other}"
            )
            raise InputError(msg)
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector_extra_config.get("lazy_offload"):
            _refuse(
                "its KV connector reads ahead in vLLM's order what will be evicted",
                "with lazy_offload=false in its kv_connector_extra_config",
            )
        super().__init__(vllm_config, *args, **more)
        host_blocks(self.kv_cache_manager, HostSettings.from_environment())

    def add_request(self, request: Any) -> None:
        """Add a request, or an update of one that streams its prompt."""
        known = request.request_id in self.requests
        super().add_request(request)
        if not known:
            self.kv_cache_manager.queued(request)

    def _preempt_request(self, request: Any, *args: Any, **more: Any) -> None:
        super()._preempt_request(request, *args, **more)
        self.kv_cache_manager.queued(request, front=True)

    def shutdown(self) -> None:
        """Stop, and complete the recording."""
        super().shutdown()
        recorder = self.kv_cache_manager.block_pool.recorder
        if recorder is not None:
            recorder.close()


class Scheduler(_Hosted, AsyncScheduler):  # type: ignore[misc, unused-ignore]
    """vLLM's asynchronous scheduler, its default, with blocks in the order of a policy."""


class SyncScheduler(_Hosted, VllmScheduler):  # type: ignore[misc, unused-ignore]
    """vLLM's synchronous scheduler (`--no-async-scheduling`), with blocks in that order."""

    synchronous = True
