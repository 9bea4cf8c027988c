"""The KV cache: a pool of blocks, sequences that hold them, and the tree of shared spans.

When blocks become free:

    a block of          becomes free                                       trace
    ------------------  -------------------------------------------------  ---------------
    a closed sequence   at `close`, if it is private and has no other      FREE close
                        owner; shared blocks stay cached
    rejected tokens     at `rollback`                                      FREE rollback
    a duplicate         at `commit`, when another sequence has committed   FREE duplicate
                        the same keys before
    a dropped range     at `commit`, if it is private (retention)          EVICT retention
    removed tokens      at `compact`, if it is private (retention)         COMPACT
    an expired span     when an `open` or `commit` matches its keys        EVICT expired
    an evicted span     never: the call that needs blocks gets them        EVICT capacity
                        (`open`, `extend`)
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from kvcore.cache.eviction import EvictionPolicy
from kvcore.cache.hints import priority_steps
from kvcore.cache.layout import BlockLayout
from kvcore.cache.pins import ClientPins
from kvcore.cache.pool import BlockPool, CountingPool, Ids
from kvcore.cache.prefix import PrefixIndex, PrefixMatch
from kvcore.cache.recorder import Growth, Recorder, Victim, check_admission
from kvcore.cache.residency import CacheStats, Residency
from kvcore.cache.retention import (
    RetentionPolicy,
    compact_blocks,
    drop_blocks,
    is_past_shared,
    new_holes,
    own_blocks,
)
from kvcore.cache.sequence import Sequence as CacheSequence
from kvcore.cache.tree import SpanTree
from kvcore.errors import InputError, OutOfBlocks, PolicyError
from kvcore.plugins import FAILURES, Plugin, describe, find_override, policy_error, resolve
from kvcore.request import Key, Request

if TYPE_CHECKING:
    from kvcore.cache.tiers import LowerTiers


class KVCache:
    """Allocates, shares, reuses and evicts the blocks of a paged KV cache.

    Token counts are increments everywhere. `now` is in nanoseconds and never decreases;
    None stands for the time of the previous call. Every call costs O(spans touched); block
    ids, where blocks have them, move by slices, in C.

    A refused call (`InputError`, `OutOfBlocks`) changes no block. A plugin that raises, or
    returns a value outside its contract, ends the use of the cache: that call raises
    `PolicyError`, and so does every later call, with the same message.

    Args:
        blocks: blocks in the pool.
        block_size: tokens in a block.
        eviction: the eviction policy: an instance, a class, or a name such as `lfu` or
            `lfu:half_life=300`; None stands for `lru`. An instance serves one cache.
        prefix: the index that looks up cached blocks, in the same forms; None: `radix`.
        retention: the policy that drops tokens of open sequences, in the same forms; None
            keeps all tokens.
        accounting: `tokens` or `keys`, the two accountings (docs/reference/counting.md).
        key_tokens: tokens that a block key of a request stands for; None: the first request
            decides.
        trace: the recorder of every decision; None records nothing.
        ids: whether blocks have ids that can be read; with a trace they always do. The
            decisions do not depend on it; without ids they cost less.
        recompute: seconds to compute n tokens after a context of c tokens, for policies
            that weigh the cost of an eviction. None: Llama-3.1-8B on an H100.

    Attributes:
        pool: the blocks.
        tree: the spans of cached blocks.
        prefix, eviction, retention: the plugins.
        geometry: the layout of prompts in blocks.
        sequences: the open sequences by id.
        now: the time of the last call, in ns.
        stats: counts of lookups and hits so far.
        tiers: the tiers below the pool, set by `Tiers(cache, ...)`; None without tiers.
        trace: the recorder, as given.
        on_copy: called as `on_copy(source, target)` before a sequence that writes into a
            shared block gets a block of its own, to copy the K/V. It and the next two are None
            until the owner of the K/V sets them. What it or `on_fork` raises passes as it is,
            and the call can be repeated: the sequences have not changed.
        on_fork: called as `on_fork(seq, child)` before the `child` of `seq` is open, to copy
            data kept beside a sequence.
        on_compact: called as `on_compact(seq, table, held)` after `seq` was compacted, to
            copy the K/V of the tokens that stay into its new blocks. `table` is its block
            table before, with the K/V of `held` tokens. Blocks of `table` get new K/V, so
            nothing can be undone: if it raises, that ends the use of the cache, as a plugin's
            error does.

    Raises:
        InputError: sizes that do not fit one another, or a policy already in use.
    """

    # As `ServedCache` says.
    grouped: ClassVar[bool] = False
    checkpoint: ClassVar[None] = None
    allocator: Any = None

    def __init__(
        self,
        blocks: int,
        block_size: int = 16,
        *,
        eviction: EvictionPolicy | type[EvictionPolicy] | str | None = None,
        prefix: PrefixIndex | type[PrefixIndex] | str | None = None,
        retention: RetentionPolicy | type[RetentionPolicy] | str | None = None,
        accounting: str = "tokens",
        key_tokens: int | None = None,
        trace: Recorder | None = None,
        ids: bool = False,
        recompute: Callable[[int, int], float] | None = None,
    ) -> None:
        self.geometry = BlockLayout(accounting, block_size, key_tokens, recompute)
        keeps_ids = trace is not None or ids
        self.pool: CountingPool = (BlockPool if keeps_ids else CountingPool)(blocks)
        self.eviction: EvictionPolicy = resolve("eviction", eviction, "lru")
        self.prefix: PrefixIndex = resolve("prefix", prefix, "radix")
        self.retention: RetentionPolicy | None = resolve("retention", retention)
        self.sequences: dict[int, CacheSequence] = {}
        self.now = 0
        self.stats = CacheStats()
        self.tiers: LowerTiers | None = None
        self.trace = trace
        self.on_copy: Callable[[int, int], None] | None = None
        self.on_fork: Callable[[CacheSequence, CacheSequence], None] | None = None
        self.on_compact: Callable[[CacheSequence, Ids, int], None] | None = None
        self._last_id = 0
        self._admissions = 0
        self._admitted: set[int | str] = set()
        plugins: list[Plugin] = [self.eviction, self.prefix]
        if self.retention is not None:
            plugins.append(self.retention)
        for plugin in plugins:  # all of them, before one is in use
            plugin.check_unused()
        try:
            self.eviction.attach(blocks, block_size)
        except FAILURES as error:
            raise policy_error(self.eviction, "attach", error) from error
        self.tree = SpanTree(self.pool, self.prefix, self.eviction, self.geometry, trace)
        self._droppable: Callable[[CacheSequence], Iterable[tuple[int, int]]] | None = None
        self._keeps: Callable[[CacheSequence], int | None] | None = None
        if self.retention is not None:
            self._droppable = find_override(self.retention, "droppable")
            self._keeps = find_override(self.retention, "keeps")
            self.geometry.shares_output = self.retention.reads_all
            if self.retention.reads_all and not self.forgets:
                # It changes nothing, so a call would be wasted: the cache is one without it.
                plugins.remove(self.retention)
                self.retention = None
        if trace is not None:
            trace.begin(
                count=accounting,
                block_size=block_size,
                key_tokens=self.geometry.key_tokens,
                blocks=blocks,
                plugins={plugin.kind: describe(plugin) for plugin in plugins},
            )
        for plugin in plugins:  # the trace may have been refused
            plugin.bind()

    # Reading.

    @property
    def pins(self) -> ClientPins | None:
        """The pins of clients; None before the first one."""
        return self.tree.pins

    @property
    def forgets(self) -> bool:
        """Whether a running sequence may hold fewer tokens than it has."""
        return self._droppable is not None or self._keeps is not None

    @property
    def unpinned_blocks(self) -> int:
        """Number of blocks that can be evicted."""
        return self.tree.unpinned_blocks

    @property
    def evicted_blocks(self) -> int:
        """Number of blocks that have left as victims or because they expired."""
        return self.tree.evicted_blocks + self.tree.expired_blocks

    @property
    def available_blocks(self) -> int:
        """Number of blocks that are free or can be evicted."""
        return self.pool.free_blocks + self.tree.unpinned_blocks

    def probe(self, request: Request, now: int | None = None, target: int | None = None) -> int:
        """Return the number of blocks of `request` that would hit. Changes no block.

        `target` is that of `open`.

        Raises:
            InputError: a key of the request stands for another number of tokens.
        """
        return self.match(request, self.now if now is None else now, target).blocks

    def match(self, request: Request, now: int, target: int | None = None) -> PrefixMatch:
        """Return the cached prefix of `request`, which would hit. Changes no block.

        `target` is that of `open`.
        """
        if self.tree.failure is not None:
            self._raise_failure()
        prompt = self.geometry.prompt(request, target)
        match = self.tree.match(prompt.keys, prompt.limit, now)
        longer = None if target is None else self._match_generated(request, match, now, target)
        return match if longer is None else longer[1]

    def _match_generated(
        self, request: Request, match: PrefixMatch, now: int, target: int
    ) -> tuple[list[Key], PrefixMatch] | None:
        """Return the keys and the match of a preempted request, generated blocks included.

        `match` is that of its prompt. Returns None if no generated block continues it.
        """
        size = self.geometry.block_size
        first, limit = request.prompt_tokens // size, (target - 1) // size
        if limit <= first or match.blocks != first or match.span.end != first:
            return None
        keys = self.geometry.generated_keys(request, first, limit)
        if keys[first // self.geometry.ratio] not in (match.span.children or ()):
            return None
        return keys, self.tree.match(keys, limit, now, match.span)

    def block_table(self, seq: CacheSequence) -> Ids:
        """Return the ids of the blocks of `seq`, first to last, without dropped blocks.

        O(blocks) in C.

        Raises:
            InputError: a closed sequence, or the cache only counts blocks.
        """
        self._begin(seq, self.now)
        if seq.private is None:
            msg = "this cache only counts blocks: make it with ids=True to read block tables"
            raise InputError(msg)
        return seq.table()

    def record_residency(self) -> Residency:
        """Start to record how long blocks stay in the pool, and return the statistics.

        Tiers below the pool begin to record too, each in statistics of its own.
        """
        self.tree.residency = Residency(self.pool.blocks)
        if self.tiers is not None:
            self.tiers.record_residency()
        return self.tree.residency

    def residency_by_tier(self) -> dict[str, Any] | None:
        """Return `Residency.as_dict()` of the pool and of each tier below, by their names.

        Returns None if nothing was recorded.
        """
        below = () if self.tiers is None else self.tiers.residencies()
        tiers = (each.by_tier() for each in (self.tree.residency, *below) if each is not None)
        return {name: value for tier in tiers if tier for name, value in tier.items()} or None

    def check_integrity(self) -> None:
        """Check every invariant. Costs O(spans + sequences), with ids O(blocks).

        Raises:
            AssertionError: an invariant does not hold; the message has the numbers.
            PolicyError: a plugin has failed, in the middle of a call.
        """
        from kvcore.cache.integrity import check_blocks, check_tree  # noqa: PLC0415 - for checks

        if self.tree.failure is not None:
            self._raise_failure()
        check_tree(self.tree)
        check_blocks(self.pool, self.tree, self.sequences.values())
        if self.tiers is not None:
            self.tiers.check_integrity()

    # From open to close.

    def announce(self, request: Request, now: int) -> None:
        """Write REQUEST to the trace: `request` has arrived, and will be opened or rejected.

        `open` writes the line if no call of this method did.

        Raises:
            InputError: a key of the request stands for another number of tokens.
        """
        if self.trace is not None:
            self.trace.describe_keys(request, self.geometry)
            self.trace.request(request, now)

    def open(  # noqa: C901, PLR0912 - one admission, from top to bottom
        self,
        request: Request,
        first_tokens: int | None = None,
        now: int | None = None,
        *,
        resumed: bool = False,
        target: int | None = None,
        reserve: int = 0,
    ) -> CacheSequence:
        """Admit `request`: pin the blocks it hits, and allocate the blocks it computes first.

        An admission happens as a whole or not at all.

        Args:
            request: the request.
            first_tokens: tokens to allocate after the hit; None: the rest of `target`.
            now: the time in ns; None: that of the previous call.
            resumed: whether a preempted request returns. Then its hit is no reuse, since the
                blocks may be its own.
            target: tokens to compute before the next token is generated: the prompt, and
                after a preemption the output so far too. None: the prompt.
            reserve: number of blocks that must stay free or evictable.

        Raises:
            InputError: a key of the request stands for another number of tokens, or
                `first_tokens` is below 0.
            OutOfBlocks: too few blocks are free or evictable; no block has changed.
            PolicyError: a plugin failed.
        """
        tree, trace, geometry = self.tree, self.trace, self.geometry
        if tree.failure is not None:
            self._raise_failure()
        if trace is not None:
            trace.describe_keys(request, geometry)
        # The prompt in blocks, the time, and the lines that come before any other.
        keys, tokens, blocks, cacheable, lookup, limit = geometry.lay_out(request, target)
        if type(now) is not int or now < self.now:
            now = self._at(now, request)
        self.now = now
        if tree.pins:
            tree.pins.end(now)
        if trace is not None:
            check_admission(request, self._admitted, resumed=resumed)
            trace.request(request, now)
        # The hit: of the prompt, or of a preempted request's own output too.
        size = geometry.block_size
        match = tree.find(keys, limit, now)
        if target is not None:
            longer = self._match_generated(request, PrefixMatch(*match), now, target)
            if longer is not None:
                keys, match = longer
                cacheable = limit = (target - 1) // size
        span, hit, unpinned, expired = match
        # The blocks to allocate beside it, and whether there are as many.
        length, prompt_blocks = tokens, blocks
        if first_tokens is not None:
            if first_tokens < 0:
                msg = f"open with the first {first_tokens} tokens after the hit: give 0 or more"
                raise InputError(msg)
            tokens = hit * size + first_tokens
            blocks = -(-tokens // size)
        elif target is not None and geometry.accounting == "tokens":
            tokens, blocks = target, -(-target // size)
        need = blocks - hit
        # Blocks that hit are about to be pinned, so they cannot be evicted. All other unpinned
        # blocks can: below an unpinned span nothing is pinned.
        kept = unpinned + reserve
        if need > self.pool.free_blocks + tree.unpinned_blocks - kept:
            # No open sequence will free blocks, so pins of clients end.
            if tree.pins and not self.sequences and tree.pins.make_way(blocks + reserve, now):
                return self.open(
                    request, first_tokens, now, resumed=resumed, target=target, reserve=reserve
                )
            raise OutOfBlocks(self._no_room(request, need, kept, blocks + reserve))
        # From here on only a plugin can fail.
        self._last_id += 1
        self._admissions += 1
        seq = CacheSequence(
            self._last_id, self._admissions, request, keys, cacheable, lookup, hit, tokens,
            hit * size, blocks, length if target is None else target, span,
        )  # fmt: skip
        if request.retention:
            seq.priorities = priority_steps(request, size)
        if request.hints.share is not None:
            seq.cacheable = min(cacheable, request.hints.share // size)
        tree.open(seq, match, need, now, hit < limit, resumed)
        self.sequences[seq.id] = seq
        self.stats.admitted(lookup, hit, length, hit * size, resumed)
        if trace is not None:
            self._admitted.add(request.id)
            trace.admission(
                now, seq, prompt_blocks, limit, expired=expired is not None, again=resumed
            )
        return seq

    def plan_ahead(self, request: Request, now: int) -> CacheSequence:
        """Return a sequence, which is not open, with the hit of `request`. Changes no block.

        For `open_ahead`.
        """
        size = self.geometry.block_size
        keys, tokens, _, cacheable, lookup, limit = self.geometry.lay_out(request)
        match = self.tree.match(keys, limit, now)
        hit, share = match.blocks, request.hints.share
        if share is not None:
            limit = min(limit, share // size)
        return CacheSequence(
            0, 0, request, keys, min(cacheable, limit), lookup, hit, hit * size, hit * size,
            limit, tokens, match.span,
        )  # fmt: skip

    def open_ahead(
        self, planned: CacheSequence, blocks: int, now: int, reserve: int
    ) -> CacheSequence | None:
        """Open the sequence of `plan_ahead`, into which blocks are loaded before it arrives.

        The sequence pins its hit, which counts as used and not as hit. It gets private blocks
        up to position `blocks`, or fewer, so that `reserve` blocks stay free or evictable.
        Returns None if it would get none: no sequence is open then.
        """
        tree, trace, request = self.tree, self.trace, planned.request
        now = self._at(now, request)
        match = tree.match(planned.keys, planned.cacheable, now)
        if match.expired is not None:
            tree.drop_expired(match.expired, match.expired.last_request, now)
            match = tree.match(planned.keys, planned.cacheable, now)
        hit = match.blocks
        blocks = min(blocks, hit + self.available_blocks - match.unpinned_blocks - reserve)
        if blocks <= hit:
            return None
        self._last_id += 1
        self._admissions += 1
        tokens = hit * self.geometry.block_size
        seq = CacheSequence(
            self._last_id, self._admissions, request, planned.keys, planned.cacheable,
            planned.lookup_blocks, hit, tokens, tokens, hit, planned.target, match.span,
        )  # fmt: skip
        tree.open(seq, match, 0, now, missed=False, resumed=True)
        self.sequences[seq.id] = seq
        if trace is not None:
            trace.describe_keys(request, self.geometry)
            keys = seq.keys[: -(-blocks // self.geometry.ratio)]
            span = seq.span.id if hit else None
            trace.prefetch(
                now, request=request.id, seq=seq.id, keys=keys, blocks=hit, span=span
            )
        self.extend(seq, (blocks - hit) * self.geometry.block_size, now)
        return seq

    def extend(self, seq: CacheSequence, tokens: int, now: int | None = None) -> None:
        """Allocate private blocks for `tokens` more tokens; evict blocks if too few are free.

        A partial last block that another sequence shares since a fork is copied first; if
        `on_copy` raises, `seq` is as before, and the blocks for it are free.

        Raises:
            InputError: a closed sequence, or fewer than 0 tokens.
            OutOfBlocks: too few blocks are free or evictable; no block has changed.
            PolicyError: a plugin failed.
        """
        now = self._begin(seq, now)
        if tokens < 0:
            msg = f"extend by {tokens} tokens: give 0 or more, or use rollback"
            raise InputError(msg)
        total = seq.tokens + tokens
        size = self.geometry.block_size
        blocks = -(-total // size)
        need = blocks - seq.blocks
        tail = self._shared_tail(seq) if tokens and seq.tokens % size else None
        need += tail is not None
        if need:
            if need > self.available_blocks and not self.make_room(need, now):
                raise OutOfBlocks(self._no_room(seq.request, need, 0, blocks - seq.freed))
            ids = self.tree.allocate(need, seq, now)
            if tail is not None and ids is not None:
                self._copy_tail(seq, tail, ids, now)
                ids = ids[1:]
            if ids and seq.private is not None:
                if self.trace is not None:
                    self.trace.alloc(now, seq=seq.id, first=seq.blocks, runs=ids)
                seq.private.extend(ids)
            seq.blocks = blocks
        seq.tokens = total

    def commit(self, seq: CacheSequence, tokens: int, now: int | None = None) -> None:
        """Count `tokens` more tokens as computed: full blocks with keys become shareable.

        Where another sequence has committed the same keys meanwhile, `seq` switches to
        those blocks and its duplicates are freed. Then the retention policy may drop ranges of
        `seq`, or compact it to fewer tokens; from then on no more of its blocks are shared.

        Raises:
            InputError: more tokens than are allocated.
            PolicyError: a plugin failed.
        """
        now = self._begin(seq, now)
        computed = seq.computed + tokens
        if tokens < 0 or computed > seq.tokens:
            seq.refuse_commit(tokens)
        seq.computed = computed
        upto = computed // self.geometry.block_size
        if upto > seq.cacheable:
            upto = seq.cacheable
        if upto > seq.span.end and not seq.holes:
            self.tree.commit(seq, upto, now)
        if self.tiers is not None:
            self.tiers.computed(seq, now)
        if self.retention is not None:
            self._retain(self.retention, seq, now)

    def keep_generated(self, seq: CacheSequence, tokens: int, now: int) -> None:
        """Cache the generated blocks of `seq` that its first `tokens` tokens fill.

        For output to which the workload gives no keys: only this request can hit the blocks,
        when it returns after a preemption. Called before `close`, or whenever a block is full.
        The blocks become a span of their own below the last full block of the prompt,
        which must be shared, since the prompt may end inside a key of the workload. Until it
        is computed and shared, nothing happens.
        """
        self.now = now
        request, size = seq.request, self.geometry.block_size
        first, upto = request.prompt_tokens // size, tokens // size
        stays_private = seq.holes or seq.compacted or seq.family is not None
        if stays_private or request.publishes or request.hints.share is not None:
            return
        if first <= seq.span.end < upto:
            if isinstance(seq.keys, list) and seq.cacheable > first:  # some have names already
                seq.keys += self.geometry.generated_names(request, len(seq.keys), upto)
            else:
                seq.keys = self.geometry.generated_keys(request, first, upto)
                seq.span.creator = None
            seq.cacheable = upto
            self.tree.commit(seq, upto, now)

    def publish(self, seq: CacheSequence, tokens: int, now: int) -> None:
        """Share the full blocks with keys that the next `tokens` tokens of `seq` will fill.

        Their blocks are allocated. The caller lets no sequence read them before `commit` counts
        the tokens as computed. If the next key is cached already, no block is shared before.

        Raises:
            PolicyError: a plugin failed.
        """
        span, geometry = seq.span, self.geometry
        upto = min((seq.computed + tokens) // geometry.block_size, seq.cacheable)
        if upto <= span.end or seq.holes:
            return
        if not span.children or seq.keys[span.end // geometry.ratio] not in span.children:
            self.now = now
            self.tree.commit(seq, upto, now)

    def compact(self, seq: CacheSequence, tokens: int, now: int | None = None) -> None:
        """Reduce `seq` to `tokens` of the tokens that it holds, in private blocks.

        It keeps as many of its private blocks as these tokens need, and gets new ones if they
        are too few; its other private blocks are freed, and its shared blocks are unpinned and
        stay cached. `on_compact` chooses the tokens and copies their K/V. From then on no
        more blocks of `seq` are shared.

        Raises:
            InputError: fewer than 1 token, or no fewer than it holds; or `seq` has not yet
                computed all blocks that it shares.
            OutOfBlocks: too few blocks for the copy; no block has changed.
            PolicyError: a plugin or `on_compact` failed.
        """
        now = self._begin(seq, now)
        held = seq.held
        if not 0 < tokens < held or not is_past_shared(seq):
            msg = (
                f"compact sequence {seq.id} to {tokens} tokens: it holds {held}; give 1 to "
                f"{held - 1}, once it has computed all {seq.span.end} blocks that it shares"
            )
            raise InputError(msg)
        # Blocks for the tokens that stay, and for those that are allocated ahead.
        ahead = seq.tokens - seq.computed
        blocks = -(-(tokens + ahead) // self.geometry.block_size)
        need = max(0, blocks - own_blocks(self.pool, seq))
        if need > self.available_blocks and not self.make_room(need, now):
            held = seq.blocks - seq.freed
            raise OutOfBlocks(self._no_room(seq.request, need, 0, held + need))
        before = None if seq.private is None else seq.table()
        new = self.tree.allocate(need, seq, now)
        freed = compact_blocks(self.pool, seq, blocks, new)
        self.stats.compactions += 1
        self.stats.compacted_tokens += held - tokens
        self.stats.compacted_blocks += seq.blocks - seq.dropped - blocks
        if self.trace is not None:
            self.trace.compact(
                now, seq=seq.id, tokens=tokens, held=held, runs=freed, new=new, ahead=ahead
            )
        # From here on it shares nothing, and the backend copies what stays.
        if seq.family is not None:
            seq.family.remove(seq)
            seq.family = None
        self.tree.close(seq.span, now)
        seq.go_private(self.tree.root, tokens, blocks)
        if self.on_compact is not None and before is not None:
            try:
                self.on_compact(seq, before, held)
            except BaseException as error:
                msg = (
                    f"on_compact() of the owner of the K/V raised {type(error).__name__}: "
                    f"{error}; sequence {seq.id} has lost K/V: make a new cache"
                )
                raise self.tree.end(PolicyError(msg), error) from error

    def close(
        self,
        seq: CacheSequence,
        now: int | None = None,
        length: int | None = None,
        *,
        preempted: bool = False,
    ) -> None:
        """Unpin the shared blocks of `seq`, which stay cached, and free its private blocks.

        Args:
            seq: the sequence.
            now: the time in ns; None: that of the previous call.
            length: the length of its text in tokens, as for `settle`; None: it is set.
            preempted: whether the request will return; then its hints take no effect yet.
        """
        now = self._begin(seq, now)
        if length is not None:
            self.settle(seq, length)
        if seq.family is not None:
            # Share the blocks that waited for a fork, which has left or copied them since.
            self.commit(seq, 0, now)
        if seq.family is not None:  # it has none if the commit has compacted it
            seq.family.remove(seq)
        seq.is_open = False
        if self.tiers is not None:
            self.tiers.computed(seq, now)
        del self.sequences[seq.id]
        if self.trace is not None:
            freed = self._free_last(seq, seq.private_blocks)
            holes = [(first, end - first) for first, end in seq.holes]
            self.trace.free(
                now, seq=seq.id, runs=freed, reason="close", forgotten=holes,
                compacted=seq.compacted,
            )  # fmt: skip
        elif private := seq.blocks - seq.span.end - seq.freed:
            if seq.private is None:
                self.pool.free_blocks += private  # what `CountingPool.free` does
            else:
                self._free_last(seq, private)
        # The shared blocks are unpinned; hints of a request that has ended take effect.
        request, tree = seq.request, self.tree
        hints = request.hints
        if hints.pin is not None and not preempted:
            tree.pin(seq, now + hints.pin, now)
        tree.close(seq.span, now, None if preempted else request)
        if hints.demote and not preempted:
            tree.demote(seq.span)

    def fork(self, seq: CacheSequence, now: int | None = None) -> CacheSequence:
        """Return a sequence that shares every block of `seq`, copy-on-write.

        Allocates nothing, and counts as no access and no hit. A cache that only counted
        blocks gives them ids from then on. If `on_fork` raises, there is no fork.

        Raises:
            InputError: tokens beyond the prompt are allocated and not committed, so both
                sequences would write different tokens into one block.
        """
        now = self._begin(seq, now)
        # A token is known if it is computed, of the prompt, or has a key.
        known = max(seq.request.prompt_tokens, seq.cacheable * self.geometry.block_size)
        if seq.computed < seq.tokens and known < seq.tokens + seq.compacted:
            msg = (
                f"fork of sequence {seq.id}: {seq.tokens - seq.computed} allocated tokens "
                "are not committed; commit them or roll them back first"
            )
            raise InputError(msg)
        pool = self._pool_with_ids()
        child = copy(seq)
        child.id, child.private = self._last_id + 1, array("i", seq.private or ())
        child.data = None
        if seq.request.publishes:
            child.keys = list(seq.keys)  # `append_keys` extends the list of one sequence
        if self.on_fork is not None:
            self.on_fork(seq, child)
        self._last_id = child.id
        pool.share(child.private)
        if seq.family is None:
            seq.family = [seq]
        seq.family.append(child)
        child.family = seq.family
        self.tree.fork(seq)
        self.sequences[child.id] = child
        if self.trace is not None:
            self.trace.fork(now, seq=seq.id, child=child.id)
        return child

    def rollback(self, seq: CacheSequence, tokens: int, now: int | None = None) -> None:
        """Drop the newest `tokens` tokens of `seq` (rejected drafts); free whole blocks.

        Raises:
            InputError: some of the tokens are in shared or dropped blocks, or a compaction has
                left them; says how many tokens stay.
        """
        now = self._begin(seq, now)
        left, size = seq.tokens - tokens, self.geometry.block_size
        blocks = max(seq.span.end, seq.holes[-1][1] if seq.holes else 0)
        fixed = max(blocks * size, seq.compacted_to)
        if tokens and not fixed <= left <= seq.tokens:
            msg = (
                f"rollback of {tokens} tokens of sequence {seq.id}: it has {seq.tokens}, of "
                f"which the first {fixed} are shared or forgotten, and stay"
            )
            raise InputError(msg)
        first = -(-left // size)
        freed = self._free_last(seq, seq.blocks - first)
        if first < seq.blocks and self.trace is not None:
            self.trace.free(now, seq=seq.id, runs=freed, reason="rollback", first=first)
        seq.tokens, seq.blocks = left, first
        seq.computed = min(seq.computed, left)

    def adopt(self, request: Request) -> None:
        """Record that another server admitted `request`: here it opens as a resumed one."""
        if self.trace is not None:
            self._admitted.add(request.id)

    def disown(self, request: Request) -> None:
        """Drop the record of `request`, which another server continues: it would be new."""
        self._admitted.discard(request.id)

    # Decoding in bulk: many sequences grow by a token a step, and no block id is read.

    @property
    def counts_only(self) -> bool:
        """Whether blocks have no ids, so that some may be allocated for several sequences.

        `settle` then sets the share of each sequence, at the latest before the next call for
        that sequence.
        """
        return not isinstance(self.pool, BlockPool)

    def reserve(self, seq: CacheSequence, now: int) -> None:
        """Allocate a block for `seq`; evict one if none is free. One is free or evictable.

        For a pool that only counts blocks (`counts_only`), where it costs less than `extend`.

        Raises:
            PolicyError: a plugin failed.
        """
        if self.tree.failure is not None:
            self._raise_failure()
        self.now = now
        self.tree.allocate(1, seq, now)

    def free_ahead(
        self, blocks: int, requester: int | str, now: int, times: Sequence[int] | None = None
    ) -> None:
        """Evict at least `blocks` blocks, which become free. As many are evictable.

        For the growth of many sequences over many steps, in a pool that only counts blocks,
        with a policy of fixed order and without a watcher of the tree. `times` has for each
        block the ns at which `reserve` would have evicted it, for the statistics of residency;
        None if there are none.

        Raises:
            PolicyError: a plugin failed.
        """
        if self.tree.failure is not None:
            self._raise_failure()
        self.now = now
        before = self.tree.evicted_blocks
        self.tree.evict(blocks, requester, now, times)
        self.pool.free_blocks += self.tree.evicted_blocks - before

    def grow(self, order: Sequence[tuple[int, CacheSequence]]) -> None:
        """Allocate a token more of each sequence of `order`, at its time (ns).

        Their blocks are full, and as many are free or evictable. For a cache with a trace,
        which gets one line where `extend` writes one or two for each.

        Raises:
            PolicyError: a plugin failed.
        """
        size, trace, leaves = self.geometry.block_size, self.trace, self.prefix.evicts_leaves
        if self.tree.failure is not None:
            self._raise_failure()
        assert trace is not None
        free = 0 if leaves else min(self.pool.free_blocks, len(order))
        evicting = order[free:]
        if evicting and (leaves or self.tree.watcher is not None):
            # More may leave than is needed, or lines of tiers stand between the evictions.
            if free:
                self.grow(order[:free])
            for now, seq in evicting:
                seq.tokens = seq.blocks * size
                self.extend(seq, 1, now)
            return
        victims: list[Victim] = []
        ids = self.pool.allocate(free)
        assert ids is not None
        if evicting:
            ids.extend(self._evict_in_order(evicting, victims))
        self.now = order[-1][0]
        grown: list[Growth] = []
        for (now, seq), block in zip(order, ids, strict=True):
            blocks = seq.blocks
            grown.append((now, seq.id, blocks, block))
            seq.private.append(block)  # type: ignore[union-attr]  # blocks have ids
            seq.tokens, seq.blocks = blocks * size + 1, blocks + 1
        if evicting:
            requesters = [seq.request.id for _, seq in evicting]
            by = self.eviction.name
            trace.grow(order[0][0], grown=grown, by=by, victims=victims, requesters=requesters)
        else:
            trace.grow(order[0][0], grown=grown)

    def _evict_in_order(
        self, order: Sequence[tuple[int, CacheSequence]], victims: list[Victim]
    ) -> Iterable[int]:
        """Return a block for each of `order`, a time (ns) and who needs it; store `victims`."""
        tree, (now, first) = self.tree, order[0]
        if tree.fixed_order:
            times = [now for now, _ in order]
            return tree.evict(len(times), first.request.id, now, times, victims) or ()
        ids = array("i")
        for now, seq in order:
            ids.extend(tree.evict(1, seq.request.id, now, None, victims) or ())
        return ids

    def settle(self, seq: CacheSequence, tokens: int) -> None:
        """Set the length of the text of `seq` to `tokens`. O(1).

        Its blocks are allocated or reserved (see `counts_only`).
        """
        tokens -= seq.compacted
        seq.tokens = tokens
        seq.blocks = -(-tokens // self.geometry.block_size)

    def append_keys(self, seq: CacheSequence, keys: Sequence[Key]) -> None:
        """Append the `keys` of generated tokens, now that these are known. O(keys).

        Raises:
            InputError: a closed sequence, the request has no keys for its output, or prompts
                alone are counted.
        """
        self._begin(seq, self.now)
        request, geometry = seq.request, self.geometry
        # The list belongs to the sequence (see BlockLayout), and its spans refer to it.
        if not (request.publishes and isinstance(seq.keys, list)) or seq.keys is request.keys:
            msg = (
                f"request {request.id} publishes no output: its blocks get no more keys; make "
                "it by text_request(..., publish=True), for a cache that counts tokens"
            )
            raise InputError(msg)
        more = geometry.block_keys(request, keys, len(request.output_keys) + seq.named)
        seq.named += len(keys)
        seq.keys.extend(more)
        if geometry.shares_output and request.hints.share is None and not seq.compacted:
            seq.cacheable += len(more) * geometry.ratio

    # Blocks.

    def make_room(self, blocks: int, now: int) -> bool:
        """End expired pins of clients; return True if `blocks` blocks are free or evictable.

        If one sequence alone is open, more pins end until there are as many. If several are
        open, one of them will free blocks at its end, so pins stay.
        """
        tree = self.tree
        if tree.pins:
            tree.pins.end(now)
            if len(self.sequences) == 1:
                return tree.pins.make_way(blocks, now)
        return blocks <= self.available_blocks

    def _free_last(self, seq: CacheSequence, count: int) -> Ids | None:
        """Free the last `count` blocks of `seq`, deepest first.

        Returns the ids of the freed blocks, which no other sequence owns; None in a pool that
        only counts.
        """
        private, last = seq.private, None
        if private is not None:
            keep = len(private) - count
            last = private[keep:][::-1]
            del private[keep:]
        return self.pool.release(last, count)

    def _retain(self, retention: RetentionPolicy, seq: CacheSequence, now: int) -> None:
        """Drop the blocks of `seq` that `retention` names, or compact `seq`."""
        if not is_past_shared(seq):
            return
        if self._droppable is not None and own_blocks(self.pool, seq) == seq.private_blocks:
            try:
                holes = new_holes(retention, seq, self._droppable(seq))
            except BaseException as error:
                raise self.tree.fail(retention, "droppable", error) from error
            if holes:
                self.stats.dropped_blocks += drop_blocks(
                    self.pool, seq, holes, self.trace, retention.name, now
                )
        # No later token attends to a text that is complete.
        if self._keeps is None or seq.is_whole:
            return
        try:
            kept = self._keeps(seq)
            # `index` accepts whole numbers of any kind, such as those of arrays.
            if kept is not None and (not hasattr(kept, "__index__") or index(kept) < 1):
                why = f"{kept!r} of {seq.held} tokens: give 1 or more, or None for all"
                raise self.tree.refuse(retention, "keeps()", why)  # noqa: TRY301 - passes
        except BaseException as error:
            raise self.tree.fail(retention, "keeps", error) from error
        if kept is not None and kept < seq.held:
            try:
                self.compact(seq, index(kept), now)
            except OutOfBlocks:
                # Tried again after the next commit: other sequences may have freed blocks.
                self.stats.deferred_compactions += 1

    def _shared_tail(self, seq: CacheSequence) -> int | None:
        """Return the id of the last block of `seq` if another sequence owns it too, or None."""
        if seq.private and isinstance(self.pool, BlockPool):
            tail = seq.private[-1]
            return tail if tail in self.pool.owners else None
        return None

    def _copy_tail(self, seq: CacheSequence, tail: int, new: Ids, now: int) -> None:
        """Replace `tail`, the last block of `seq`, by the first of the blocks `new`.

        If `on_copy` raises, all of them are free, to be allocated in the same order.
        """
        assert isinstance(self.pool, BlockPool)
        assert seq.private is not None
        if self.on_copy is not None:
            try:
                self.on_copy(tail, new[0])
            except BaseException:
                self.pool.free(new[::-1], len(new))
                raise
        self.pool.unshare(tail)
        seq.private[-1] = new[0]
        if self.trace is not None:
            self.trace.copy(now, seq=seq.id, block=seq.blocks - 1, source=tail, to=new[0])

    def _pool_with_ids(self) -> BlockPool:
        """Return the pool; a pool that only counts is replaced by one with ids first.

        O(blocks) the first time.
        """
        if isinstance(self.pool, BlockPool):
            return self.pool
        pool = BlockPool(self.pool.blocks)
        for span in self.tree.spans():
            span.ids = pool.allocate(span.blocks)
        for seq in self.sequences.values():
            seq.private = pool.allocate(seq.private_blocks)
        self.pool = self.tree.pool = pool
        return pool

    # Refusals.

    def _at(self, now: int | None, request: Request) -> int:
        """Return the time of a call in ns; None stands for that of the previous call."""
        if now is None:
            return self.now
        if type(now) is not int or now < self.now:
            msg = (
                f"a call for request {request.id} has the time {now!r}, the one before "
                f"{self.now}: time is whole nanoseconds and never decreases"
            )
            raise InputError(msg)
        self.now = now
        return now

    def _begin(self, seq: CacheSequence, now: int | None) -> int:
        """Check that `seq` is open in this cache, and return the time of the call."""
        if self.tree.failure is not None or self.sequences.get(seq.id) is not seq:
            self._refuse(seq)
        if type(now) is not int or now < self.now:
            return self._at(now, seq.request)
        self.now = now
        return now

    def _refuse(self, seq: CacheSequence) -> NoReturn:
        """Raise the error of a call: a plugin has failed, or `seq` is not open here."""
        if self.tree.failure is not None:
            self._raise_failure()
        why = "not of this cache" if seq.is_open else "closed"
        msg = f"sequence {seq.id} (request {seq.request.id}) is {why}"
        raise InputError(msg)

    def _raise_failure(self) -> NoReturn:
        """Raise the first error of a plugin again, after which no call works."""
        # A new exception, since raising one object again lengthens its traceback each time.
        raise PolicyError(str(self.tree.failure)) from self.tree.failure

    def _no_room(self, request: Request, need: int, kept: int, total: int) -> str:
        """Return why `request` cannot get `need` more blocks, to have `total`.

        `kept` unpinned blocks must stay.
        """
        pool, evictable = self.pool, self.tree.unpinned_blocks - kept
        never = f": {total} in all never fit, make the pool larger"
        return (
            f"request {request.id} needs {need} more blocks; {pool.free_blocks} of "
            f"{pool.blocks} are free and {max(evictable, 0)} can be evicted"
            f"{never if total > pool.blocks else ''}"
        )
