"""The KV cache: a pool of blocks, the sequences that hold them, the prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import attrs

from kvcore.cache.drops import forget
from kvcore.cache.eviction import EvictionPolicy
from kvcore.cache.integrity import check_blocks
from kvcore.cache.layout import Geometry, retention_steps
from kvcore.cache.pool import BlockPool, CountingPool, Ids
from kvcore.cache.prefix import Match, PrefixCache
from kvcore.cache.record import check_admission, record_close, record_header, record_open
from kvcore.cache.recorder import Recorder
from kvcore.cache.refusals import check_fork, check_rollback, refuse_commit, refuse_stranger
from kvcore.cache.residency import CacheStats
from kvcore.cache.retention import RetentionPolicy
from kvcore.cache.sequence import Sequence
from kvcore.cache.sharing import copy_tail, free_last, shared_tail, table, with_ids
from kvcore.cache.span import SpanGeometry
from kvcore.errors import InputError, OutOfBlocks
from kvcore.plugins import find_override, policy_error
from kvcore.plugins.manager import resolve
from kvcore.request import Request


class KVCache:
    """Decides which blocks exist, who holds them, what can be reused, and who dies.

    Token counts are increments everywhere. `now` is in nanoseconds and never decreases;
    None is the time of the call before. Every call costs O(spans touched); where blocks
    have ids these move by slices, in C.

    Args:
        blocks: blocks in the pool.
        block_size: tokens in a block.
        eviction: the eviction policy; None is the `lru` plugin. One instance, one cache.
        prefix: the prefix cache; None is the `radix` plugin.
        retention: what an open sequence may forget; None: nothing.
        count: `tokens` or `keys`, the two countings (see docs/reference/counting.md).
        key_tokens: tokens a request's block key stands for; None: `block_size`.
        trace: where every decision is written; None: nowhere.
        ids: whether blocks have ids that can be read; with a trace they always have.
            Decisions are the same either way; without ids they cost less.
        recompute: seconds to compute n tokens after a context of c tokens, for policies
            that weigh what an eviction costs. None: Llama-3-8B on an H100.
        copied: called as `copied(source, target)` when a writer gets a block of its own,
            to copy the K/V in it; an attribute too. None: there is none.

    Attributes:
        pool, prefix, eviction, retention, geometry: its parts.
        sequences: the open sequences by id.
        now: the time of the last call.
        stats: what has been looked up and hit so far.

    Raises:
        InputError: sizes that do not fit one another, or a policy already in use.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int = 16,
        *,
        eviction: EvictionPolicy | None = None,
        prefix: PrefixCache | None = None,
        retention: RetentionPolicy | None = None,
        count: str = "tokens",
        key_tokens: int | None = None,
        trace: Recorder | None = None,
        ids: bool = False,
        recompute: Callable[[int, int], float] | None = None,
        copied: Callable[[int, int], None] | None = None,
    ) -> None:
        self.geometry = geometry = Geometry(count, block_size, key_tokens)
        keeps_ids = trace is not None or ids
        self.pool: CountingPool = (BlockPool if keeps_ids else CountingPool)(blocks)
        self.eviction: EvictionPolicy = resolve("eviction", eviction, "lru")
        self.prefix: PrefixCache = resolve("prefix", prefix, "radix")
        self.retention: RetentionPolicy | None = resolve("retention", retention)
        self.sequences: dict[int, Sequence] = {}
        self.now = 0
        self.stats = CacheStats()
        self.trace = trace
        self.copied = copied
        self._serial = 0
        self._admissions = 0
        self._admitted: set[int | str] = set()
        plugins = [
            self.eviction,
            self.prefix,
            *([] if self.retention is None else [self.retention]),
        ]
        for plugin in plugins:
            plugin.bind()
        self.eviction.attach(blocks, block_size)
        if recompute is None:
            from kvcore.models.cost import default_prefill_cost  # noqa: PLC0415  (a long table)

            recompute = default_prefill_cost()
        span_geometry = SpanGeometry(block_size, geometry.ratio, recompute)
        self.prefix.attach(self.pool, self.eviction, span_geometry, trace)
        self._on_miss: Callable[[Request, int, int], None] | None = find_override(
            self.eviction, "on_miss"
        )
        if trace is not None:
            record_header(trace, geometry, blocks, plugins)

    @property
    def room(self) -> int:
        """Blocks that are free or can be evicted."""
        return self.pool.free + self.prefix.unpinned

    def probe(self, request: Request, now: int | None = None) -> int:
        """Return how many blocks of `request` would hit. Pure: nothing changes.

        Raises:
            InputError: the request's keys are not those the cache was made for.
        """
        keys, _, _, _, _, limit = self.geometry.prompt(request)
        return self.prefix.probe(keys, limit, self.now if now is None else now)[1]

    def open(
        self,
        request: Request,
        first_tokens: int | None = None,
        now: int | None = None,
        *,
        again: bool = False,
        spare: int = 0,
    ) -> Sequence:
        """Admit `request`: pin what it hits, allocate what it will compute first.

        All or nothing. `first_tokens` is how many tokens to allocate after the hit; None
        is the rest of the prompt. `again` says that a preempted request returns: what it
        finds are its own blocks, which is no reuse. `spare` blocks must stay free or
        evictable.

        Raises:
            InputError: as for `probe`, or fewer than 0 tokens.
            OutOfBlocks: there is no room; nothing has changed.
            PolicyError: the eviction policy failed; nothing has changed but evictions
                that were already made, which were valid.
        """
        keys, tokens, blocks, cacheable, lookup, limit = self.geometry.prompt(request)
        if type(now) is not int or now < self.now:
            now = self._at(now)
        self.now = now
        prefix, pool = self.prefix, self.pool
        trace = self.trace
        if trace is not None:
            check_admission(self._admitted, request, again=again)
            trace.request(request, now)
        match = prefix.probe(keys, limit, now)
        hit = match[1]
        size = self.geometry.block_size
        length, whole = tokens, blocks
        if first_tokens is not None:
            if first_tokens < 0:
                msg = f"open with the first {first_tokens} tokens after the hit: give 0 or more"
                raise InputError(msg)
            tokens = hit * size + first_tokens
            blocks = -(-tokens // size)
        need = blocks - hit
        if need > pool.free + prefix.unpinned - match[2] - spare:
            raise OutOfBlocks(self._no_room(request, need, match[2] + spare))
        seq = Sequence(
            self._serial + 1, self._admissions + 1, request, keys, cacheable, lookup, hit,
            tokens, hit * size, blocks, match[0],
        )  # fmt: skip
        if request.retention:
            seq.priorities = retention_steps(request, size)
        self._admit(seq, match, need, limit, now, again=again)
        self._serial += 1
        self._admissions += 1
        self.sequences[seq.id] = seq
        self.stats.admitted(lookup, hit, length, hit * size, again=again)
        if trace is not None:
            self._admitted.add(request.id)
            record_open(trace, seq, whole, limit, match, now, again=again)
        return seq

    def extend(self, seq: Sequence, tokens: int, now: int | None = None) -> None:
        """Allocate private blocks for `tokens` more tokens, evicting if need be.

        A partial last block that another sequence shares since a fork is copied first.

        Raises:
            OutOfBlocks: there is no room; nothing has changed.
            PolicyError: as for `open`.
        """
        if self.sequences.get(seq.id) is not seq:
            refuse_stranger(seq)
        now = self._at(now)
        if tokens < 0:
            msg = f"extend by {tokens} tokens: give 0 or more, or use rollback"
            raise InputError(msg)
        total = seq.tokens + tokens
        size = self.geometry.block_size
        blocks = -(-total // size)
        need = blocks - seq.blocks
        copied = shared_tail(self.pool, seq) if tokens and seq.tokens % size else None
        need += copied is not None
        if need:
            prefix, pool = self.prefix, self.pool
            if need > pool.free + prefix.unpinned:
                raise OutOfBlocks(self._no_room(seq.request, need, 0))
            ids = self._take(need, seq, now)
            if copied is not None:
                ids = copy_tail(self.pool, seq, copied, ids, self.trace, now, self.copied)
            if ids and seq.private is not None:
                if self.trace is not None:
                    self.trace.line("ALLOC", now, seq=seq.id, first=seq.blocks, runs=ids)
                seq.private.extend(ids)
            prefix.extend(seq, blocks - seq.blocks)
            seq.blocks = blocks
        seq.tokens = total

    def commit(self, seq: Sequence, tokens: int, now: int | None = None) -> None:
        """Say that `tokens` more tokens are computed: full keyed blocks become shareable.

        Where another sequence has committed the same keys meanwhile, `seq` switches to
        those blocks and its duplicates are freed. Then `seq` forgets what its retention
        policy says it may; once it has, it publishes no more.

        Raises:
            InputError: more than was allocated.
            PolicyError: a plugin failed.
        """
        if self.sequences.get(seq.id) is not seq:
            refuse_stranger(seq)
        if type(now) is not int or now < self.now:
            now = self._at(now)
        self.now = now
        computed = seq.computed + tokens
        if not seq.computed <= computed <= seq.tokens:
            refuse_commit(seq, tokens)
        seq.computed = computed
        upto = computed // self.geometry.block_size
        if upto > seq.cacheable:
            upto = seq.cacheable
        if upto > seq.span.end and not seq.gaps:
            self.prefix.commit(seq, upto, now)
        if self.retention is not None:
            forgotten = forget(self.pool, self.retention, seq, self.trace, now)
            self.stats.forgotten_blocks += forgotten

    def close(self, seq: Sequence, now: int | None = None) -> None:
        """Unpin what `seq` shares, which stays cached, and free the rest."""
        if self.sequences.get(seq.id) is not seq:
            refuse_stranger(seq)
        if type(now) is not int or now < self.now:
            now = self._at(now)
        self.now = now
        seq.is_open = False
        del self.sequences[seq.id]
        if seq.family is not None:
            seq.family.remove(seq)
        if self.trace is not None:
            freed = free_last(self.pool, seq, seq.private_blocks)
            record_close(self.trace, seq, freed, now)
        elif seq.blocks > seq.span.end:
            free_last(self.pool, seq, seq.private_blocks)
        self.prefix.close(seq, now)

    def fork(self, seq: Sequence, now: int | None = None) -> Sequence:
        """Return a sequence that shares every block of `seq`, copy-on-write.

        Allocates nothing: no access and no hit. A cache that only counted blocks gives
        them ids from here on.

        Raises:
            InputError: tokens beyond the prompt are allocated and not committed, so the
                two would compute different tokens in the same place.
        """
        if self.sequences.get(seq.id) is not seq:
            refuse_stranger(seq)
        check_fork(seq, self.geometry.block_size)
        now = self._at(now)
        pool = self.pool = with_ids(self.pool, self.prefix, self.sequences.values())
        self._serial += 1
        child = attrs.evolve(seq, id=self._serial, private=array("i", seq.private or ()))
        pool.share(child.private or array("i"))
        if seq.family is None:
            seq.family = [seq]
        seq.family.append(child)
        child.family = seq.family
        self.prefix.fork(seq, child)
        self.sequences[child.id] = child
        if self.trace is not None:
            self.trace.line("FORK", now, seq=seq.id, child=child.id)
        return child

    def rollback(self, seq: Sequence, tokens: int, now: int | None = None) -> None:
        """Drop the newest `tokens` tokens of `seq` (rejected drafts); free whole blocks.

        Raises:
            InputError: it would reach into blocks that are already shareable, or forgotten.
        """
        if self.sequences.get(seq.id) is not seq:
            refuse_stranger(seq)
        now = self._at(now)
        size = self.geometry.block_size
        check_rollback(seq, tokens, size)
        left = seq.tokens - tokens
        first = -(-left // size)
        freed = free_last(self.pool, seq, seq.blocks - first)
        if first < seq.blocks and self.trace is not None:
            self.trace.line("FREE", now, seq=seq.id, runs=freed, reason="rollback", first=first)
        seq.tokens, seq.blocks = left, first
        seq.computed = min(seq.computed, left)

    def block_table(self, seq: Sequence) -> Ids:
        """Return the ids of the blocks of `seq`, first to last, without what it has forgotten.

        O(blocks) in C.

        Raises:
            InputError: the cache only counts blocks.
        """
        if seq.private is None:
            msg = "this cache only counts blocks: make it with ids=True to read block tables"
            raise InputError(msg)
        return table(seq)

    def check_integrity(self) -> None:
        """Check every invariant. Costs O(spans + sequences), with ids O(blocks).

        Raises:
            AssertionError: one does not hold; the message has the numbers.
        """
        self.prefix.check_integrity()
        check_blocks(self.pool, self.prefix, self.sequences.values())

    def _at(self, now: int | None) -> int:
        """Return the time of a call: None is that of the call before."""
        if now is None:
            return self.now
        if type(now) is not int or now < self.now:
            msg = f"time is whole nanoseconds and never decreases: {now!r} after {self.now}"
            raise InputError(msg)
        self.now = now
        return now

    def _admit(
        self, seq: Sequence, match: Match, need: int, limit: int, now: int, *, again: bool
    ) -> None:
        """Pin, allocate and count the access, or take back what was done of it."""
        prefix = self.prefix
        prefix.open(seq, match, now)
        try:
            if self._on_miss is not None and not again:
                self._tell_missed(seq, limit, now)
            seq.private = self._take(need, seq, now)
            try:
                prefix.hit(seq, now, again=again)
            except Exception:
                self.pool.give(None if seq.private is None else seq.private[::-1], need)
                raise
        except Exception:
            prefix.undo(seq, match, now)
            raise

    def _tell_missed(self, seq: Sequence, limit: int, now: int) -> None:
        assert self._on_miss is not None
        if seq.hit_blocks < limit:
            try:
                self._on_miss(seq.request, seq.hit_blocks, now)
            except Exception as error:
                raise policy_error(self.eviction, "on_miss", error) from error

    def _take(self, need: int, seq: Sequence, now: int) -> Ids | None:
        pool = self.pool
        missing = need - pool.free
        if missing <= 0:
            return pool.take(need)
        victims = self.prefix.evict(missing, seq.request.id, now)
        ids = pool.take(pool.free)
        if ids is not None and victims is not None:
            ids.extend(victims)
        return ids

    def _no_room(self, request: Request, need: int, reserved: int) -> str:
        return (
            f"request {request.id} needs {need} more blocks; {self.pool.free} of "
            f"{self.pool.blocks} are free and {self.prefix.unpinned - reserved} can be evicted"
        )
