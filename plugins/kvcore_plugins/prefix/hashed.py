"""The hashed prefix index: a dictionary from the key of a block to the span that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import attrs

from kvcore import PrefixIndex, Span
from kvcore.request import Key
from kvcore_plugins.bounds import one_of


@attrs.define(slots=False, eq=False)
class Hashed(PrefixIndex):
    """Look up whole blocks by their chained keys, in one dictionary.

    A key stands for all blocks before it too, so a lookup need not start at the first block. A
    block is cached only if its predecessor is: the last key that is cached is found by
    bisection, in O(log keys) lookups, and the last of its blocks below the span of its first.
    Storing, splitting and evicting cost O(keys).

    Options:
        spans: `runs` keeps blocks of one history in one span; `block` makes each block a span
            of its own, as in engines that cache block by block. Policies then choose among
            blocks, and every step costs O(blocks).

    Source: the block pool of vLLM (Kwon et al., 2023), which maps the hash of a block to
    the block; here a key maps to the span of the block.
    """

    name: ClassVar[str] = "hashed"
    later_options = ("spans",)

    spans: Literal["runs", "block"] = one_of("runs", "block")
    # By each key, the span that holds the first of its blocks.
    _spans: dict[Key, Span] = attrs.field(init=False, factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        """Store what the option decides."""
        self.block_spans = self.spans == "block"

    def match(self, keys: Sequence[Key], limit: int, after: Span) -> tuple[Span, int]:
        """Return the span of the last cached block. O(log keys)."""
        spans, ratio = self._spans, after.geometry.ratio
        # Of the keys, those before `low` have their first block cached, those from `high` on
        # have not.
        low, high, last = -(-after.end // ratio), -(-limit // ratio), after
        while low < high:
            middle = (low + high) // 2
            span = spans.get(keys[middle])
            if span is None:
                high = middle
            else:
                low, last = middle + 1, span
        # The other blocks of that key may be in spans below.
        end_of_limit = min(limit, low * ratio)
        position = after.end if last is after else min(last.end, end_of_limit)
        while position < end_of_limit and last.children:
            child = last.children.get(keys[low - 1])
            if child is None:
                break
            last, position = child, min(child.end, end_of_limit)
        return last, position

    def insert(self, span: Span, first: int) -> None:
        """Enter the blocks of `span` from position `first` on."""
        self._enter(span, first)

    def split(self, upper: Span, lower: Span) -> None:
        """Enter the blocks that were in `lower` under `upper`."""
        self._enter(upper, upper.start)

    def remove(self, span: Span, first: int) -> None:
        """Delete the blocks of `span` from position `first` on."""
        for key in _keys_begun(span, first):
            del self._spans[key]

    def _enter(self, span: Span, first: int) -> None:
        for key in _keys_begun(span, first):
            self._spans[key] = span


def _keys_begun(span: Span, first: int) -> Sequence[Key]:
    """Return the keys of whose blocks the first is in `span`, at position `first` or later."""
    ratio = span.geometry.ratio
    return span.path_keys[-(-first // ratio) : -(-span.end // ratio)]
