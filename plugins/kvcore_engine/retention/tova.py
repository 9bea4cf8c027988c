"""TOVA: tokens that the newest token attends to."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import ScoreRetention
from kvcore.engine import Tensor
from kvcore_engine.retention.token_retention import HeldTokens, Reads


@attrs.define(slots=False, eq=False, kw_only=True)
class TOVA(ScoreRetention):
    """Keep the tokens to which the newest token attends most, the same in all heads.

    Attention weights are averaged over all query heads of a layer. As published a token goes
    with every step; here the newest token decides on a block of them at once.

    Options:
        budget, recent, sinks, when: as of every policy with scores.

    Source: Oren et al., "Transformers are multi-state RNNs", EMNLP 2024.
    """

    name: ClassVar[str] = "tova"
    reads = Reads(queries=1)

    def score(self, held: HeldTokens) -> Tensor:
        """Return the weight that the newest token gave each token, the same in all heads.

        So all heads of a layer hold the same tokens, in the same order.
        """
        return held.weights[:, :, -1].mean(1, keepdim=True).expand(held.positions.shape)
