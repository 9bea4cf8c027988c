"""When requests arrive: a workload's times, or, in closed loops, its sessions' own pace."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from heapq import heappop, heappush

from kvcore.errors import InputError
from kvcore.request import Request
from kvcore.units import INT64_LIMIT

NEVER = INT64_LIMIT
"""A time (ns) that does not come: the clock ends before it."""


class Arrivals:
    """The requests of a workload in the order in which they arrive.

    Open-loop requests are read as their time comes: memory holds one. A request that comes
    `after` another is sent `think` after that one's end, whatever time was recorded for it;
    from the first request of a session on, the rest of the workload is read at once, since
    a session may run ahead of its recording.

    Args:
        requests: the workload.
        rate_scale: how many times as fast open-loop requests arrive.

    Attributes:
        next_at: when (ns) the next request arrives that is known of, or NEVER.
        following: requests that wait for the end of another one, with their place in the
            workload, by the id of the other one.

    Raises:
        InputError: a rate that is not positive; while reading: an arrival before the one
            before it or before 0, an id for the second time.
    """

    def __init__(self, requests: Iterable[Request], rate_scale: float = 1.0) -> None:
        if not 0 < rate_scale < float("inf"):
            msg = (
                f"rate_scale={rate_scale}: give how many times as fast requests arrive, above 0"
            )
            raise InputError(msg)
        self._scale = Fraction(str(rate_scale))
        self._scaled = rate_scale != 1
        self._requests = iter(requests)
        self._session_of: dict[int | str, str | None] = {}
        self._last = 0
        self._closed = False
        self._due: list[tuple[int, int, Request]] = []
        self.following: dict[int | str, list[tuple[int, Request]]] = {}
        self._read()
        self.next_at = self._due[0][0] if self._due else NEVER

    def take(self) -> tuple[int, Request]:
        """Remove and return the next request, with its time of arrival (ns)."""
        due = self._due
        at, _, request = heappop(due)
        if request.after is None:
            self._read()
        self.next_at = due[0][0] if due else NEVER
        return at, request

    def ended(self, request: Request, now: int) -> None:
        """Called when `request` has ended: schedules the requests that come after it."""
        followers = self.following.pop(request.id, None)
        if followers is not None:
            for place, follower in followers:
                self._enter(now + follower.think_time, place, follower)
            self.next_at = self._due[0][0]

    def check_all_came(self) -> None:
        """Raise InputError if requests wait for one that never ends."""
        for awaited, ((_, first), *_) in self.following.items():
            known = awaited in self._session_of
            why = "in the end waits for it" if known else "is not in the workload"
            msg = f"request {first.id!r} comes after request {awaited!r}, which {why}"
            raise InputError(msg)

    def _read(self) -> None:
        """Read up to the next open-loop request; from the first of a session on, to the end."""
        for request in self._requests:
            at = request.arrival
            if request.id in self._session_of:
                msg = f"request {request.id!r}: an earlier request has the same id"
                raise InputError(msg)
            self._session_of[request.id] = request.session
            self._closed |= request.session is not None
            place = len(self._session_of)
            if at < self._last:
                msg = (
                    f"request {request.id!r} (number {place}) arrives at {at} ns, before "
                    f"{self._last} ns: times start at 0 and never decrease; sort the workload"
                )
                raise InputError(msg)
            self._last = at
            if request.after is not None:
                session = self._session_of.get(request.after, request.session)
                if request.session is None or session != request.session:
                    msg = (
                        f"request {request.id!r} of session {request.session!r} comes after "
                        f"request {request.after!r} of session {session!r}: give both the same"
                    )
                    raise InputError(msg)
                self.following.setdefault(request.after, []).append((place, request))
                continue
            if self._scaled:
                at = int(at / self._scale)
            self._enter(at, place, request)
            if not self._closed:
                return

    def _enter(self, at: int, place: int, request: Request) -> None:
        if at >= NEVER:
            msg = f"request {request.id!r} arrives 2^63 ns (292 years) or more from the start"
            raise InputError(msg)
        heappush(self._due, (at, place, request))
