"""Keep states by a policy of one's own: compare it with those that there are, without a clock.

Run it with `python examples/keep_states.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvcore import CheckpointPolicy, GroupedCache, LayerGroup, Plugins, Segment
from kvcore_plugins.cache_groups.segments import SegmentedGroups
from kvcore_plugins.checkpoint import Chunk
from kvcore_replay.untimed import replay_groups

GROUPS = [LayerGroup("full", 1024), *[LayerGroup("state", 1024)] * 3]
"""Groups like those of Qwen3-Next: an attention layer to three with a state."""


class Inner(CheckpointPolicy):
    """Keep states where the default does; evict those inside a text before those at its end."""

    name: ClassVar[str] = "inner"

    def victim(self, segments: Sequence[Segment]) -> Segment:
        """Return the least recently used segment, if possible one with another below it."""
        return next((segment for segment in segments if segment.children), segments[0])


def main() -> None:
    """Print the share of prompt tokens that each policy hits in a pool of 1,000 blocks."""
    requests = list(Plugins().build("workload", "agents:sessions=60"))
    for policy in (CheckpointPolicy(), Chunk(), Inner()):
        kind = SegmentedGroups if isinstance(policy, Inner) else GroupedCache
        cache = kind(GROUPS, 1000, checkpoint=policy)
        replay_groups(requests, cache)
        print(f"{policy.name:8} {cache.stats.ratios()['token']:.1%}")


if __name__ == "__main__":
    main()
