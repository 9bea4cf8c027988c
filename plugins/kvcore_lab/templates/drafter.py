"""A drafter: which tokens a step verifies besides the newest one, here for simulations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvcore import Drafter, Request
from kvcore.serving import StepWork
from kvcore.units import PS_PER_S


@attrs.define(slots=False, eq=False)
class Example(Drafter):
    """Draft more tokens the better the answer goes: a longer text is easier to guess.

    Options:
        tokens: largest number of drafts of a sequence in a step.
        warm: number of output tokens after which all drafts are accepted.
        seconds: seconds that a draft takes.
    """

    name: ClassVar[str] = "example"
    tokens: int = attrs.field(default=4, validator=attrs.validators.ge(1))
    warm: int = attrs.field(default=100, validator=attrs.validators.ge(1))
    seconds: float = attrs.field(default=1e-4, validator=attrs.validators.ge(0))

    def accepted(self, request: Request, index: int, most: int) -> tuple[int, int]:
        """Return how many tokens are drafted, and how many of them are accepted."""
        del request
        drafted = min(most, self.tokens)
        return drafted, drafted * min(index, self.warm) // self.warm

    def duration(self, work: StepWork, drafts: Sequence[int]) -> int:
        """Return the picoseconds of drafting: all sequences draft side by side."""
        del work
        return round(self.seconds * PS_PER_S) * max(drafts, default=0)
