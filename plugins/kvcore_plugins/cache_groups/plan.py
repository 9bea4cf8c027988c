"""The plan of cache groups: which layers of a model share a block table, and their block size.

Any free block can go to any group, since the blocks of all groups have the same bytes: what is
smaller has more tokens in a block, or is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil
from typing import Any, ClassVar

import attrs

import kvcore
from kvcore.cache import CheckpointPolicy, EvictionPolicy, PrefixIndex
from kvcore.errors import InputError
from kvcore.models.codec import Codec
from kvcore.models.layers import LayerCache
from kvcore.models.memory import KVLayout
from kvcore.models.spec import ModelSpec
from kvcore.plugins import find_override
from kvcore_plugins.cache_groups.cache import GroupedCache
from kvcore_plugins.cache_groups.groups import GroupKind, LayerGroup
from kvcore_plugins.cache_groups.segments import SegmentedGroups


@attrs.frozen
class GroupPlan:
    """The cache groups of a model: a `LayerPlan`.

    Attributes:
        groups: the groups.
        bytes_per_block: bytes of a block of any of them, on all devices together.
        caches: what the layers of each group keep; none if only the groups are known, as from
            the header of a trace.
    """

    where: ClassVar[str] = "cache groups"
    takes_tiers: ClassVar[bool] = True

    groups: tuple[LayerGroup, ...]
    bytes_per_block: int
    caches: tuple[tuple[LayerCache, ...], ...] = ()

    @property
    def splits(self) -> bool:
        """Whether layers are told apart: not if all of them keep all tokens."""
        return len(self.groups) > 1 or self.groups[0].kind != "full"

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks of a decoding request of `tokens` tokens, of all groups."""
        return sum(group.blocks_for(tokens) for group in self.groups)

    def blocks_in(self, budget: int) -> int:
        """Return how many blocks fit into `budget` bytes."""
        return max(0, budget) // self.bytes_per_block

    def check_keys(self, model: str, key_tokens: int) -> None:
        """Raise InputError if blocks of a group do not fit keys of so many tokens."""
        for size in {group.block_size for group in self.groups}:
            if size % key_tokens and key_tokens % size:
                msg = (
                    f"blocks of {model} have {size:,} tokens, so that all groups take the same "
                    f"bytes, and keys of the workload {key_tokens}: one must divide the other. "
                    f"Give block_size={key_tokens}"
                )
                raise InputError(msg)

    def cache(
        self,
        blocks: int,
        *,
        eviction: EvictionPolicy,
        recompute: Callable[[int, int], float] | None,
        prefix: PrefixIndex | None,
        checkpoint: CheckpointPolicy,
        **options: Any,
    ) -> GroupedCache:
        """Return a cache of these groups: `LayerPlan.cache`."""
        del prefix  # groups look up names
        options["checkpoint"] = checkpoint
        if find_override(checkpoint, "victim"):
            if eviction.name != "lru":
                msg = (
                    f"eviction {eviction.name!r}: checkpoint {checkpoint.name!r} chooses what "
                    "leaves: leave one of them out"
                )
                raise InputError(msg)
            return SegmentedGroups(self.groups, blocks, recompute=recompute, **options)
        if eviction.name == "lru":
            return GroupedCache(self.groups, blocks, eviction=eviction, **options)
        # The front door says where policies are hosted: most runs have LRU.
        return kvcore.HostedGroups(
            self.groups, blocks, eviction=eviction, recompute=recompute, **options
        )

    def as_dict(self, blocks: int, checkpoint: CheckpointPolicy) -> dict[str, Any]:
        """Return the groups for JSON: `LayerPlan.as_dict`."""
        del blocks
        groups = [attrs.asdict(group) for group in self.groups]
        interval = {"prefix_cache_retention_interval": checkpoint.interval}
        return {"cache_groups": {**interval, "groups": groups}}


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
        layers = sum(cache.layers for cache in caches)
        group = LayerGroup("full", block_size, layers=layers)
        return GroupPlan((group,), ceil(block_size * size), (tuple(caches),))
    sizes, page = _equal_pages(model, caches, per_token, block_size)
    counts = [cache.layers for cache in caches]
    layers = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    splits = [(cache, count) for cache in caches for count in _split(cache.layers, layers)]
    return GroupPlan(
        tuple(_group(cache, sizes[cache], count) for cache, count in splits),
        ceil(max(count for _, count in splits) * page),
        tuple((attrs.evolve(cache, layers=count),) for cache, count in splits),
    )


def _group(cache: LayerCache, block_size: int, layers: int) -> LayerGroup:
    """Return the group of `layers` layers with `cache`."""
    if cache.kind == "state":
        return LayerGroup("state", block_size, layers=layers)
    if cache.window is None:
        return LayerGroup("full", block_size, layers=layers)
    kind: GroupKind = "chunk" if cache.kind == "chunk" else "window"
    return LayerGroup(kind, block_size, cache.window, layers)


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
        tokens_of_page = most / per_token[cache] if cache.grows else Fraction(1)
        if tokens_of_page.denominator != 1:
            msg = (
                f"{model.name}: blocks of its layers cannot be made equal: {cache} take "
                f"{float(per_token[cache]):g} bytes a token and layer, others {float(most):g}"
            )
            raise InputError(msg)
        sizes[cache] = tokens * int(tokens_of_page)
    return sizes, tokens * most


def _split(layers: int, size: int) -> list[int]:
    """Return the layers of groups of at most `size` layers, dealt out in turn."""
    groups = -(-layers // size)
    return [len(range(first, layers, groups)) for first in range(groups)]
