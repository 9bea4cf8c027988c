"""The retention contract, and the operations that drop blocks of open sequences."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from operator import index
from typing import Any, ClassVar

from kvcore.cache.pool import BlockPool, CountingPool, Ids
from kvcore.cache.recorder import Recorder
from kvcore.cache.sequence import Hole, Sequence, merge_holes
from kvcore.models.spec import ModelSpec
from kvcore.plugins.base import Plugin, wrong_answer


class RetentionPolicy(Plugin):
    """Decides which tokens of an open sequence need no K/V any longer, or are not read.

    The cache calls the policy after each chunk of a prefill, and, while the sequence
    generates, after each full block. Dropped blocks leave the block table for good: private
    blocks are freed at once; shared blocks are hidden from the sequence and stay cached and
    pinned. From then on no more blocks of the sequence are shared, since the K/V that it
    computes without those tokens is not the one that its keys stand for.

    A policy by position returns the ranges to drop (`droppable`), of which whole blocks are
    dropped at once. A policy that picks single tokens returns how many to keep (`keeps`); the
    sequence is compacted to that many tokens in private blocks, with a choice of tokens for
    each layer and K/V head. The choice needs tensors: see `kvcore.ScoreRetention`. Override one
    of the two methods.

    A sequence that shares private blocks with a fork drops no blocks, but it may be compacted,
    into blocks of its own. Neither happens before it has computed all blocks that it shares.

    A method that raises ends the use of the cache.

    Attributes:
        reads_all: whether a token attends to all tokens that are kept. If generated tokens do
            not, their K/V is not what keys of an output stand for, and is not shared.
    """

    kind: ClassVar[str] = "retention"
    reads_all: ClassVar[bool] = True

    def droppable(self, seq: Sequence) -> Iterable[tuple[int, int]]:
        """Return ranges `(start, end)` of token positions that `seq` may drop.

        Positions count from 0; `seq.computed` tokens are computed, and no range may reach
        beyond. Ranges may contain blocks that are dropped already. Whole blocks inside a
        range are dropped. Pure: an equal sequence gets an equal answer. The default is none.
        """
        del seq
        return ()

    def timing(self, model: ModelSpec) -> dict[str, Any]:
        """Return options of a latency model that follow from what a step reads; {}: all."""
        del model
        return {}

    def keeps(self, seq: Sequence) -> int | None:
        """Return how many of the `seq.held` tokens of `seq` to keep; None: all, the default.

        Pure, and a function of lengths alone, so that a simulation decides as a run on tensors
        does: `held`, `position`, `target`, `compacted`.
        The answer for a sequence whose prompt is partly computed (`position < target`) holds
        for the chunks that follow too. If the blocks for a compaction are missing, the cache
        calls the method again after the next commit. It does not call it once the text is
        computed up to its last token: no later token attends to it.
        """
        del seq
        return None


def is_past_shared(seq: Sequence) -> bool:
    """Return True if `seq` has computed all blocks that it shares.

    It has not if a fork shared them earlier: then `seq` will write the K/V that other
    sequences find there.
    """
    return seq.computed >= seq.span.end * seq.span.geometry.block_size


def own_blocks(pool: CountingPool, seq: Sequence) -> int:
    """Return how many private blocks of `seq` have no other owner. O(private blocks)."""
    if seq.private is None or not isinstance(pool, BlockPool) or not pool.owners:
        return seq.private_blocks
    owners = pool.owners
    return sum(block not in owners for block in seq.private)


def compact_blocks(
    pool: CountingPool, seq: Sequence, blocks: int, new: Ids | None
) -> Ids | None:
    """Reduce the private blocks of `seq` to its first ones, then `new`: `blocks` in all.

    Frees its other private blocks, deepest first, and returns their ids, or None in a pool
    that only counts. Blocks that a fork owns too stay with the fork. O(private blocks).
    """
    if seq.private is None:
        pool.free(None, max(0, seq.private_blocks - blocks))
        return None
    assert isinstance(pool, BlockPool)
    own = seq.private
    if pool.owners:
        own = array("i", [block for block in own if not pool.unshare(block)])
    freed = own[blocks:]
    freed.reverse()
    pool.free(freed, len(freed))
    seq.private = own[:blocks] + (new or array("i"))
    return freed


def new_holes(policy: Plugin, seq: Sequence, ranges: Iterable[tuple[int, int]]) -> list[Hole]:
    """Return the ranges of blocks that lie whole in `ranges` of tokens and are not dropped yet.

    They are disjoint and in order. O(ranges log ranges + holes).

    Raises:
        PolicyError: what `policy` has answered is no range of computed tokens.
    """
    size, wanted = seq.span.geometry.block_size, []
    for tokens in ranges if isinstance(ranges, Iterable) else (ranges,):
        try:
            # `index` accepts whole numbers of any kind, such as those of arrays.
            start, end = map(index, tokens)
        except (TypeError, ValueError):
            start = end = -1
        if not 0 <= start <= end <= seq.computed:
            why = f"{tokens!r}: give (start, end) with 0 <= start <= end <= {seq.computed}"
            raise wrong_answer(policy, "droppable()", f"{why}, the computed tokens")
        wanted.append((-(-start // size), end // size))
    wanted.sort()
    return list(_without(seq.holes, wanted))


def drop_blocks(
    pool: CountingPool,
    seq: Sequence,
    holes: list[Hole],
    trace: Recorder | None,
    by: str,
    now: int,
) -> int:
    """Remove the blocks in `holes` from the block table of `seq`; return their number.

    Private ones are freed, deepest first, as at `close`. O(holes), ids by slices.
    """
    # Deepest first, so that the indices of the others stay right.
    holes = [*reversed(holes)]
    freed = [_drop(pool, seq, first, end) for first, end in holes]
    seq.holes = merge_holes([*seq.holes, *holes])
    count = sum(end - first for first, end in holes)
    seq.dropped += count
    seq.dropped_tokens += count * seq.span.geometry.block_size
    if trace is not None:
        for (first, end), ids in zip(holes, freed, strict=True):
            trace.drop(now, seq=seq.id, first=first, blocks=end - first, runs=ids, by=by)
    return count


def _without(holes: tuple[Hole, ...], wanted: Iterable[Hole]) -> Iterator[Hole]:
    """Yield the parts of `wanted`, in order, that are in none of `holes`, nor twice."""
    block = hole = 0
    for first, end in wanted:
        block = max(block, first)
        while block < end:
            while hole < len(holes) and holes[hole][1] <= block:
                hole += 1
            low, high = holes[hole] if hole < len(holes) else (end, end)
            if block < low:
                high = min(low, end)
                yield block, high
            block = high


def _drop(pool: CountingPool, seq: Sequence, first: int, end: int) -> Ids | None:
    """Remove the blocks `[first, end)` from the table of `seq`; return the freed ids.

    Shared blocks among them are only hidden. Returns None in a pool that only counts.
    """
    private_from = max(first, seq.span.end)
    count = max(end - private_from, 0)
    seq.freed += count
    if seq.private is None:
        pool.free(None, count)
        return None
    between = ((max(seq.span.end, low), min(private_from, high)) for low, high in seq.holes)
    dropped = sum(max(high - low, 0) for low, high in between)
    offset = private_from - seq.span.end - dropped
    ids = seq.private[offset : offset + count]
    ids.reverse()
    del seq.private[offset : offset + count]
    pool.free(ids, count)
    return ids
