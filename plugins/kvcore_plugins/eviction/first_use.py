"""Which blocks a request uses for the first time, even if it was preempted in between."""

from __future__ import annotations

from kvcore import Request, Span

_RUNNING = 1000
"""Requests that are followed, where an engine tells of no end of them."""


class FirstUses:
    """Follows how far each running request has used its prompt and answer, in blocks.

    A request that is preempted may find its blocks evicted when it returns, and stores them
    again. That is no other use of them, as it is no hit where they are still cached: a policy
    that remembers what was evicted asks here. O(1).

    A tier may get blocks of a request long after the request has ended, the last ones first,
    and hears of no end; in a cache of several groups a request has a block of each at one
    position. No request is followed there, and every use is the first.

    Args:
        follows: `one_path` of the policy.
    """

    def __init__(self, *, follows: bool) -> None:
        """Create an empty memory."""
        self._follows = follows
        self._reached: dict[int | str, int] = {}

    def count(self, span: Span, start: int) -> int:
        """Count that the latest request of `span` uses it from block `start` to its end.

        Returns:
            The position from which on it had not used it before, `start` or more.
        """
        if not self._follows:
            return start
        reached, request = self._reached, span.last_request
        before = reached.get(request, 0)
        if span.end > before:
            reached[request] = span.end
            if len(reached) > _RUNNING:
                del reached[next(iter(reached))]
        return max(start, before)

    def end(self, request: Request) -> None:
        """Forget `request`, for a policy to call in its `on_end`."""
        self._reached.pop(request.id, None)
