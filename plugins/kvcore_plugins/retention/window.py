"""A sliding window over an active sequence, with attention sinks."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import InputError, RetentionPolicy
from kvcore.cache import Sequence


@attrs.define(slots=False, eq=False)
class Window(RetentionPolicy):
    """Keep the first tokens and the newest ones; forget what lies between.

    Whole blocks go, so that up to a block more stays at both ends of what is forgotten,
    and up to another one until the next block is full.

    Options:
        tokens: how many of the newest tokens stay, 1 or more.
        sinks: how many of the first ones do. Four keep a model fluent that was trained
            without windows; without any it fails as soon as the first token is gone.

    Source: Xiao, Tian, Chen, Han and Lewis, "Efficient streaming language models with
    attention sinks", ICLR 2024. There positions are counted within the cache; here K/V
    keeps the position it was computed with.
    """

    name: ClassVar[str] = "window"

    tokens: int = attrs.field(default=4096)
    sinks: int = attrs.field(default=0)

    @tokens.validator
    def _is_positive(self, _: object, value: int) -> None:
        if value < 1:
            msg = f"window: tokens={value} must be 1 or more"
            raise InputError(msg)

    @sinks.validator
    def _is_count(self, _: object, value: int) -> None:
        if value < 0:
            msg = f"window: sinks={value} must be 0 or more"
            raise InputError(msg)

    def droppable(self, seq: Sequence) -> list[tuple[int, int]]:
        """Return what lies between the sinks and the window. O(1)."""
        end = seq.computed - self.tokens
        return [(self.sinks, end)] if self.sinks < end else []
