"""The tiers below a traced cache of groups: the names in them, rebuilt from the lines alone."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeAlias

from kvcore.trace import events
from kvcore.trace.events import violated
from kvcore.untrusted import MOST_TIER_KEYS
from kvcore_replay.state.tiers import TracedTiers

Place: TypeAlias = tuple[int, Any]
"""The group and the name of a block."""


class TracedGroupTiers(TracedTiers):
    """All tiers below a traced cache of groups.

    Attributes:
        places: by tier, the blocks in it.
        held: by tier, the blocks that loads read, with the number of these loads.
    """

    def __init__(self, header: events.Header) -> None:
        """Start with the empty tiers that HEADER gives.

        Raises:
            ValueError: a tier of HEADER cannot be.
        """
        super().__init__(header, 1)
        assert header.cache_groups
        groups = header.cache_groups.groups
        most = max(group.layers for group in groups)
        for tier in self.levels.values():
            slot = tier.record.slot_bytes
            tier.group_bytes = [
                group.block_bytes or -(-slot * group.layers // most) for group in groups
            ]
        self.places: dict[str, set[Place]] = {name: set() for name in self.levels}
        self.held: dict[str, Counter[Place]] = {name: Counter() for name in self.levels}

    def has(self, place: Place) -> str | None:
        """Return the nearest tier that has a block and loads it; None: there is none."""
        for name, tier in self.levels.items():
            if place in self.places[name] and tier.record.options.get("load") != "never":
                return name
        return None

    def store_places(self, event: events.Offload, places: list[Place]) -> None:
        """Apply OFFLOAD of these blocks."""
        tier = self.tier(event.tier)
        self.places[tier.name].update(places)
        if sum(map(len, self.places.values())) > MOST_TIER_KEYS:
            violated(f"tiers hold more than {MOST_TIER_KEYS:,} blocks, which is the most")
        tier.used += len(places)
        tier.stored += len(places)
        tier.queue(tier.size_of(event), event.t, write=True)

    def drop_places(self, event: events.Discard, places: list[Place]) -> None:
        """Apply DROP of these blocks."""
        tier = self.tier(event.tier)
        for place in places:
            self.places[tier.name].remove(place)
        tier.used -= len(places)
        tier.dropped[event.reason] = tier.dropped.get(event.reason, 0) + len(places)
