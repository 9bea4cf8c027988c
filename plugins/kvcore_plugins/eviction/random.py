"""Random replacement."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, ClassVar

import attrs

from kvcore import EvictionPolicy, Span


@attrs.define(slots=False, eq=False)
class Random(EvictionPolicy):
    """Evict an evictable span chosen at random: the baseline without any knowledge.

    All unpinned leaves are equally likely. Draws depend on the seed, the request for which
    room is made, the time, and how many victims it had, never on what was drawn for other
    requests. A victim stays the victim until it is gone or used. O(1) per event.

    Options:
        seed: what the draws come from.
    """

    name: ClassVar[str] = "random"

    seed: int = attrs.field(default=0)

    _leaves: list[Span] = attrs.field(init=False, factory=list, repr=False)
    _places: dict[Span, int] = attrs.field(init=False, factory=dict, repr=False)
    _current: Span | None = attrs.field(init=False, default=None, repr=False)
    _for: tuple[int | str | None, int] = attrs.field(init=False, default=(None, 0), repr=False)
    _victims: int = attrs.field(init=False, default=0, repr=False)

    def on_pin(self, span: Span) -> None:
        """Take `span` out: the last leaf takes its place."""
        place = self._places.pop(span, None)
        if place is not None:
            last = self._leaves.pop()
            if last is not span:
                self._leaves[place] = last
                self._places[last] = place
        if span is self._current:
            self._current = None

    def on_release(self, span: Span, now: int) -> None:
        """Add `span` if it is a leaf."""
        del now
        if span.is_leaf:
            self.on_leaf(span)

    def on_leaf(self, span: Span) -> None:
        """Add `span`."""
        self._places[span] = len(self._leaves)
        self._leaves.append(span)

    def on_remove(self, span: Span, reason: str) -> None:
        """Forget `span`."""
        del reason
        self.on_pin(span)

    def victim(self, now: int) -> Span:
        """Return the span drawn."""
        if self._current is None:
            if self._for != (self.requester, now):
                self._for = self.requester, now
                self._victims = 0
            text = f"{self.seed}/{self.name}/{self.requester!r}/{now}/{self._victims}"
            digest = blake2b(text.encode(), digest_size=8).digest()
            self._current = self._leaves[int.from_bytes(digest) % len(self._leaves)]
            self._victims += 1
        return self._current

    def state(self) -> Any:
        """Return the leaves in their order, and where the draws stand."""
        return tuple(self._leaves), self._current, self._for, self._victims

    def restore(self, state: Any) -> None:
        """Take leaves and draws from `state`."""
        leaves, self._current, self._for, self._victims = state
        self._leaves = list(leaves)
        self._places = {span: place for place, span in enumerate(leaves)}
