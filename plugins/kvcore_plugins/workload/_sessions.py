"""Sessions of requests that wait for one another, whose prompts continue one another."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from itertools import count, islice

import attrs

from kvcore.request import Key, KeyPrefix, Request
from kvcore_plugins.workload.rows import Pending


@attrs.define
class Session:
    """The last request of a session, and what the next one can share with it.

    Attributes:
        last: id of the last request; None: there is none yet.
        arrival: when it was sent, as far as that is known (ns).
        end: when its answer was complete, or else `arrival` (ns).
        wait: time from its end to the next request (ns); None: it is not known.
        context: tokens of its prompt and its answer.
        path: keys of the full blocks of `context`.
    """

    last: int | None = None
    arrival: int = 0
    end: int = 0
    wait: int | None = None
    context: int = 0
    path: array[int] = attrs.field(factory=lambda: array("q"))


@attrs.frozen
class Turn:
    """A row of a session.

    Attributes:
        serial: the id of the request.
        time: its recorded time (ns), or that of its session.
        end: when its answer was complete (ns); None: it is not known.
        before, after: time from the end of the request before to it, and from its end to the
            next one (ns); None: it is not known.
        prompt, output: tokens.
        shared: first tokens of the prompt that are those of the context before; None: it is
            not known, so that nothing is shared.
        keys, generated: keys of the prompt and of what follows, where the tokens are known.
    """

    serial: int
    time: int
    end: int | None
    before: int | None
    after: int | None
    prompt: int
    output: int
    shared: int | None = None
    keys: Sequence[Key] = ()
    generated: Sequence[Key] = ()


class SessionChain:
    """Builds the requests of sessions: each is sent after the answer of the one before.

    Args:
        key_tokens: tokens of a key.
    """

    def __init__(self, key_tokens: int) -> None:
        self._key_tokens = key_tokens
        self._sessions: dict[str, Session] = {}
        self._new_keys = count()

    def session(self, label: str | None) -> Session:
        """Return the session of this label; without one a new session."""
        if label is None:
            return Session()
        return self._sessions.setdefault(label, Session())

    def build(self, turn: Turn, label: str | None, tenant: str | None) -> Pending:
        """Return the request of a turn, which is the next one of its session."""
        session = self.session(label)
        think = 0
        arrival = turn.time
        if session.last is not None:
            wait = turn.before if turn.before is not None else session.wait
            think = max(0, turn.time - session.end) if wait is None else wait
            arrival = max(arrival, session.arrival + (0 if wait is None else wait))
        keys, generated = self._extend(session, turn)
        build = partial(
            Request,
            id=turn.serial,
            arrival=arrival,
            prompt_tokens=turn.prompt,
            output_tokens=turn.output,
            keys=keys,
            output_keys=generated,
            key_tokens=self._key_tokens,
            session=label,
            tenant=tenant,
            after=session.last,
            think_time=think,
        )
        session.last, session.arrival = turn.serial, arrival
        session.end = arrival if turn.end is None else max(turn.end, arrival)
        session.wait = turn.after
        return arrival, build

    def _extend(self, session: Session, turn: Turn) -> tuple[Sequence[Key], Sequence[Key]]:
        """Return the keys of a prompt, and of what follows; store them as those of the session.

        Full blocks of the tokens that are shared keep their keys, all others get new ones.
        """
        if turn.shared is None:
            return turn.keys, turn.generated
        size = self._key_tokens
        kept = min(turn.shared, session.context) // size
        session.context = turn.prompt + turn.output
        path = session.path[:kept]
        path.extend(islice(self._new_keys, session.context // size - kept))
        session.path = path
        full_blocks = turn.prompt // size
        return KeyPrefix(path, full_blocks), path[full_blocks:].tolist()
