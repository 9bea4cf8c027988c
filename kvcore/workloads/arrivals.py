"""Requests in the order in which they arrive: as recorded, or after the end of another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from heapq import heappop, heappush
from itertools import chain
from typing import Final

from kvcore.errors import InputError
from kvcore.request import Request
from kvcore.units import INT64_LIMIT

NEVER: Final = INT64_LIMIT
"""A time (ns) that does not come: the clock ends before it."""


class Arrivals:
    """The requests of a workload in the order in which they arrive.

    Open-loop requests are read as their time comes: memory holds one. A request that comes
    `after` another is sent its `think_time` after the end of that one, whatever time was
    recorded for it. From the first request of a session on, the rest of the workload is read
    at once, since a session may run ahead of its recording.

    With `prefetches` more open-loop requests are read: all that arrive within the longest
    `prefetch` hint so far after the next one, so that each prefetch is known in time.

    The way of a request::

        workload --_read--> _due, by time of arrival ------------------take--> the loop
                   |         ^                 +-> _ahead ----take_prefetch--> the loop
                   |         | ended: the one before it has, `think_time` ago
                   +-----> following, by the id of the one before it

    Args:
        requests: the workload.
        rate_scale: how many times as fast open-loop requests arrive.
        prefetches: whether hints for prefetches are collected.

    Attributes:
        scale: `rate_scale`, exactly.
        next_at: when (ns) the next of the known requests arrives, or NEVER.
        prefetch_at: when (ns) the next of the known prefetches is due, or NEVER.
        closed: whether a request of a session has been read, and so all that follow it.
        following: requests that wait for the end of another one, with their index in the
            workload, by the id of that one.

    Raises:
        InputError: the rate is not positive. While reading: a request arrives before its
            predecessor or before 0, or an id comes for the second time.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        rate_scale: float = 1.0,
        *,
        prefetches: bool = False,
    ) -> None:
        if isinstance(rate_scale, bool | str) or not 0 < rate_scale < float("inf"):
            msg = (
                f"rate_scale={rate_scale!r}: give how many times as fast they arrive: a finite "
                "number above 0"
            )
            raise InputError(msg)
        self.scale = Fraction(str(rate_scale))
        self._scaled = rate_scale != 1
        self._requests = iter(requests)
        self._session_of: dict[int | str, str | None] = {}
        # Most workloads number their requests: these numbers were read, without a session.
        self._first_number = self._next_number = self._came = 0
        self._last = 0
        self.closed = self._follows = False
        self._due: list[tuple[int, int, Request]] = []
        # When a prefetch is due, index, arrival, request; and the longest hint so far.
        self._ahead: list[tuple[int, int, int, Request]] = []
        self._longest = 0 if prefetches else -1
        self._newest = 0
        self.prefetch_at = NEVER
        self.following: dict[int | str, list[tuple[int, Request]]] = {}
        self._read()
        self.next_at = self._due[0][0] if self._due else NEVER

    @property
    def last_start(self) -> int | None:
        """When (ns) the last request comes that follows none; None if none follows another."""
        return self._newest if self._follows else None

    def restart(self) -> Iterator[Request]:
        """Return all requests, for the core in C, which gives them back by `resume`."""
        first = [request for _, _, request in self._due]
        self._due.clear()
        self._session_of.clear()
        self._requests = chain(first, self._requests)
        return self._requests

    def note(self, name: int | str, first: int, following: int) -> int:
        """Note a name, for the core in C, that is not next after `first` up to `following`.

        Returns the number that continues them now.
        """
        self._first_number, self._next_number = first, following
        self._note(name, None)
        return self._next_number

    def resume(
        self, ahead: Request | None, due: int, came: int, last: int, first: int, following: int
    ) -> None:
        """Go on where the core in C stopped: after `came` requests, the last at `last` (ns).

        `ahead` is the next one, if it has been read. It arrives at `due` (ns) and is one of
        those that came; at -1 it is not, and remains to be checked. The numbers are as for
        `note`.
        """
        self._came, self._last = came, last
        self._first_number, self._next_number = first, following
        if ahead is not None and due >= 0:
            self._enter(due, came, ahead)
            self._newest = due
        else:
            if ahead is not None:
                self._requests = chain((ahead,), self._requests)
            self._read()
        self.next_at = self._due[0][0] if self._due else NEVER

    def take(self) -> tuple[int, Request]:
        """Remove and return the next request, with its time of arrival (ns)."""
        due = self._due
        arrival, _, request = heappop(due)
        if request.after is None and (not due or self._newest < due[0][0] + self._longest):
            self._read()
        self.next_at = due[0][0] if due else NEVER
        return arrival, request

    def take_prefetch(self) -> tuple[int, Request]:
        """Remove the next prefetch; return when (ns) its request arrives, and the request."""
        _, _, arrival, request = heappop(self._ahead)
        self.prefetch_at = self._ahead[0][0] if self._ahead else NEVER
        return arrival, request

    def ended(self, request: Request, now: int) -> None:
        """Called when `request` has ended: schedules the requests that come after it."""
        followers = self.following.pop(request.id, None)
        if followers is not None:
            for index, follower in followers:
                self._enter(now + follower.think_time, index, follower)
            self.next_at = self._due[0][0]

    def check_all_came(self) -> None:
        """Raise InputError if requests wait for one that never ends."""
        if self.following:
            awaited, ((_, first), *_) = next(iter(self.following.items()))
            known = self._has_come(awaited)
            why = "in the end waits for it" if known else "is not in the workload"
            msg = f"request {first.id!r} comes after request {awaited!r}, which {why}"
            raise InputError(msg)

    def _read(self) -> None:
        """Read up to the next open-loop request; from the first of a session on, to the end."""
        for request in self._requests:
            arrival, name, session = request.arrival, request.id, request.session
            index = self._came = self._came + 1
            if index == 1 and isinstance(name, int):
                self._first_number = self._next_number = name
            if name == self._next_number and session is None and not self._session_of:
                self._next_number += 1
            else:
                self._note(name, session)
            if arrival < self._last:
                msg = (
                    f"request {name!r} (number {index}) arrives at {arrival} ns, before "
                    f"{self._last} ns: times start at 0 and never decrease; sort the workload"
                )
                raise InputError(msg)
            self._last = arrival
            if request.after is not None:
                self._follow(request, index)
                continue
            if self._scaled:
                arrival = int(arrival / self.scale)
            self._enter(arrival, index, request)
            self._newest = arrival
            if not self.closed and arrival >= self._due[0][0] + self._longest:
                return

    def _follow(self, request: Request, index: int) -> None:
        """Keep a request that comes after another one, until that has ended."""
        awaited = request.after
        assert awaited is not None
        if request.session is None:
            msg = (
                f"request {request.id!r} comes after request {awaited!r} and has no session: "
                "give both the same session"
            )
            raise InputError(msg)
        if self._has_come(awaited):
            _check_session(request, self._session_of.get(awaited))
        self._follows = True
        self.following.setdefault(awaited, []).append((index, request))

    def _note(self, name: int | str, session: str | None) -> None:
        """Keep the name of a request that was read, and its session."""
        for _, follower in self.following.get(name, ()):
            _check_session(follower, session)
        if session is not None:
            self.closed = True
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

    def _enter(self, arrival: int, index: int, request: Request) -> None:
        if arrival >= NEVER:
            msg = f"request {request.id!r} arrives 2^63 ns (292 years) or more from the start"
            raise InputError(msg)
        heappush(self._due, (arrival, index, request))
        if self._longest < 0:
            return
        early = request.hints.prefetch
        if early is not None:
            self._longest = max(self._longest, early)
            heappush(self._ahead, (arrival - early, index, arrival, request))
            self.prefetch_at = self._ahead[0][0]


def _check_session(request: Request, other: str | None) -> None:
    """Refuse a request that comes after one of another session."""
    if request.session != other:
        msg = (
            f"request {request.id!r} of session {request.session!r} comes after request "
            f"{request.after!r} of session {other!r}: give both the same session"
        )
        raise InputError(msg)
