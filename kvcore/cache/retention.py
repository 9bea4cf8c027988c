"""Retention: the contract of what an open sequence may drop, and the dropping of it."""

from __future__ import annotations

from array import array
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

    A policy that forgets by position says which ranges may go (`droppable`): whole blocks go,
    at once. One that picks single tokens says how many stay (`keeps`), and the sequence is
    compacted: it goes on in private blocks with that many tokens, of which each layer and K/V
    head has its own choice. That choice needs tensors: see `kvcore.engine.ScoreRetention`. How
    many stay, and when, depends on lengths alone, so that a simulation decides as a run on
    tensors does. Override one method or the other.

    A sequence drops nothing while it shares private blocks with a fork, though it may be
    compacted then, into blocks of its own; neither happens before it has computed what a fork
    has published.

    A method that raises ends the use of the cache.
    """

    kind: ClassVar[str] = "retention"

    def droppable(self, seq: Sequence) -> Iterable[tuple[int, int]]:
        """Return ranges `(start, end)` of token positions that `seq` may drop.

        Positions count from 0; `seq.computed` tokens are computed, and no range may reach
        beyond. Ranges may name again what is dropped already. Whole blocks inside a range
        go. Pure: an equal sequence gets an equal answer. Nothing unless overridden.
        """
        del seq
        return ()

    def keeps(self, seq: Sequence) -> int | None:
        """Return how many of the `seq.held` tokens of `seq` it goes on with; None: all.

        Pure, and a function of lengths alone: `held`, `position`, `target`, `compacted`.
        What it says of a sequence whose prompt is partly computed (`position < target`)
        holds for the chunks that follow too. Where there is no room for the blocks of a
        compaction, the cache asks again when more is computed. It does not ask when prompt and
        output are computed, but for the last token: nothing attends to them any more. None
        unless overridden.
        """
        del seq
        return None


def may_drop(pool: CountingPool, seq: Sequence) -> bool:
    """Return True if `seq` is alone with its private blocks, and past all that is shared.

    O(private blocks) in C.
    """
    if not is_past_shared(seq):
        return False
    if seq.private is None or not isinstance(pool, BlockPool) or not pool.owners:
        return True
    return pool.owners.keys().isdisjoint(seq.private)


def is_past_shared(seq: Sequence) -> bool:
    """Return True if `seq` has computed all blocks that it shares.

    Otherwise a fork has published them before: `seq` is about to write there, for all who
    find those blocks.
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
    """Make `blocks` private blocks the table of `seq`: its own first ones, then `new`.

    Frees its other own ones, deepest first, and returns their ids; None where the pool
    counts. Those that a fork owns too are left to that. O(private blocks).
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
    """Remove the blocks in `holes` from the block table of `seq`; return their number.

    Private ones become free, deepest first, as at `close`. O(holes), ids by slices.
    """
    # Deepest first: what is still to go keeps its place.
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
    """Remove the blocks `[first, end)` from the table of `seq`; return the freed ids.

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
