"""Priorities and expiry times of spans, and the retention hints that set them."""

from __future__ import annotations

from typing import TypeAlias

from kvcore.cache.span import Span
from kvcore.request import DEFAULT_PRIORITY, Request

PriorityStep: TypeAlias = tuple[int, int, int | None]
"""(end block, priority, duration in ns): holds from the end of the previous step."""

PriorityRange: TypeAlias = tuple[int, int, int, int | None]
"""(first block, end block, priority, duration in ns)."""


def priority_steps(request: Request, block_size: int) -> list[PriorityStep]:
    """Return the priorities in the hints of `request`, by block.

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
    begin, steps = 0, list[PriorityStep]()
    for border in sorted({border for hint in ranges for border in hint[:2]} - {0}):
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
    """Return the ranges of `steps` whose priority is not the default one."""
    starts = [0, *(end for end, _, _ in steps)]
    return [
        (start, end, priority, duration)
        for start, (end, priority, duration) in zip(starts, steps, strict=False)
        if (priority, duration) != (DEFAULT_PRIORITY, None)
    ]


def hint_borders(steps: list[PriorityStep]) -> list[int]:
    """Return the blocks at which a hinted range begins or ends, sorted."""
    return sorted({border for hinted in hinted_ranges(steps) for border in hinted[:2]})


def apply_hints(deepest: Span, steps: list[PriorityStep], now: int) -> None:
    """Raise the priorities of `deepest` and the spans above it to those of `steps`.

    The spans were split where hints begin and end. O(spans + hints).
    """
    ranges = hinted_ranges(steps)
    span = deepest
    while span.parent is not None:
        reset_lapsed_priority(span, now)
        while ranges and ranges[-1][0] >= span.end:
            ranges.pop()
        for start, end, priority, duration in ranges[-1:]:
            if start <= span.start and span.end <= end:
                until = None if duration is None else now + duration
                raise_priority(span, priority, until, now)
        if (parent := span.parent).parent is not None:
            raise_priority(parent, span.priority, span.priority_until, now)
        span = parent


def may_append(span: Span, priority: int, until: int | None) -> bool:
    """Return True if `span` has that priority, which would end no earlier than it does now."""
    ends = span.priority_until
    return span.priority == priority and (until is None or (ends is not None and ends <= until))


def raise_priority(span: Span, priority: int, until: int | None, now: int) -> None:
    """Give `span` that priority until `until` (ns), unless it has a higher or a longer one."""
    reset_lapsed_priority(span, now)
    if span.priority < priority:
        span.priority, span.priority_until = priority, until
    elif span.priority == priority and span.priority_until is not None:
        span.priority_until = None if until is None else max(until, span.priority_until)


def reset_lapsed_priority(span: Span, now: int) -> None:
    """Set the default priority if that of `span` has ended at `now`."""
    # Left in place, a priority that has ended would outweigh a lower one that still holds.
    if span.priority_until is not None and span.priority_until <= now:
        span.priority, span.priority_until = DEFAULT_PRIORITY, None


def raise_priority_above(span: Span, now: int) -> None:
    """Raise every ancestor of `span` to its priority, until it ends there. O(path)."""
    parent = span.parent
    while parent is not None and parent.parent is not None:
        raise_priority(parent, span.priority, span.priority_until, now)
        parent = parent.parent


def raise_expiry(span: Span, before: int | None, below: int | None) -> int | None:
    """Make `span` expire no earlier than its children; return its time (ns; None: never).

    `below` is the time of the child on the path, which may have changed. `before` is the time
    of the span when it was no earlier than those of its children. O(1), or O(children) if a
    policy has set an earlier time since.
    """
    expires = span.expires
    if expires is None:
        return None
    if type(expires) is not int or expires < 0:
        msg = f"expires of {span!r} is {expires!r}: give whole ns from 0 on, or None"
        raise ValueError(msg)
    if span.children and (before is None or expires < before):
        times = [child.expires for child in span.children.values()]
        below = None if None in times else max(filter(None, times), default=0)
    if below is None or expires < below:
        span.expires = expires = below
    return expires


def raise_expiry_above(span: Span) -> None:
    """Make every ancestor of `span` expire no earlier than it does. O(ancestors raised)."""
    below, parent = span.expires, span.parent
    while parent is not None and parent.parent is not None:
        expires = parent.expires
        if expires is None or (below is not None and expires >= below):
            return
        parent.expires = below
        parent = parent.parent
