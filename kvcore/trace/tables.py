"""What a replay rebuilds: spans and block tables, made from trace lines alone."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, NoReturn

import attrs

from kvcore.cache.pool import Ids
from kvcore.trace.layout import Prompt


class ViolationError(ValueError):
    """A line that cannot follow from the lines before it."""


def violated(reason: str) -> NoReturn:
    """Raise ViolationError."""
    raise ViolationError(reason)


@attrs.define(eq=False)
class TracedSpan:
    """A run of cached blocks: ids and keys of the positions from `start` on.

    `keys` are those of the whole prompt that stored it. `creator` is the sequence that may
    still grow it in place.
    """

    id: int
    start: int
    ids: Ids
    keys: list[Any]
    parent: TracedSpan | None
    pins: int
    creator: int | None
    last_access: int
    hits: int = 0
    children: int = 0

    @property
    def end(self) -> int:
        """The position after its last block."""
        return self.start + len(self.ids)


@attrs.define(eq=False)
class TracedSequence:
    """An open sequence: the deepest span it holds, and its private blocks after that."""

    id: int
    prompt: Prompt
    span: TracedSpan
    private: Ids
    hit: int
    again: bool

    @property
    def blocks(self) -> int:
        """How many blocks its table has."""
        return self.span.end + len(self.private)

    def table(self) -> Ids:
        """Return its block table: the ids of its blocks, first to last."""
        parts = [self.private, *(span.ids for span in path(self.span))]
        table: Ids = array("i")
        for part in reversed(parts):
            table.extend(part)
        return table


def path(span: TracedSpan) -> Iterator[TracedSpan]:
    """Yield `span` and what is above it, up to the first blocks of the prompt."""
    while span.parent is not None:
        yield span
        span = span.parent


@attrs.define
class Hits:
    """What admissions looked up and hit, in blocks; `again` ones found their own."""

    lookup_blocks: int = 0
    hit_blocks: int = 0
    self_hit_blocks: int = 0
    looked_up: int = 0
    ratios: float = 0.0

    def count(self, lookup: int, hit: int, *, again: bool) -> None:
        """Count an admission that hit `hit` of `lookup` blocks."""
        if again:
            self.self_hit_blocks += hit
        elif lookup:
            self.lookup_blocks += lookup
            self.hit_blocks += hit
            self.looked_up += 1
            self.ratios += hit / lookup

    def as_dict(self) -> dict[str, Any]:
        """Return the counts, with the hit ratio by block and by request (None: no lookups)."""
        some = self.looked_up > 0
        return {
            "lookup_blocks": self.lookup_blocks,
            "hit_blocks": self.hit_blocks,
            "self_hit_blocks": self.self_hit_blocks,
            "ratio": {
                "block": self.hit_blocks / self.lookup_blocks if some else None,
                "request": self.ratios / self.looked_up if some else None,
            },
        }
