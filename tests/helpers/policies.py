"""All configurations of eviction policies under test: add a new policy in one line.

A key is the text that a user would write. A value makes the same policy at block level; None
means that the policy has no score, and cannot be compared block by block.
"""

from __future__ import annotations

from functools import partial

from helpers.reference import policies as blocks

from kvcore import EvictionPolicy, Plugins

POLICIES = {
    "arc": None,
    "cost": blocks.Cost,
    "fifo": blocks.FIFO,
    "lfu": partial(blocks.Fading, "ns", 2, 300 * 10**9),
    "lfu:half_life=2e-8": partial(blocks.Fading, "ns", 2, 20),
    "lfu:half_life=3,unit=accesses": partial(blocks.Fading, "opened", 2, 3),
    "lfu:decay=0.9": partial(blocks.Fading, "opened", 1 / 0.9),
    "lfu:half_life=2,unit=touches": partial(blocks.Touches, 2**-0.5),
    "lfu:decay=0.5,unit=touches": partial(blocks.Touches, 0.5),
    "lfu:half_life=inf": blocks.Plain,
    "lfu:decay=1": blocks.Plain,
    "lru": blocks.LRU,
    "mru": blocks.MRU,
    "priority": blocks.Priority,
    "random": None,
    "random:seed=7": None,
    "s3fifo": None,
    "s3fifo:small=0.4,ghost=2,promote=1": None,
    "s3fifo:ghost=0,promote=3": None,
    "sieve": None,
    "slru": blocks.SLRU,
    "slru:protected=0": partial(blocks.SLRU, 0),
    "slru:protected=0.2": partial(blocks.SLRU, 0.2),
    "slru:protected=1": partial(blocks.SLRU, 1),
    "lookahead": partial(blocks.Lookahead, 64),
    "lookahead:requests=3": partial(blocks.Lookahead, 3),
    "lookahead:requests=all": partial(blocks.Lookahead, None),
    "lruk": None,
    "lruk:k=3,correlated=2,history=0.5": None,
    "lruk:history=1000": blocks.LRUK,
    "lruk:k=3,correlated=2,history=1000": partial(blocks.LRUK, 3, 2),
    "tail-lru": None,
    "tail-lru:threshold=12,unit=tokens,turn=0": partial(blocks.TailLRU, 12, 0),
    "tail-lru:threshold=0.02,turn=6": partial(blocks.TailLRU, 0.02, 6, seconds=True),
    "tinylfu": None,
    "tinylfu:window=0.2,protected=0.5,period=2": None,
    "tool-ttl": None,
    "tool-ttl:prior=0.5": None,
    "hazard": None,
    "hazard:guard=false": None,
    "hazard:guard=false,prior=0.1,by=turns+hits": None,
    "workload-aware": None,
    "workload-aware:type=tool,turns=2,window=3,history=0": None,
    "ttl": partial(blocks.TTL, 300 * 10**9),
    "ttl:ttl=2e-8": partial(blocks.TTL, 20),
}

SCORED = [name for name, make in POLICIES.items() if make is not None]

_PLUGINS = Plugins()


def build(name: str) -> EvictionPolicy:
    """Build the configuration `name`."""
    policy: EvictionPolicy = _PLUGINS.build("eviction", name)
    return policy
