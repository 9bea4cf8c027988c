"""Hits and evictions of streams in SGLang's caches and in a KVCache."""

import attrs
from helpers.cache_streams import KvcoreCache, hits_of
from helpers.sglang_engine import SglangCache

from kvcore_plugins.traces.digest import EvictionDigest


def _digest(hits, keys):
    """Return the compared values: all hits, the number of victims, and a digest of these."""
    evictions = EvictionDigest()
    for key in keys:
        evictions.add(key if isinstance(key, int) else repr(key).encode())
    return hits, len(keys), evictions.hexdigest


@attrs.define
class _Evicted:
    """A replacement for the statistics of a tree that keeps the keys of evicted blocks."""

    keys: list = attrs.field(factory=list)

    def on_hit(self, span, now):
        """Do nothing."""

    def on_store(self, span, blocks):
        """Do nothing."""

    def on_evict(self, span, blocks, now, reason):
        """Append the keys of evicted blocks, the deepest first."""
        self.keys += reversed(span.keys())


def in_kvcore(stream, eviction):
    """Return hits and evictions of `stream` in the model of SGLang's cache."""
    ours = KvcoreCache.like("sglang", stream.blocks, eviction=eviction)
    evicted = ours.cache.tree.residency = _Evicted()
    return _digest(hits_of(stream, ours), evicted.keys)


def in_sglang(stream, core, eviction="lru", config=None):
    """Return hits and evictions in SGLang's own cache, under a policy of SGLang."""
    theirs = SglangCache(stream.blocks, core, eviction, config)
    return _digest(hits_of(stream, theirs), theirs.evicted)


def hosted(stream, core, eviction, **config):
    """Return hits and evictions in SGLang's own cache, under a policy of kvcore."""
    return in_sglang(stream, core, "kvcore", {"eviction": eviction, **config})
