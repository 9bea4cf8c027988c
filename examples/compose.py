"""Import, compose and run: three eviction policies on the bundled trace, without names.

Run it with `python examples/compose.py`.
"""

from __future__ import annotations

from kvcore import KVCache
from kvcore_plugins.eviction import LFU, LRU, Cost
from kvcore_plugins.prefix import Radix
from kvcore_plugins.workload import Mooncake
from kvcore_replay.untimed import replay


def main() -> None:
    """Print the share of prompt blocks that each policy finds in a pool of 5,859."""
    workload = Mooncake()
    for eviction in (LRU(), LFU(half_life=300), Cost()):
        cache = KVCache(
            blocks=5_859,
            block_size=workload.key_tokens,
            accounting="keys",
            eviction=eviction,
            prefix=Radix(),
        )
        replay(workload, cache)
        ratio = cache.stats.ratios()["block"]
        print(f"{eviction.name:5} {cache.stats.hit_blocks:7,} blocks hit, {ratio:.1%}")


if __name__ == "__main__":
    main()
