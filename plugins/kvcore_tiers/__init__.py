"""Tiers: levels of K/V storage below the pool, in host memory, on disk, or in Redis.

It adds the plugins of the kind `tier`, whose contract is in the core (`kvcore/cache/tiers.py`),
and `kvcore.Tiers` and `kvcore.GroupTiers` for runs from Python. To read, in this order::

    hierarchy.py   all tiers below a cache: which blocks are stored and loaded, and when
    level.py       one of them: its slots and their content, and its transfers
    grouped.py     the same below cache groups, whose blocks have names and no path
    link.py        the link of a tier, on which transfers take turns
    tier/          the plugins: capacity, links, and where the bytes of a block are kept
"""
