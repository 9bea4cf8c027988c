"""Ghosts: which keys have left the cache lately, remembered without their blocks."""

from __future__ import annotations

from collections.abc import Sequence as Keys
from typing import Any

import attrs

from kvcore.cache.layout import BlockLayout
from kvcore.cache.span import Span
from kvcore.errors import InputError
from kvcore.request import Key, Request


@attrs.define(eq=False, repr=False)
class _Run:
    """A run of consecutive positions of one path: remembered, or what runs hang from.

    Those remembered form a ring in the order in which they were added.
    """

    start: int
    end: int
    keys: Keys[Key]
    parent: _Run | None = None
    children: dict[Key, _Run] = attrs.field(factory=dict)
    older: _Run | None = None
    newer: _Run | None = None

    def link(self, older: _Run) -> None:
        """Enter the ring just after `older`."""
        newer = older.newer
        assert newer is not None
        self.older, self.newer = older, newer
        older.newer = newer.older = self

    def unlink(self) -> None:
        """Leave the ring."""
        assert self.older is not None
        assert self.newer is not None
        self.older.newer, self.newer.older = self.newer, self.older
        self.older = self.newer = None


class GhostTree:
    """Remembers up to `capacity` tokens of what was evicted: a radix tree without blocks.

    Over capacity the least recently added run leaves, tail first. Room is counted in whole
    keys, so that what is remembered does not depend on how many blocks a key has.

    Every call costs O(runs on the path it is about), `add` and `resize` besides O(runs
    that leave). Memory is proportional to the runs remembered; keys are kept by reference,
    as spans keep them.

    Raises:
        InputError: the capacity is below 0.
    """

    __slots__ = ("_geometry", "_ring", "capacity", "tokens")

    capacity: int
    """How many tokens it may remember; change it by `resize`."""

    tokens: int
    """How many tokens it remembers."""

    def __init__(self, tokens: int) -> None:
        """Remember nothing yet, and at most `tokens` tokens."""
        self._geometry: BlockLayout | None = None
        self._clear()
        self.resize(tokens)

    def add(self, span: Span, blocks: int) -> None:
        """Remember the last `blocks` blocks of `span`, which were evicted just now.

        To be called from the policy's `on_trim(span, blocks)`, where those blocks are cut
        off already, and from its `on_remove`, with `span.blocks`. The tail is older than
        what comes before it. What was remembered before is the most recent now.
        """
        geometry = self._geometry = span.geometry
        end = span.end
        siblings = span.parent.children if span.parent is not None else None
        if siblings and siblings.get(span.path_keys[span.start // geometry.ratio]) is span:
            end += blocks
        self._remember(span.path_keys, end - blocks, end)
        self._shed()

    def match(self, request: Request) -> int:
        """Return how many tokens of the prompt of `request` are remembered. Pure.

        They need not begin at its start: what comes before may be cached.
        """
        geometry = self._geometry
        if geometry is None:
            return 0
        keys, ratio = request.keys, geometry.ratio
        stride = geometry.block_size // request.key_tokens
        if stride > 1:
            keys = keys[stride - 1 :: stride]
        end, found = len(keys) * ratio, 0
        run = self._ring
        while run.end < end:
            child = run.children.get(keys[run.end // ratio])
            if child is None:
                break
            run, stop = child, _agreement(child, keys, end, ratio)
            if run.newer is not None:
                found += stop - run.start
            if stop < run.end:
                break
        return found * geometry.block_size

    def forget(self, span: Span) -> int:
        """Forget the blocks of `span`; return how many tokens of it were remembered.

        To be called from the policy's `on_insert` and `on_extend`: it is cached again.
        """
        if not self.tokens:
            return 0
        runs, deepest = self._tile(span.path_keys, span.start, span.end, grow=False)
        before = self.tokens
        for run in runs:
            self._drop(run)
        self._tidy(deepest)
        return before - self.tokens

    def resize(self, tokens: int) -> None:
        """Remember at most `tokens` tokens from now on.

        Raises:
            InputError: fewer than 0.
        """
        if tokens < 0:
            msg = f"a ghost of {tokens} tokens: give 0 or more"
            raise InputError(msg)
        self.capacity = tokens
        self._shed()

    def state(self) -> Any:
        """Return a value that trees which remember alike compare equal by. O(keys)."""
        runs: list[tuple[int, int, tuple[Key, ...]]] = []
        run, geometry = self._ring.newer, self._geometry
        while run is not self._ring:
            assert run is not None
            assert geometry is not None
            if run.older is not None and run.older.parent is run:
                # One run, though cut: what lay between the two in the order has gone.
                _, end, path = runs.pop()
            else:
                end, path = run.end, tuple(run.keys[: (run.end - 1) // geometry.ratio + 1])
            runs.append((run.start, end, path))
            run = run.newer
        return self.capacity, geometry, tuple(runs)

    def restore(self, state: Any) -> None:
        """Remember what `state` says, and nothing else."""
        self.capacity, self._geometry, runs = state
        self._clear()
        for start, end, keys in runs:
            self._remember(keys, start, end)

    def _clear(self) -> None:
        self.tokens = 0
        self._ring = _Run(0, 0, ())
        self._ring.older = self._ring.newer = self._ring

    def _remember(self, keys: Keys[Key], start: int, end: int) -> None:
        """Make `[start, end)` the most recent, its tail the oldest of it."""
        runs, deepest = self._tile(keys, start, end, grow=True)
        for run in reversed(runs):
            if run.newer is None:
                assert self._geometry is not None
                self.tokens += (run.end - run.start) * self._geometry.block_size
            else:
                run.unlink()
            assert self._ring.older is not None
            run.link(self._ring.older)
        self._tidy(deepest)

    def _tile(
        self, keys: Keys[Key], start: int, end: int, *, grow: bool
    ) -> tuple[list[_Run], _Run]:
        """Return the runs that cover `[start, end)` exactly, and the deepest one met.

        Runs are cut at both ends and where `keys` leave them. What is in no run is put
        into new ones if `grow`, and left out if not.
        """
        assert self._geometry is not None
        ratio = self._geometry.ratio
        runs, at = [], self._ring
        while at.end < end:
            child = at.children.get(keys[at.end // ratio])
            if child is None:
                if not grow:
                    break
                stop = start if at.end < start else end
                child = _Run(at.end, stop, keys, at)
                at.children[keys[at.end // ratio]] = child
            else:
                stop = _agreement(child, keys, end, ratio)
                if child.start < start < stop:
                    stop = start
                if stop < child.end:
                    child = self._cut(child, stop)
            if child.start >= start:
                runs.append(child)
            at = child
        return runs, at

    def _cut(self, lower: _Run, at: int) -> _Run:
        """Cut `lower` at block position `at`; return the new upper half."""
        assert self._geometry is not None
        assert lower.parent is not None
        ratio, keys = self._geometry.ratio, lower.keys
        upper = _Run(lower.start, at, keys, lower.parent, {keys[at // ratio]: lower})
        lower.parent.children[keys[lower.start // ratio]] = upper
        lower.parent, lower.start = upper, at
        if lower.newer is not None:
            upper.link(lower)
        return upper

    def _drop(self, run: _Run) -> None:
        """Forget `run`; it stays in the tree until that is tidied."""
        if run.newer is not None:
            assert self._geometry is not None
            self.tokens -= (run.end - run.start) * self._geometry.block_size
            run.unlink()

    def _shed(self) -> None:
        """Forget the oldest, tail first, until the rest has room."""
        if self._geometry is None:
            return
        size = self._geometry.block_size
        room = self.capacity // (size * self._geometry.ratio) * self._geometry.ratio
        while (excess := self.tokens // size - room) > 0:
            oldest = self._ring.newer
            assert oldest is not None
            if excess < oldest.end - oldest.start:
                self._cut(oldest, oldest.end - excess)
            self._drop(oldest)
            self._tidy(oldest)

    def _tidy(self, run: _Run) -> None:
        """Take out, from `run` up, what nothing hangs from; join what is one run again."""
        assert self._geometry is not None
        ratio = self._geometry.ratio
        while run is not self._ring:
            parent = run.parent
            assert parent is not None
            place = run.keys[run.start // ratio]
            if not run.children and run.newer is None:
                del parent.children[place]
            elif len(run.children) == 1:
                (child,) = run.children.values()
                if run.older is child or run.newer is child.newer is None:
                    child.start, child.parent = run.start, parent
                    parent.children[place] = child
                    if run.newer is not None:
                        run.unlink()
            run = parent


def _agreement(run: _Run, keys: Keys[Key], end: int, ratio: int) -> int:
    """Return where `keys`, as far as `end`, leave `run`. Its first key is known to match."""
    stop = min(run.end, end)
    low, high = run.start // ratio, (stop - 1) // ratio
    if keys[high] == run.keys[high]:
        return stop
    while high - low > 1:
        middle = (low + high) // 2
        if keys[middle] == run.keys[middle]:
            low = middle
        else:
            high = middle
    return high * ratio
