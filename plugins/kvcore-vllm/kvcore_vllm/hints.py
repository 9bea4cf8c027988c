"""KV hints of vLLM: requests of a client or a router about the K/V of a prompt.

An action of type `kvcore:retain` has the payload `{"priority": 80, "start": 0, "end": 2048,
"seconds": 600}`, all but the priority optional; one of type `kvcore:session`
`{"session": "…", "tool": "…"}`. Other actions are ignored.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from kvcore.request import Retention
from kvcore.units import NS_PER_S
from kvcore.untrusted import LONGEST_SALT, LONGEST_SESSION

_log = logging.getLogger("vllm.kvcore")

RETAIN, SESSION = "kvcore:retain", "kvcore:session"

MOST_KINDS = 256
"""Warnings that are told apart; clients choose their words, and further ones count together."""

_warned = Counter[str]()

MOST_HINTS, MOST_SECONDS = 128, 365 * 86_400
"""Largest number of hints of a request that are read, since each is looked at for each block;
and of seconds for which one holds."""


def read_hints(request_id: str, envelope: Any) -> dict[str, Any]:
    """Return the KV hints of a request, by attribute of a kvcore request.

    A hint that cannot be read, or is one of too many, is omitted with a warning in the log; of
    equal warnings the 1st, the 10th, the 100th and so on are there, with their count.
    """
    hints: dict[str, Any] = {}
    actions = () if envelope is None else envelope.actions
    if len(actions) > MOST_HINTS:
        _warn(request_id, f"of its {len(actions):,} KV hints the first {MOST_HINTS} are read")
    for action in actions[:MOST_HINTS]:
        try:
            _read(action.action_type, action.payload, hints)
        except Exception as error:  # noqa: BLE001 - of one request, and the engine is of all
            name, why = _line(action.action_id, 60), _line(error, 200)
            _warn(request_id, f"KV hint {name}: {why}")
    return hints


def _warn(request_id: str, what: str) -> None:
    """Log what is wrong with the hints of a request, or count that it has been logged."""
    kind = what if what in _warned or len(_warned) < MOST_KINDS else ""
    _warned[kind] += 1
    count = _warned[kind]
    if count == 10 ** (len(str(count)) - 1):
        times = f" ({count:,} times)" if count > 1 else ""
        _log.warning("request %s: %s%s", request_id, what, times)


def short_name(name: Any, longest: int = LONGEST_SALT) -> str | None:
    """Return a name that policies keep as long as a block is cached; None: it is too long."""
    return name if isinstance(name, str) and len(name) <= longest else None


def _line(text: object, longest: int) -> str:
    """Return the beginning of a text of a client, with escapes, for a line of the log."""
    return str(text).encode("unicode_escape")[:longest].decode()


def _read(kind: str, payload: dict[str, Any], hints: dict[str, Any]) -> None:
    """Add the hint of an action to `hints`."""
    if kind == RETAIN:
        seconds = payload.get("seconds")
        if seconds is None:
            duration = None
        elif type(seconds) in (int, float) and 0 < seconds <= MOST_SECONDS:
            duration = max(1, round(seconds * NS_PER_S))
        else:  # of a text, a billion copies would be made
            msg = f"seconds must be above 0, and at most {MOST_SECONDS:,}, not {seconds!r}"
            raise ValueError(msg)
        start, end = payload.get("start", 0), payload.get("end")
        hint = Retention(start, end, payload["priority"], duration)
        hints["retention"] = *hints.get("retention", ()), hint
    elif kind == SESSION:
        names = {name: payload.get(name) for name in ("session", "tool")}
        given = {name: value for name, value in names.items() if value is not None}
        for name, value in given.items():
            if short_name(value, LONGEST_SESSION) is None:
                msg = f"{name} must be text of at most {LONGEST_SESSION} characters"
                raise ValueError(msg)
        hints |= given
