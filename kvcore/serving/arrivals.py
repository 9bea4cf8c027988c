"""The arrivals of a workload: open-loop requests, sessions, and hints for prefetches."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from heapq import heappop, heappush
from typing import Final

from kvcore.compiled import mypyc_attr
from kvcore.errors import InputError
from kvcore.request import Request
from kvcore.units import INT64_LIMIT

NEVER: Final = INT64_LIMIT
"""A time (ns) that does not come: the clock ends before it."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Arrivals:
    """The requests of a workload in the order in which they arrive.

    Open-loop requests are read as their time comes: memory holds one. A request that comes
    `after` another is sent its `think_time` after the end of that one, whatever time was
    recorded for it. From the first request of a session on, the rest of the workload is read
    at once, since a session may run ahead of its recording.

    With `prefetches` more open-loop requests are read: all that arrive within the longest
    `prefetch` hint so far after the next one, so that each prefetch is known in time.

    Args:
        requests: the workload.
        rate_scale: how many times as fast open-loop requests arrive.
        prefetches: whether hints for prefetches are collected.

    Attributes:
        next_at: when (ns) the next of the known requests arrives, or NEVER.
        prefetch_at: when (ns) the next of the known prefetches is due, or NEVER.
        following: requests that wait for the end of another one, with their place in the
            workload, by the id of that one.

    Raises:
        InputError: the rate is not positive. While reading: a request arrives before its
            predecessor or before 0, or an id comes for the second time.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        rate_scale: int | float = 1.0,  # noqa: PYI041 - of an int a compiler makes a float
        *,
        prefetches: bool = False,
    ) -> None:
        if not 0 < rate_scale < float("inf"):
            msg = (
                f"rate_scale={rate_scale}: give how many times as fast they arrive: a finite "
                "number above 0"
            )
            raise InputError(msg)
        self._scale = Fraction(str(rate_scale))
        self._scaled = rate_scale != 1
        self._requests = iter(requests)
        self._session_of: dict[int | str, str | None] = {}
        # Most workloads number their requests: these numbers were read, without a session.
        self._first_number = self._next_number = self._came = 0
        self._last = 0
        self._closed = False
        self._due: list[tuple[int, int, Request]] = []
        # When a prefetch is due, place, arrival, request; and the longest hint so far.
        self._ahead: list[tuple[int, int, int, Request]] = []
        self._longest = 0 if prefetches else -1
        self._newest = 0
        self.prefetch_at = NEVER
        self.following: dict[int | str, list[tuple[int, Request]]] = {}
        self._read()
        self.next_at = self._due[0][0] if self._due else NEVER

    def take(self) -> tuple[int, Request]:
        """Remove and return the next request, with its time of arrival (ns)."""
        due = self._due
        at, _, request = heappop(due)
        if request.after is None and (not due or self._newest < due[0][0] + self._longest):
            self._read()
        self.next_at = due[0][0] if due else NEVER
        return at, request

    def take_prefetch(self) -> tuple[int, Request]:
        """Remove the next prefetch; return when (ns) its request arrives, and the request."""
        _, _, at, request = heappop(self._ahead)
        self.prefetch_at = self._ahead[0][0] if self._ahead else NEVER
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
            known = self._has_come(awaited)
            why = "in the end waits for it" if known else "is not in the workload"
            msg = f"request {first.id!r} comes after request {awaited!r}, which {why}"
            raise InputError(msg)

    def _read(self) -> None:
        """Read up to the next open-loop request; from the first of a session on, to the end."""
        for request in self._requests:
            at, known, session = request.arrival, request.id, request.session
            self._note(known, session)
            if session is not None:
                self._closed = True
            place = self._came
            if at < self._last:
                msg = (
                    f"request {known!r} (number {place}) arrives at {at} ns, before "
                    f"{self._last} ns: times start at 0 and never decrease; sort the workload"
                )
                raise InputError(msg)
            self._last = at
            if request.after is not None:
                came = self._has_come(request.after)
                other = self._session_of.get(request.after) if came else session
                if session is None or other != session:
                    msg = (
                        f"request {known!r} of session {session!r} comes after "
                        f"request {request.after!r} of session {other!r}: give both the same "
                        "session"
                    )
                    raise InputError(msg)
                self.following.setdefault(request.after, []).append((place, request))
                continue
            if self._scaled:
                at = int(at / self._scale)
            self._enter(at, place, request)
            self._newest = at
            if not self._closed and at >= self._due[0][0] + self._longest:
                return

    def _note(self, name: int | str, session: str | None) -> None:
        """Keep the name of a request that was read, and its session."""
        if not self._came and isinstance(name, int):
            self._first_number = self._next_number = name
        self._came += 1
        if session is None and name == self._next_number and name not in self._session_of:
            self._next_number += 1
        elif self._has_come(name):
            msg = f"request {name!r}: an earlier request has the same id"
            raise InputError(msg)
        else:
            self._session_of[name] = session

    def _has_come(self, name: int | str) -> bool:
        """Return True if the request `name` has been read."""
        if isinstance(name, int) and self._first_number <= name < self._next_number:
            return True
        return name in self._session_of

    def _enter(self, at: int, place: int, request: Request) -> None:
        if at >= NEVER:
            msg = f"request {request.id!r} arrives 2^63 ns (292 years) or more from the start"
            raise InputError(msg)
        heappush(self._due, (at, place, request))
        if self._longest < 0:
            return
        early = request.hints.prefetch
        if early is not None:
            self._longest = max(self._longest, early)
            heappush(self._ahead, (at - early, place, at, request))
            self.prefetch_at = self._ahead[0][0]
