"""A prefix index: which cached blocks a prompt can reuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvcore import PrefixIndex, Span
from kvcore.request import Key


class Example(PrefixIndex):
    """Look up blocks in a table, from the last one of a prompt to the first that is cached."""

    name: ClassVar[str] = "example"

    def __init__(self) -> None:
        """Create an empty table."""
        self._spans: dict[tuple[Key, int], Span] = {}

    def match(self, keys: Sequence[Key], limit: int, after: Span) -> tuple[Span, int]:
        """Return the span of the last cached block up to `limit`, and the end of the match."""
        ratio = after.geometry.ratio
        for block in range(limit - 1, after.end - 1, -1):
            span = self._spans.get((keys[block // ratio], block % ratio))
            if span is not None:
                return span, block + 1
        return after, after.end

    def insert(self, span: Span, first: int) -> None:
        """Enter the blocks of `span` from position `first` on."""
        for row in _rows(span, first):
            self._spans[row] = span

    def split(self, upper: Span, lower: Span) -> None:
        """Enter the blocks that were in `lower` under `upper`."""
        del lower
        self.insert(upper, upper.start)

    def remove(self, span: Span, first: int) -> None:
        """Delete the blocks of `span` from position `first` on."""
        for row in _rows(span, first):
            del self._spans[row]


def _rows(span: Span, first: int) -> Iterator[tuple[Key, int]]:
    """Yield the rows of blocks: their key, and which of the blocks of this key each is."""
    ratio = span.geometry.ratio
    return ((span.path_keys[block // ratio], block % ratio) for block in range(first, span.end))
