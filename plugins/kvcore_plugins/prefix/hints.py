"""Retention priority and expiry: what a hit or an insertion raises along its path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore import PolicyError, Span
from kvcore.cache import Sequence
from kvcore.request import DEFAULT_PRIORITY

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


def raise_priority(span: Span, root: Span, now: int) -> None:
    """Give every ancestor of `span` at least its priority, for at least as long. O(path)."""
    parent = span.parent
    while parent is not None and parent is not root:
        _raise_to(parent, span.priority, span.priority_until, now)
        parent = parent.parent


def may_grow(span: Span, priority: int, until: int | None) -> bool:
    """Say whether blocks of that priority can join `span`: its own must not end earlier."""
    if span.priority != priority:
        return False
    return until is None or (span.priority_until is not None and span.priority_until <= until)


def cut_at_hints(tree: SpanTree, seq: Sequence) -> list[Span]:
    """Split the spans that `seq` hit where its hints begin and end; return upper halves.

    Raises:
        PolicyError: the policy failed at one; all are joined again.
    """
    borders = sorted({border for start, end, _, _ in _hints(seq) for border in (start, end)})
    uppers: list[Span] = []
    span = seq.span
    try:
        while span is not tree.root:
            inside = [border for border in borders if span.start < border < span.end]
            if inside:
                uppers.append(tree.split_pinned(span, inside[-1]))
            assert span.parent is not None
            span = span.parent
    except PolicyError:
        tree.join_all(uppers)
        raise
    return uppers


def apply_hints(tree: SpanTree, seq: Sequence, now: int) -> None:
    """Give the spans that `seq` hit the priorities its request asks for.

    They have been split where its hints begin and end. O(spans hit · hints).
    """
    hints = _hints(seq)
    span = seq.span
    while span is not tree.root:
        _lapse(span, now)
        for start, end, priority, duration in hints:
            if start <= span.start and span.end <= end:
                _raise_to(span, priority, None if duration is None else now + duration, now)
        raise_priority(span, tree.root, now)
        assert span.parent is not None
        span = span.parent


def _hints(seq: Sequence) -> list[tuple[int, int, int, int | None]]:
    """Return what `seq` asks for beyond the default: (start, end, priority, duration)."""
    steps = seq.priorities or []
    starts = [0, *(end for end, _, _ in steps)]
    return [
        (start, end, priority, duration)
        for start, (end, priority, duration) in zip(starts, steps, strict=False)
        if (priority, duration) != (DEFAULT_PRIORITY, None)
    ]


def _raise_to(span: Span, priority: int, until: int | None, now: int) -> None:
    _lapse(span, now)
    if span.priority < priority:
        span.priority, span.priority_until = priority, until
    elif span.priority == priority and span.priority_until is not None:
        longer = until is None or until > span.priority_until
        span.priority_until = until if longer else span.priority_until


def _lapse(span: Span, now: int) -> None:
    """Write down that the duration of a priority is over, so that it outweighs nothing."""
    if span.priority_until is not None and span.priority_until <= now:
        span.priority, span.priority_until = DEFAULT_PRIORITY, None
