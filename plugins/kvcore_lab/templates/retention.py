"""A retention policy: which tokens of a running sequence keep their K/V."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore.cache import RetentionPolicy, Sequence


@attrs.define(slots=False, eq=False)
class Example(RetentionPolicy):
    """Keep the first tokens and the newest part of a sequence; drop the tokens between them.

    Options:
        sinks: number of first tokens that stay.
        share: share of the computed tokens that stay because they are the newest.
    """

    name: ClassVar[str] = "example"
    sinks: int = attrs.field(default=4, validator=attrs.validators.ge(0))
    share: float = attrs.field(
        default=0.5, validator=[attrs.validators.gt(0), attrs.validators.le(1)]
    )

    def droppable(self, seq: Sequence) -> list[tuple[int, int]]:
        """Return the range of tokens that are neither first nor new."""
        end = seq.computed - int(seq.computed * self.share)
        return [(self.sinks, end)] if self.sinks < end else []
