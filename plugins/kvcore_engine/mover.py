"""Tiers in a run on tensors: a thread per tier writes and reads blocks as the tiers decide.

    thread of the loop                           thread of a tier
    ------------------                           ----------------
    bytes out of the pool, or a read from the
    tier above, then the write       -- queue -> one call of the store after the other,
    a read, when a load begins       -- queue -> in the order in which they were queued
    bytes into the pool, when the    <-- done --
    load is due: the loop waits

The order makes slots safe: a read of a slot is queued before the slot gets another block, and a
read after that waits for the write.

Slots in memory of the host need no thread: the backend copies between the pool and the slots, a
write at once, a load when it is due. A load pins its slots until then. Blocks that go on to
another tier are copied out of a slot before it is free.

No call may take longer than `call_timeout`. The loop abandons a tier that exceeds it: all calls
queued there have failed, and it gets no further calls until the late one has returned and a
pause is over. So a tier that hangs costs time once, and never a wrong text.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from logging import getLogger
from secrets import token_bytes
from threading import Condition, Thread
from time import monotonic, perf_counter_ns
from typing import Any, Literal

import attrs

from kvcore.cache import Ids, KVCache
from kvcore.cache.sequence import Sequence as Holder
from kvcore.cache.tiers import StoredBlock, TierStore
from kvcore.engine.backend import Backend
from kvcore.engine.generator import Generator
from kvcore.errors import InputError
from kvcore.plugins import FAILURES, describe
from kvcore.plugins.base import find_override
from kvcore.request import Key
from kvcore_tiers.hierarchy import Tiers
from kvcore_tiers.level import Level, Part, path_ids

SCHEMA = 2
"""Version of the names and the layout of stored K/V: raised if old slots must not be read."""

CHUNK_BYTES = 4 << 20
"""Bytes of a call of a store, unless a block has more: the loop copies one while it runs."""

LONG_RUN = 1 << 20
"""Bytes of slots in a row that are worth a call of the backend. Shorter runs of a chunk are
copied by one call, through a buffer."""

QUEUED_BYTES = 64 << 20
"""Bytes of queued writes of a tier. The loop waits for the tier beyond that."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds in which a failed tier gets no new calls; doubled by each later failure in a row."""

MOST_FREE = 32
"""Buffers that are kept for reuse: new memory costs as much as a copy."""

_NEVER = float("inf")


@attrs.define(eq=False)
class _Task:
    """A call of a store.

    Attributes:
        what: the method.
        blocks: the blocks; `drop` reads their slots alone.
        buffer: memory for the bytes written or read, `[blocks or more, slot_bytes]`.
        source: the read from another tier that fills the buffer before.
        path: the path of the blocks that a write stores; None for a preempted sequence.
        done: whether the call has returned, or is not made any more.
        failed: whether the call failed, was too late, or was not made.
        right: number of first blocks that were written or read intact; set with `done`.
    """

    what: Literal["write", "read", "drop", "present", "close"]
    blocks: list[StoredBlock] = attrs.field(factory=list)
    buffer: memoryview = attrs.field(default=memoryview(b""), repr=False)
    source: _Task | None = None
    path: Holder | None = None
    done: bool = False
    failed: bool = False
    right: int = 0

    @property
    def known(self) -> int:
        """The number of leading blocks whose bytes are known."""
        return len(self.blocks) if self.source is None else self.source.right


class _Channel:
    """The store of a level, and the thread that alone calls it.

    Attributes:
        memory: its slots, if the loop itself reads and writes them: nothing is queued then.
        table: the block in each slot in use; empty for slots in memory.
        tails: by slot, the partial blocks of preempted sequences, as `swap_out` returned them.
        queued_blocks: blocks of writes that are not done.
        lost: writes that have failed, and are not yet reported to the directory.
    """

    def __init__(self, level: Level, store: TierStore, changed: Condition) -> None:
        self.level, self.store = level, store
        self.memory: memoryview | None = None
        self.table: dict[int, StoredBlock] = {}
        self.tails: dict[int, Any] = {}
        self.queued_blocks = 0
        self.lost: list[_Task] = []
        self.asks_present = type(store).present is not TierStore.present
        self._changed = changed
        self._queue: deque[_Task] = deque()
        self._running: _Task | None = None
        self._deadline = _NEVER
        self._stuck = False
        self._again = 0.0
        self._pause = FIRST_PAUSE
        self._bad: set[int] = set()
        self._is_served = self._is_closed = False

    @property
    def is_ready(self) -> bool:
        """Whether the channel accepts calls."""
        return not self._stuck and monotonic() >= self._again

    @property
    def deadline(self) -> float:
        """The time (`monotonic`) at which the running call is late."""
        return _NEVER if self._stuck else self._deadline

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or running, or nothing can run."""
        return self._stuck or not (self._queue or self._running)

    def submit(self, task: _Task) -> _Task:
        """Queue a task; while a call hangs, or after `close`, it has failed at once."""
        with self._changed:
            if task.what == "write":
                self.queued_blocks += len(task.blocks)
            if self._stuck or self._is_closed:
                self._end(task, failed=True)
            if not self._is_closed and (not self._stuck or task.what == "close"):
                self._queue.append(task)
                self._changed.notify_all()
            self._is_closed = self._is_closed or task.what == "close"
            if not self._is_served:
                self._is_served = True
                name = f"kvcore tier {self.level.name}"
                Thread(target=self._serve, name=name, daemon=True).start()
        return task

    def runs(self, slots: Ids) -> Iterator[tuple[int, memoryview]]:
        """Yield each run of slots in a row: the place of its first slot, and its memory."""
        assert self.memory is not None
        first = 0
        for index in range(1, len(slots) + 1):
            if index == len(slots) or slots[index] != slots[index - 1] + 1:
                yield first, self.memory[slots[first] : slots[first] + index - first]
                first = index

    def has_long_runs(self, slots: Ids) -> bool:
        """Return True if copying each run of slots by itself is fastest."""
        runs = 1 + sum(slot != before + 1 for before, slot in pairwise(slots))
        return runs == 1 or runs * LONG_RUN <= len(slots) * self.level.slot_bytes

    def abandon(self) -> None:
        """Fail the running call if it is late, and all calls queued behind it."""
        with self._changed:
            if self._running is None or monotonic() < self.deadline:
                return
            self._stuck = True
            self._fail(f"{self._running.what} takes too long")
            self._end(self._running, failed=True)
            self.flush()

    def flush(self) -> None:
        """Fail all queued calls."""
        with self._changed:
            while self._queue:
                self._end(self._queue.popleft(), failed=True)

    def _serve(self) -> None:
        """Make the calls, until the store is closed."""
        task = None
        while task is None or task.what != "close":
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                task = self._running = self._queue.popleft()
                source = task.source
                if source is not None:
                    self._changed.wait_for(partial(getattr, source, "done"))
                self._deadline = monotonic() + self.level.tier.call_timeout
                self._changed.notify_all()
            error: BaseException | None = None
            try:
                right = self._call(task)
            except FAILURES as raised:
                error = raised
            with self._changed:
                self._running, self._deadline = None, _NEVER
                if error is not None:
                    self._fail(f"{task.what}: {type(error).__name__}: {error}")
                elif not self._stuck:
                    self._pause = FIRST_PAUSE
                if not task.done:
                    task.right = 0 if error else right
                    self._end(task, failed=error is not None)
                self._stuck = False
                self._changed.notify_all()

    def _call(self, task: _Task) -> int:
        """Make a call; return the number of first blocks that are intact."""
        store, blocks = self.store, task.blocks
        if task.what == "close":
            store.close()
        elif task.what == "drop":
            store.drop([block.slot for block in blocks])
        elif task.what == "write":
            if task.known:
                store.write(blocks[: task.known], task.buffer[: task.known])
            return task.known
        else:
            # A slot whose write has failed may hold anything.
            wrong = (index for index, block in enumerate(blocks) if block.slot in self._bad)
            known = next(wrong, len(blocks))
            if not known:
                return 0
            wanted = blocks[:known]
            if task.what == "present":
                right = store.present(wanted)
            else:
                right = store.read(wanted, task.buffer[:known])
            if type(right) is not int or not 0 <= right <= known:
                msg = f"returned {right!r} for {known} blocks"
                raise ValueError(msg)
            return right
        return len(blocks)

    def _end(self, task: _Task, *, failed: bool) -> None:
        """Mark a task as done. Called with the lock held."""
        task.done, task.failed = True, failed
        if task.what == "write":
            self.queued_blocks -= len(task.blocks)
            slots = [block.slot for block in task.blocks]
            self._bad.difference_update(slots[: task.right])
            self._bad.update(slots[task.right :])
            if task.right < len(slots) and task.path is not None:
                self.lost.append(task)
        self._changed.notify_all()

    def _fail(self, why: str) -> None:
        """Count a failure, and pause the store. Called with the lock held.

        A call that was queued before a pause, and fails within it without having hung, tells
        nothing new: a store may have a pause of its own, in which all calls fail at once.
        """
        self.level.stats.errors += 1
        if not self._stuck and monotonic() < self._again:
            return
        text = "kvcore: tier %s is left alone for %g s: %s"
        getLogger("kvcore").warning(text, self.level.name, self._pause, why)
        self._again = monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


class TensorMover:
    """Moves the bytes of a run on tensors between its pool and its tiers.

    Moving a block costs two copies, one here and one in the store; or one, if the store's slots
    are in memory that the backend can use, and no level above has a queue.

    Attributes:
        spent_ns: time in which the loop has copied and waited here, since it was last set to 0.
        on_loaded: called with the blocks of the pool into which blocks of a tier were copied.
    """

    def __init__(self, tiers: Tiers, backend: Backend, identity: bytes) -> None:
        """Open the stores, and insert the blocks that they have kept into the directories.

        Raises:
            InputError: the backend gives no bytes, sizes differ, or a tier cannot be opened.
            StorageError: there is too little room for a tier.
        """
        self.spent_ns = 0
        self.on_loaded: Callable[[Ids], object] = lambda _blocks: None
        self._tiers, self._backend = tiers, backend
        self._changed = Condition()
        self._free: list[memoryview] = []
        self._writes: deque[_Task] = deque()
        self._ratio = tiers.cache.geometry.ratio
        self._channels: dict[Level, _Channel] = {}
        self._check()
        self._chunk = max(1, CHUNK_BYTES // backend.layout.bytes_per_block)
        # A backend with buffers of its own, such as pinned ones, copies fastest through them.
        direct = find_override(backend, "host_buffer") is None
        try:
            for level in tiers.levels:
                store, blocks = _opened(level, identity)
                channel = self._channels[level] = _Channel(level, store, self._changed)
                direct = direct and store.memory is not None
                if direct:
                    channel.memory = store.memory
                else:
                    channel.table.update(_recover(channel, blocks))
        except BaseException:
            self.close(whole=False)
            raise
        tiers.move_with(self)
        tiers.describe()

    def _check(self) -> None:
        """Raise InputError if the tiers do not fit the backend."""
        tiers, layout = self._tiers, self._backend.layout
        if find_override(self._backend, "read_blocks") is None:
            self._backend.read_blocks((), memoryview(b""))
        size = tiers.levels[0].slot_bytes
        msg = ""
        if size != layout.bytes_per_block:
            msg = (
                f"tiers with slots of {size} bytes for blocks of {layout.bytes_per_block}: "
                f"make them as Tiers(cache, tiers, {layout.bytes_per_block}, ids=True)"
            )
        elif not tiers.keeps_ids:
            msg = "run with tiers that only count slots: make them with Tiers(..., ids=True)"
        if msg:
            raise InputError(msg)

    def is_ready(self, level: Level) -> bool:
        """Return False while the store of `level` is paused, since it has failed."""
        self._abandon_late()
        return self._channels[level].is_ready

    def store(self, level: Level, source: Level | None, ids: Ids, holder: Holder) -> None:
        """Copy blocks of the pool, or of `source`, and queue their write."""
        began = perf_counter_ns()
        channel, slots = self._channels[level], holder.private
        assert slots is not None
        above = None if source is None else self._channels[source]
        if channel.memory is not None:
            self._put(channel, slots, above, ids)
        else:
            blocks = self._name(channel, holder, holder.hit_blocks, slots)
            for first in range(0, len(blocks), self._chunk):
                part = blocks[first : first + self._chunk]
                moved = ids[first : first + self._chunk]
                read = None
                buffer = self._room(channel, len(part))
                if above is None or above.memory is not None:
                    self._copy(above, moved, buffer[: len(part)])
                else:
                    named = [above.table[slot] for slot in moved]
                    read = above.submit(_Task("read", named, buffer))
                self._write(channel, _Task("write", part, buffer, read, holder))
        self.spent_ns += perf_counter_ns() - began

    def _put(self, channel: _Channel, slots: Ids, above: _Channel | None, ids: Ids) -> None:
        """Copy blocks of the pool (None), or slots of `above`, into slots in memory."""
        if above is not None or channel.has_long_runs(slots):
            for index, run in channel.runs(slots):
                self._copy(above, ids[index : index + len(run)], run)
            return
        size, buffer = channel.level.slot_bytes, self._buffer()
        for first in range(0, len(slots), self._chunk):
            part = slots[first : first + self._chunk]
            self._copy(None, ids[first : first + len(part)], buffer[: len(part)])
            rows = buffer.cast("B")
            for index, run in channel.runs(part):
                run.cast("B")[:] = rows[index * size : (index + len(run)) * size]
        self._free.append(buffer)

    def _take(self, channel: _Channel, slots: Ids, ids: Ids) -> None:
        """Copy slots in memory into the blocks `ids` of the pool."""
        if channel.has_long_runs(slots):
            for index, run in channel.runs(slots):
                self._backend.write_blocks(ids[index : index + len(run)], run)
            return
        buffer = self._buffer()
        for first in range(0, len(slots), self._chunk):
            part = slots[first : first + self._chunk]
            self._copy(channel, part, buffer[: len(part)])
            self._backend.write_blocks(ids[first : first + len(part)], buffer[: len(part)])
        self._free.append(buffer)

    def _copy(self, above: _Channel | None, ids: Ids, into: memoryview) -> None:
        """Copy blocks of the pool (None), or slots in memory, into memory of the host."""
        if above is None:
            self._backend.read_blocks(ids, into)
            return
        rows, offset = into.cast("B"), 0
        for _, run in above.runs(ids):
            rows[offset : offset + run.nbytes] = run.cast("B")
            offset += run.nbytes

    def park(self, level: Level, ids: Ids, holder: Holder) -> None:
        """Copy the private blocks of a preempted sequence, and queue their write.

        The last one, if it is not full, stays here as `swap_out` returns it: a codec may not
        have coded it yet, so that it has no bytes to write.
        """
        began = perf_counter_ns()
        channel, slots = self._channels[level], holder.private
        assert slots is not None
        full = len(ids)
        if holder.tokens % self._backend.layout.block_size:
            full -= 1
            channel.tails[slots[full]] = self._backend.swap_out(ids[full:])
        if channel.memory is not None:
            self._put(channel, slots[:full], None, ids[:full])
        else:
            first = holder.blocks - len(ids)
            blocks = [
                StoredBlock(slot, first + index, None, token_bytes(16), token_bytes(16))
                for index, slot in enumerate(slots[:full])
            ]
            channel.table.update((block.slot, block) for block in blocks)
            for index in range(0, full, self._chunk):
                part = blocks[index : index + self._chunk]
                buffer = self._room(channel, len(part))
                self._copy(None, ids[index : index + len(part)], buffer[: len(part)])
                self._write(channel, _Task("write", part, buffer))
        self.spent_ns += perf_counter_ns() - began

    def load(self, part: Part) -> None:
        """Queue the reads of a load; slots in memory need none."""
        channel, slots = self._channels[part.level], part.slots
        part.data = []
        if channel.memory is not None:
            return
        assert slots is not None
        if slots and slots[-1] in channel.tails:
            slots = slots[:-1]
        blocks = [channel.table[slot] for slot in slots]
        for first in range(0, len(blocks), self._chunk):
            chunk = blocks[first : first + self._chunk]
            part.data.append(channel.submit(_Task("read", chunk, self._buffer())))

    def finish(self, part: Part, ids: Ids) -> int:
        """Wait for the reads of a load, and copy intact blocks into the blocks `ids`."""
        began = perf_counter_ns()
        channel, slots = self._channels[part.level], part.slots
        assert slots is not None
        right = 0
        if channel.memory is not None:
            right = len(ids) - any(slot in channel.tails for slot in slots[-1:])
            self._take(channel, slots[:right], ids)
        # All at once: threads that take turns with the loop spend more time on the lock.
        self._wait(lambda: all(task.done for task in part.data))
        for task in part.data:
            if task.right:
                into = ids[right : right + task.right]
                self._backend.write_blocks(into, task.buffer[: task.right])
            right += task.right
            if task.failed:
                part.reason = "failed"
            self._recycle(task)
            if task.right < len(task.blocks):
                break
        else:
            if right < len(ids):
                self._backend.swap_in(channel.tails[slots[-1]], ids[right:])
                right += 1
        self.on_loaded(ids[:right])
        self.spent_ns += perf_counter_ns() - began
        return right

    def dropped(self, level: Level, slots: Ids) -> None:
        """Called when slots are freed: their blocks are dropped from the store."""
        channel = self._channels[level]
        blocks = [channel.table.pop(slot) for slot in slots if slot in channel.table]
        for slot in slots:
            channel.tails.pop(slot, None)
        if blocks:
            channel.submit(_Task("drop", blocks))

    def present(self, level: Level, slots: Ids) -> int:
        """Return how many of the first `slots` still have their blocks.

        Calls only stores that drop blocks by themselves, and waits for the answer.
        """
        channel = self._channels[level]
        if channel.memory is not None or not channel.asks_present:
            return len(slots)
        began = perf_counter_ns()
        task = channel.submit(_Task("present", [channel.table[slot] for slot in slots]))
        self._wait(lambda: task.done)
        self.spent_ns += perf_counter_ns() - began
        return task.right

    def lost(self) -> Iterator[tuple[Level, Holder, int]]:
        """Yield each failed write once: its level and path, and its first lost position."""
        for channel in self._channels.values():
            while channel.lost:
                task = channel.lost.pop()
                if task.path is not None:
                    yield channel.level, task.path, task.blocks[0].position + task.right

    def close(self, *, whole: bool) -> None:
        """Close the stores; if `whole`, after all queued calls, and drop lost blocks.

        A second call finds them closed, and waits for nothing. The threads end, except one
        that waits for a store that hangs.
        """
        channels = [*self._channels.values()]
        if whole:
            self._wait(lambda: all(channel.is_idle for channel in channels))
        for channel in channels:
            channel.flush()
            channel.memory = None
        tasks = [channel.submit(_Task("close")) for channel in channels]
        self._wait(lambda: all(task.done for task in tasks))
        if whole:
            self._tiers.drop_lost(self._tiers.cache.now)

    def _name(
        self, channel: _Channel, holder: Holder, first: int, slots: Ids
    ) -> list[StoredBlock]:
        """Name the blocks of a path from `first` on, which go into `slots`. O(blocks)."""
        above = path_ids(holder.span, first - 1, first) if first else None
        parent = channel.table[above[0]].chain if above else b""
        blocks = []
        for position, slot in enumerate(slots, first):
            key = holder.keys[position // self._ratio]
            chain = chained(parent, position, key)
            block = channel.table[slot] = StoredBlock(slot, position, key, chain, parent)
            blocks.append(block)
            parent = chain
        return blocks

    def _room(self, channel: _Channel, blocks: int) -> memoryview:
        """Return a buffer once a tier has written enough of its queue."""
        limit = max(QUEUED_BYTES // channel.level.slot_bytes - blocks, 0)
        if channel.queued_blocks > limit:
            self._wait(lambda: channel.is_idle or channel.queued_blocks <= limit)
        while self._writes and self._writes[0].done:
            task = self._writes.popleft()
            self._recycle(task)
        return self._buffer()

    def _write(self, channel: _Channel, task: _Task) -> None:
        self._writes.append(channel.submit(task))

    def _recycle(self, task: _Task) -> None:
        """Keep the buffer of a task that is done, unless a call may still use it."""
        failed = task.failed or (task.source is not None and task.source.failed)
        if not failed and len(self._free) < MOST_FREE:
            self._free.append(task.buffer)

    def _buffer(self) -> memoryview:
        """Return memory for a chunk."""
        return self._free.pop() if self._free else self._backend.host_buffer(self._chunk)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait until `until()` is true; abandon tiers that take too long meanwhile."""
        with self._changed:
            while not until():
                late = self._abandon_late()
                if not until():
                    self._changed.wait(None if late == _NEVER else max(late - monotonic(), 0))

    def _abandon_late(self) -> float:
        """Abandon tiers whose calls are late; return the next deadline."""
        now = monotonic()
        for channel in self._channels.values():
            if channel.deadline <= now:
                channel.abandon()
        return min((channel.deadline for channel in self._channels.values()), default=_NEVER)


def chained(parent: bytes, position: int, key: Key) -> bytes:
    """Return 16 bytes that identify a block and, by `parent`, all blocks before it."""
    # `repr` keeps the integer 1 and the text "1" apart.
    text = position.to_bytes(8, "little") + repr(key).encode()
    return blake2b(parent + text, digest_size=16).digest()


def identity(
    cache: KVCache, generator: Generator, backend: Backend, seed: int, *, texts: bool
) -> bytes:
    """Return 16 bytes that identify the K/V: blocks of equal identity are interchangeable.

    They depend on generator, backend, layout, seed and retention policy, and on the relation of
    keys and tokens (`texts`: keys are hashes of tokens; else tokens are derived from keys).
    """
    layout = attrs.asdict(backend.layout, recurse=False, filter=lambda a, _: a.name != "blocks")
    parts = [
        SCHEMA,
        generator.identity(),
        sorted((name, str(value)) for name, value in layout.items()),
        backend.name,
        cache.geometry.key_tokens,
        None if cache.retention is None else describe(cache.retention),
        generator.vocabulary,
        seed,
        texts,
    ]
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def _opened(level: Level, identity: bytes) -> tuple[TierStore, list[StoredBlock]]:
    """Open the store of a tier; return it with the blocks that an earlier run has left in it.

    Raises:
        InputError: it cannot be opened, or does not answer for longer than a call may take.
        StorageError: there is too little room for it.
    """
    tier, pool = level.tier, level.pool
    blocks: list[StoredBlock] = []
    opened: list[TierStore] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            opened.append(tier.open(pool.blocks, level.slot_bytes, identity))
            for block in opened[0].recover():
                if block.slot < pool.blocks and block.key is not None:
                    blocks.append(block)  # noqa: PERF401 - it is looked at meanwhile
        except BaseException as error:  # noqa: BLE001 - it is raised again, or reported
            failed.append(error)

    thread = Thread(target=work, name=f"kvcore-open-{level.name}", daemon=True)
    thread.start()
    seen = -1
    while thread.is_alive() and seen < len(blocks):
        seen = len(blocks)
        thread.join(tier.call_timeout)
    if thread.is_alive():
        msg = (
            f"tier {level.name!r} has not answered for {tier.call_timeout:g} s while it was "
            "opened: see that it is there, give it more time with call_timeout, or leave it out"
        )
        raise InputError(msg)
    if failed and not (opened and isinstance(failed[0], FAILURES)):
        raise failed[0]
    if failed:
        level.stats.errors += 1
        text = "kvcore: tier %s: what it holds cannot be found: %s"
        getLogger("kvcore").warning(text, level.name, failed[0])
        blocks.clear()
    return opened[0], blocks


def _recover(channel: _Channel, blocks: list[StoredBlock]) -> dict[int, StoredBlock]:
    """Insert `blocks`, found in the store of a channel, into the directory of its level.

    A block is dropped unless its name is right, and all blocks before it are there. Later paths
    count as used later. O(blocks x paths that share them).
    """
    level = channel.level
    pool, ratio = level.pool, level.tree.geometry.ratio
    right: dict[bytes, StoredBlock] = {}
    for block in sorted(blocks, key=lambda block: block.position):
        above = right.get(block.parent)
        follows = above.position + 1 if above else 0 if block.parent == b"" else -1
        named = chained(block.parent, block.position, block.key) == block.chain
        if named and follows == block.position:
            right.setdefault(block.chain, block)
    wrong = [block for block in blocks if right.get(block.chain) is not block]
    if wrong:
        channel.submit(_Task("drop", wrong))
    table = {block.slot: block for block in right.values()}
    if table:
        taken = pool.allocate(max(table) + 1)
        assert taken is not None
        free = array("i", [slot for slot in reversed(taken) if slot not in table])
        pool.free(free, len(free))
        parents = {block.parent for block in right.values()}
        watcher, level.tree.watcher = level.tree.watcher, None
        for last in blocks:
            if last.chain in parents or right.get(last.chain) is not last:
                continue
            path = [last]
            while path[-1].parent:
                path.append(right[path[-1].parent])
            path.reverse()
            keys = [block.key for block in path[::ratio]]
            level.restore(keys, array("i", [block.slot for block in path]))
        level.tree.watcher = watcher
        level.stats.recovered = len(table)
    return table
