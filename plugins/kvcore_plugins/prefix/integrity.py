"""The invariants of the prefix tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore import Span

if TYPE_CHECKING:
    from kvcore_plugins.prefix.tree import SpanTree


def check_tree(tree: SpanTree) -> None:
    """Check links, places, pins and counts of every span. O(spans).

    Raises:
        AssertionError: one is broken; the message has the spans and numbers.
    """
    cached = unpinned = 0
    for span in tree.spans():
        cached += span.blocks
        unpinned += 0 if span.ref_count else span.blocks
        _check_span(tree, span)
    _require(
        (cached, unpinned) == (tree.cached, tree.unpinned),
        f"spans hold {cached} blocks, {unpinned} unpinned; "
        f"counted are {tree.cached} and {tree.unpinned}",
    )


def _check_span(tree: SpanTree, span: Span) -> None:
    parent = span.parent
    if parent is None:
        _require(False, f"{span!r} is cached and its parent is not")  # noqa: FBT003
        return
    key = span.path_keys[span.start // tree.geometry.ratio]
    _require((parent.children or {}).get(key) is span, f"{parent!r} does not lead to {span!r}")
    _require(parent.end == span.start < span.end, f"{span!r} does not continue {parent!r}")
    if parent is not tree.root:
        last = (parent.end - 1) // tree.geometry.ratio
        same = parent.path_keys[last] == span.path_keys[last]
        _require(same, f"{span!r} does not continue the prompt of {parent!r}")
        later = parent.ref_count or parent.released_order > span.released_order
        _require(bool(later), f"{parent!r} is less recent than its child {span!r}")
    if span.ids is not None:
        _require(len(span.ids) == span.blocks, f"{span!r} holds {len(span.ids)} ids")
    children = (span.children or {}).values()
    below = sum(child.ref_count for child in children)
    _require(below <= span.ref_count, f"{span!r}: its children are pinned {below} times")
    if span.expires is not None:
        late = [c for c in children if c.expires is None or c.expires > span.expires]
        _require(not late, f"{span!r} expires before its children {late}")


def _require(holds: bool, message: str) -> None:  # noqa: FBT001
    if not holds:
        raise AssertionError(message)
