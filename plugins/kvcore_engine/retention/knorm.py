"""K-norm: tokens whose keys have a small norm."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import ScoreRetention
from kvcore.engine import Tensor
from kvcore_engine.retention.token_retention import HeldTokens, Reads


@attrs.define(slots=False, eq=False, kw_only=True)
class KNorm(ScoreRetention):
    """Keep the tokens whose keys have the smallest L2 norm.

    In trained models these tend to be the ones that get attention. Needs no queries, and no
    attention weights. As published the first two layers keep everything; here every layer keeps
    the same number.

    Options:
        budget, recent, sinks, when: as of every policy with scores.

    Source: Devoto et al., "A simple and effective L2 norm-based strategy for KV cache
    compression", EMNLP 2024.
    """

    name: ClassVar[str] = "knorm"
    reads = Reads(keys=True)

    def score(self, held: HeldTokens) -> Tensor:
        """Return the negated norm of each key."""
        from kvcore_plugins.codec.dtypes import widened  # noqa: PLC0415 - torch: not in a simulation

        return -widened(held.keys).norm(dim=-1)
