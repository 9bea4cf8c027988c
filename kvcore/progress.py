"""Progress of long runs, shown as a bar or a log, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeAlias, TypeVar

Item = TypeVar("Item")

Tick: TypeAlias = Callable[[int], None]
"""Called with the number of items that were processed since the last call, or with bytes of
the file that they come from: a trace has as many lines as it has, but a size."""

Progress: TypeAlias = Callable[[str, int | None], AbstractContextManager[Tick]]
"""Begins to show progress: called with a description and the number of items (None: unknown),
it returns a context that gives the `Tick` to call."""

STRIDE = 256
"""Items between two ticks, so that showing progress costs nothing beside the work."""


def silent(description: str, total: int | None) -> AbstractContextManager[Tick]:
    """Return a `Tick` that shows nothing: the default `Progress`."""
    del description, total
    return nullcontext(unseen)


def unseen(done: int) -> None:
    """Drop a number of processed items: the `Tick` of `silent`."""
    del done


def ticked(items: Iterable[Item], tick: Tick) -> Iterable[Item]:
    """Return `items`, calling `tick` after every `STRIDE` of them and after the last.

    The calls are with items; or with bytes, if `items` has a `position` in its file, as the
    reader of a trace does.
    """
    return items if tick is unseen else Ticked(items, tick)


class Ticked(Generic[Item]):
    """What `ticked` returns for progress that is shown.

    Attributes:
        items: what is yielded.
    """

    def __init__(self, items: Iterable[Item], tick: Tick) -> None:
        self.items, self._tick = items, tick

    def __iter__(self) -> Iterator[Item]:
        """Yield the items, and count them."""
        items, tick = self.items, self._tick
        told = count = 0
        for count, item in enumerate(items, 1):
            yield item
            if not count % STRIDE:
                told, before = getattr(items, "position", count), told
                tick(told - before)
        tick(getattr(items, "position", count) - told)
