"""The plan of cache groups: which layers of a model share a block table, and their block size.

Any free block can go to any group, since the blocks of all groups have the same bytes: what is
smaller has more tokens in a block, or is padded. Of a model that keeps compressed K/V, pages of
several sizes lie side by side in a block instead (`_packed`).
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, lcm
from typing import Any, ClassVar, Final

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

PACKED_BLOCK: Final = 256
"""Tokens of a block of compressed entries, which the engine's kernels read whole."""

PACKED_WINDOW: Final = 64
"""Tokens of a block of a window beside them."""

PACKED_PAGE: Final = 512
"""Bytes of which a page of one layer has a multiple there."""


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
                    f"Give block_size={key_tokens}, on the command line --block-size "
                    f"{key_tokens}"
                )
                raise InputError(msg)

    def cache(
        self,
        blocks: int,
        *,
        eviction: EvictionPolicy,
        prefix: PrefixIndex | None,
        checkpoint: CheckpointPolicy,
        **options: Any,
    ) -> GroupedCache:
        """Return a cache of these groups: `LayerPlan.cache`."""
        options["checkpoint"] = checkpoint
        if find_override(checkpoint, "victim"):
            if eviction.name != "lru":
                msg = (
                    f"eviction {eviction.name!r}: checkpoint {checkpoint.name!r} chooses what "
                    "leaves: leave one of them out"
                )
                raise InputError(msg)
            return SegmentedGroups(self.groups, blocks, **options)
        if eviction.name == "lru":
            return GroupedCache(self.groups, blocks, eviction=eviction, **options)
        # The front door says where policies are hosted: most runs have LRU.
        return kvcore.HostedGroups(self.groups, blocks, eviction=eviction, **options)

    def as_dict(self, blocks: int, checkpoint: CheckpointPolicy) -> dict[str, Any]:
        """Return the groups for JSON: `LayerPlan.as_dict`."""
        groups = [group.as_dict() for group in self.groups]
        interval = {"prefix_cache_retention_interval": checkpoint.interval}
        return {"cache_groups": {**interval, "groups": groups}}


def groups_of(
    model: ModelSpec, block_size: int = 16, codec: Codec | str = "fp16", devices: int = 1
) -> GroupPlan:
    """Return the cache groups of a model, as vLLM 0.33 plans them.

    Layers that keep all tokens alone are one group. Else blocks are made equal: attention
    with fewer bytes a token has more tokens in a block, attention beside a state so many that
    the state fits. Layers of each kind are then split into groups of as many layers as the
    rarest kind has, or the commonest one where that is less than 1.5 times as much. Compressed
    entries have blocks of 256 tokens, K/V in fp16 or fp8 as it is.

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
    packs = any(cache.kind == "compressed" for cache in caches)
    # Tokens wait for a compressor beside entries alone, recurrent states beside none.
    unknown = [c for c in caches if (c.kind == "state" and packs != (c.window is not None))]
    unknown += [c for c in caches if c.kind == "cross" or (packs and c.kind == "chunk")]
    if unknown:
        msg = f"{model.name}: there is no rule for the cache group of {unknown[0]}"
        raise InputError(msg)
    if packs:
        # Whole kernel blocks, which may be shorter than the keys of a workload.
        if block_size % PACKED_BLOCK == 0:
            block_size = PACKED_BLOCK
        layout = KVLayout(model, codec, lcm(block_size, PACKED_BLOCK))
        return _packed(layout, caches, devices)
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


def _packed(layout: KVLayout, caches: list[LayerCache], devices: int) -> GroupPlan:
    """Return the groups of a model that keeps compressed entries: layers of several page sizes.

    A block is as large as the widest group, which all layers that keep all tokens are::

        full      [ entries | index keys | entries for more tokens ]
        window    [ pages of 64 tokens                          ]
        window    [ pages of 64 tokens                        ]
        state     [ pages of 4 tokens | smaller ones ]
        state     [ pages of 8 tokens ]

    Layers of two page sizes that occur equally often stay together; kinds with more layers are
    split into groups of about as many.

    Source: vLLM 0.33, `_get_packed_kv_cache_groups`, with pages of plain rows.
    """
    kinds: dict[tuple[int, int | None], list[LayerCache]] = {}
    for cache in caches:
        size = layout.block_size if cache.window is None else PACKED_WINDOW
        if cache.kind == "state" and cache.window is not None:
            # Pages as large as those of entries: 4 tokens of 8, and 8 of 128.
            size = min(cache.window // 2, 8)
        kinds.setdefault((size, cache.window), []).append(cache)
    regular = [kind for kind in kinds.values() if len({cache.layers for cache in kind}) == 1]
    counts = [kind[0].layers for kind in regular]
    least = max((kind[0].layers for kind in regular if len(kind) > 1), default=0)
    if not least:
        msg = f"{layout.model.name}: there is no rule for compressed entries without an indexer"
        raise InputError(msg)
    layers = min(
        range(least, max(counts) + 1), key=lambda n: (sum(-count % n for count in counts), -n)
    )
    groups, kept, widths = list[LayerGroup](), list[tuple[LayerCache, ...]](), list[int]()
    for (size, window), kind in kinds.items():
        split = -(-kind[0].layers // layers) if kind in regular else 1
        for first in range(split):
            own = [attrs.evolve(c, layers=len(range(first, c.layers, split))) for c in kind]
            total = sum(cache.layers for cache in own)
            width = sum(c.layers * _page_bytes(layout, c, size, devices) for c in own)
            groups.append(
                LayerGroup("window" if window else "full", size, window, total, width)
            )
            kept.append(tuple(own))
            widths.append(width)
    return GroupPlan(tuple(groups), max(widths), tuple(kept))


def _page_bytes(layout: KVLayout, cache: LayerCache, size: int, devices: int) -> int:
    """Return the bytes of `size` tokens in one layer, padded on each device, on all of them."""
    per_token = layout.cache_bytes(cache)
    if cache.window is not None:
        per_token += Fraction(cache.state_bytes, cache.window)
    on_device = size * per_token * cache.copies(devices) / devices
    return devices * PACKED_PAGE * ceil(on_device / PACKED_PAGE)


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
