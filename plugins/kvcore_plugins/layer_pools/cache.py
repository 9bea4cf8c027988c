"""A cache with a pool for full attention, and one each for windows and for states.

Source: the unified radix cache of SGLang 0.5.23 with its components for full attention, windows
(`swa`) and states (`mamba`, with an extra buffer), whose hits, refusals and evictions it has.
"""

from __future__ import annotations

from array import array
from math import lcm
from typing import Any, Final, NoReturn

import attrs

from kvcore import InputError, OutOfBlocks, Request, Span
from kvcore.cache import KVCache, Sequence
from kvcore.cache.prefix import PrefixMatch
from kvcore.request import Key, whole_key_tokens
from kvcore.serving.decode_batch import DecodeBatch
from kvcore.serving.scheduler import Batching
from kvcore_plugins.layer_pools.allocator import PooledAllocator
from kvcore_plugins.layer_pools.tree import PooledTree

WINDOW_INTERVAL: Final = 128
"""Tokens that a decoding request generates between two releases of passed window slots."""

STATE_CHUNK: Final = 64
"""Tokens from state to state that are computed on the way in a prompt."""

STATE_INTERVAL: Final = 256
"""Generated tokens from one kept state to the next."""

STATE_SLOTS: Final = 3
"""State slots of a running request: one that it writes, and two in which it keeps states."""

STATE_RATIO: Final = 5
"""State slots for each request that may run: its own, that of its hit, and one to exchange."""


@attrs.define(eq=False)
class Holding:
    """The slots and locks of an open sequence in the pools beside that of full attention.

    Attributes:
        span: the span at whose end it resumes, whose windows and state are locked.
        top: position of the first block of the locked windows.
        windows: number of private window slots.
        passed: number of first blocks whose private window slots are free again.
        states: number of private state slots.
        junction: tokens after which the next states or windows are cached, since others share
            the prefix up to there and it has none; None: there is no such length.
    """

    span: Span
    top: int = 0
    windows: int = 0
    passed: int = 0
    states: int = 0
    junction: int | None = None


class PooledCache(KVCache):
    """A `KVCache` of the K/V of full attention, with pools for other layers beside it.

    A position of a prompt is hit if the full attention before it is cached, and the window and
    the state at it. What is cached of a window ages by itself, so that of an old prefix only
    the K/V of full attention may be left, from which no request can resume::

        span                root - [ A    ] - [ B    ] - [ C ]
        full attention              cached     cached     cached
        window                        -        cached     cached      hits end after B or C
        state                         -          -        cached      hits end after C

    A trace has the spans as ever, and lines for what the other pools have of them.

    Args:
        blocks, block_size, options: as for `KVCache`, in `tokens` accounting. The prefix index
            has to evict leaves whole.
        window: tokens that a token attends to, itself included; None: no layer has a window.
        window_slots: window slots, a block each.
        state_slots: slots of states; None: no layer has a state.
        tree: the class of the tree of spans.

    Attributes:
        window: tokens before a position that a window needs to resume there.
        passed_slots: number of window slots that running requests have freed so far.

    Raises:
        InputError: as `KVCache`; pools that are too small; or parts that these do not know.
    """

    tree: PooledTree

    def __init__(
        self,
        blocks: int,
        block_size: int = 16,
        *,
        window: int | None = None,
        window_slots: int = 0,
        state_slots: int | None = None,
        tree: type[PooledTree] = PooledTree,
        **options: Any,
    ) -> None:
        super().__init__(blocks, block_size, **options)
        size = block_size
        self.window = 0 if window is None else window - 1
        window_blocks = -(-self.window // size)
        slots = None if window is None else window_slots
        self._check_parts(window_blocks, slots, state_slots)
        self.tree = tree(self, window_blocks, slots, state_slots)
        self._grid = size if state_slots is None else lcm(STATE_CHUNK, size)
        self.passed_slots = 0
        self._held: dict[int, Holding] = {}
        if self.trace is not None:
            pools = {"window": window, "window_slots": slots, "state_slots": state_slots}
            self.trace.describe(layer_pools={k: v for k, v in pools.items() if v is not None})

    def _check_parts(
        self, window_blocks: int, window_slots: int | None, state_slots: int | None
    ) -> None:
        """Refuse parts that pools beside that of full attention cannot have."""
        least = 2 * window_blocks + WINDOW_INTERVAL // self.geometry.block_size + 2
        problem, pool = "", ", with more blocks or memory"
        if self.retention is not None:
            problem = "a retention policy drops blocks of one pool; leave it out"
        elif not self.prefix.evicts_leaves or self.prefix.block_spans:
            problem = "leaves are evicted whole; give prefix='radix:evict=leaf'"
        elif self.eviction.expires_spans:
            problem = f"eviction {self.eviction.name!r} lets blocks expire; give another one"
        elif window_slots is not None and window_blocks < 1:
            problem = "a window has 2 tokens or more"
        elif window_slots is not None and window_slots < least:
            problem = f"{window_slots:,} window slots are too few; give {least:,} or more{pool}"
        elif state_slots is not None and state_slots < STATE_RATIO:
            problem = f"{state_slots} state slots are too few; give {STATE_RATIO} or more{pool}"
        if problem:
            msg = f"a pool for each kind of layer: {problem}"
            raise InputError(msg)

    def allocator(self, batch: DecodeBatch, batching: Batching) -> PooledAllocator:
        """Return the allocator of its blocks in a run.

        Raises:
            InputError: blocks are to be hit before they are computed, or a prompt is to get
                all of its blocks at once.
        """
        rules = batching.rules
        if rules.commit != "computed" or rules.reserve == "prompt":
            msg = (
                "pools of layers share what is computed, and allocate by chunk: give "
                "commit=computed and reserve=chunk"
            )
            raise InputError(msg)
        return PooledAllocator(self, batch)

    # Reading.

    @property
    def counts_only(self) -> bool:
        """Whether many steps may be allocated as one number: never, since windows pass."""
        return False

    @property
    def available_blocks(self) -> int:
        """Number of blocks that a running request can get in all pools that it needs."""
        full, windows = super().available_blocks, self.tree.windows
        return full if windows is None else min(full, windows.available)

    @property
    def longest_chunk(self) -> int | None:
        """Tokens for which a request alone finds window slots at once; None: any number."""
        tree = self.tree
        if tree.windows is None:
            return None
        size = self.geometry.block_size
        kept = 2 * tree.window_blocks + WINDOW_INTERVAL // size + 1
        return (tree.windows.slots - kept) * size

    @property
    def full_blocks(self) -> int:
        """Number of blocks of full attention that are free or can be evicted."""
        return super().available_blocks

    def lacks_slots(
        self, request: Request, match: PrefixMatch, target: int, chunk: int | None
    ) -> str:
        """Return which slots are too few to open `request`, or "" if there are enough.

        Args:
            request: the request.
            match: its cached prefix.
            target: tokens to compute before the next one is generated.
            chunk: tokens of its first chunk; None: all.
        """
        tree, span = self.tree, match.span
        if tree.windows is not None:
            need = self._window_need(request, target - self._tokens(match.blocks), chunk)
            locked = tree.window_path(span, tree.window_blocks)
            room = tree.windows.available - tree.windows.unlocked(locked)
            if need > room:
                return f"{need} window slots; {room} are free or can be evicted"
        if tree.states is not None:
            room = tree.states.available - tree.states.unlocked([span])
            if room < STATE_SLOTS:
                return f"{STATE_SLOTS} state slots; {room} are free or can be evicted"
            most = tree.states.slots // STATE_RATIO
            if len(self._held) >= most:
                return f"one of the {most} places for requests that run, which are taken"
        return ""

    def _window_need(self, request: Request, left: int, chunk: int | None) -> int:
        """Return the window slots of a request: those of its chunk, and of what it keeps."""
        size = self.geometry.block_size
        first = left if chunk is None else min(left, chunk)
        kept = min(left + request.output_tokens, self.window)
        return -(-max(first - self.window, 0) // size) + -(-kept // size) + 1

    def _no_room(self, request: Request, need: int, kept: int, total: int) -> str:
        windows = self.tree.windows
        if windows is None or need > self.full_blocks - kept:
            return super()._no_room(request, need, kept, total)
        return (
            f"request {request.id} needs {need} more window slots; {windows.free} of "
            f"{windows.slots} are free and {windows.evictable} can be evicted"
        )

    def _tokens(self, blocks: int) -> int:
        return blocks * self.geometry.block_size

    def check_integrity(self) -> None:
        """Check every invariant. Costs O(spans + sequences).

        Raises:
            AssertionError: an invariant does not hold; the message has the numbers.
        """
        super().check_integrity()
        tree, holding = self.tree, self._held.values()
        if tree.windows is not None:
            tree.windows.check(sum(each.windows for each in holding))
        if tree.states is not None:
            tree.states.check(sum(each.states for each in holding))

    # From open to close.

    def open(
        self,
        request: Request,
        first_tokens: int | None = None,
        now: int | None = None,
        *,
        resumed: bool = False,
        target: int | None = None,
        reserve: int = 0,
    ) -> Sequence:
        """Admit `request`, as `KVCache.open` does, if all pools have room."""
        now = self._at(now, request)
        tree, length = self.tree, request.prompt_tokens if target is None else target
        match = self.match(request, now, target)
        lacking = self.lacks_slots(request, match, length, first_tokens)
        if lacking:
            msg = f"request {request.id} needs {lacking}"
            raise OutOfBlocks(msg)
        self.announce(request, now)
        holding = Holding(match.span)
        junction = self._tokens(self._split_match(request, target, now)) // self._grid
        ends = self._last_whole_key(request) // self._grid
        for length in (ends * self._grid, junction * self._grid):
            if length > self._tokens(match.blocks):
                holding.junction = length
        match = self.match(request, now, target)
        if first_tokens is not None:
            length = self._tokens(match.blocks) + first_tokens
        self._check_blocks(request, match, length, reserve, now)
        self._lock(holding, match.span)
        if tree.states is not None:
            tree.states.touch([match.span])
            tree.take(tree.states, STATE_SLOTS, request.id, now)
            holding.states = STATE_SLOTS
        try:
            seq = super().open(
                request, first_tokens, now, resumed=resumed, target=target, reserve=reserve
            )
        except BaseException:
            self._release(holding)
            raise
        if seq.span is not holding.span:
            self._unlock(holding)
            self._lock(holding, seq.span)
        self._held[seq.id] = holding
        if tree.windows is not None:
            tree.windows.touch(tree.window_path(seq.span, tree.window_blocks + 1))
            self._take_windows(holding, seq, seq.blocks - seq.span.end)
        return seq

    def extend(self, seq: Sequence, tokens: int, now: int | None = None) -> None:
        """Allocate blocks for `tokens` more tokens, as `KVCache.extend` does.

        Window slots that a decoding request has passed are freed before.
        """
        now = self._begin(seq, now)
        holding, blocks = self._held[seq.id], seq.blocks
        if seq.tokens >= seq.target:
            self._pass_windows(holding, seq, seq.tokens, WINDOW_INTERVAL)
        super().extend(seq, tokens, now)
        self._take_windows(holding, seq, seq.blocks - blocks)

    def commit(self, seq: Sequence, tokens: int, now: int | None = None) -> None:
        """Count `tokens` more tokens as computed.

        At the end of a chunk of a prompt its blocks become shareable, up to the last position
        at which a state was kept if layers have states; those of the output do when the
        request ends.
        """
        now = self._begin(seq, now)
        holding, cacheable, start = self._held[seq.id], seq.cacheable, seq.computed
        end = start + tokens
        upto = self._chunk_end(holding, start, end)
        seq.cacheable = 0
        try:
            super().commit(seq, tokens, now)
        finally:
            seq.cacheable = cacheable
        if end > seq.target:
            return
        at_junction = upto == holding.junction
        self._pass_windows(holding, seq, (upto or end) - 1, 1)
        if upto is None:
            return
        if self.tree.states is not None:
            self.tree.take(self.tree.states, 1, seq.request.id, self.now)
            holding.states += 1
        self._share(holding, seq, min(upto // self.geometry.block_size, cacheable))
        if at_junction:
            holding.junction = None
            self._pass_windows(holding, seq, end - 1, 1)

    def keep_generated(self, seq: Sequence, tokens: int, now: int) -> None:
        """Cache the generated blocks of `seq` that its first `tokens` tokens fill.

        Those up to the last position at which a state was kept, if layers have states.
        """
        self.now = now
        request, size = seq.request, self.geometry.block_size
        first = request.prompt_tokens // size
        upto = self._kept_output(seq, tokens) // size
        if request.publishes or request.hints.share is not None or seq.cacheable < first:
            return
        start = seq.span.end
        if upto > max(first, start):
            if start < first and first % self.geometry.ratio:
                # A key has one name, so what the prompt has of its last one is shared before.
                self.tree.commit(seq, first, now)
            seq.keys = self.geometry.generated_keys(request, first, upto)
            seq.cacheable = upto
            self._share(self._held[seq.id], seq, upto, start)

    def close(
        self,
        seq: Sequence,
        now: int | None = None,
        length: int | None = None,
        *,
        preempted: bool = False,
    ) -> None:
        """Free what `seq` alone has in all pools; what is shared stays cached."""
        if seq.is_open and self.sequences.get(seq.id) is seq:
            self.now = self._at(now, seq.request)
            holding, tree = self._held.pop(seq.id), self.tree
            if seq.request.publishes and not preempted:
                upto = self._kept_output(seq, seq.computed) // self.geometry.block_size
                if min(upto, seq.cacheable) > seq.span.end:
                    self._share(holding, seq, min(upto, seq.cacheable))
            if tree.windows is not None and not preempted:
                tree.windows.touch(tree.window_path(seq.span, tree.window_blocks + 1))
            self._release(holding)
            if self.trace is not None and holding.passed > seq.span.end:
                seq.holes = ((seq.span.end, holding.passed),)  # of windows, for its last line
        super().close(seq, now, length, preempted=preempted)

    def _check_blocks(
        self, request: Request, match: PrefixMatch, tokens: int, reserve: int, now: int
    ) -> None:
        """Raise OutOfBlocks, before any pool evicts, if full attention has too few blocks."""
        pins, blocks = self.tree.pins, -(-tokens // self.geometry.block_size)
        if pins:
            pins.end(now)
        need, kept = blocks - match.blocks, match.unpinned_blocks + reserve
        if need > self.full_blocks - kept:
            if pins and not self.sequences and pins.make_way(blocks + reserve, now):
                return
            raise OutOfBlocks(self._no_room(request, need, kept, blocks + reserve))

    def _unknown(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a call of `KVCache` that other pools than that of full attention lack."""
        msg = "a pool for each kind of layer has no forks, rollbacks, compactions or prefetches"
        raise InputError(msg)

    fork = rollback = compact = open_ahead = _unknown

    # Pools beside that of full attention.

    def _match_generated(
        self, request: Request, match: PrefixMatch, now: int, target: int
    ) -> tuple[list[Key], PrefixMatch] | None:
        """Return keys and match with generated blocks, as `KVCache` does.

        They may be in one span with blocks of the prompt, at whose end there is a state.
        """
        longer = super()._match_generated(request, match, now, target)
        size = self.geometry.block_size
        first, limit = request.prompt_tokens // size, (target - 1) // size
        known = self.geometry.prompt(request).cacheable
        if longer is not None or limit <= first or known < first or request.publishes:
            return longer
        keys = self.geometry.generated_keys(request, first, limit)
        whole = self.tree.match(keys, limit, now)
        return (keys, whole) if whole.blocks > match.blocks else None

    def _last_whole_key(self, request: Request) -> int:
        """Return the tokens of a prompt up to the end of what a longer one can share.

        0: that is the prompt, or its last whole block.
        """
        prompt, size = request.prompt_tokens, self.geometry.block_size
        whole = whole_key_tokens(prompt, len(request.keys), request.key_tokens)
        is_end = whole >= prompt // size * size
        return 0 if is_end or request.publishes else whole

    def _split_match(self, request: Request, target: int | None, now: int) -> int:
        """Split the span in which full attention matches in part; return the blocks of it."""
        prompt = self.geometry.prompt(request, target)
        span, end = self.tree.full_match(prompt.keys, prompt.limit, now)
        if end < span.end and end > span.start:
            self.tree.cut(span, end, now)
        return end

    def _chunk_end(self, holding: Holding, start: int, end: int) -> int | None:
        """Return up to where a chunk of a prompt can be shared; None: it cannot."""
        at_junction = holding.junction is not None and start < holding.junction <= end
        if self.tree.states is None:
            return holding.junction if at_junction else end
        grid = self._grid
        kept = start + (end - start) // grid * grid
        if kept == start:
            return None
        if at_junction and holding.junction is not None:
            chunk = max(STATE_CHUNK, self.geometry.block_size)
            if holding.junction < end and (holding.junction - start) % chunk == 0:
                return holding.junction
        return kept

    def _kept_output(self, seq: Sequence, tokens: int) -> int:
        """Return how many first tokens of a request that ends can be shared, or 0."""
        if self.tree.states is None:
            return tokens
        interval = lcm(self._grid, STATE_INTERVAL)
        kept = tokens // interval * interval
        return kept if kept > seq.target else 0

    def _share(
        self, holding: Holding, seq: Sequence, upto: int, first: int | None = None
    ) -> None:
        """Share the first `upto` blocks of `seq`, with their windows and the state at the end.

        Where others have cached the same meanwhile, tombstones get what `seq` has. Its blocks
        up to `first` have been shared before; None: all that it does share.
        """
        tree, newest = self.tree, self.tree.created
        first = seq.span.end if first is None else first
        windows: list[int] = []
        state: int | None = None
        if upto > first:
            tree.commit(seq, upto, self.now)
            seq.span.creator = None  # no span grows whose slots are counted
        if tree.windows is not None:
            for span in tree.path_from(first, seq.span):
                is_new = span.created_order > newest
                windows += self._share_windows(holding, span, is_new=is_new)
            tree.windows.touch(tree.window_path(seq.span, tree.window_blocks + 1))
        if tree.states is not None and holding.states:
            if seq.span.end == upto and seq.span not in tree.states and upto:
                tree.states.add(seq.span)
                state = seq.span.id
            else:
                tree.states.free += 1
                tree.states.touch([seq.span])
            holding.states -= 1
        self._unlock(holding)
        self._lock(holding, seq.span)
        if self.trace is not None:
            self.trace.keep_slots(self.now, seq=seq.id, windows=windows, state=state)

    def _share_windows(self, holding: Holding, span: Span, *, is_new: bool) -> list[int]:
        """Give the window slots of a sequence for the blocks of `span` to it, or free them.

        Returns the ids of the spans that got some.
        """
        windows, now = self.tree.windows, self.now
        assert windows is not None
        start = max(span.start, holding.passed)
        private = span.end - start
        if private <= 0:
            return []
        holding.windows -= private
        if span in windows:
            windows.free += private
            return []
        if start > span.start:
            self.tree.cut(span, start, now)
        spans = [span]
        # Of a new leaf the last window is a span of its own, which alone is locked.
        if is_new and private > self.tree.window_blocks:
            spans.insert(0, self.tree.cut(span, span.end - self.tree.window_blocks, now))
        for part in spans:
            windows.add(part)
        return [part.id for part in spans]

    def _take_windows(self, holding: Holding, seq: Sequence, blocks: int) -> None:
        """Allocate private window slots, if there are windows."""
        if self.tree.windows is not None and blocks > 0:
            self.tree.take(self.tree.windows, blocks, seq.request.id, self.now)
            holding.windows += blocks

    def _pass_windows(
        self, holding: Holding, seq: Sequence, computed: int, interval: int
    ) -> None:
        """Free the private slots that no token after the first `computed` ones needs.

        If these are `interval` tokens or more.
        """
        windows, size = self.tree.windows, self.geometry.block_size
        if windows is None or computed - self.window < self._tokens(holding.passed) + interval:
            return
        before = max(holding.passed, seq.span.end)
        passed = max(before, computed // size - self.tree.window_blocks)
        windows.free += passed - before
        if self.trace is not None and passed > before:
            self.trace.free(
                self.now, seq=seq.id, runs=array("i"), reason="passed",
                forgotten=[(before, passed - before)],
            )  # fmt: skip
        self.passed_slots += passed - before
        holding.windows -= passed - before
        holding.passed = passed

    def _lock(self, holding: Holding, span: Span) -> None:
        """Lock what is needed to resume at the end of `span`."""
        holding.span, holding.top = span, span.end
        tree = self.tree
        if tree.windows is not None:
            path = tree.window_path(span, tree.window_blocks)
            tree.windows.lock(path)
            holding.top = path[-1].start if path else span.end
        if tree.states is not None and span.parent is not None:
            tree.states.lock([span])

    def _unlock(self, holding: Holding) -> None:
        """End the lock of `_lock`; spans may have been split since."""
        tree, span = self.tree, holding.span
        if tree.windows is not None:
            tree.windows.unlock(tree.path_from(holding.top, span))
        if tree.states is not None and span.parent is not None:
            tree.states.unlock([span])

    def _release(self, holding: Holding) -> None:
        """Free the private slots of a sequence, and unlock what it needed."""
        if self.tree.windows is not None:
            self.tree.windows.free += holding.windows
        if self.tree.states is not None:
            self.tree.states.free += holding.states
        self._unlock(holding)
