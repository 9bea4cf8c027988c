"""The check of one server's trace, against the state that the lines before each one make.

Three independent accounts of a cache, each kept from the lines alone: the order in which a
pool hands out blocks (`AllocationOrder`), the life cycles of requests (`Lifecycles`), and the
spans, tables and pins of a `CacheState`. Readers that trust a whole file, such as
`kvcore explain`, need only the last.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container
from typing import Any

from kvcore.cache.pool import BlockPool, Ids
from kvcore.trace import events
from kvcore.trace.events import CLUSTER_EVENTS, POOL_EVENTS, methods_by_event, violated
from kvcore.trace.fields import encode_runs
from kvcore_replay.check.base import CacheChecker, expires
from kvcore_replay.check.pool import AllocationOrder, CachedKeys
from kvcore_replay.check.tiers import TierChecker
from kvcore_replay.state.cache import APPLIED, TIERED, CacheState, TracedSequence, TracedSpan
from kvcore_replay.state.layout import TracedPrompt

# Events between the first victim of a call and the lines that take its block.
ADMISSION = frozenset({"EVICT", "SPLIT", "HIT", "MISS", "ALLOC", "COPY", "COMPACT"})

# Events between a commit and the pins of the forked siblings that share its blocks.
SHARING = frozenset({"COMMIT", "SPLIT", "FREE"})


class TraceChecker(CacheChecker[CacheState]):
    """Checks each event against the state before it, then applies it.

    Of the code of the caches it uses the pool alone. The cached blocks are counted by key, and
    the hit of a prompt is found by bisection, since no block is cached without those before it.
    """

    def __init__(self, header: events.Header, state: CacheState | None = None) -> None:
        """Start with the empty cache that HEADER gives; or with its `state`.

        Raises:
            ValueError: the sizes do not fit one another.
        """
        super().__init__(CacheState(header) if state is None else state)
        plugins = header.plugins
        self._retention = plugins["retention"].name if "retention" in plugins else None
        self._blocks, self._ratio = header.blocks, self.state.layout.ratio
        prefix = plugins.get("prefix")
        leaves = prefix is not None and prefix.options.get("evict") == "leaf"
        # An engine evicts when it likes, and may hit less than is cached.
        self._of_engine = bool(header.engine)
        self._order = AllocationOrder(header.blocks, leaves=leaves)
        self._cached_keys = CachedKeys(self._ratio)
        self._last_span = 0
        # Pools beside that of full attention, which may evict in place of the policy.
        self._evicting_pools: Container[str] = ()
        # The request whose call dropped expired spans last: its MISS may name that reason.
        self._expired_for: int | str | None = None
        # The least and the most blocks of a request that may hit when it returns: those that it
        # had computed. A run without a clock does not record which of them it gave up.
        self._returning: dict[int | str, tuple[int, int]] = {}
        # Blocks of a COMMIT `same` that the next line must free.
        self._duplicates: Ids = array("i")
        # Owners, besides the one that committed them, of blocks that are cached by now: each
        # must pin them by a COMMIT `shared` before anything else happens.
        self._unpinned = 0
        # Event, sequence and reason that the next line must have; and this one.
        self._next: tuple[str, int, str | None] | None = None
        self._due: tuple[str, int, str | None] | None = None
        self._checks: dict[str, Callable[[Any], object]] = {
            **methods_by_event(self, *APPLIED, "END"),
            **dict.fromkeys(CLUSTER_EVENTS, lambda _: violated("HEADER has no replicas")),
            **dict.fromkeys(POOL_EVENTS, lambda _: violated("HEADER has no pools of layers")),
        }
        tiers, accounts = self.state.tiers, (self.state, self._cached_keys, self.lifecycles)
        self._tiers = None if tiers is None else TierChecker(tiers, *accounts)

    @property
    def pool(self) -> BlockPool:
        """The pool, with its free blocks in order and the owners of others."""
        return self._order.pool

    def apply(self, event: events.Event) -> None:
        """Check the next event after HEADER, and apply it. O(spans touched), blocks in C.

        Raises:
            ViolationError: the event contradicts what came before.
        """
        name, state = event.event, self.state
        due = self._due = self._next
        if due is not None and due[:2] != (name, getattr(event, "seq", None)):
            self._refuse_early(name)
        if self._unpinned and name not in SHARING:
            self._refuse_unpinned()
        begins = event.t != self._now
        if begins:
            if due is not None or self._unpinned or self._evicting is not None:
                violated(f"it is of one call with the line before, which is at {self._now} ns")
            self._now = event.t
            self._order.settle()
        if self._tiers is not None and self._tiers.check(event, begins=begins):
            if name.startswith("LOAD") and self._evicting is not None:
                self._refuse_victims()
            state.apply(event)
            return
        if name not in ADMISSION:
            self._expired_for = None
            # A call that fails, as its policy does, is the last one of a trace.
            if self._evicting is not None and name != "END":
                self._refuse_victims()
            self._order.settle()
        self._next = None
        self._checks.get(name, self._lifecycle)(event)
        state.apply(event)
        free = self._order.free
        total = free + state.cached + state.private
        if total != self._blocks:
            violated(
                f"{free} free + {state.cached} cached + {state.private} private blocks are "
                f"{total}; the pool has {state.header.blocks}"
            )

    def cached_tokens(self, request: events.Request) -> int:
        """Return the number of tokens of a prompt that would hit now. O(log keys)."""
        prompt, layout = self.state.layout.prompt(request), self.state.layout
        return min(self._cached_keys.match(prompt.keys), prompt.limit) * layout.block_size

    def _request(self, event: events.Request) -> None:
        known = self.state.requests.get(event.id)
        if known is not None:
            if self._tiers is None or not self.lifecycles.is_announced(event.id):
                violated(f"request {event.id!r} has a REQUEST line already")
            self._tiers.arrive(event, known)
        self.lifecycles.arrive(event.id, self._caps.output(event))

    def _prefetch(self, event: events.Prefetch) -> None:
        if self._tiers is None:
            violated("HEADER has no tiers")
        if event.request in self.state.requests:
            violated(f"request {event.request!r} is known already")
        cached = self._cached_keys.match(event.keys)
        if event.blocks != cached or cached >= len(event.keys) * self._ratio:
            violated(f"{cached} blocks are cached of {len(event.keys)} keys")
        if bool(event.blocks) is not isinstance(event.span, int):
            violated(f"a span is what holds {event.blocks} blocks that are cached")
        self.lifecycles.announce(event.request)
        self._must_open(event.seq)
        if event.blocks:
            span, last = self.state.span(event.span), (event.blocks - 1) // self._ratio  # type: ignore[arg-type]
            if span.end != event.blocks or span.keys[last] != event.keys[last]:
                violated(f"span {span.id} is not what these keys have up to {event.blocks}")

    def _hit(self, event: events.Hit) -> None:
        prompt = self._admit(event, event.blocks)
        self._must_hold(event.seq, prompt, self.state.span(event.span), event.blocks)
        if event.blocks < prompt.blocks:
            self._next = ("MISS", event.seq, None)

    def _miss(self, event: events.Miss) -> None:
        if self._due is None:
            prompt, hit, resumed = self._admit(event, 0), 0, bool(event.again)
        else:
            seq = self.state.sequence(event.seq)
            prompt, hit, resumed = seq.prompt, seq.hit, seq.resumed
        if (event.request, event.block, bool(event.again)) != (prompt.id, hit, resumed):
            violated(f"sequence {event.seq} is of request {prompt.id!r} and hit {hit} blocks")
        # What expired may have been dropped by an earlier call, which then failed.
        absent = ["expired", "absent"] if self._expired_for == prompt.id else ["absent"]
        if hit >= self._limits(prompt, resumed=resumed)[0]:
            # A prompt of less than a block has keys once it has generated the rest of one.
            short = prompt.tokens <= self.state.layout.block_size and bool(prompt.keys)
            unkeyed = prompt.unkeyed and not (resumed and short)
            reasons = ["no keys" if unkeyed else "partial"]
            if (resumed or self._of_engine) and (hit < prompt.cacheable or prompt.generated):
                reasons += absent
        else:
            reasons = absent
            if resumed and prompt.generated:
                reasons += ["partial", "no keys"]
        if event.why not in reasons:
            violated(f"block {hit} missed as {event.why!r}; it is {reasons[0]!r}")

    def _split(self, event: events.Split) -> None:
        self._must_be_new(event.upper)

    def _alloc(self, event: events.Alloc) -> None:
        seq, ids = self.state.sequence(event.seq), self.state.ids(event.runs)
        if event.first != seq.blocks:
            violated(f"sequence {seq.id} has {seq.blocks} blocks: {event.first} is not next")
        self.lifecycles.grow(seq.prompt.id, seq.id)
        self._take(seq, ids)

    def _take(self, seq: TracedSequence, ids: Ids, *, copy: bool = False) -> None:
        """Check that `seq` gets these blocks, and that victims left for its request alone."""
        if self._evicting not in (None, seq.prompt.id):
            self._refuse_victims()
        self._order.take(ids, seq.prompt.id, copy=copy)
        if not self._order.owes:
            self._evicting = None

    def _copy(self, event: events.Copy) -> None:
        seq, source = self.state.sequence(event.seq), event.source
        if not seq.private or (event.block, source) != (seq.blocks - 1, seq.private[-1]):
            violated(f"block {source} is not the private tail of sequence {seq.id}")
        if not self._order.pool.unshare(source):
            violated(f"block {source} has one owner, who may write to it")
        self._take(seq, self.state.ids([(event.to, 1)]), copy=True)

    def _commit(self, event: events.Commit) -> None:
        seq, count = self.state.sequence(event.seq), event.blocks
        # Under a lag, a plan that pauses a job comes before the commit of what it has computed.
        if not self._lag:
            self.lifecycles.grow(seq.prompt.id, seq.id)
        end = event.first + count
        if event.first != seq.span.end or end > seq.blocks:
            violated(
                f"the private blocks of sequence {seq.id} are {seq.span.end} to {seq.blocks}"
            )
        if seq.has_forgotten:
            violated(f"sequence {seq.id} has forgotten blocks, so it has none to share")
        if seq.prompt.share is not None and end > seq.prompt.share:
            violated(f"request {seq.prompt.id!r} shares {seq.prompt.share} blocks")
        if event.generated is True:
            self._generated(seq, end)
        elif end > seq.prompt.cacheable:
            violated(f"request {seq.prompt.id!r} has {seq.prompt.cacheable} blocks to share")
        ids = seq.private[:count]
        if event.how in ("new", "grown"):
            self._store(event, seq, ids)
        else:
            self._switch(event, seq, ids)

    def _generated(self, seq: TracedSequence, end: int) -> None:
        """Check that the generated blocks of `seq` up to position `end` may be cached."""
        prompt, layout = seq.prompt, self.state.layout
        first = prompt.tokens // layout.block_size
        self._must_cache_output()
        longest = layout.tokens_of(prompt, self.lifecycles.output(prompt.id))
        begin = self._begin_generated(seq, first)
        beyond = begin > seq.span.end or end * layout.block_size > longest
        if beyond or prompt.share is not None:
            violated(
                f"the blocks that request {prompt.id!r} generates are {first} to "
                f"{longest // layout.block_size}, after all of its prompt"
            )
        layout.name_generated(prompt, end)
        self._cached_keys.begin(prompt.generated, begin)

    def _begin_generated(self, seq: TracedSequence, first: int) -> int:
        """Return the first block that `seq` may share with those generated from `first` on."""
        return first

    def _store(self, event: events.Commit, seq: TracedSequence, ids: Ids) -> None:
        """Check that private blocks of `seq` may be cached now."""
        if self._unpinned:
            self._refuse_unpinned()
        parent, owners = seq.span, self._order.pool.owners
        first, end = parent.end, parent.end + len(ids)
        keys = seq.prompt.generated if event.generated is True else seq.prompt.keys
        if not self._cached_keys.store(keys, first, end):
            violated(f"some of the blocks {first} to {end} of sequence {seq.id} are cached")
        if owners:
            self._unpinned = sum(owners.get(block, 0) for block in ids)
        if event.how == "new":
            self._must_be_new(event.span)
        elif event.span != parent.id or parent.creator != seq.id:
            violated(f"sequence {seq.id} may not grow span {event.span} in place")

    def _switch(self, event: events.Commit, seq: TracedSequence, ids: Ids) -> None:
        """Check that `seq` may hold a span of another sequence for blocks of its own."""
        span = self.state.span(event.span)
        if span.parent is not seq.span:
            violated(f"span {span.id} does not continue what sequence {seq.id} holds")
        self._must_hold(seq.id, seq.prompt, span, event.first + event.blocks)
        if event.how == "same":
            self._duplicates = ids
            self._next = ("FREE", seq.id, "duplicate")
            return
        self._unpinned -= len(ids)
        if ids != span.ids or not all(map(self._order.pool.unshare, ids)):
            violated(f"sequence {seq.id} does not hold the blocks of span {span.id}")

    def _evict(self, event: events.Evict | events.Drop) -> None:
        if event.scope == "sequence":
            self._drop(event)
            return
        span, ids = self.state.span(event.span), self.state.ids(event.runs)
        if span.pins or span.children:
            violated(f"span {span.id} has {span.pins} pins and {span.children} children")
        if not ids or ids != span.ids[: -len(ids) - 1 : -1]:
            violated(f"span {span.id} is {encode_runs(span.ids[::-1])}, tail first")
        self._must_be_as_used(event, span)
        end, ratio = span.end, self._ratio
        first = end - len(ids)
        self._cached_keys.remove(span.keys, first, end)
        if event.reason == "capacity":
            while end > first and self.digests:
                key = (end - 1) // ratio
                start = max(key * ratio, first)
                self.evictions.add(span.keys[key], end - start)
                end = start
            if event.by == self._eviction and not self._of_engine:
                self._evict_for(event.requester)
                self._order.evict(ids, event.requester)
                return
        self.state.prompt(event.requester)
        if event.reason == "expired":
            if not expires(str(self._eviction)):
                violated(f"eviction policy {self._eviction!r} expires nothing")
            self._expired_for = event.requester
        elif event.reason == "gone" and not self._of_engine:
            violated("only an engine loses blocks, and HEADER names none")
        self._order.expire(ids)

    def _must_be_as_used(self, event: events.Evict, span: TracedSpan) -> None:
        """Check the policy, the age and the hits in the line of a victim."""
        age = event.t - span.last_access
        by = event.by if event.by in self._evicting_pools else self._eviction
        if event.by != by or event.hits != span.hits or event.age != age:
            violated(
                f"span {span.id}: by {by!r}, age {age} ns, {span.hits} hits "
                f"expected; the line says by {event.by!r}, age {event.age} ns, "
                f"{event.hits} hits"
            )

    def _drop(self, event: events.Drop) -> None:
        self._order.settle()
        seq, first = self.state.sequence(event.seq), event.first
        end = first + event.blocks
        if event.by != self._retention:
            violated(f"by retention policy {self._retention!r}, not {event.by!r}")
        if not self._order.pool.owners.keys().isdisjoint(seq.private):
            violated(f"sequence {seq.id} shares private blocks with a fork: it keeps them")
        if end > seq.blocks or any(low < end and first < high for low, high in seq.holes):
            violated(f"blocks {first} to {end} are not in the table of sequence {seq.id}")
        freed = seq.private[seq.private_slice(first, end)][::-1]
        self._must_free(seq.id, event.runs, freed)
        self._order.pool.release(freed)

    def _compact(self, event: events.Compact) -> None:
        seq, tokens, kept = self.state.sequence(event.seq), event.tokens, event.held
        layout, pool, ahead = self.state.layout, self._order.pool, event.ahead or 0
        self._expired_for = None
        self.lifecycles.grow(seq.prompt.id, seq.id)
        dropped = sum(end - first for first, end in seq.holes)
        computed, before = kept + dropped * layout.block_size, seq.compacted_to
        if layout.blocks_for(kept + ahead) != seq.blocks - dropped or computed < before:
            violated(
                f"sequence {seq.id} has {seq.blocks - dropped} blocks, and kept {before} "
                f"tokens before: they are not for {kept} tokens and {ahead} to come"
            )
        if tokens >= kept or computed < seq.span.end * layout.block_size:
            violated(
                f"of {kept} tokens {tokens} stay: it must be fewer, and sequence {seq.id} "
                f"must have computed the {seq.span.end} blocks that it shares"
            )
        if self.state.header.mode != "untimed":
            self._must_be_asked(seq, computed, ahead)
        keep = layout.blocks_for(tokens + ahead)
        own = seq.private
        if pool.owners:
            own = array("i", [block for block in own if block not in pool.owners])
        new, freed = self.state.ids(event.new or []), own[keep:][::-1]
        if len(new) != max(0, keep - len(own)):
            violated(f"{keep} blocks stay, of {len(own)} own ones and {len(new)} new ones")
        if new:
            self._take(seq, new)
        elif self._evicting is not None:
            self._refuse_victims()
        self._order.settle()
        self._must_free(seq.id, event.runs, freed)
        pool.free(freed, len(freed))
        if pool.owners:
            for block in seq.private:
                pool.unshare(block)

    def _must_be_asked(self, seq: TracedSequence, computed: int, ahead: int) -> None:
        """Check that a compaction comes after a chunk of the prompt, or when a block is full.

        The table of `seq` has `computed` computed tokens, and room for `ahead` more.
        """
        if self._retention is None:
            violated("HEADER has no retention policy that asks for it")
        layout, prompt = self.state.layout, seq.prompt
        text = computed + ahead + seq.compacted
        longest = layout.tokens_of(prompt, self.lifecycles.output(prompt.id))
        as_asked = text == prompt.tokens or not (ahead or computed % layout.block_size)
        if not prompt.tokens <= text <= longest or not (as_asked or seq.resumed):
            violated(
                f"sequence {seq.id} has room for {text} tokens of its text, {ahead} of them to "
                "come: it is compacted after a chunk of its prompt, and when a block is full"
            )

    def _free(self, event: events.Free) -> None:
        seq, reason = self.state.sequence(event.seq), event.reason
        ids = self.state.ids(event.runs)
        if self._due is not None:
            fits = reason == self._due[2]
        else:
            fits = reason in ("close", "rollback") and not self._unpinned
        if not fits:
            violated(f"sequence {seq.id} has no blocks to free with reason {reason!r} here")
        if reason == "duplicate":
            dropped = self._duplicates
        else:
            keep = 0
            if reason == "rollback":
                first = event.first if isinstance(event.first, int) else seq.blocks - len(ids)
                keep = first - seq.span.end - seq.freed
                fixed = seq.span.end or self.state.layout.blocks_for(seq.compacted_to)
                if first < fixed or not 0 <= keep < len(seq.private):
                    violated(f"blocks {fixed} to {seq.blocks} can be rolled back")
            dropped = seq.private[keep:]
        self._must_free(seq.id, event.runs, self._order.pool.release(dropped[::-1]))
        if reason == "close":
            self._close(event, seq)

    def _close(self, event: events.Free, seq: TracedSequence) -> None:
        """Check the dropped blocks of `seq`, and store how many may hit when it returns."""
        forgotten = self._forgotten(seq)
        if (event.forgotten or []) != forgotten:
            told = [list(hole) for hole in forgotten]
            violated(f"sequence {seq.id} has forgotten {told}, as first and count")
        if (event.compacted or 0) != seq.compacted:
            violated(f"compactions of sequence {seq.id} removed {seq.compacted} tokens")
        if self._due is None:
            self.lifecycles.close(seq.prompt.id, seq.id)
        if self._tiers is not None and self._tiers.close(seq.id):
            return
        prompt, end = seq.prompt, seq.span.end
        least, greatest = self._limits(prompt, resumed=True)
        # Blocks that it does not share itself may have been cached by others meanwhile.
        untimed = self.state.header.mode == "untimed"
        partly = untimed or seq.has_forgotten or prompt.share is not None
        named = max(prompt.cacheable, len(prompt.generated) * self._ratio)
        greatest = max(greatest, end, named if partly else end)
        if not (untimed or self._of_engine):
            least = max(least, end)
        self._returning[prompt.id] = least, greatest

    def _forgotten(self, seq: TracedSequence) -> list[tuple[int, int]]:
        """Return the ranges (first, count) of blocks that the last line of `seq` names."""
        return seq.forgotten

    def _fork(self, event: events.Fork) -> None:
        seq = self.state.sequence(event.seq)
        self.state.fork_copies(seq)
        self._must_open(event.child)
        self._order.pool.share(seq.private)

    def _keys(self, event: events.Keys) -> None:
        self.lifecycles.generate(event.request)

    def _lifecycle(self, event: Any) -> None:
        """Check the line of a server about a request, whose sequence must be open."""
        if event.event in TIERED or (
            self._tiers is None and getattr(event, "how", None) == "swap"
        ):
            violated("HEADER has no tiers")
        seq = self.state.sequence(event.seq) if hasattr(event, "seq") else None
        closes = self.lifecycles.apply(event)
        if seq is None:
            self._must_not_fit(self.state.prompt(event.request))
            return
        if event.event == "FIRST_TOKEN":
            self._must_have_blocks(seq, 1)
        elif event.event == "FINISH":
            # By the wall clock a client may leave before its prompt is computed.
            early = seq.resumed or not event.output
            if not (early and self.state.header.mode == "wall"):
                self._must_have_blocks(seq, event.output)
        if closes:
            self._next = ("FREE", seq.id, "close")

    def _admit(self, event: events.Hit | events.Miss, hit: int) -> TracedPrompt:
        """Check the first line of an admission: it hits the cached part of the prompt."""
        prompt, resumed = self.state.prompt(event.request), bool(event.again)
        if self._evicting not in (None, prompt.id):
            self._refuse_victims()
        self._order.serve(prompt.id)
        self._must_hit(prompt, hit, resumed=resumed)
        self.lifecycles.admit(prompt.id, event.seq, resumed=resumed)
        self._must_open(event.seq)
        return prompt

    def _must_hit(self, prompt: TracedPrompt, hit: int, *, resumed: bool) -> None:
        """Check that an admission hits the cached part of the prompt."""
        match = self._cached_keys.match(prompt.keys)
        if resumed and prompt.generated and match >= prompt.tokens // self._size:
            match = self._cached_keys.match(prompt.generated)
        least, greatest = (min(match, end) for end in self._limits(prompt, resumed=resumed))
        if not least <= hit <= greatest:
            violated(f"{hit} blocks hit; {greatest} are cached and may hit")

    def _limits(self, prompt: TracedPrompt, *, resumed: bool) -> tuple[int, int]:
        """Return the least and the most blocks of an admission that may hit."""
        limits = 0 if self._of_engine else prompt.limit, prompt.limit
        return self._returning.get(prompt.id, limits) if resumed else limits

    def _must_be_new(self, span: int) -> None:
        if span <= self._last_span:
            violated(f"span {span} is not new: the last one was {self._last_span}")
        self._last_span = span

    def _must_hold(self, seq: int, prompt: TracedPrompt, span: TracedSpan, end: int) -> None:
        last = (end - 1) // self._ratio
        beyond = prompt.generated and end > prompt.tokens // self._size
        keys = prompt.generated if beyond else prompt.keys
        if span.end != end or span.keys[last] != keys[last]:
            violated(f"span {span.id} is not what sequence {seq} has up to block {end}")

    def _must_have_blocks(self, seq: TracedSequence, output: int) -> None:
        """Check that `seq` has, or has dropped, the blocks of its prompt and its output."""
        layout = self.state.layout
        need = layout.blocks_for(layout.tokens_of(seq.prompt, output) - seq.compacted)
        if seq.blocks < need:
            violated(
                f"sequence {seq.id} has had {seq.blocks} blocks; its prompt and {output} "
                f"tokens of output take {need}"
            )

    def _must_not_fit(self, prompt: TracedPrompt) -> None:
        """Check that a request that a server rejects is empty, or too large for it.

        By the wall clock a client may leave before its request is admitted.
        """
        if self.state.header.mode == "wall":
            return
        output = self.lifecycles.output(prompt.id)
        tokens = self.state.layout.tokens_of(prompt, output)
        need = self.state.layout.blocks_for(tokens)
        if not self._caps.refuses(prompt.tokens, tokens) and need <= self.state.header.blocks:
            violated(f"request {prompt.id!r} needs {need} blocks, and the pool has enough")

    def _refuse_early(self, name: str) -> None:
        assert self._due is not None
        tiers, seq = self._tiers, self._due[1]
        if name not in TIERED or tiers is None or not tiers.stores_before_close(seq):
            violated(f"{self._due[0]} of sequence {self._due[1]} must come before this")

    def _refuse_unpinned(self) -> None:
        violated("forked sequences still hold blocks that are cached now, without a pin")
