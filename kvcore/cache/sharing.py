"""Private blocks and their owners: forks, copy-on-write, giving up, the block table."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from kvcore.cache.pool import BlockPool, CountingPool, Ids
from kvcore.cache.prefix import PrefixCache
from kvcore.cache.recorder import Recorder
from kvcore.cache.sequence import Sequence


def with_ids(
    pool: CountingPool, prefix: PrefixCache, sequences: Iterable[Sequence]
) -> BlockPool:
    """Return `pool` with ids, given to every block in use if there were none. O(blocks)."""
    if isinstance(pool, BlockPool):
        return pool
    named = BlockPool(pool.blocks)
    for span in prefix.spans():
        span.ids = named.take(span.blocks)
    for seq in sequences:
        seq.private = named.take(seq.private_blocks)
    prefix.pool = named
    return named


def shares_private(pool: CountingPool, seq: Sequence) -> bool:
    """Say whether another sequence owns private blocks of `seq` too. O(blocks) in C."""
    if seq.private is None or not isinstance(pool, BlockPool) or not pool.owners:
        return False
    return not pool.owners.keys().isdisjoint(seq.private)


def shared_tail(pool: CountingPool, seq: Sequence) -> int | None:
    """Return the id of the last block of `seq` if another sequence owns it too."""
    if seq.private and isinstance(pool, BlockPool):
        tail = seq.private[-1]
        return tail if tail in pool.owners else None
    return None


def copy_tail(
    pool: CountingPool,
    seq: Sequence,
    tail: int,
    ids: Ids | None,
    trace: Recorder | None,
    now: int,
    copied: Callable[[int, int], None] | None,
) -> Ids:
    """Put the first of `ids` in the place of `tail`, and tell `copied`; return the others."""
    assert isinstance(pool, BlockPool)
    assert seq.private is not None
    assert ids is not None
    pool.disown(tail)
    copy = seq.private[-1] = ids[0]
    if trace is not None:
        block = seq.blocks - 1
        trace.line("COPY", now, seq=seq.id, block=block, **{"from": tail, "to": copy})
    if copied is not None:
        copied(tail, copy)
    return ids[1:]


def free_last(pool: CountingPool, seq: Sequence, count: int) -> Ids | None:
    """Free the last `count` blocks of `seq`, deepest first.

    Returns the ids that no other sequence owns; None where the pool counts.
    """
    private = seq.private
    if not count:
        return None if private is None else private[:0]
    if private is None:
        pool.give(None, count)
        return None
    assert isinstance(pool, BlockPool)
    keep = len(private) - count
    dropped = private[keep:]
    dropped.reverse()
    del private[keep:]
    return pool.release(dropped)


def table(seq: Sequence) -> Ids:
    """Return the ids of the blocks of `seq` that it has not forgotten, first to last.

    O(blocks) in C.
    """
    parts = []
    span = seq.span
    while span.parent is not None:
        parts.append(span.ids)
        span = span.parent
    ids: Ids = array("i")
    for part in reversed(parts):
        if part is not None:
            ids.extend(part)
    for first, end in reversed(seq.gaps):
        del ids[first:end]
    ids.extend(seq.private or ())
    return ids
