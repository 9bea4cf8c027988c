"""Streams through SGLang's caches and through a KVCache: what hits, and what leaves."""

import attrs
from helpers.cache_streams import Ours, hits_of
from helpers.sglang_engine import Theirs

from kvcore.trace.fields import EvictionDigest


def _digest(hits, keys):
    """Return what is compared: all hits, how many blocks left, and a digest of these."""
    evictions = EvictionDigest()
    for key in keys:
        evictions.add(key if isinstance(key, int) else repr(key).encode())
    return hits, len(keys), evictions.hexdigest


@attrs.define
class _Evicted:
    """Takes the place of the statistics of a tree, and keeps the keys of what leaves."""

    keys: list = attrs.field(factory=list)

    def on_hit(self, span, now):
        """Do nothing."""

    def on_store(self, span, blocks):
        """Do nothing."""

    def on_evict(self, span, blocks, now, reason):
        """Keep the keys."""
        self.keys += reversed(span.keys())


def in_kvcore(stream, eviction):
    """Return what `stream` hits and evicts in the model of SGLang's cache."""
    ours = Ours.like("sglang", stream.blocks, eviction=eviction)
    evicted = ours.cache.tree.residency = _Evicted()
    return _digest(hits_of(stream, ours), evicted.keys)


def in_sglang(stream, core, eviction="lru", config=None):
    """Return what it hits and evicts in SGLang's own cache, under a policy of SGLang's name."""
    theirs = Theirs(stream.blocks, core, eviction, config)
    return _digest(hits_of(stream, theirs), theirs.evicted)


def hosted(stream, core, eviction, **config):
    """Return the same under a policy of kvcore."""
    return in_sglang(stream, core, "kvcore", {"eviction": eviction, **config})
