"""Sequences that grow in step: their blocks are counted, and told apart when they leave."""

from __future__ import annotations

from collections.abc import Sequence as Keys

from kvcore.cache.kvcache import KVCache
from kvcore.cache.pool import BlockPool
from kvcore.cache.sequence import Sequence
from kvcore.plugins import find_override
from kvcore.request import Key


def grows_by_count(cache: KVCache) -> bool:
    """Say whether `reserve` may be used: blocks have no ids, and nobody is told of growth."""
    return not isinstance(cache.pool, BlockPool) and not find_override(cache.prefix, "extend")


def reserve(cache: KVCache, blocks: int) -> None:
    """Take `blocks` free blocks for open sequences, without saying for which. O(1).

    Raises:
        OutOfBlocks: fewer are free.
    """
    cache.pool.take(blocks)


def settle(seq: Sequence, tokens: int) -> None:
    """Say that `seq` has `tokens` tokens, its blocks being allocated or reserved. O(1)."""
    seq.tokens = tokens
    seq.blocks = -(-tokens // seq.span.geometry.block_size)


def name_blocks(seq: Sequence, keys: Keys[Key]) -> None:
    """Say that the first blocks of `seq` without keys have `keys`, now that they are known.

    Its request must be one that `publishes`, with a key for each block. O(keys).
    """
    # The list is the sequence's own, and its spans refer to it.
    seq.keys.extend(keys)  # type: ignore[attr-defined]
    seq.cacheable += len(keys)
