"""Drafters for tests: one that knows what the exact generator says, and is wrong at times."""

from hashlib import blake2b
from typing import ClassVar

import attrs
from helpers.engine import VOCABULARY, digest

from kvcore.engine import TokenDrafter


def coin(*parts):
    """Return a number in [0, 100) for all of `parts`."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "little") % 100


@attrs.define(slots=False, eq=False)
class Knowing(TokenDrafter):
    """Draft the digests that the generator `Exact` draws, but for some of them.

    Options:
        tokens: drafts a step.
        right: of 100 drafts, how many are what comes.
        silent: of 100 steps, in how many nothing is drafted.
    """

    name: ClassVar[str] = "knowing"

    tokens: int = attrs.field(default=3)
    right: int = attrs.field(default=70)
    silent: int = attrs.field(default=10)

    def draft(self, tokens, most):
        """Return the digests of what is known and drafted."""
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
