"""A cache with a pool for each kind of layer, as SGLang has it for hybrid models.

sizes.py       how the memory is divided among the pools
side.py        the windows and the states of cached spans
tree.py        the tree of spans, some of which lack a window or a state
cache.py       the cache: what a request has in all pools, from open to close
allocator.py   the blocks of jobs while they decode
"""

from kvcore_plugins.layer_pools.cache import PooledCache
from kvcore_plugins.layer_pools.sizes import LayerPools

__all__ = ["LayerPools", "PooledCache"]
