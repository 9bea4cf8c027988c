"""What a replay rebuilds: spans and block tables, made from trace lines alone."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, NoReturn

import attrs

from kvcore.cache.pool import Ids
from kvcore.cache.sequence import Hole, merge_holes
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
    """An open sequence: the deepest span it holds, and its private blocks after that.

    `gaps` are the blocks it has forgotten, `returned` those of them that were private.
    """

    id: int
    prompt: Prompt
    span: TracedSpan
    private: Ids
    hit: int
    again: bool
    gaps: tuple[Hole, ...] = ()
    returned: int = 0

    @property
    def blocks(self) -> int:
        """How many blocks its table has, with those it has forgotten."""
        return self.span.end + len(self.private) + self.returned

    @property
    def forgotten(self) -> list[list[int]]:
        """The blocks it has forgotten, as its closing FREE has them: [first, count]."""
        return [[first, end - first] for first, end in self.gaps]

    def table(self) -> Ids:
        """Return its block table: the ids of the blocks it has not forgotten, in order."""
        table: Ids = array("i")
        for part in reversed([span.ids for span in path(self.span)]):
            table.extend(part)
        for first, end in reversed(self.gaps):
            del table[first:end]
        return table + self.private

    def forget(self, first: int, end: int) -> Ids:
        """Forget the blocks `[first, end)`; return those of its own, deepest first.

        Raises:
            ViolationError: they are not in its table.
        """
        if end > self.blocks or any(low < end and first < high for low, high in self.gaps):
            violated(f"blocks {first} to {end} are not in the table of sequence {self.id}")
        start = max(first, self.span.end)
        passed = sum(
            max(min(high, start) - max(low, self.span.end), 0) for low, high in self.gaps
        )
        at = start - self.span.end - passed
        count = max(end - start, 0)
        freed = self.private[at : at + count]
        freed.reverse()
        del self.private[at : at + count]
        self.gaps = merge_holes([*self.gaps, (first, end)])
        self.returned += count
        return freed


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
