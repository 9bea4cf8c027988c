"""Prompts of a small tree, as texts whose letters are keys of some blocks each."""

from helpers.requests import keyed, prefixes

from kvcore import KVCache
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix
from kvcore_replay.untimed import replay


def requests(texts, ratio=1, key=str):
    """Return a request per text; its keys are `key` of its prefixes, of `ratio` tokens each."""
    return [keyed(index, prefixes(text, key), ratio) for index, text in enumerate(texts)]


def number(text):
    """Return an integer key for a text of at most 7 letters."""
    return int.from_bytes(text.encode(), "big")


def replayed_hits(served, ratio, blocks):
    """Return the hits of LRU when each of `served` is opened, committed and closed in turn."""
    cache = KVCache(
        blocks, 1, eviction=LRU(), prefix=Radix(), accounting="keys", key_tokens=ratio
    )
    return replay(served, cache).hit_blocks
