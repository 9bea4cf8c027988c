"""The spans that the end of a request releases, of all that are released at that time."""

from __future__ import annotations

from kvcore import Request, Span


class LastEnd:
    """Knows the latest request that ended, and which spans its end releases.

    A preemption and the end of a client's pin may come at the same time. The spans that an end
    releases are a path: the first is of the request, each other one above the last.
    """

    _request: Request | None = None
    _at = -1
    _above: Span | None = None  # the span whose release would be the next one

    def begin(self, request: Request, now: int) -> None:
        """Store `request`, for a policy to call in its `on_end`."""
        self._request, self._at, self._above = request, now, None

    def of(self, span: Span, now: int) -> Request | None:
        """Return the request whose end releases `span` now; None if something else does."""
        request = self._request
        if request is None or now != self._at:
            return None
        own = span is self._above or span.last_request == request.id
        if not (own or span.keys()[-1] in request.keys):
            return None
        self._above = span.parent
        return request
