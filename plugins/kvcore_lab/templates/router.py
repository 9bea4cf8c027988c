"""A router: which of several servers gets a request."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import Replica, Request, Router


@attrs.define(slots=False, eq=False)
class Example(Router):
    """Send a request where the fewest prompt tokens are in flight, less those that hit.

    Options:
        hit_weight: tokens in flight that a token of the prompt which hits makes up for.
    """

    name: ClassVar[str] = "example"
    hit_weight: float = attrs.field(default=2.0, validator=attrs.validators.ge(0))

    def cost(self, request: Request, replica: Replica) -> float:
        """Return the cost of a server, of which the lowest is taken."""
        del request
        return replica.prompt_tokens - self.hit_weight * replica.hit_tokens
