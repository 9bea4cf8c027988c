"""Progress of long runs: as a bar, as a log, or hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeAlias, TypeVar

Item = TypeVar("Item")

Tick: TypeAlias = Callable[[int], None]
"""Called with the number of items processed since the last call; or with a number of bytes, for
a file whose number of lines is not known, such as a trace."""

Progress: TypeAlias = Callable[[str, int | None], AbstractContextManager[Tick]]
"""Begins to show progress: called with a description and the number of items (None: unknown),
it returns a context manager whose value is the `Tick` to call."""

STRIDE = 256
"""Items between two ticks, so that the cost of progress is small beside that of the work."""


def silent(description: str, total: int | None) -> AbstractContextManager[Tick]:
    """Return a `Tick` that shows nothing: the default `Progress`."""
    del description, total
    return nullcontext(unseen)


def unseen(done: int) -> None:
    """Drop a number of processed items: the `Tick` of `silent`."""
    del done


def ticked(items: Iterable[Item], tick: Tick) -> Iterable[Item]:
    """Return `items`, calling `tick` after every `STRIDE` of them and after the last.

    Ticks count items; or bytes, if `items` has a `position` in its file, as the reader of a
    trace has.
    """
    return items if tick is unseen else Ticked(items, tick)


class Ticked(Generic[Item]):
    """The iterable that `ticked` returns for progress that is shown.

    Attributes:
        items: the items that it yields.
    """

    def __init__(self, items: Iterable[Item], tick: Tick) -> None:
        self.items, self._tick = items, tick

    def __iter__(self) -> Iterator[Item]:
        """Yield the items, and count them."""
        items, tick = self.items, self._tick
        done = count = 0
        for count, item in enumerate(items, 1):
            yield item
            if not count % STRIDE:
                before, done = done, getattr(items, "position", count)
                tick(done - before)
        tick(getattr(items, "position", count) - done)
