"""The hashed prefix index: a dictionary from the key of a block to the span that holds it."""

from __future__ import annotations

from collections.abc import Sequence as Keys
from typing import ClassVar, Literal

import attrs

from kvcore import InputError, PrefixIndex, Span
from kvcore.request import Key


@attrs.define(slots=False, eq=False)
class Hashed(PrefixIndex):
    """Look up whole blocks by their chained keys, in one dictionary.

    The key of a block stands for all blocks before it too, so a lookup need not start at the
    first block. A block is cached only if its predecessor is: the end of a hit is found by
    bisection, in O(log blocks) lookups. Storing, splitting and evicting cost O(blocks).

    Options:
        spans: `runs` keeps blocks of one history in one span; `block` makes each block a span
            of its own, as in engines that cache block by block. Policies then choose among
            blocks, and every step costs O(blocks).

    Source: the block pool of vLLM (Kwon et al., 2023), which maps the hash of a block to
    the block; here a key maps to the span of the block.
    """

    name: ClassVar[str] = "hashed"
    later_options = ("spans",)

    spans: Literal["runs", "block"] = attrs.field(default="runs")
    # The second number distinguishes the blocks of one key.
    _spans: dict[tuple[Key, int], Span] = attrs.field(init=False, factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        """Check the option."""
        if self.spans not in ("runs", "block"):
            msg = f"hashed: spans={self.spans!r} is not known; there are: runs, block"
            raise InputError(msg)
        self.block_spans = self.spans == "block"

    def match(self, keys: Keys[Key], limit: int, after: Span) -> tuple[Span, int]:
        """Return the span of the last cached block. O(log blocks)."""
        spans, ratio = self._spans, after.geometry.ratio
        # Of the blocks, the first `low` are cached, and those from `high` on are not.
        low, high, found = after.end, limit, after
        while low < high:
            middle = (low + high) // 2
            span = spans.get((keys[middle // ratio], middle % ratio))
            if span is None:
                high = middle
            else:
                low, found = middle + 1, span
        return found, low

    def insert(self, span: Span, first: int) -> None:
        """Enter the blocks of `span` from position `first` on."""
        self._enter(span, first)

    def split(self, upper: Span, lower: Span) -> None:
        """Enter the blocks that were in `lower` under `upper`."""
        del lower
        self._enter(upper, upper.start)

    def remove(self, span: Span, first: int) -> None:
        """Delete the blocks of `span` from position `first` on."""
        spans, keys, ratio = self._spans, span.path_keys, span.geometry.ratio
        for block in range(first, span.end):
            del spans[keys[block // ratio], block % ratio]

    def _enter(self, span: Span, first: int) -> None:
        spans, keys, ratio = self._spans, span.path_keys, span.geometry.ratio
        for block in range(first, span.end):
            spans[keys[block // ratio], block % ratio] = span
