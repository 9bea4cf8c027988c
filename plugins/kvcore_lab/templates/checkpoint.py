"""A checkpoint policy: where states of a hybrid model are kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import attrs

from kvcore import CheckpointPolicy, Request


@attrs.define(slots=False, eq=False)
class Example(CheckpointPolicy):
    """Keep states in the middle of long prompts too, where other prompts may leave them.

    Options:
        least: tokens from which on a prompt is long.
    """

    name: ClassVar[str] = "example"
    least: int = attrs.field(default=4096, validator=attrs.validators.ge(1))

    def boundaries(self, request: Request, hit: int, junction: int) -> Iterable[int]:
        """Return the end of the prompt, the junction, and the middle of a long prompt."""
        yield from super().boundaries(request, hit, junction)
        if request.prompt_tokens >= self.least:
            yield request.prompt_tokens // 2
