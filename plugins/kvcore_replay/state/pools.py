"""The state of a traced cache with a pool for each kind of layer, rebuilt from its events.

Full attention is in spans, as in `kvcore_replay.state.cache`. What other layers keep is counted
in slots, which are free, private to a sequence, or kept by a span:

    window  free --ALLOC--> private --KEEP--> of a span --TOMBSTONE, EVICT--> free
                               +--COMMIT without KEEP, FREE--> free

    state   free --KEEP, at the end of a chunk--> of a span --TOMBSTONE, EVICT--> free

A private block has a window slot until the window has passed it. A sequence has three state
slots from HIT or MISS to FREE.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from kvcore.trace import events
from kvcore.trace.events import POOL_EVENTS, methods_by_event, violated
from kvcore_replay.state.cache import CacheState, TracedSequence, TracedSpan, path

STATES = 3
"""State slots of an open sequence."""


class PoolState(CacheState):
    """Spans, sequences and the slots of all pools of a traced cache.

    Attributes:
        window_blocks: blocks before a position that a window needs to resume there.
        slots, free_slots: number of slots, and of free ones, of `window` and `state`, as far as
            there are such pools.
        kept: by pool, the spans that are no tombstones.
        passed: by open sequence, the number of first blocks that have no private window slot.
    """

    def __init__(self, header: events.Header) -> None:
        """Start with the empty pools that HEADER gives.

        Raises:
            ValueError: the sizes do not fit one another.
        """
        record = header.layer_pools
        assert record
        super().__init__(header)
        if header.count != "tokens" or header.tiers:
            violated("pools of layers count tokens, and have no tiers below them")
        if (record.window is None) != (record.window_slots is None):
            violated("window slots are those of a window, and HEADER has one of both")
        self.window_blocks = -(-((record.window or 1) - 1) // header.block_size)
        sizes = {"window": record.window_slots, "state": record.state_slots}
        self.slots = {pool: slots for pool, slots in sizes.items() if slots is not None}
        self.free_slots = dict(self.slots)
        self.kept: dict[str, set[TracedSpan]] = {pool: set() for pool in self.slots}
        self.passed: dict[int, int] = {}
        self._by_first_block: dict[tuple[Any, int], TracedSpan] = {}
        self._apply |= methods_by_event(self, *POOL_EVENTS)

    def slots_of(self, pool: str, span: TracedSpan) -> int:
        """Return the slots that a span takes of a pool if it is no tombstone."""
        return len(span.ids) if pool == "window" else 1

    # Lookups.

    def match(
        self, keys: list[Any], limit: int, after: list[TracedSpan] | None = None
    ) -> tuple[list[TracedSpan], int]:
        """Return the spans of full attention that have a prompt, in order, and the blocks.

        At most `limit` blocks; the last span may go on otherwise. The search begins below the
        spans `after`, which are known to match. O(its spans).
        """
        ratio, spans = self.layout.ratio, list(after or ())
        end = spans[-1].end if spans else 0
        limit = min(limit, len(keys) * ratio)
        while end < limit:
            span = self._by_first_block.get(self._name(keys, end))
            if span is None:
                break
            spans.append(span)
            # Keys are chained, so they differ from the first one that does on.
            low, high, others = end // ratio, -(-min(span.end, limit) // ratio), span.keys
            equal = bisect_left(
                range(low, high), 1, key=lambda index: keys[index] != others[index]
            )
            end = min(span.end, limit, (low + equal) * ratio)
            if end < span.end:
                break
        self.count_work(len(spans))
        return spans, end

    def lacks(self, spans: list[TracedSpan], end: int) -> list[str]:
        """Return the pools without which no request can go on after the first `end` blocks.

        A window is needed of the blocks before `end`, a state at `end`.
        """
        spans, lacking = [span for span in spans if span.start < end], []
        self.count_work(len(spans))
        kept = self.kept.get("window")
        if kept is not None and any(
            span not in kept for span in spans if span.end > end - self.window_blocks
        ):
            lacking.append("window")
        kept = self.kept.get("state")
        if kept is not None and end and (spans[-1].end != end or spans[-1] not in kept):
            lacking.append("state")
        return lacking

    def resumable(self, spans: list[TracedSpan], end: int) -> int:
        """Return the last position up to `end`, at the end of a span, that no pool lacks."""
        ends = sorted({min(span.end, end) for span in spans}, reverse=True)
        return next((last for last in ends if not self.lacks(spans, last)), 0)

    def window_path(self, span: TracedSpan, blocks: int) -> list[TracedSpan]:
        """Return `span` and those above it that have the last `blocks` blocks up to its end."""
        spans, end = [], span.end
        for above in path(span):
            if end - above.end >= blocks:
                break
            spans.append(above)
        self.count_work(len(spans))
        return spans

    # Events.

    def _admit(self, event: events.Hit | events.Miss, hit: int) -> TracedSequence:
        seq = super()._admit(event, hit)
        self.passed[seq.id] = 0
        self._add_free("state", -STATES)
        return seq

    def _alloc(self, event: events.Alloc) -> None:
        super()._alloc(event)
        self._add_free("window", -len(self.ids(event.runs)))

    def _commit(self, event: events.Commit) -> None:
        passed, end = self.passed[event.seq], event.first + event.blocks
        self._add_free("window", max(0, end - max(event.first, passed)))
        super()._commit(event)
        if event.how == "new":
            self._add(self.spans[event.span])

    def _split(self, event: events.Split) -> None:
        super()._split(event)
        lower, upper = self.spans[event.span], self.spans[event.upper]
        self._add(upper)
        self._add(lower)
        if lower in self.kept.get("window", ()):  # a state is that of its end
            self.kept["window"].add(upper)

    def _keep(self, event: events.Keep) -> None:
        self.sequence(event.seq)
        for span in event.windows or ():
            self._gain("window", self.span(span))
        if isinstance(event.state, int):
            self._gain("state", self.span(event.state))

    def _tombstone(self, event: events.Tombstone) -> None:
        self._lose(event.pool, self.span(event.span))

    def _evict(self, event: events.Evict | events.Drop) -> None:
        if event.scope == "sequence":
            violated("a sequence with pools of layers drops no blocks")
        span = self.span(event.span)
        for pool, kept in self.kept.items():
            if span in kept:
                self._lose(pool, span)
        del self._by_first_block[self._name(span.keys, span.start)]
        super()._evict(event)
        if span.ids:
            violated(f"span {span.id} leaves in part, and leaves leave whole")

    def _free(self, event: events.Free) -> None:
        seq = self.sequence(event.seq)
        if event.reason == "passed":
            for first, count in event.forgotten or ():
                self.passed[seq.id] = first + count
                self._add_free("window", count)
        elif event.reason == "close":
            passed = self.passed.pop(seq.id)
            self._add_free("window", max(0, seq.blocks - max(passed, seq.span.end)))
            self._add_free("state", STATES)
        super()._free(event)

    def _add_free(self, pool: str, slots: int) -> None:
        """Add free slots to a pool, or take some (below 0), if there is such a pool."""
        if pool in self.free_slots:
            self.free_slots[pool] += slots

    def _gain(self, pool: str, span: TracedSpan) -> None:
        """Take slots for a span, which is no tombstone of the pool then."""
        if span in self.kept[pool]:
            violated(f"span {span.id} has its {pool} already")
        self.kept[pool].add(span)
        self._add_free(pool, -self.slots_of(pool, span))

    def _lose(self, pool: str, span: TracedSpan) -> None:
        """Free the slots of a span, which is a tombstone of the pool then."""
        if span not in self.kept[pool]:
            violated(f"span {span.id} has no {pool} that it could lose")
        self.kept[pool].remove(span)
        self._add_free(pool, self.slots_of(pool, span))

    def _add(self, span: TracedSpan) -> None:
        """Let `match` find a new span, or one that begins elsewhere now."""
        self._by_first_block[self._name(span.keys, span.start)] = span

    def _name(self, keys: list[Any], position: int) -> tuple[Any, int]:
        return keys[position // self.layout.ratio], position
