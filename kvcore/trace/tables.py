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
