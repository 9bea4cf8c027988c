"""Rows of a log that continue one another: each is sent after the answer that it quotes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import attrs

from kvcore.request import Key, Request
from kvcore_plugins.workload.logged import LoggedRequest


class Quoted(NamedTuple):
    """A request whose prompt and answer later prompts may begin with.

    Attributes:
        request: its id.
        session: its session.
        arrival: when it was sent (ns).
        tokens: those of its prompt and its answer, as later prompts quote it.
        following: the key after its last one in a prompt that continues it; None: there is no
            such prompt yet.
    """

    request: int | str
    session: str
    arrival: int
    tokens: int
    following: Key | None = None


@attrs.define
class Turns:
    """Finds the request that a prompt continues: it begins with its prompt and its answer.

    Keys are chained, so one equal key means that everything before it is equal too. An answer
    whose keys are unknown is taken to be in a prompt that begins with the prompt before it,
    and is longer by the answer at least. A prompt of less than a key is continued by none.

    Where prompts go on in different ways, what they share is no turn but a system prompt: from
    the second way on, none of them continues it.

    Memory grows by an entry for each request. Finding costs a look-up for each key that no
    earlier prompt ends with.

    Attributes:
        linked: number of requests that continue another one.
    """

    linked: int = 0
    # By the last key of prompt and answer; None: what ends there is shared.
    _ends: dict[Key, Quoted | None] = attrs.field(factory=dict, init=False)

    def quoted(self, request: Request) -> Quoted | None:
        """Return the request that `request` continues; None if it continues none."""
        ends, keys = self._ends, request.keys
        following = None
        for key in reversed(keys):
            if key in ends:
                quoted = ends[key]
                if quoted is None:
                    return None
                if quoted.tokens <= request.prompt_tokens:
                    if following is not None:
                        is_turn = quoted.following in (None, following)
                        ends[key] = quoted._replace(following=following) if is_turn else None
                    return ends[key]
            following = key
        return None

    def add(self, request: Request, session: str) -> None:
        """Record a request, which later ones may continue."""
        tokens = request.prompt_tokens + request.output_tokens
        if isinstance(request, LoggedRequest) and request.quoted is not None:
            last, tokens = request.quoted
        elif request.output_keys:
            last = request.output_keys[-1]
        elif full := min(request.prompt_tokens // request.key_tokens, len(request.keys)):
            last = request.keys[full - 1]
        else:
            return
        known = self._ends.get(last)
        if known is None and last in self._ends:
            return
        following = None if known is None else known.following
        self._ends[last] = Quoted(request.id, session, request.arrival, tokens, following)

    def link(
        self, requests: Iterable[Request], applies: Callable[[], bool] = lambda: True
    ) -> Iterator[Request]:
        """Yield requests; those that continue one without a session come after it.

        Requests that follow one already stay as they are.

        The time that a client waits is the time between the two rows: how long the answer took
        is not in it to know. `applies` is asked with the first request.
        """
        links: bool | None = None
        for request in requests:
            if links is None:
                links = applies()
            if links and request.session is None:
                quoted = self.quoted(request) if request.after is None else None
                session = str(request.id) if quoted is None else quoted.session
                if request.after is None:
                    request.session = session
                if quoted is not None:
                    request.after = quoted.request
                    request.think_time = request.arrival - quoted.arrival
                    self.linked += 1
                self.add(request, session)
            yield request


def overlapping(
    requests: Iterable[Request], sent: dict[int | str, int], ended: dict[int | str, int]
) -> tuple[int, int]:
    """Count the requests that continue another one, and those sent before its answer ended.

    Args:
        requests: the requests; those of sessions are left out.
        sent: when each was sent in a run (ns).
        ended: when each ended in it (ns).
    """
    turns, continued, early = Turns(), 0, 0
    for request in requests:
        if request.session is not None:
            continue
        quoted = turns.quoted(request)
        if quoted is not None and request.id in sent and quoted.request in ended:
            continued += 1
            early += sent[request.id] < ended[quoted.request]
        turns.add(request, "")
    return continued, early
