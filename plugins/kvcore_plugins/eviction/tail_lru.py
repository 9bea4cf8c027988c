"""Tail-optimised LRU: evict blocks first whose loss does not change the tail of TTFT."""

from __future__ import annotations

from bisect import bisect_left
from typing import ClassVar, Literal

import attrs
from attrs.validators import ge

from kvcore import ScoreEviction, Span
from kvcore_plugins.bounds import bounded, one_of


@attrs.define(slots=False, eq=False, repr=False, on_setattr=attrs.setters.NO_OP)
class TailLRU(ScoreEviction):
    """Evict blocks first that a conversation can lose and still answer in time, then by LRU.

    The next prompt of a conversation of L tokens has L + `turn` tokens. Those that are not
    cached are computed; while that takes no longer than the threshold, its time to first
    token is not in the tail. So the last blocks of a conversation are surplus if they, and
    the new turn, can be computed within the threshold. Surplus blocks are evicted first, those
    of the least recent conversation before others; without surplus, this is LRU.

    Fitted to spans: a path from the root is a conversation, and L is the greatest length to
    which a prompt through a span has been cached; common blocks of several prompts belong to
    the longest. Surplus is counted in whole keys. Of a victim no more than its surplus is
    evicted at once. Answers that are not cached, and partial blocks, are part of `turn`.
    O(log leaves + log keys) per event, and O(spans of the path) when one is stored.

    `span.data` is L in blocks.

    Options:
        threshold: the target of the time to first token, in the unit below.
        unit: `s`, seconds by the recompute cost of the cache (the default), or `tokens` to
            compute.
        turn: expected tokens of the next turn.

    Source: Zhang, Li, Moallemi and Peng, "Tail-optimized caching for LLM inference",
    NeurIPS 2025 (T-LRU).
    """

    name: ClassVar[str] = "tail-lru"

    threshold: float = bounded(0.2, "0 or more", ge(0))
    unit: Literal["s", "tokens"] = one_of("s", "tokens")
    turn: int = bounded(256, "a number of tokens, 0 or more", ge(0))

    def on_insert(self, span: Span, now: int) -> None:
        """Store the new length of the conversation in the path."""
        self._store_length(span)

    def on_extend(self, span: Span, blocks: int) -> None:
        """Store the new length of the conversation in the path."""
        self._store_length(span)

    def on_split(self, upper: Span, lower: Span) -> None:
        """Assign both halves to one conversation."""
        upper.data = lower.data
        super().on_split(upper, lower)

    def score(self, span: Span, now: int) -> bool:
        """Return True if the tail block of `span` is needed to answer in time."""
        return self._surplus_start(span) == span.end

    def evictable_blocks(self, span: Span) -> int:
        """Return the surplus blocks of `span`; all blocks if none is surplus."""
        return span.end - self._surplus_start(span) or span.blocks

    def _store_length(self, span: Span) -> None:
        end: int = span.end
        ancestor: Span | None = span
        # The root has no parent. If one span extends as far, so do all above it.
        while (
            ancestor is not None and ancestor.parent is not None and (ancestor.data or 0) < end
        ):
            ancestor.data = end
            ancestor = ancestor.parent

    def _surplus_start(self, span: Span) -> int:
        """Return the first position in `span` from which on its blocks are surplus."""
        ratio = span.geometry.ratio
        keys = range(span.start // ratio, -(-span.end // ratio))
        index = bisect_left(keys, 1, key=lambda key: self._answers_in_time(span, key * ratio))
        return min(max(span.start, (keys.start + index) * ratio), span.end)

    def _answers_in_time(self, span: Span, cached: int) -> bool:
        """Return True if the next turn meets the threshold with `cached` blocks cached."""
        size = span.geometry.block_size
        missing = (span.data - cached) * size + self.turn
        if self.unit == "tokens":
            return bool(missing <= self.threshold)
        return span.geometry.recompute_seconds(cached * size, missing) <= self.threshold
