"""Tail-optimised LRU: first what cannot change the tail of TTFT."""

from __future__ import annotations

from bisect import bisect_left
from typing import ClassVar, Literal

import attrs

from kvcore import InputError, ScoreEviction, Span

UNITS = ("s", "tokens")


@attrs.define(slots=False, eq=False)
class TailLRU(ScoreEviction):
    """Evict first what a conversation can lose and still answer in time, then as LRU.

    A conversation of L tokens comes back with L + `turn` tokens. What is not cached of
    them has to be computed; as long as that stays within the threshold, its time to first
    token is no part of the tail. So blocks at its end are surplus as far as computing
    them, and the new turn, keeps within the threshold. Surplus leaves first, that of the
    least recent conversation before others; if there is none, this is LRU.

    Fitted to spans: a path from the root is a conversation, L the furthest that any prompt
    through a span has been cached; where prompts part, their common blocks belong to the
    longest. Surplus is counted in whole keys. Of a victim no more than its surplus leaves
    at once. Answers that are not cached, and partial blocks, are part of `turn`.
    O(log leaves + log keys) per event, and O(spans of the path) when one is stored.

    Options:
        threshold: the time to first token to keep, in the unit below.
        unit: `s`, seconds by the cache's recompute cost (the default), or `tokens`, those
            left to compute.
        turn: tokens that the next turn is expected to add.

    Source: Zhang, Li, Moallemi and Peng, "Tail-optimized caching for LLM inference",
    NeurIPS 2025 (T-LRU).
    """

    name: ClassVar[str] = "tail-lru"

    threshold: float = attrs.field(default=0.2)
    unit: Literal["s", "tokens"] = attrs.field(default="s")
    turn: int = attrs.field(default=256)

    @threshold.validator
    def _is_threshold(self, _: object, value: float) -> None:
        if not value >= 0:
            msg = f"tail-lru: threshold={value} must be 0 or more"
            raise InputError(msg)

    @unit.validator
    def _is_unit(self, _: object, value: str) -> None:
        if value not in UNITS:
            msg = f"tail-lru: unit={value!r} is not known; there are: {', '.join(UNITS)}"
            raise InputError(msg)

    @turn.validator
    def _is_length(self, _: object, value: int) -> None:
        if value < 0:
            msg = f"tail-lru: turn={value} must be a number of tokens, 0 or more"
            raise InputError(msg)

    def on_insert(self, span: Span, now: int) -> None:
        """Note how far the conversation reaches now."""
        del now
        end: int = span.end
        at: Span | None = span
        # The root has no parent. Above a span that reaches as far, all do.
        while at is not None and at.parent is not None and (at.data or 0) < end:
            at.data = end
            at = at.parent

    def on_extend(self, span: Span, blocks: int) -> None:
        """Note how far the conversation reaches now."""
        del blocks
        self.on_insert(span, 0)

    def on_split(self, upper: Span, lower: Span) -> None:
        """Let both halves be of one conversation."""
        upper.data = lower.data
        super().on_split(upper, lower)

    def score(self, span: Span, now: int) -> bool:
        """Return whether its tail block is needed to answer in time."""
        del now
        return self._enough(span) == span.end

    def evictable_blocks(self, span: Span) -> int:
        """Return how many blocks of it are surplus; if none are, all of it may go."""
        return span.end - self._enough(span) or span.blocks

    def _enough(self, span: Span) -> int:
        """Return the first position in `span` from which on its blocks are surplus."""
        ratio = span.geometry.ratio
        keys = range(span.start // ratio, -(-span.end // ratio))
        place = bisect_left(keys, 1, key=lambda key: self._in_time(span, key * ratio))
        return min(max(span.start, (keys.start + place) * ratio), span.end)

    def _in_time(self, span: Span, cached: int) -> bool:
        """Say whether the next turn keeps to the threshold with so many blocks cached."""
        size = span.geometry.block_size
        missing = (span.data - cached) * size + self.turn
        if self.unit == "tokens":
            return bool(missing <= self.threshold)
        return span.geometry.recompute_seconds(cached * size, missing) <= self.threshold
