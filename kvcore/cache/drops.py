"""Forgetting: blocks that leave the table of a sequence while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import index

from kvcore.cache.pool import CountingPool, Ids
from kvcore.cache.recorder import Recorder
from kvcore.cache.retention import RetentionPolicy
from kvcore.cache.sequence import Gap, Sequence, merged
from kvcore.cache.sharing import shares_private
from kvcore.plugins import policy_error


def forget(
    pool: CountingPool,
    retention: RetentionPolicy,
    seq: Sequence,
    trace: Recorder | None,
    now: int,
) -> int:
    """Let `seq` forget what its retention policy says it may; return how many blocks.

    Nothing while it shares private blocks with a fork, nor before it has computed what a
    fork has published of them meanwhile: it is about to write there, for all who find it.
    O(ranges log ranges + gaps), and O(gaps) for each new one; ids move by slices.

    Raises:
        PolicyError: the policy raised, or named tokens that are not computed; nothing has
            changed.
    """
    behind = seq.computed < seq.span.end * seq.span.geometry.block_size
    if behind or shares_private(pool, seq):
        return 0
    try:
        wanted = _whole_blocks(retention.forgettable(seq), seq)
    except Exception as error:
        raise policy_error(retention, "forgettable", error) from error
    gone = list(_new(seq.gaps, wanted))
    if not gone:
        return 0
    # Deepest first: what is still to go keeps its place.
    gone.reverse()
    freed = [_drop(pool, seq, first, end) for first, end in gone]
    seq.gaps = merged([*seq.gaps, *gone])
    count = sum(end - first for first, end in gone)
    seq.forgotten += count
    if trace is not None:
        for (first, end), ids in zip(gone, freed, strict=True):
            trace.line(
                "EVICT", now, seq=seq.id, first=first, blocks=end - first, runs=ids,
                by=retention.name, reason="retention", scope="sequence",
            )  # fmt: skip
    return count


def _whole_blocks(ranges: Iterable[tuple[int, int]], seq: Sequence) -> list[Gap]:
    """Return the blocks that lie whole in ranges of tokens, in order."""
    size, blocks = seq.span.geometry.block_size, []
    for given in ranges:
        # Whole numbers of any kind, such as those of arrays.
        start, end = map(index, given)
        if not 0 <= start <= end <= seq.computed:
            msg = f"tokens {start} to {end} of {seq.computed} computed ones"
            raise ValueError(msg)
        blocks.append((-(-start // size), end // size))
    return sorted(blocks)


def _new(gaps: tuple[Gap, ...], wanted: Iterable[Gap]) -> Iterator[Gap]:
    """Yield the parts of `wanted`, in order, that are in none of `gaps`, nor twice."""
    at = place = 0
    for first, end in wanted:
        at = max(at, first)
        while at < end:
            while place < len(gaps) and gaps[place][1] <= at:
                place += 1
            low, high = gaps[place] if place < len(gaps) else (end, end)
            if at < low:
                high = min(low, end)
                yield at, high
            at = high


def _drop(pool: CountingPool, seq: Sequence, first: int, end: int) -> Ids | None:
    """Take the blocks `[first, end)` out of the table of `seq`; return the ids freed.

    Deepest first, as `close` frees; None where the pool counts.
    """
    own = max(first, seq.span.end)
    count = max(end - own, 0)
    seq.returned += count
    if seq.private is None:
        pool.give(None, count)
        return None
    at = own - seq.span.end - seq.forgotten_between(seq.span.end, own)
    ids = seq.private[at : at + count]
    ids.reverse()
    del seq.private[at : at + count]
    pool.give(ids, count)
    return ids
