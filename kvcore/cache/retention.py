"""The retention contract: what a sequence that is still running may forget."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from kvcore.plugins.base import Plugin

if TYPE_CHECKING:
    from kvcore.cache.sequence import Sequence


class RetentionPolicy(Plugin):
    """Says which tokens of an open sequence need no K/V any longer.

    The cache asks whenever a sequence has computed something: after each chunk of its
    prefill, and while it generates, whenever it has filled a block. What it forgets leaves
    its block table for good: the blocks of its own are free at once, those it shares are
    hidden from it and stay cached and pinned. From then on it publishes nothing, since what
    it computes without those tokens is not the K/V that its keys stand for.

    A sequence forgets nothing while it shares blocks of its own with a fork, nor before it
    has computed what a fork has published of them.
    """

    kind: ClassVar[str] = "retention"

    @abstractmethod
    def forgettable(self, seq: Sequence) -> Iterable[tuple[int, int]]:
        """Return ranges `(start, end)` of token positions that `seq` may forget.

        Positions count from 0; `seq.computed` tokens are computed, and no range may reach
        beyond. Ranges may name again what is forgotten already. Whole blocks inside a range
        go. Pure: an equal sequence gets an equal answer.
        """
