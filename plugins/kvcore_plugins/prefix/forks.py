"""What a commit means for the sequences that share the committed blocks since a fork."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore import PolicyError, Span
from kvcore.cache import BlockPool, Ids, Sequence

if TYPE_CHECKING:
    from kvcore_plugins.prefix.tree import SpanTree


def pin_for_siblings(tree: SpanTree, seq: Sequence, first: int, ids: Ids, now: int) -> None:
    """Pin what `seq` has just committed for the forked siblings that hold it as well.

    `ids` are the committed blocks, from position `first` on. A sibling's ownership of
    them becomes a pin of their span; blocks before `first` that `seq` had exchanged for
    another's are exchanged in the sibling's table too. O(siblings · blocks).

    Raises:
        PolicyError: the policy failed at a split. All siblings are pinned all the same,
            since they share the blocks already.
    """
    failed = None
    for sibling in seq.family or ():
        if sibling is not seq and sibling.private is not None:
            ahead = first - sibling.span.end
            common = _common(sibling.private, ahead, ids)
            if common:
                span, lower = _span_ending_at(tree, seq.span, first + common)
                try:
                    if lower is not None:
                        tree.tell_split(span, lower)
                except PolicyError as error:
                    failed = error
                _pin_for(tree, sibling, span, first, now)
    if failed is not None:
        raise failed


def _common(private: Ids, ahead: int, ids: Ids) -> int:
    """Return how many of `ids` stand in `private` from index `ahead` on."""
    if ahead < 0:
        return 0
    common = 0
    for mine, theirs in zip(private[ahead:], ids, strict=False):
        if mine != theirs:
            break
        common += 1
    return common


def _span_ending_at(tree: SpanTree, span: Span, end: int) -> tuple[Span, Span | None]:
    """Return the span above or at `span` that ends at `end`, and what was cut off for it."""
    while span.start >= end:
        assert span.parent is not None
        span = span.parent
    if span.end == end:
        return span, None
    upper = tree.cut(span, end)
    upper.ref_count -= 1
    return upper, span


def _pin_for(tree: SpanTree, sibling: Sequence, deepest: Span, first: int, now: int) -> None:
    path = []
    span = deepest
    while span is not sibling.span:
        path.append(span)
        assert span.parent is not None
        span = span.parent
    for span in reversed(path):
        span.creator = None
        span.ref_count += 1
        begin = sibling.span.end
        assert sibling.private is not None
        held = sibling.private[: span.end - begin]
        del sibling.private[: span.end - begin]
        sibling.span = span
        if span.end <= first:
            tree.record_switch(sibling, span, begin, held[::-1], now)
            continue
        assert isinstance(tree.pool, BlockPool)
        for block in held:
            tree.pool.disown(block)
        tree.record_commit(sibling, span, begin, len(held), "shared", now)
