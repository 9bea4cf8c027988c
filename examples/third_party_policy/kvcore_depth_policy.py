"""Evict the deepest span first: what lies near the root serves the most prompts."""

from kvcore import ScoreEviction, hookimpl


class Deepest(ScoreEviction):
    """Evict the span that begins deepest, least recent first among equals."""

    name = "deepest"

    def score(self, span, now):
        """Return the depth, the greatest first."""
        return -span.depth


@hookimpl
def kvcore_eviction_policies():
    """Register the policy."""
    return [Deepest]
