"""H2O: heavy hitters, and the newest tokens."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import ScoreRetention
from kvcore.engine import Tensor
from kvcore_engine.retention.token_retention import HeldTokens, Reads


@attrs.define(slots=False, eq=False, kw_only=True)
class H2O(ScoreRetention):
    """Keep the tokens that got the most attention so far, and the newest ones.

    Attention is summed over all tokens that the sequence has computed, and over the query
    heads of a K/V head. Tokens that hit in the prefix cache have no queries: the sums begin
    with the first token computed. They never decay, so old tokens have an advantage, against
    which `recent` protects the newest ones.

    Options:
        budget, sinks, when: as of every policy with scores.
        recent: how many of the newest tokens stay: a number, or a share of the budget. Half of
            the budget as published.

    Source: Zhang et al., "H2O: heavy-hitter oracle for efficient generative inference of large
    language models", NeurIPS 2023.
    """

    name: ClassVar[str] = "h2o"
    reads = Reads(attention=True)

    recent: int | float = attrs.field(default=0.5)

    def score(self, held: HeldTokens) -> Tensor:
        """Return the attention that each token has got."""
        return held.attention
