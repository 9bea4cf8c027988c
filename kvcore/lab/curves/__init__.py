"""Hit curves: what policies hit by the size of the pool, exact or sampled."""

from kvcore.lab.curves.curves import POINTS, Curve, Curves, Steps, curve, spread_sizes

__all__ = ["POINTS", "Curve", "Curves", "Steps", "curve", "spread_sizes"]
