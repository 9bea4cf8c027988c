"""The core in C beside the cache: whether it is used, and which caches it changes."""

from __future__ import annotations

from functools import cache as once
from typing import Any

from kvcore.cache.kvcache import KVCache
from kvcore.cache.pool import CountingPool
from kvcore.cache.residency import Residency
from kvcore.cache.served import ServedCache
from kvcore.cache.span import Span
from kvcore.histogram import borders
from kvcore.native import library
from kvcore.plugins import find_override
from kvcore.request import NO_HINTS, Request


@once
def core() -> Any | None:
    """Return the library, which knows the classes of the cache; None: it is not used."""
    native = library()
    if native is not None:
        native.bind(Span, Request, NO_HINTS, borders())
    return native


def why_not(cache: ServedCache) -> str:
    """Return why the core does not change `cache`; "" if it does."""
    if type(cache) is not KVCache or type(cache.pool) is not CountingPool:
        return f"a {type(cache).__name__} with a {type(cache.pool).__name__}"
    tree = cache.tree
    hears = (find_override(cache.eviction, name) for name in ("on_queued", "on_dequeued"))
    reasons = (
        ("a trace", cache.trace),
        ("tiers", cache.tiers),
        ("a retention policy", cache.retention),
        ("a policy that hears of the queue", any(hears)),
        ("statistics of its own", type(tree.residency) not in (Residency, type(None))),
        ("spans that expire", tree._expires),
        ("leaves evicted whole", tree._evicts_leaves),
        ("a cache in use", cache.now or cache.stats.requests or cache.sequences),
        ("a cache in use", tree.cached_blocks or tree.pins or tree.failure),
    )
    return next((name for name, holds in reasons if holds), "")


def defines(plugin: object, name: str, method: str) -> bool:
    """Return True if the class that defines `method` of a plugin defines `name` too."""
    for base in type(plugin).__mro__:
        if method in vars(base):
            return name in vars(base)
    return False


def known_plugins(cache: KVCache) -> int:
    """Return whose work the core does: 1, the index, which walks the tree; 2, the policy."""
    index, policy = cache.prefix, cache.eviction
    walks = index.walks_tree and defines(index, "walks_tree", "match")
    return walks + 2 * ("by_release" in vars(type(policy)) and policy.by_release)
