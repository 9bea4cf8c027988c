"""Forgetting: blocks that leave the table of a sequence while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvcore.cache.pool import BlockPool, CountingPool, Ids
from kvcore.cache.sequence import Gap, Sequence
from kvcore.policy import Recorder, RetentionPolicy, broken


def forget(
    pool: CountingPool,
    retention: RetentionPolicy,
    seq: Sequence,
    trace: Recorder | None,
    now: int,
) -> int:
    """Let `seq` forget what its retention policy says it may; return how many blocks.

    Nothing while it shares private blocks with a fork. O(gaps), ids by slices.

    Raises:
        PolicyError: the policy raised, or named tokens that are not computed; nothing has
            changed.
    """
    if seq.family is not None and len(seq.family) > 1:
        return 0
    try:
        ranges = list(retention.forgettable(seq))
        gone = list(_new(seq.gaps, _whole_blocks(ranges, seq)))
    except Exception as error:
        raise broken(retention, "forgettable", error) from error
    for first, end in gone:
        freed = _drop(pool, seq, first, end)
        if trace is not None:
            trace.line(
                "EVICT", now, seq=seq.id, first=first, blocks=end - first, runs=freed,
                by=retention.name, reason="retention", scope="sequence",
            )  # fmt: skip
    return sum(end - first for first, end in gone)


def _whole_blocks(ranges: Iterable[tuple[int, int]], seq: Sequence) -> list[Gap]:
    """Return the blocks that lie whole in ranges of tokens, in order."""
    size = seq.span.shape.block_size
    for start, end in ranges:
        if not 0 <= start <= seq.computed or not start <= end <= seq.computed:
            msg = f"tokens {start} to {end} of {seq.computed} computed ones"
            raise ValueError(msg)
    return sorted((-(-start // size), end // size) for start, end in ranges)


def _new(gaps: Iterable[Gap], wanted: Iterable[Gap]) -> Iterator[Gap]:
    """Yield the parts of `wanted`, in order, that are in none of `gaps`, nor twice."""
    taken = sorted(gaps)
    done = 0
    for first, end in wanted:
        at = max(first, done)
        for low, high in taken:
            if high <= at:
                continue
            if low >= end:
                break
            if at < low:
                yield at, low
            at = high
        if at < end:
            yield at, end
        done = max(done, end)


def _drop(pool: CountingPool, seq: Sequence, first: int, end: int) -> Ids | None:
    """Take the blocks `[first, end)` out of the table of `seq`; return the ids freed.

    Deepest first, as `close` frees; None where the pool counts.
    """
    own = max(first, seq.span.end)
    count = max(end - own, 0)
    ids: Ids | None = None
    if seq.private is not None:
        assert isinstance(pool, BlockPool)
        at = own - seq.span.end - seq.forgotten_between(seq.span.end, own)
        ids = seq.private[at : at + count]
        ids.reverse()
        del seq.private[at : at + count]
        pool.release(ids)
    else:
        pool.give(None, count)
    seq.gaps = _merged([*seq.gaps, (first, end)])
    seq.forgotten += end - first
    seq.returned += count
    return ids


def _merged(gaps: list[Gap]) -> tuple[Gap, ...]:
    """Return disjoint gaps in order, those that touch as one."""
    merged: list[Gap] = []
    for first, end in sorted(gaps):
        if merged and merged[-1][1] == first:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((first, end))
    return tuple(merged)
