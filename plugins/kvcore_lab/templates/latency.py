"""A latency model: how long a step of a server takes."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import LatencyModel
from kvcore.serving import StepWork


@attrs.define(slots=False, eq=False)
class Example(LatencyModel):
    """Take a time for each step, each token, and each token of context that is read.

    Options:
        overhead: seconds of a step.
        token: seconds of a token that is computed.
        read: seconds of a token of context of a sequence that decodes.
    """

    name: ClassVar[str] = "example"
    overhead: float = attrs.field(default=5e-3, validator=attrs.validators.ge(0))
    token: float = attrs.field(default=1e-5, validator=attrs.validators.ge(0))
    read: float = attrs.field(default=1e-8, validator=attrs.validators.ge(0))

    def seconds(self, work: StepWork) -> float:
        """Return the seconds that a step takes."""
        tokens = work.prefill + work.decode
        read: int = sum(work.context)
        return self.overhead + self.token * tokens + self.read * read
