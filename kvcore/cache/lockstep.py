"""Sequences that grow in step: their blocks are counted, and told apart when they leave."""

from __future__ import annotations

from kvcore.cache.kvcache import KVCache
from kvcore.cache.pool import BlockPool
from kvcore.cache.sequence import Sequence
from kvcore.policy import overridden


def grows_by_count(cache: KVCache) -> bool:
    """Say whether `reserve` may be used: blocks have no ids, and nobody is told of growth."""
    return not isinstance(cache.pool, BlockPool) and not overridden(cache.prefix, "extend")


def reserve(cache: KVCache, blocks: int) -> None:
    """Take `blocks` free blocks for open sequences, without saying for which. O(1).

    Raises:
        OutOfBlocks: fewer are free.
    """
    cache.pool.take(blocks)


def settle(seq: Sequence, tokens: int) -> None:
    """Say that `seq` has `tokens` tokens, its blocks being allocated or reserved. O(1)."""
    seq.tokens = tokens
    seq.blocks = -(-tokens // seq.span.shape.block_size)
