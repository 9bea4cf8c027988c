"""Prompt lookup: drafts copied from earlier text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import ClassVar

import attrs
from attrs.validators import ge

from kvcore import InputError
from kvcore_engine.drafter.token_drafter import TokenDrafter

_WIDTH = array("q").itemsize
"""Bytes of a token in the searched text."""


@attrs.define(slots=False, eq=False)
class PromptLookup(TokenDrafter):
    """Draft the tokens that followed the last n tokens earlier, in the prompt or the output.

    The longest n-gram that occurs again counts, from `longest` tokens down to `shortest`, and
    of its places the latest that has `tokens` tokens after it. Costs no model, and O(text)
    a step and sequence: for answers that repeat their prompt, as summaries and edits do.

    Options:
        tokens: the most drafts a step, k.
        longest, shortest: tokens of the n-grams that are looked up.

    Raises:
        InputError: `shortest` is above `longest`, so that no n-gram would be looked up.

    Source: Saxena, "Prompt lookup decoding", 2023.
    """

    name: ClassVar[str] = "prompt-lookup"

    tokens: int = attrs.field(default=4)
    longest: int = attrs.field(default=3, validator=ge(1))
    shortest: int = attrs.field(default=1, validator=ge(1))

    def __attrs_post_init__(self) -> None:
        """Check that there are lengths to look up."""
        if self.shortest > self.longest:
            msg = (
                f"prompt-lookup: shortest={self.shortest} is above longest={self.longest}, so "
                "that nothing is looked up: give shortest up to longest"
            )
            raise InputError(msg)

    def draft(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return up to `most` tokens that followed the last tokens earlier."""
        count = len(tokens)
        text = array("q", tokens).tobytes()
        for length in range(min(self.longest, count - 1), self.shortest - 1, -1):
            tail = text[-length * _WIDTH :]
            # The latest place with enough tokens after it, else the latest one.
            end = _last_end(text, tail, count - most) or _last_end(text, tail, count - 1)
            if end:
                return tokens[end : end + most]
        return ()


def _last_end(text: bytes, tail: bytes, stop: int) -> int:
    """Return the token at which the last `tail` in the first `stop` tokens of `text` ends.

    0 if there is none. Bytes are searched, which is done in C.
    """
    start = text.rfind(tail, 0, max(stop, 0) * _WIDTH)
    while start > 0 and start % _WIDTH:  # from within a token on
        start = text.rfind(tail, 0, start + len(tail) - 1)
    return 0 if start < 0 else (start + len(tail)) // _WIDTH
