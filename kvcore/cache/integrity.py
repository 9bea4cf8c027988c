"""The invariant of the pool: every block is free, cached or private, exactly once."""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.cache.pool import BlockPool, CountingPool
from kvcore.cache.prefix import PrefixCache
from kvcore.cache.sequence import Sequence
from kvcore.cache.span import Span


def check_blocks(
    pool: CountingPool, prefix: PrefixCache, sequences: Iterable[Sequence]
) -> None:
    """Check free + cached + private = blocks, and with ids that each block is in one place.

    Raises:
        AssertionError: it does not hold; the message has all the numbers.
    """
    open_sequences = list(sequences)
    _check_pins(prefix, open_sequences)
    if isinstance(pool, BlockPool):
        private = _check_ids(pool, prefix, open_sequences)
    else:
        private = sum(seq.private_blocks for seq in open_sequences)
    total = pool.free + prefix.cached + private
    if total != pool.blocks or min(pool.free, prefix.cached, private) < 0:
        msg = (
            f"{pool.free} free + {prefix.cached} cached + {private} private blocks are "
            f"{total}, but the pool has {pool.blocks}"
        )
        raise AssertionError(msg)


def _check_pins(prefix: PrefixCache, sequences: list[Sequence]) -> None:
    """Check that a span is pinned once for each open sequence whose path it is on."""
    pins: dict[Span, int] = {}
    for seq in sequences:
        span = seq.span
        while span.parent is not None:
            pins[span] = pins.get(span, 0) + 1
            span = span.parent
    for span in prefix.spans():
        held = pins.pop(span, 0)
        if held != span.ref_count:
            msg = f"{span!r} is on the paths of {held} open sequences"
            raise AssertionError(msg)
    if pins:
        msg = f"open sequences hold {list(pins)}, which are not cached"
        raise AssertionError(msg)


def _check_ids(pool: BlockPool, prefix: PrefixCache, sequences: list[Sequence]) -> int:
    """Check that no id is in two places; return how many distinct ids are private."""
    owners: dict[int, int] = {}
    for seq in sequences:
        ids = seq.private
        if ids is None or len(ids) != seq.private_blocks:
            held = None if ids is None else len(ids)
            msg = f"{seq!r} should hold {seq.private_blocks} private blocks and holds {held}"
            raise AssertionError(msg)
        for block in ids:
            owners[block] = owners.get(block, 0) + 1
    extra = {block: count - 1 for block, count in owners.items() if count > 1}
    if extra != pool.owners:
        msg = f"blocks with several owners are {extra}, but the pool has {pool.owners}"
        raise AssertionError(msg)
    places = {"free": pool.freed(), "private": owners}
    seen: dict[int, str] = {}
    for place, blocks in places.items():
        _place(seen, place, blocks)
    for span in prefix.spans():
        _place(seen, f"span {span.id}", span.ids or ())
    if len(seen) != pool.minted:
        msg = f"{pool.minted} blocks have been used, but {len(seen)} are accounted for"
        raise AssertionError(msg)
    return len(owners)


def _place(seen: dict[int, str], place: str, blocks: Iterable[int]) -> None:
    for block in blocks:
        if block in seen:
            msg = f"block {block} is in two places: {seen[block]} and {place}"
            raise AssertionError(msg)
        seen[block] = place
