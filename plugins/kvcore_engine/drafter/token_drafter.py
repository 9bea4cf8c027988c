"""The contract of drafters on tensors, which draft tokens that the served model verifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import attrs

from kvcore.cache import Ids
from kvcore.engine.backend import Backend
from kvcore.engine.batch import RaggedBatch, Tensor
from kvcore.engine.generator import Generator
from kvcore.errors import PolicyError
from kvcore.serving.drafter import Drafter
from kvcore_engine.tokens import TokenStream


@attrs.frozen
class DraftSequence:
    """A decoding sequence that may be drafted for.

    Attributes:
        request: id of its request.
        stream: its token ids: `stream.token_ids(0, position + 1)` is its text.
        position: position of its newest token, whose K/V the step computes.
        index: output tokens it has: the first draft is for this index of its output.
        most: the most drafts, 1 or more.
        block_table: its blocks, with slots for the newest token and for `most` drafts.
    """

    request: int | str
    stream: TokenStream
    position: int
    index: int
    most: int
    block_table: Ids


class Draft(NamedTuple):
    """Tokens that are drafted for a sequence.

    Attributes:
        tokens: token ids, in order; empty: nothing is drafted.
        probabilities: distributions that the tokens were drawn from, `[tokens, vocabulary]`;
            None: the tokens were not drawn, but chosen.
    """

    tokens: Sequence[int] = ()
    probabilities: Tensor = None


class TokenDrafter(Drafter):
    """Drafts tokens for sequences whose token ids are known. The easy tier is `draft`.

    Deterministic: the drafts for a sequence follow from its tokens and its seed.
    """

    def load(self, generator: Generator, backend: Backend, seed: int) -> None:
        """Get ready to draft for a model. Called once, when the pool of blocks is allocated.

        Nothing lies in the blocks yet, which may be used until this returns.

        Raises:
            InputError: the drafter cannot work beside this model.
        """

    def draft(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return up to `most` tokens that may follow `tokens`, the text of a sequence."""
        msg = f"drafter plugin {self.name!r} defines neither draft() nor drafts(): define one"
        raise PolicyError(msg)

    def drafts(self, sequences: Sequence[DraftSequence]) -> Sequence[Draft]:
        """Return a draft for each sequence of a step. The full tier: by `draft` by default."""
        return [
            Draft(
                self.draft(sequence.stream.token_ids(0, sequence.position + 1), sequence.most)
            )
            for sequence in sequences
        ]

    def on_prefill(self, requests: Sequence[int | str], batch: RaggedBatch) -> None:
        """Called with the prompt tokens that a step computes, and their requests' ids."""

    def on_loaded(self, blocks: Ids) -> None:
        """Called when K/V is loaded from a tier into `blocks`: a drafter's own is not there."""

    def on_drawn(self, requests: Sequence[int | str], rows: Sequence[int]) -> None:
        """Called after a step, with the ids of requests that have a new newest token.

        `rows` are the rows of `generator.states` that these tokens were drawn from.
        """

    def on_end(self, requests: Sequence[int | str]) -> None:
        """Called after a step, with the ids of requests that have all of their output."""
