"""Cache groups: layers that keep different things, in one pool of equal blocks.

A group is some layers with one block table. Any free block can go to any group, since the
blocks of all groups have the same bytes: what is smaller has more tokens in a block, or is
padded.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import attrs

from kvcore.errors import InputError
from kvcore.models.codec import Codec
from kvcore.models.layers import LayerCache
from kvcore.models.memory import KVLayout
from kvcore.models.spec import ModelSpec


@attrs.frozen
class CacheGroup:
    """Layers with one block table.

    Attributes:
        caches: what these layers keep, all of them over as many tokens.
        block_size: tokens in a block of the group.
    """

    caches: tuple[LayerCache, ...]
    block_size: int

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks of a decoding request of `tokens` tokens.

        A window spans a block more than it fills; of a state the last one is kept beside the
        one that is written.
        """
        blocks, cache = -(-tokens // self.block_size), self.caches[0]
        if cache.kind == "state":
            return min(blocks, 2)
        if cache.window is None:
            return blocks
        return min(blocks, -(-cache.window // self.block_size) + (cache.kind != "chunk"))


@attrs.frozen
class GroupPlan:
    """The cache groups of a model.

    Attributes:
        groups: the groups.
        bytes_per_block: bytes of a block of any of them, on all devices together.
    """

    groups: tuple[CacheGroup, ...]
    bytes_per_block: int

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks of a decoding request of `tokens` tokens, of all groups."""
        return sum(group.blocks_for(tokens) for group in self.groups)

    def blocks_in(self, budget: int) -> int:
        """Return how many blocks fit into `budget` bytes."""
        return max(0, budget) // self.bytes_per_block


def groups_of(
    model: ModelSpec, block_size: int = 16, codec: Codec | str = "fp16", devices: int = 1
) -> GroupPlan:
    """Return the cache groups of a model, as vLLM 0.33 plans them.

    Layers that keep all tokens alone are one group. Else blocks are made equal: attention
    with fewer bytes a token has more tokens in a block, attention beside a state so many that
    the state fits. Layers of each kind are then split into groups of as many layers as the
    rarest kind has, or the commonest one where that is less than 1.5 times as much.

    Args:
        model: the model.
        block_size: tokens in a block of the attention with the most bytes a token.
        codec: codec of K/V.
        devices: number of devices that share the model.

    Raises:
        InputError: there is no rule for what a layer keeps, or blocks cannot be made equal.
    """
    layout = KVLayout(model, codec, block_size)
    caches = [cache for cache in model.layer_caches if cache.kind != "shared"]
    other = next((cache for cache in caches if cache.kind in ("cross", "compressed")), None)
    if other is not None:
        msg = f"{model.name}: there is no rule for the cache group of {other}"
        raise InputError(msg)
    per_token = {cache: layout.cache_bytes(cache) * cache.copies(devices) for cache in caches}
    if all(cache.grows and cache.window is None for cache in caches):
        size = sum((cache.layers * per_token[cache] for cache in caches), Fraction(0))
        return GroupPlan((CacheGroup(tuple(caches), block_size),), ceil(block_size * size))
    sizes, page = _equal_pages(model, caches, per_token, block_size)
    counts = [cache.layers for cache in caches]
    layers = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    splits = [(cache, count) for cache in caches for count in _split(cache.layers, layers)]
    groups = tuple(
        CacheGroup((attrs.evolve(cache, layers=count),), sizes[cache])
        for cache, count in splits
    )
    return GroupPlan(groups, ceil(max(count for _, count in splits) * page))


def _equal_pages(
    model: ModelSpec,
    caches: list[LayerCache],
    per_token: dict[LayerCache, Fraction],
    block_size: int,
) -> tuple[dict[LayerCache, int], Fraction]:
    """Return the tokens in a block of each cache, and the bytes of a block in one layer."""
    most = max(per_token.values())
    state = max(cache.state_bytes for cache in caches)
    # Tokens of the widest attention, in whole blocks, such that a state fits.
    tokens = block_size * max(1, ceil(state / (block_size * most)))
    sizes = {}
    for cache in caches:
        each = most / per_token[cache] if cache.grows else Fraction(1)
        if each.denominator != 1:
            msg = (
                f"{model.name}: blocks of its layers cannot be made equal: {cache} take "
                f"{float(per_token[cache]):g} bytes a token and layer, others {float(most):g}"
            )
            raise InputError(msg)
        sizes[cache] = tokens * int(each)
    return sizes, tokens * most


def _split(layers: int, size: int) -> list[int]:
    """Return the layers of groups of at most `size` layers, dealt out in turn."""
    groups = -(-layers // size)
    return [len(range(first, layers, groups)) for first in range(groups)]
