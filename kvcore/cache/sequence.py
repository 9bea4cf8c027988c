"""A sequence: one request's blocks, from admission to close."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Keys
from typing import TypeAlias

import attrs

from kvcore.cache.span import Span
from kvcore.request import Key, Request

Gap: TypeAlias = tuple[int, int]
"""(first, end): block positions that a sequence has forgotten."""


@attrs.define(eq=False, repr=False)
class Sequence:
    """The block table of an open request: a path of shared spans, then private blocks.

    Read it freely; only the cache writes. Lengths are tokens unless they say blocks.

    Attributes:
        id: serial of the sequence in this cache; forks have one of their own.
        admission: serial of the admission; a fork is of the admission of its parent.
        request: what it serves.
        keys: its chain of block keys, `ratio` blocks each.
        cacheable: blocks that may be shared once computed.
        lookup_blocks, hit_blocks: blocks looked up and hit when it was opened.
        tokens: allocated, the hit included.
        computed: committed so far, the hit included.
        blocks: blocks in its table.
        span: its deepest shared span; blocks before `span.end` are shared.
        private: ids of the blocks from `span.end` on, but for those it has forgotten; None
            in a pool that only counts.
        priorities: retention hints as (end block, priority, duration ns), by position.
        family: it and the open sequences it shares private blocks with, after a fork.
        gaps: the blocks it has forgotten, as ranges of positions, in order.
        forgotten, returned: how many those are, and how many of them were its own and are
            free again; the others stay cached.
        is_open: False once closed.
    """

    id: int
    admission: int
    request: Request
    keys: Keys[Key]
    cacheable: int
    lookup_blocks: int
    hit_blocks: int
    tokens: int
    computed: int
    blocks: int
    span: Span
    private: array[int] | None = None
    priorities: list[tuple[int, int, int | None]] | None = None
    family: list[Sequence] | None = None
    gaps: tuple[Gap, ...] = ()
    forgotten: int = 0
    returned: int = 0
    is_open: bool = True

    @property
    def private_blocks(self) -> int:
        """Blocks of its own: partial tail, unkeyed, or not committed yet."""
        return self.blocks - self.span.end - self.returned

    @property
    def forgotten_tokens(self) -> int:
        """Computed tokens whose K/V it attends to no longer."""
        return self.forgotten * self.span.geometry.block_size

    def forgotten_between(self, first: int, end: int) -> int:
        """Count the blocks from position `first` up to `end` that it has forgotten."""
        return sum(max(min(end, high) - max(first, low), 0) for low, high in self.gaps)

    def __repr__(self) -> str:
        """Show id, request and length."""
        return f"<Sequence {self.id}: request {self.request.id}, {self.tokens} tokens>"


def merged(gaps: Iterable[Gap]) -> tuple[Gap, ...]:
    """Return disjoint gaps in order, those that touch as one."""
    parts: list[Gap] = []
    for first, end in sorted(gaps):
        if parts and parts[-1][1] == first:
            parts[-1] = parts[-1][0], end
        else:
            parts.append((first, end))
    return tuple(parts)
