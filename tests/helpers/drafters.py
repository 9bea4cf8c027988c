"""A drafter that predicts the tokens of the generator `Exact`, with some errors."""

from hashlib import blake2b
from typing import ClassVar

import attrs
from helpers.engine import VOCABULARY, digest

from kvcore_engine.drafter.token_drafter import TokenDrafter


def coin(*parts):
    """Return a number in [0, 100) drawn by a hash of `parts`."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "little") % 100


@attrs.define(slots=False, eq=False)
class NoisyOracle(TokenDrafter):
    """A drafter of the digests that the generator `Exact` draws, some of them wrong.

    Options:
        tokens: number of drafts per step.
        right: percentage of drafts that are right.
        silent: percentage of steps in which nothing is drafted.
    """

    name: ClassVar[str] = "knowing"

    tokens: int = attrs.field(default=3)
    right: int = attrs.field(default=70)
    silent: int = attrs.field(default=10)

    def draft(self, tokens, most):
        """Return up to `most` drafts, of which some are wrong; at times none."""
        text, drafts = list(tokens), []
        if coin("silent", len(text), text[-1]) < self.silent:
            return drafts
        for _ in range(most):
            token = digest(text)
            if coin("right", len(text), text[-1]) >= self.right:
                token = (token + 1) % VOCABULARY
            text.append(token)
            drafts.append(token)
        return drafts
