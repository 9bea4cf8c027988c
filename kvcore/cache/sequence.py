"""A sequence: one request's blocks, from admission to close."""

from __future__ import annotations

from array import array
from collections import abc
from typing import Any, NoReturn, TypeAlias

from kvcore.cache.hints import PriorityStep
from kvcore.cache.pool import Ids
from kvcore.cache.span import Span
from kvcore.errors import InputError
from kvcore.request import Key, Request

Hole: TypeAlias = tuple[int, int]
"""(first, end): block positions that a sequence has dropped."""


class Sequence:
    """The block table of an open request: a path of shared spans, then private blocks.

    Its table::

        position  0          4         7        10        13
                  +----------+---------+- - - - +---------+
                  |   span   |   span  |  hole  |         |
                  +----------+---------+- - - - +---------+
                  |<----- shared ----->|<---- private --->|
                                   span.end            blocks

    Shared blocks are those of `span` and of all spans above it, which this sequence pins.
    Private blocks belong to this sequence, and perhaps to its forks. A hole is a range that its
    retention policy dropped: private blocks in it are free again, shared ones are hidden from
    the sequence, and stay pinned.

    A compaction leaves a sequence with private blocks alone. From then on a position in its
    table is no position in its text: all lengths exclude the `compacted` tokens, which lie in
    no block. Each layer and K/V head has its own choice of the tokens that are left.

    Only the cache writes to it, except for `data`. Lengths are in tokens unless the name has
    `blocks`.

    Attributes:
        id: serial number of the sequence in this cache; a fork has another one.
        admission: serial number of the admission; a fork has that of its parent.
        request: the request that it serves.
        keys: its chain of block keys, `ratio` blocks each.
        named: number of keys of its output that became known while it was open.
        cacheable: number of its first blocks that may be shared once computed.
        lookup_blocks, hit_blocks: blocks looked up and hit when it was opened.
        tokens: tokens for which blocks are allocated, the hit included.
        computed: tokens committed so far, the hit included.
        blocks: blocks in its table, holes included.
        target: tokens of its text to be computed before the next one is generated: the
            prompt, and after a preemption the output so far too.
        span: its deepest shared span; blocks before `span.end` are shared.
        private: ids of the blocks from `span.end` on, without holes; None in a pool that
            only counts.
        priorities: its retention hints by block, or None.
        family: after a fork, the open sequences that share its private blocks, and itself.
        holes: the ranges of block positions that it has dropped, in order.
        dropped: number of blocks in holes.
        freed: number of these that were private, and are free again; the others stay cached.
        compacted: tokens that compactions have removed.
        compacted_to: tokens that the last compaction left.
        dropped_tokens: computed tokens whose K/V is dropped or removed by compactions.
        is_open: whether it is open.
        data: data of the executor that computes its K/V; None in a new fork.
    """

    __slots__ = (
        "admission", "blocks", "cacheable", "compacted", "compacted_to", "computed", "data",
        "dropped", "dropped_tokens", "family", "freed", "hit_blocks", "holes", "id", "is_open",
        "keys", "lookup_blocks", "named", "priorities", "private", "request", "span", "target",
        "tokens",
    )  # fmt: skip

    def __init__(
        self,
        id: int,  # noqa: A002 - as the attribute
        admission: int,
        request: Request,
        keys: abc.Sequence[Key],
        cacheable: int,
        lookup_blocks: int,
        hit_blocks: int,
        tokens: int,
        computed: int,
        blocks: int,
        target: int,
        span: Span,
    ) -> None:
        self.id = id
        self.admission = admission
        self.request = request
        self.keys = keys
        self.cacheable = cacheable
        self.lookup_blocks = lookup_blocks
        self.hit_blocks = hit_blocks
        self.tokens = tokens
        self.computed = computed
        self.blocks = blocks
        self.target = target
        self.span = span
        self.private: Ids | None = None
        self.priorities: list[PriorityStep] | None = None
        self.family: list[Sequence] | None = None
        self.holes: tuple[Hole, ...] = ()
        self.dropped = self.freed = self.named = 0
        self.compacted = self.compacted_to = self.dropped_tokens = 0
        self.is_open = True
        self.data: Any = None

    @property
    def private_blocks(self) -> int:
        """Number of private blocks: the partial tail, blocks without a key or not committed."""
        return self.blocks - self.span.end - self.freed

    @property
    def held(self) -> int:
        """Number of computed tokens with K/V in its table, to which the next token attends."""
        return self.computed + self.compacted - self.dropped_tokens

    @property
    def position(self) -> int:
        """Number of computed tokens of its text, held or not: the position of the next one."""
        return self.computed + self.compacted

    @property
    def is_whole(self) -> bool:
        """Whether all of its text is computed; False if its output is not known."""
        request = self.request
        # The last token is not computed, since none attends to it.
        end = request.prompt_tokens + request.output_tokens - 1
        return request.output_tokens > 0 and self.position >= end

    def table(self) -> Ids:
        """Return the ids of its blocks, first to last, without holes. O(blocks) in C."""
        shared = []
        span = self.span
        while span.parent is not None:
            shared.append(span.ids or ())
            span = span.parent
        ids: Ids = array("i")
        for part in reversed(shared):
            ids.extend(part)
        for first, end in reversed(self.holes):  # `private` is without them already
            del ids[first:end]
        ids.extend(self.private or ())
        return ids

    def go_private(self, root: Span, tokens: int, blocks: int) -> None:
        """Record a compaction to `tokens` computed tokens, of which none is shared (`root`).

        The table is `blocks` private blocks then, for these tokens and for those that are
        allocated and not computed.
        """
        ahead = self.tokens - self.computed
        self.compacted += self.computed - tokens
        self.dropped_tokens = self.compacted
        self.tokens, self.computed, self.blocks = tokens + ahead, tokens, blocks
        self.compacted_to = tokens
        self.span, self.cacheable = root, 0
        self.holes, self.dropped, self.freed = (), 0, 0

    def refuse_commit(self, tokens: int) -> NoReturn:
        """Raise the InputError of a commit of more tokens than are allocated, or below 0."""
        msg = (
            f"commit of {tokens} tokens to sequence {self.id}: {self.computed} of its "
            f"{self.tokens} allocated tokens are committed; give 0 to "
            f"{self.tokens - self.computed}"
        )
        raise InputError(msg)

    def __repr__(self) -> str:
        """Show id, request and length."""
        return f"<Sequence {self.id}: request {self.request.id}, {self.tokens} tokens>"


def merge_holes(holes: abc.Iterable[Hole]) -> tuple[Hole, ...]:
    """Return `holes`, which do not overlap, in order; adjacent ones as one."""
    merged: list[Hole] = []
    for first, end in sorted(holes):
        if merged and merged[-1][1] == first:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((first, end))
    return tuple(merged)
