"""Random replacement."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import EvictionPolicy, Span
from kvcore.blake2 import blake2b


@attrs.define(slots=False, eq=False, repr=False)
class Random(EvictionPolicy):
    """Evict an evictable span drawn at random: a baseline.

    All unpinned leaves are equally likely. A draw depends on the seed, the request that
    needs blocks, the time, and the number of earlier victims for that request, not on draws
    for other requests. A victim stays the victim until it has left or is used. O(1) per
    event.

    Options:
        seed: number from which all draws are derived.
    """

    name: ClassVar[str] = "random"

    seed: int = 0

    _victims = 0

    def attach(self, blocks: int, block_size: int) -> None:
        """Store the size of the pool and create the empty list of leaves."""
        super().attach(blocks, block_size)
        self._current: Span | None = None
        self._drawn_for: tuple[int | str | None, int] = None, 0
        self._leaves: list[Span] = []
        self._index: dict[Span, int] = {}

    def on_pin(self, span: Span) -> None:
        """Remove `span`; the last leaf moves to its place in the list."""
        index = self._index.pop(span, None)
        if index is not None:
            last = self._leaves.pop()
            if last is not span:
                self._leaves[index] = last
                self._index[last] = index
        if span is self._current:
            self._current = None

    def on_release(self, span: Span, now: int) -> None:
        """Append `span` if it is a leaf."""
        if span.is_leaf:
            self.on_leaf(span)

    def on_leaf(self, span: Span) -> None:
        """Append `span`."""
        self._index[span] = len(self._leaves)
        self._leaves.append(span)

    def on_remove(self, span: Span, reason: str) -> None:
        """Remove `span`."""
        self.on_pin(span)

    def victim(self, now: int) -> Span:
        """Return the span that was drawn."""
        if self._current is None:
            if self._drawn_for != (self.requester, now):
                self._drawn_for = self.requester, now
                self._victims = 0
            text = f"{self.seed}/{self.name}/{self.requester!r}/{now}/{self._victims}"
            digest = blake2b(text.encode(), digest_size=8).digest()
            self._current = self._leaves[int.from_bytes(digest) % len(self._leaves)]
            self._victims += 1
        return self._current
