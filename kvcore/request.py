"""One request of a workload: what arrives, when, and which block keys its prompt has."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

import attrs

from kvcore.errors import InputError
from kvcore.units import LIMIT

Key: TypeAlias = Hashable
"""A chained block key: equal keys mean equal blocks *and* equal everything before them."""

DEFAULT_PRIORITY = 35
"""Retention priority of a block for which no hint was given (1 goes first, 100 last)."""

HIGHEST_PRIORITY = 100


@attrs.frozen
class Retention:
    """A hint that the tokens `[start, end)` of a prompt deserve a retention priority.

    `end=None` means to the end of the prompt. `duration` is in nanoseconds from the
    moment the blocks are stored or hit; after it they have the default priority again.
    """

    start: int
    end: int | None
    priority: int
    duration: int | None = None

    def __attrs_post_init__(self) -> None:
        """Check the range and the priority."""
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            msg = f"retention hint for tokens {self.start} to {self.end}: no tokens"
            raise InputError(msg)
        if not 1 <= self.priority <= HIGHEST_PRIORITY:
            msg = f"retention priority must be 1 to {HIGHEST_PRIORITY}, not {self.priority}"
            raise InputError(msg)
        if self.duration is not None and (type(self.duration) is not int or self.duration <= 0):
            msg = f"retention duration must be whole nanoseconds above 0, not {self.duration!r}"
            raise InputError(msg)


@attrs.frozen(kw_only=True)
class SLO:
    """What a client expects, in nanoseconds; None where it expects nothing.

    `ttft` is the time to the first token, `tpot` the mean time of a later one, and
    `deadline` the time to the last, all counted from the request's arrival but `tpot`.
    """

    ttft: int | None = None
    tpot: int | None = None
    deadline: int | None = None

    def __attrs_post_init__(self) -> None:
        """Check that every time given is a positive number of nanoseconds."""
        for name in ("ttft", "tpot", "deadline"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value <= 0):
                msg = f"SLO {name} must be whole nanoseconds above 0, not {value!r}"
                raise InputError(msg)


@attrs.define(kw_only=True)
class Request:
    """A request as a workload yields it. Treat it as immutable.

    Attributes:
        id: unique in its workload.
        arrival: nanoseconds since the workload's start.
        prompt: prompt length in tokens.
        output: tokens to generate.
        keys: chained block keys of the prompt, `key_tokens` tokens each; the last may
            cover a partial block. May be shorter than the prompt, or empty.
        key_tokens: tokens a key stands for.
        salt, tenant: whose prefix this is. `keys` already depend on the salt.
        priority: scheduling priority (higher is more urgent).
        slo: what its client expects; None: what the run expects of all.
        predicted: output tokens that a predictor expects; None: there is none.
        retention: retention hints by token range.
        session, after, think: closed-loop traffic. This request is sent `think`
            nanoseconds after request `after` of the same session has finished.
        output_keys: keys of the blocks that follow the prompt's, where they are known.
    """

    id: int | str
    arrival: int = 0
    prompt: int
    output: int = 0
    keys: Sequence[Key] = ()
    key_tokens: int
    salt: str | None = None
    tenant: str | None = None
    priority: int = 0
    slo: SLO | None = None
    predicted: int | None = None
    retention: tuple[Retention, ...] = ()
    session: str | None = None
    after: int | str | None = None
    think: int = 0
    output_keys: Sequence[Key] = ()

    @property
    def publishes(self) -> bool:
        """Whether blocks it generates are shared: their keys are known, or a run tells them."""
        return bool(self.output_keys)

    def __attrs_post_init__(self) -> None:
        """Check what is counted by."""
        if (
            type(self.prompt) is not int
            or type(self.output) is not int
            or type(self.arrival) is not int
            or type(self.key_tokens) is not int
            or not 0 <= self.prompt < LIMIT
            or not 0 <= self.output < LIMIT
            or self.key_tokens < 1
        ):
            msg = (
                f"request {self.id!r}: arrival (ns), prompt, output and key_tokens (tokens) "
                f"are whole numbers, lengths from 0 to 2^63 - 1, key_tokens from 1 on; given: "
                f"arrival={self.arrival!r}, prompt={self.prompt!r}, output={self.output!r}, "
                f"key_tokens={self.key_tokens!r}"
            )
            raise InputError(msg)
        if type(self.think) is not int or self.think < 0:
            msg = f"request {self.id!r}: think={self.think!r} must be whole ns, 0 or more"
            raise InputError(msg)
        if self.predicted is not None and (
            type(self.predicted) is not int or self.predicted < 0
        ):
            msg = f"request {self.id!r}: predicted={self.predicted!r} must be tokens, 0 or more"
            raise InputError(msg)
