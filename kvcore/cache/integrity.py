"""Checks of the invariants of a cache: of its spans, pins and block ids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from kvcore.cache.pins import PIN_SHARE, ClientPins
from kvcore.cache.pool import BlockPool, CountingPool
from kvcore.cache.sequence import Sequence
from kvcore.cache.span import Span
from kvcore.cache.tree import SpanTree


def check_tree(tree: SpanTree) -> None:
    """Check links, positions, pins and counts of every span, and that the index finds it.

    O(spans), times the cost of a match.

    Raises:
        AssertionError: an invariant is broken; the message has the spans and numbers.
    """
    cached = unpinned = 0
    for span in tree.spans():
        cached += span.blocks
        unpinned += 0 if span.ref_count else span.blocks
        _check_span(tree, span)
    if (cached, unpinned) != (tree.cached_blocks, tree.unpinned_blocks):
        _broken(
            f"spans hold {cached} blocks, {unpinned} unpinned; "
            f"counted are {tree.cached_blocks} and {tree.unpinned_blocks}"
        )


def _check_span(tree: SpanTree, span: Span) -> None:
    parent, ratio, generated = span.parent, tree.geometry.ratio, span.is_generated
    if parent is None:
        _broken(f"{span!r} is cached and its parent is not")
    if (parent.children or {}).get(span.path_keys[span.start // ratio]) is not span:
        _broken(f"{parent!r} does not lead to {span!r}")
    if not parent.end == span.start < span.end:
        _broken(f"{span!r} does not continue {parent!r}")
    if parent is not tree.root:
        last = (parent.end - 1) // ratio
        begins = generated and not parent.is_generated
        if not begins and parent.path_keys[last] != span.path_keys[last]:
            _broken(f"{span!r} does not continue the prompt of {parent!r}")
        if not parent.ref_count and parent.released_order <= span.released_order:
            _broken(f"{parent!r} is less recent than its child {span!r}")
    if span.ids is not None and len(span.ids) != span.blocks:
        _broken(f"{span!r} holds {len(span.ids)} ids")
    if span.children:
        _check_children(span, list(span.children.values()))
    # Generated blocks are looked up below the prompt, with names in place of keys.
    match = tree.index.match(span.path_keys, span.end, parent if generated else tree.root)
    if match != (span, span.end):
        _broken(f"prefix plugin {tree.index.name!r} finds {match} where {span!r} ends")


def _check_children(span: Span, children: list[Span]) -> None:
    below = sum(child.ref_count for child in children)
    if below > span.ref_count:
        _broken(f"{span!r}: its children are pinned {below} times")
    if span.expires is not None:
        late = [c for c in children if c.expires is None or c.expires > span.expires]
        if late:
            _broken(f"{span!r} expires before its children {late}")


def check_blocks(pool: CountingPool, tree: SpanTree, sequences: Iterable[Sequence]) -> None:
    """Check pins, free + cached + private = blocks, and of ids that each is in one place.

    Raises:
        AssertionError: the sum is wrong; the message has all the numbers.
    """
    open_sequences = list(sequences)
    for seq in open_sequences:
        if seq.compacted and (seq.span is not tree.root or seq.cacheable):
            _broken(f"{seq!r} was compacted, and shares blocks")
    spans = list(tree.spans())
    _check_pins(
        spans, [*(seq.span for seq in open_sequences), *(p.span for p in tree.pins or ())]
    )
    if tree.pins is not None:
        _check_client_pins(tree.pins, pool.blocks)
    if isinstance(pool, BlockPool):
        private = _check_ids(pool, spans, open_sequences)
    else:
        private = sum(seq.private_blocks for seq in open_sequences)
    free, cached = pool.free_blocks, tree.cached_blocks
    total = free + cached + private
    if total != pool.blocks or min(free, cached, private) < 0:
        _broken(
            f"{free} free + {cached} cached + {private} private blocks are "
            f"{total}, but the pool has {pool.blocks}"
        )


def _paths(ends: Iterable[Span]) -> dict[Span, int]:
    """Return for each span the number of paths down to `ends` that contain it."""
    pins: dict[Span, int] = {}
    for span in ends:
        above = span
        while above.parent is not None:
            pins[above] = pins.get(above, 0) + 1
            above = above.parent
    return pins


def _check_pins(spans: list[Span], ends: list[Span]) -> None:
    """Check that a span is pinned once for each open sequence or pin whose path it is on."""
    pins = _paths(ends)
    for span in spans:
        count = pins.pop(span, 0)
        if count != span.ref_count:
            _broken(f"{span!r} is on the paths of {count} open sequences and pins")
    if pins:
        _broken(f"open sequences and pins hold {list(pins)}, which are not cached")


def _check_client_pins(pins: ClientPins, pool_blocks: int) -> None:
    """Check the counts of client pins, and that they hold no more than their share."""
    pinned = _paths(pin.span for pin in pins)
    blocks, limit = sum(span.blocks for span in pinned), PIN_SHARE * pool_blocks
    if pinned != pins.held:
        _broken(f"clients pin {pinned}; counted are {pins.held}")
    if blocks != pins.blocks:
        _broken(f"they hold {blocks}, not {pins.blocks}")
    if blocks > limit:
        _broken(f"pins hold {blocks} blocks, of {limit} that they may")


def _check_ids(pool: BlockPool, spans: list[Span], sequences: list[Sequence]) -> int:
    """Check that no id is in two places; return how many distinct ids are private."""
    owners: dict[int, int] = {}
    for seq in sequences:
        ids = seq.private
        if ids is None or len(ids) != seq.private_blocks:
            owned = None if ids is None else len(ids)
            _broken(
                f"{seq!r} should hold {seq.private_blocks} private blocks and holds {owned}"
            )
        for block in ids:
            owners[block] = owners.get(block, 0) + 1
    extra = {block: count - 1 for block, count in owners.items() if count > 1}
    if extra != pool.owners:
        _broken(f"blocks with several owners are {extra}, but the pool has {pool.owners}")
    held_by: list[tuple[str, Iterable[int]]] = [("free", pool.free_ids()), ("private", owners)]
    held_by += [(f"span {span.id}", span.ids or ()) for span in spans]
    seen: dict[int, str] = {}
    for owner, blocks in held_by:
        for block in blocks:
            if block in seen:
                _broken(f"block {block} is in two places: {seen[block]} and {owner}")
            seen[block] = owner
    if len(seen) != pool.high_water:
        _broken(f"{pool.high_water} blocks have been used, but {len(seen)} are accounted for")
    return len(owners)


def _broken(message: str) -> NoReturn:
    raise AssertionError(message)
