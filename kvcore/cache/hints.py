"""Retention hints: priorities and expiry times, from a request to the spans of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvcore.cache.span import Span
from kvcore.request import DEFAULT_PRIORITY, Request

PriorityStep: TypeAlias = tuple[int, int, int | None]
"""(end block, priority, duration in ns): holds from the end of the step before it."""

PriorityRange: TypeAlias = tuple[int, int, int, int | None]
"""(first block, end block, priority, duration in ns)."""


def priority_steps(request: Request, block_size: int) -> list[PriorityStep]:
    """Return the priorities that `request` asks for, by block.

    Steps cover positions from 0 on without gaps; after the last step the default
    priority holds. A block gets the highest priority of the hints that touch it.
    """
    prompt = max(request.prompt_tokens, len(request.keys) * request.key_tokens)
    length = -(-prompt // block_size)
    ranges = [
        (
            hint.start // block_size,
            length if hint.end is None else -(-hint.end // block_size),
            hint.priority,
            hint.duration,
        )
        for hint in request.retention
    ]
    borders = sorted({border for start, end, _, _ in ranges for border in (start, end)} - {0})
    steps: list[PriorityStep] = []
    begin = 0
    for border in borders:
        hints = [(p, d) for start, end, p, d in ranges if start <= begin < end]
        priority, duration = max(
            hints,
            key=lambda hint: (hint[0], hint[1] is None, hint[1] or 0),
            default=(DEFAULT_PRIORITY, None),
        )
        steps.append((border, priority, duration))
        begin = border
    return steps


def hinted_ranges(steps: list[PriorityStep]) -> list[PriorityRange]:
    """Return the parts of `steps` that ask for more or less than the default priority."""
    starts = [0, *(end for end, _, _ in steps)]
    return [
        (start, end, priority, duration)
        for start, (end, priority, duration) in zip(starts, steps, strict=False)
        if (priority, duration) != (DEFAULT_PRIORITY, None)
    ]


def may_append(span: Span, priority: int, until: int | None) -> bool:
    """Return True if blocks of that priority can join `span`: its own must not end earlier."""
    if span.priority != priority:
        return False
    return until is None or (span.priority_until is not None and span.priority_until <= until)


def raise_priority(span: Span, priority: int, until: int | None, now: int) -> None:
    """Give `span` at least `priority`, and for at least as long."""
    reset_lapsed_priority(span, now)
    if span.priority < priority:
        span.priority, span.priority_until = priority, until
    elif span.priority == priority and span.priority_until is not None:
        longer = until is None or until > span.priority_until
        span.priority_until = until if longer else span.priority_until


def reset_lapsed_priority(span: Span, now: int) -> None:
    """Set the default priority if the duration of the span's own is over at `now`."""
    # Left in place, a priority that has ended would outweigh a lower one that still holds.
    if span.priority_until is not None and span.priority_until <= now:
        span.priority, span.priority_until = DEFAULT_PRIORITY, None


def raise_priority_above(span: Span, now: int) -> None:
    """Give every ancestor of `span` at least its priority, for at least as long. O(path)."""
    parent = span.parent
    while parent is not None and parent.parent is not None:
        raise_priority(parent, span.priority, span.priority_until, now)
        parent = parent.parent


def expiries(span: Span) -> list[int | None]:
    """Return when `span` and each of its ancestors expires, from `span` up. O(path)."""
    times = []
    while span.parent is not None:
        times.append(span.expires)
        span = span.parent
    return times


def raise_expiry(span: Span, before: Sequence[int | None]) -> None:
    """Make `span` and each of its ancestors expire no earlier than what continues it.

    `before` is when they expired when this held, by `expiries`. A time that has become
    earlier is compared with those of all children. O(path), and O(children) for such a time.
    """
    below: int | None = 0
    for time in before:
        if _is_earlier(span.expires, time):
            for child in (span.children or {}).values():
                _raise_to(span, child.expires)
        _raise_to(span, below)
        below = span.expires
        span = span.parent  # type: ignore[assignment]


def _raise_to(span: Span, time: int | None) -> None:
    if _is_earlier(span.expires, time):
        span.expires = time


def _is_earlier(time: int | None, other: int | None) -> bool:
    """Return True if `time` comes before `other`; None never comes."""
    return time is not None and (other is None or time < other)
