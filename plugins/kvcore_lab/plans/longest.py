"""The longest sequence of a workload that a replica serves, and the pool that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self, TypeAlias, cast

import attrs

from kvcore.config import RunParts
from kvcore.request import Request
from kvcore.serving.latency import SimulatedExecutor
from kvcore_lab.plans.early_end import loop_of

if TYPE_CHECKING:
    from kvcore_plugins.cache_groups import GroupedCache

Lengths: TypeAlias = Mapping[tuple[int, int], int]
"""Numbers of requests, by the tokens of their prompts and of their outputs."""


@attrs.frozen
class Longest:
    """The longest sequence that a replica is to serve.

    Attributes:
        tokens: its tokens, prompt and output: `max_model_len` if that is set; else those of
            the longest request that the largest pool holds, but no more than the model has
            positions for, unless a prompt takes all of these.
        blocks: blocks of the pool that it fills.
        rejected: requests that the largest pool rejects.
        reason: why it rejects the first of these; "": it rejects none.
    """

    tokens: int
    blocks: int
    rejected: int
    reason: str

    @classmethod
    def from_lengths(cls, parts: RunParts, lengths: Lengths) -> Self:
        """Return the longest sequence of a workload in the pool of `parts`. O(lengths)."""
        cache = parts.served_cache()
        # Without requests: it says which of them it would reject.
        loop = loop_of(None, parts, [], cache, SimulatedExecutor(parts.latency()))
        reasons = {
            (prompt, output): loop.unfit(
                Request(id=0, prompt_tokens=prompt, output_tokens=output, key_tokens=1)
            )
            for prompt, output in lengths
        }
        served = [length for length, reason in reasons.items() if not reason]
        tokens, positions = parts.batching.max_model_len, parts.model.positions
        if tokens is None:
            tokens = max(map(sum, served), default=1)
            if max(served, default=(positions,))[0] < positions:
                tokens = min(tokens, positions)
        blocks = -(-tokens // parts.geometry.block_size)
        if cache.grouped:
            blocks = cast("GroupedCache", cache).most_blocks(tokens)
        rejected = sum(count for length, count in lengths.items() if reasons[length])
        return cls(tokens, blocks, rejected, next(filter(None, reasons.values()), ""))
