"""KV hints of vLLM: requests of a client or a router about the K/V of a prompt.

An action of type `kvcore:retain` has the payload `{"priority": 80, "start": 0, "end": 2048,
"seconds": 600}`, all but the priority optional; one of type `kvcore:session`
`{"session": "…", "tool": "…"}`. Other actions are ignored.
"""

from __future__ import annotations

import logging
from typing import Any

from kvcore import InputError
from kvcore.request import Retention
from kvcore.units import NS_PER_S

_log = logging.getLogger("vllm.kvcore")

RETAIN, SESSION = "kvcore:retain", "kvcore:session"


def read_hints(request_id: str, envelope: Any) -> dict[str, Any]:
    """Return the KV hints of a request, by attribute of a kvcore request.

    A hint that cannot be read is omitted, with a warning in the log.
    """
    hints: dict[str, Any] = {}
    for action in () if envelope is None else envelope.actions:
        try:
            _read(action.action_type, action.payload, hints)
        except (KeyError, TypeError, ValueError, InputError) as error:
            _log.warning("request %s: KV hint %s: %s", request_id, action.action_id, error)
    return hints


def _read(kind: str, payload: dict[str, Any], hints: dict[str, Any]) -> None:
    """Add the hint of an action to `hints`."""
    if kind == RETAIN:
        seconds = payload.get("seconds")
        duration = None if seconds is None else round(seconds * NS_PER_S)
        start, end = payload.get("start", 0), payload.get("end")
        hint = Retention(start, end, payload["priority"], duration)
        hints["retention"] = *hints.get("retention", ()), hint
    elif kind == SESSION:
        for name in ("session", "tool"):
            value = payload.get(name)
            if value is not None and not isinstance(value, str):
                msg = f"{name} must be text, not {value!r}"
                raise ValueError(msg)
            hints[name] = value
