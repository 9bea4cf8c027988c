"""Prompt lookup: what followed the same words before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
from attrs.validators import ge

from kvcore.engine import TokenDrafter


@attrs.define(slots=False, eq=False)
class PromptLookup(TokenDrafter):
    """Draft what followed the last n tokens where they stood before, in prompt or output.

    The longest n-gram that occurs again counts, from `longest` tokens down to `shortest`, and
    of its places the latest that has `tokens` tokens after it. Costs no model, and O(text)
    a step and sequence: for answers that repeat their prompt, as summaries and edits do.

    Options:
        tokens: the most drafts a step, k.
        longest, shortest: tokens of the n-grams that are looked up.

    Source: Saxena, "Prompt lookup decoding", 2023.
    """

    name: ClassVar[str] = "prompt-lookup"

    tokens: int = attrs.field(default=4)
    longest: int = attrs.field(default=3, validator=ge(1))
    shortest: int = attrs.field(default=1, validator=ge(1))

    def draft(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return what followed the last tokens before."""
        count = len(tokens)
        for length in range(min(self.longest, count - 1), self.shortest - 1, -1):
            tail, nearest = tokens[count - length :], 0
            for end in range(count - 1, length - 1, -1):
                if tokens[end - 1] == tail[-1] and tokens[end - length : end] == tail:
                    nearest = nearest or end
                    if end + most <= count:
                        return tokens[end : end + most]
            if nearest:
                return tokens[nearest : nearest + most]
        return ()
