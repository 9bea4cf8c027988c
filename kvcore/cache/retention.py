"""Retention: the contract of what an open sequence may drop, and the dropping of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from operator import index
from typing import ClassVar

from kvcore.cache.pool import BlockPool, CountingPool, Ids
from kvcore.cache.recorder import Recorder
from kvcore.cache.sequence import Hole, Sequence, merge_holes
from kvcore.plugins.base import Plugin


class RetentionPolicy(Plugin):
    """Decides which tokens of an open sequence need no K/V any longer.

    The cache asks whenever a sequence has computed something: after each chunk of its
    prefill, and while it generates, whenever it has filled a block. What a sequence drops
    leaves its block table for good: private blocks are free at once; shared blocks are
    hidden from it and stay cached and pinned. From then on it publishes nothing, since what
    it computes without those tokens is not the K/V that its keys stand for.

    A sequence drops nothing while it shares private blocks with a fork, nor before it has
    computed what a fork has published of them.

    A method that raises ends the use of the cache.
    """

    kind: ClassVar[str] = "retention"

    @abstractmethod
    def droppable(self, seq: Sequence) -> Iterable[tuple[int, int]]:
        """Return ranges `(start, end)` of token positions that `seq` may drop.

        Positions count from 0; `seq.computed` tokens are computed, and no range may reach
        beyond. Ranges may name again what is dropped already. Whole blocks inside a range
        go. Pure: an equal sequence gets an equal answer.
        """


def may_drop(pool: CountingPool, seq: Sequence) -> bool:
    """Return True if `seq` is alone with its private blocks, and past all that is shared.

    A sequence behind `span.end` has yet to compute what a fork has published: it is about
    to write there, for all who find those blocks. O(private blocks) in C.
    """
    if seq.computed < seq.span.end * seq.span.geometry.block_size:
        return False
    if seq.private is None or not isinstance(pool, BlockPool) or not pool.owners:
        return True
    return pool.owners.keys().isdisjoint(seq.private)


def new_holes(seq: Sequence, ranges: Iterable[tuple[int, int]]) -> list[Hole]:
    """Return the blocks that lie whole in `ranges` of tokens and are not dropped yet.

    Disjoint, in order. O(ranges log ranges + holes).

    Raises:
        ValueError: a range reaches beyond the computed tokens.
    """
    size, wanted = seq.span.geometry.block_size, []
    for given in ranges:
        # Whole numbers of any kind, such as those of arrays.
        start, end = map(index, given)
        if not 0 <= start <= end <= seq.computed:
            msg = f"tokens {start} to {end} of {seq.computed} computed ones"
            raise ValueError(msg)
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
    """Take the blocks in `holes`, in order, out of the table of `seq`; return their number.

    Private ones become free, deepest first, as at `close`. O(holes), ids by slices.
    """
    # Deepest first: what is still to go keeps its place.
    holes = [*reversed(holes)]
    freed = [_drop(pool, seq, first, end) for first, end in holes]
    seq.holes = merge_holes([*seq.holes, *holes])
    count = sum(end - first for first, end in holes)
    seq.dropped += count
    if trace is not None:
        for (first, end), ids in zip(holes, freed, strict=True):
            trace.drop(now, seq=seq.id, first=first, blocks=end - first, runs=ids, by=by)
    return count


def _without(holes: tuple[Hole, ...], wanted: Iterable[Hole]) -> Iterator[Hole]:
    """Yield the parts of `wanted`, in order, that are in none of `holes`, nor twice."""
    at = place = 0
    for first, end in wanted:
        at = max(at, first)
        while at < end:
            while place < len(holes) and holes[place][1] <= at:
                place += 1
            low, high = holes[place] if place < len(holes) else (end, end)
            if at < low:
                high = min(low, end)
                yield at, high
            at = high


def _drop(pool: CountingPool, seq: Sequence, first: int, end: int) -> Ids | None:
    """Take the blocks `[first, end)` out of the table of `seq`; return the ids freed.

    Shared blocks among them are only hidden. None where the pool counts.
    """
    private_from = max(first, seq.span.end)
    count = max(end - private_from, 0)
    seq.freed += count
    if seq.private is None:
        pool.free(None, count)
        return None
    at = private_from - seq.span.end - seq.dropped_between(seq.span.end, private_from)
    ids = seq.private[at : at + count]
    ids.reverse()
    del seq.private[at : at + count]
    pool.free(ids, count)
    return ids
