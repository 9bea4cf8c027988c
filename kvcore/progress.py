"""Progress of long runs, shown as a bar or a log, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias, TypeVar

Item = TypeVar("Item")

Tick: TypeAlias = Callable[[int], None]
"""Called with the number of items that were processed since the last call."""

Progress: TypeAlias = Callable[[str, int | None], AbstractContextManager[Tick]]
"""Begins to show progress: called with a description and the number of items (None: unknown),
it returns a context that gives the `Tick` to call."""

STRIDE = 256
"""Items between two ticks, so that showing progress costs nothing beside the work."""


def silent(description: str, total: int | None) -> AbstractContextManager[Tick]:
    """Begin a run whose progress is not shown: the default `Progress`."""
    del description, total
    return nullcontext(unseen)


def unseen(done: int) -> None:
    """Drop a number of processed items: the `Tick` of `silent`."""
    del done


def ticked(items: Iterable[Item], tick: Tick) -> Iterable[Item]:
    """Return `items`, calling `tick` after every `STRIDE` of them and after the last."""
    return items if tick is unseen else _ticked(items, tick)


def _ticked(items: Iterable[Item], tick: Tick) -> Iterator[Item]:
    fresh = 0
    for item in items:
        yield item
        fresh += 1
        if fresh == STRIDE:
            tick(fresh)
            fresh = 0
    tick(fresh)
