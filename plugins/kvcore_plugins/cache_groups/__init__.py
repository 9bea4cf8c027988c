"""Cache groups: one pool of equal blocks for layers that keep different things, as vLLM has it.

To read: `plan.py` makes the groups of a model; `groups.py` has what a group keeps of a request;
`cache.py` finds, allocates and frees its blocks, by their names in `named_blocks.py`;
`allocator.py` does so for the jobs of a run.
"""

from __future__ import annotations

from kvcore_plugins.cache_groups.cache import GroupedCache
from kvcore_plugins.cache_groups.groups import LayerGroup
from kvcore_plugins.cache_groups.plan import GroupPlan, groups_of

__all__ = ["GroupPlan", "GroupedCache", "LayerGroup", "groups_of"]
