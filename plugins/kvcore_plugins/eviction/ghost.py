"""Ghosts: the keys of recently evicted blocks, stored without the blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import attrs

from kvcore.cache.layout import common_prefix
from kvcore.cache.span import Span
from kvcore.errors import InputError
from kvcore.request import Key, Request


@attrs.define(eq=False, repr=False)
class _Run:
    """Block positions `[start, end)` of one path: a ghost, or an inner node of the tree.

    Ghosts form a doubly linked ring in the order in which they were added; an inner node has
    neither `older` nor `newer`.
    """

    start: int
    end: int
    keys: Sequence[Key]
    parent: _Run | None = None
    children: dict[Key, _Run] = attrs.field(factory=dict)
    older: _Run | None = None
    newer: _Run | None = None

    def link(self, older: _Run) -> None:
        """Insert this run into the ring just after `older`."""
        newer = older.newer
        assert newer is not None
        self.older, self.newer = older, newer
        older.newer = newer.older = self

    def unlink(self) -> None:
        """Remove this run from the ring."""
        assert self.older is not None
        assert self.newer is not None
        self.older.newer, self.newer.older = self.newer, self.older
        self.older = self.newer = None


class GhostTree:
    """Stores the keys of up to `capacity` tokens of evicted spans: a radix tree without blocks.

    Over capacity the least recently added run is dropped, tail first. The capacity is rounded
    down to whole keys, so that the content does not depend on how many blocks a key has.

    Every call costs O(runs on the path of its keys); `add` and `resize` also cost O(runs
    dropped). Memory is O(runs); keys are stored by reference, as in spans.

    Args:
        tokens: the capacity in tokens.

    Raises:
        InputError: the capacity is below 0.
    """

    __slots__ = ("_block_size", "_ratio", "_ring", "capacity", "tokens")

    capacity: int
    """The maximum of `tokens`; changed by `resize`."""

    tokens: int
    """The number of tokens whose keys are stored."""

    def __init__(self, tokens: int) -> None:
        """Create an empty tree with a capacity of `tokens` tokens."""
        self._block_size = self._ratio = 1  # those of the first span
        self.tokens = 0
        self._ring = _Run(0, 0, ())
        self._ring.older = self._ring.newer = self._ring
        self.capacity = tokens
        self.resize(tokens)

    def add(self, span: Span, blocks: int) -> None:
        """Store the keys of the last `blocks` blocks of `span`, which were just evicted.

        For a policy to call in its `on_trim(span, blocks)`, and in its `on_remove` with
        `span.blocks`. The blocks become the most recent content, the tail the oldest of
        them, even if they were stored before.
        """
        self._block_size, self._ratio = span.geometry.block_size, span.geometry.ratio
        end = span.end
        # In on_trim the blocks are cut off from the span, which its parent still has.
        siblings = span.parent.children if span.parent is not None else None
        cached = siblings.get(span.path_keys[span.start // self._ratio]) if siblings else None
        if cached is not None and cached.id == span.id:
            end += blocks
        self._remember(span.path_keys, end - blocks, end)
        self._shrink()

    def match(self, request: Request) -> int:
        """Return how many tokens of the prompt of `request` are stored. Changes nothing.

        They need not begin at its start: the blocks before them may be cached.
        """
        if not self.tokens:
            return 0
        keys, ratio = _keys_of(request, self._block_size), self._ratio
        end, hit_blocks = len(keys) * ratio, 0
        run = self._ring
        while run.end < end:
            child = run.children.get(keys[run.end // ratio])
            if child is None:
                break
            run = child
            stop = common_prefix(run.keys, keys, run.start, min(run.end, end), ratio)
            if run.newer is not None:
                hit_blocks += stop - run.start
            if stop < run.end:
                break
        return hit_blocks * self._block_size

    def forget(self, span: Span) -> int:
        """Drop the blocks of `span`, and return how many of its tokens were stored.

        For a policy to call in its `on_insert` and `on_extend`: the span is cached again.
        """
        if not self.tokens or span.path_keys[0] not in self._ring.children:
            return 0
        runs, deepest = self._runs_of(span.path_keys, span.start, span.end, create=False)
        before = self.tokens
        for run in runs:
            self._drop(run)
        self._prune(deepest)
        return before - self.tokens

    def resize(self, tokens: int) -> None:
        """Change the capacity to `tokens` tokens, and drop the oldest content above it.

        Raises:
            InputError: `tokens` is below 0.
        """
        if tokens < 0:
            msg = f"a ghost of {tokens} tokens: give 0 or more"
            raise InputError(msg)
        before, self.capacity = self.capacity, tokens
        if tokens < before:
            self._shrink()

    def _remember(self, keys: Sequence[Key], start: int, end: int) -> None:
        """Make `[start, end)` the most recent content, its tail the oldest of it."""
        if keys[0] not in self._ring.children:
            self._begin(keys, start, end)
            return
        runs, deepest = self._runs_of(keys, start, end, create=True)
        for run in reversed(runs):
            if run.newer is None:
                self.tokens += (run.end - run.start) * self._block_size
            else:
                run.unlink()
            assert self._ring.older is not None
            run.link(self._ring.older)
        self._prune(deepest)

    def _begin(self, keys: Sequence[Key], start: int, end: int) -> None:
        """Store `[start, end)` of a path whose first key is new: no run is cut or joined."""
        first = ring = self._ring
        if start:
            first = ring.children[keys[0]] = _Run(0, start, keys, ring)
        run = _Run(start, end, keys, first)
        first.children[keys[start // self._ratio]] = run
        self.tokens += (end - start) * self._block_size
        assert ring.older is not None
        run.link(ring.older)

    def _runs_of(
        self, keys: Sequence[Key], start: int, end: int, *, create: bool
    ) -> tuple[list[_Run], _Run]:
        """Return the runs that cover `[start, end)` exactly, and the deepest one visited.

        Runs are cut at both ends, and where `keys` diverge from them. Positions in no run
        are put into new ones with `create`, and left out otherwise.
        """
        ratio = self._ratio
        runs, run = [], self._ring
        while run.end < end:
            child = run.children.get(keys[run.end // ratio])
            if child is None:
                if not create:
                    break
                stop = start if run.end < start else end
                child = _Run(run.end, stop, keys, run)
                run.children[keys[run.end // ratio]] = child
            else:
                stop = common_prefix(child.keys, keys, child.start, min(child.end, end), ratio)
                if child.start < start < stop:
                    stop = start
                if stop < child.end:
                    child = self._cut(child, stop)
            if child.start >= start:
                runs.append(child)
            run = child
        return runs, run

    def _cut(self, lower: _Run, position: int) -> _Run:
        """Cut `lower` at block position `at`; return the new upper half."""
        assert lower.parent is not None
        ratio, keys = self._ratio, lower.keys
        upper = _Run(
            lower.start, position, keys, lower.parent, {keys[position // ratio]: lower}
        )
        lower.parent.children[keys[lower.start // ratio]] = upper
        lower.parent, lower.start = upper, position
        if lower.newer is not None:
            upper.link(lower)
        return upper

    def _drop(self, run: _Run) -> None:
        """Drop the content of `run`, which stays in the tree until that is pruned."""
        if run.newer is not None:
            self.tokens -= (run.end - run.start) * self._block_size
            run.unlink()

    def _shrink(self) -> None:
        """Drop the oldest content, tail first, until the rest fits into the capacity."""
        size, ratio = self._block_size, self._ratio
        limit = self.capacity // (size * ratio) * ratio
        while (excess := self.tokens // size - limit) > 0:
            oldest = self._ring.newer
            assert oldest is not None
            if excess < oldest.end - oldest.start:
                self._cut(oldest, oldest.end - excess)
            self._drop(oldest)
            self._prune(oldest)

    def _prune(self, run: _Run) -> None:
        """Remove, from `run` up, nodes without content below; join runs that were cut."""
        ratio = self._ratio
        while run is not self._ring:
            parent = run.parent
            assert parent is not None
            key = run.keys[run.start // ratio]
            if not run.children and run.newer is None:
                del parent.children[key]
            elif len(run.children) == 1:
                (child,) = run.children.values()
                # Adjacent in the ring, or both without content: one run again.
                if run.older is child or run.newer is child.newer is None:
                    child.start, child.parent = run.start, parent
                    parent.children[key] = child
                    if run.newer is not None:
                        run.unlink()
            run = parent


Value = TypeVar("Value")


class GhostRuns(Generic[Value]):
    """Stores a value for each run of evicted blocks, by the first key of the run.

    For policies that learn from what returns after an eviction. Over capacity the least
    recently added run is dropped. A run is found as a whole, where the one before it ends: it
    is neither cut nor joined, and prompts that part inside it find it. O(1) per run.

    Args:
        blocks: the most blocks of all runs together.
    """

    __slots__ = ("_block_size", "_capacity", "_ratio", "_runs", "blocks")

    blocks: int
    """The number of blocks of all runs."""

    def __init__(self, blocks: int) -> None:
        """Store no run."""
        self._runs: OrderedDict[Key, tuple[Value, int, Sequence[Key]]] = OrderedDict()
        self._capacity, self.blocks = blocks, 0
        self._block_size = self._ratio = 1  # those of the first span

    def add(self, span: Span, end: int, value: Value) -> list[Value]:
        """Store `value` for the blocks from the start of `span` to `end`; at least one.

        For a policy to call in its `on_remove`, with the end before any `on_trim` if these
        blocks belong to the run.

        Returns:
            The values of the runs that were dropped.
        """
        self._block_size, self._ratio = span.geometry.block_size, span.geometry.ratio
        key, blocks = span.path_keys[span.start // self._ratio], max(1, end - span.start)
        runs = self._runs
        if key in runs:
            self.blocks -= runs.pop(key)[1]
        runs[key] = value, blocks, span.path_keys
        self.blocks += blocks
        dropped = []
        while self.blocks > self._capacity:
            value, blocks, _ = runs.popitem(last=False)[1]
            self.blocks -= blocks
            dropped.append(value)
        return dropped

    def take(self, request: Request, hit_blocks: int) -> list[tuple[Value, int, int]]:
        """Remove the runs that follow the hit of `request`.

        For a policy to call in its `on_miss`.

        Returns:
            Their values, and of each the block positions from which and up to which the prompt
            has the keys of the run. Where the prompt parts from a run, it is the last.
        """
        runs, ratio = self._runs, self._ratio
        taken: list[tuple[Value, int, int]] = []
        keys, start = _keys_of(request, self._block_size), hit_blocks // ratio * ratio
        while start < len(keys) * ratio and (run := runs.pop(keys[start // ratio], None)):
            value, blocks, path = run
            self.blocks -= blocks
            end = min(start + -(-blocks // ratio) * ratio, len(keys) * ratio)
            stop = common_prefix(path, keys, start, end, ratio)
            taken.append((value, start, stop))
            start = stop if stop == end else len(keys) * ratio
        return taken

    def values(self) -> list[Value]:
        """Return all values, those of the least recent runs first."""
        return [value for value, _, _ in self._runs.values()]


def _keys_of(request: Request, block_size: int) -> Sequence[Key]:
    """Return the keys by which the blocks of `request` are found."""
    stride = block_size // request.key_tokens
    return request.keys[stride - 1 :: stride] if stride > 1 else request.keys
