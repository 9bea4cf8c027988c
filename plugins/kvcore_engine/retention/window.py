"""A sliding window over an active sequence, with attention sinks."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs

from kvcore import InputError
from kvcore.cache import Sequence
from kvcore.engine import Tensor
from kvcore_engine.retention.token_retention import HeldTokens, TokenRetention, has_spare_block


@attrs.define(slots=False, eq=False)
class Window(TokenRetention):
    """Keep the first tokens and the newest ones; drop the tokens between them.

    Whole blocks are dropped, so that up to a block more stays at both ends of the gap, and up
    to another one until the next block is full. With `positions=cache` the sequence is
    compacted instead, to exactly these tokens, whenever it has filled a block more.

    Options:
        tokens: how many of the newest tokens stay, 1 or more.
        sinks: how many of the first tokens stay. Four keep a model fluent that was trained
            without windows; without any it fails as soon as the first token is dropped.
        positions: `text`: K/V keeps the position that it was computed with; `cache`: tokens
            that stay get consecutive positions, so that no distance is longer than the number
            of held tokens. Keys are rotated for that, which needs a model with a rotary
            embedding.

    Source: Xiao, Tian, Chen, Han and Lewis, "Efficient streaming language models with
    attention sinks", ICLR 2024, with `positions=cache`.
    """

    name: ClassVar[str] = "window"

    tokens: int = attrs.field(default=4096)
    sinks: int = attrs.field(default=0)
    positions: Literal["text", "cache"] = attrs.field(default="text")

    def __attrs_post_init__(self) -> None:
        """Check the options."""
        problem = None
        if self.tokens < 1:
            problem = f"tokens={self.tokens} must be 1 or more"
        elif self.sinks < 0:
            problem = f"sinks={self.sinks} must be 0 or more"
        elif self.positions not in ("text", "cache"):
            problem = f"positions={self.positions!r} is not known; there are: text, cache"
        if problem:
            msg = f"window: {problem}"
            raise InputError(msg)

    @property
    def rebases(self) -> bool:  # type: ignore[override] # of the instance
        """Whether the tokens that stay get consecutive positions."""
        return self.positions == "cache"

    def recent_of(self, seq: Sequence) -> int:
        """Return the length of the window."""
        return self.tokens

    def droppable(self, seq: Sequence) -> list[tuple[int, int]]:
        """Return the range of tokens between the sinks and the window. O(1)."""
        end = seq.computed - self.tokens
        return [(self.sinks, end)] if self.sinks < end and not self.rebases else []

    def keeps(self, seq: Sequence) -> int | None:
        """Return the number of sinks and window tokens, if a block more than these is full."""
        length = self.sinks + self.tokens
        return length if self.rebases and has_spare_block(seq, length) else None

    def score(self, held: HeldTokens) -> Tensor:
        """Return the position of each token: the newest stay."""
        return held.positions.double()
