"""Retention priority and expiry: what a hit or an insertion raises along its path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore import DEFAULT_PRIORITY, Sequence, Span

if TYPE_CHECKING:
    from kvcore_plugins.prefix.tree import SpanTree


def raise_expiry(span: Span, root: Span) -> None:
    """Let every ancestor of `span` expire no earlier than it does. O(path)."""
    expires = span.expires
    parent = span.parent
    while parent is not None and parent is not root:
        if parent.expires is not None and (expires is None or parent.expires < expires):
            parent.expires = expires
        expires = parent.expires
        parent = parent.parent


def raise_priority(span: Span, root: Span) -> None:
    """Give every ancestor of `span` at least its priority, for at least as long. O(path)."""
    parent = span.parent
    while parent is not None and parent is not root:
        _raise_to(parent, span.priority, span.priority_until)
        parent = parent.parent


def apply_hints(tree: SpanTree, seq: Sequence, now: int) -> None:
    """Give the spans that `seq` hit the priorities its request asks for.

    Splits them at the borders of the hints. O(spans hit + hints).
    """
    steps = [
        (start, end, priority, duration)
        for start, (end, priority, duration) in zip(
            [0, *(end for end, _, _ in seq.priorities or ())],
            seq.priorities or (),
            strict=False,
        )
        if (priority, duration) != (DEFAULT_PRIORITY, None)
    ]
    borders = sorted({border for start, end, _, _ in steps for border in (start, end)})
    span = seq.span
    while span is not tree.root:
        inside = [border for border in borders if span.start < border < span.end]
        if inside:
            tree.split_pinned(span, inside[-1])
        for start, end, priority, duration in steps:
            if start <= span.start and span.end <= end:
                _raise_to(span, priority, None if duration is None else now + duration)
        raise_priority(span, tree.root)
        assert span.parent is not None
        span = span.parent


def _raise_to(span: Span, priority: int, until: int | None) -> None:
    if span.priority < priority:
        span.priority, span.priority_until = priority, until
    elif span.priority == priority and span.priority_until is not None:
        longer = until is None or until > span.priority_until
        span.priority_until = until if longer else span.priority_until
