"""Keep the tokens with the largest values: what they add when they are attended to."""

from kvcore import ScoreRetention, hookimpl
from kvcore_engine.retention import Reads


class BigValues(ScoreRetention):
    """Keep the tokens whose values have the largest L2 norm."""

    name = "big-values"
    reads = Reads(values=True)

    def score(self, held):
        """Return the norm of each value, `[layers, kv_heads, tokens]`."""
        return held.values.double().norm(dim=-1)


@hookimpl
def kvcore_retention_policies():
    """Register the policy."""
    return [BigValues]
