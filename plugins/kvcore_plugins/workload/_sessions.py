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
        prompt, context: tokens of its prompt, and of its prompt and its answer.
        path: keys of the full blocks of `context`.
    """

    last: int | None = None
    arrival: int = 0
    end: int = 0
    wait: int | None = None
    prompt: int = 0
    context: int = 0
    path: array[int] = attrs.field(factory=lambda: array("q"))

    def quoted(self, prompt: int) -> int:
        """Return the first tokens of a prompt that repeats what was said, by its length alone.

        That is the last prompt and its answer; without the answer, such as reasoning, if the
        prompt is too short for it. One that is shorter than the last prompt repeats nothing.
        """
        if prompt >= self.context:
            return self.context
        return self.prompt if prompt >= self.prompt else 0


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
        opening: in the first row of a session, first tokens of the prompt that are those of
            other sessions' first prompts, of the same tenant if it has any; None: none are.
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
    opening: int | None = None
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
        # The keys of the longest first prompt of a session, by tenant; None: of all tenants.
        self._openings: dict[str | None, array[int]] = {}
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
        keys, generated = self._extend(session, turn, tenant)
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

    def _extend(
        self, session: Session, turn: Turn, tenant: str | None
    ) -> tuple[Sequence[Key], Sequence[Key]]:
        """Return the keys of a prompt, and of what follows; store them as those of the session.

        Full blocks of the tokens that are shared keep their keys, all others get new ones.
        """
        if turn.shared is None:
            return turn.keys, turn.generated
        size, opening = self._key_tokens, session.last is None and turn.opening is not None
        path, openings = (
            session.path[: min(turn.shared, session.context) // size],
            self._openings,
        )
        if opening:
            known = openings.get(tenant) or openings.get(None) or path
            path = known[: (turn.opening or 0) // size]
        session.prompt, session.context = turn.prompt, turn.prompt + turn.output
        path.extend(islice(self._new_keys, session.context // size - len(path)))
        session.path = path
        if opening:
            # Of the longest one most is there to be shared.
            for name in (tenant, None):
                if len(openings.get(name, ())) < len(path):
                    openings[name] = path
        full_blocks = turn.prompt // size
        return KeyPrefix(path, full_blocks), path[full_blocks:].tolist()
