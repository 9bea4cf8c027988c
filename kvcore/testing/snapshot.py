"""All of a cache's state as values, to be compared before and after a call."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import attrs

from kvcore.cache import BlockPool

if TYPE_CHECKING:
    from kvcore.cache import KVCache, Sequence
    from kvcore.policy import Span


def snapshot(cache: KVCache) -> dict[str, Any]:
    """Return what later decisions of `cache` depend on, and its statistics.

    Two snapshots are equal iff nothing changed between them: free blocks and their order,
    spans with pins, ids, history and policy data, open sequences, the policy's order.
    """
    pool, prefix = cache.pool, cache.prefix
    return {
        "free": pool.free,
        "ids": (
            (pool.freed(), pool.minted, dict(pool.owners))
            if isinstance(pool, BlockPool)
            else None
        ),
        "prefix": (prefix.cached, prefix.unpinned, prefix.evicted, prefix.expired_blocks),
        "spans": {span.id: _span(span) for span in prefix.spans()},
        "sequences": {seq.id: _sequence(seq) for seq in cache.sequences.values()},
        "stats": attrs.asdict(cache.stats),
        "policy": cache.eviction.state(),
    }


def _span(span: Span) -> dict[str, Any]:
    links = {
        "parent": None if span.parent is None else span.parent.id,
        "children": {key: child.id for key, child in (span.children or {}).items()},
        "creator": getattr(span.creator, "id", None),
        "keys": span.keys(),
        "ids": deepcopy(span.ids),
        "data": deepcopy(span.data),
    }
    return _values(span, {"shape", "path_keys", *links}) | links


def _sequence(seq: Sequence) -> dict[str, Any]:
    links = {
        "span": seq.span.id,
        "private": deepcopy(seq.private),
        "family": [member.id for member in seq.family or ()],
    }
    return _values(seq, {"request", "keys", *links}) | links


def _values(instance: Any, left_out: set[str]) -> dict[str, Any]:
    names = {field.name for field in attrs.fields(type(instance))} - left_out
    return {name: getattr(instance, name) for name in names}
