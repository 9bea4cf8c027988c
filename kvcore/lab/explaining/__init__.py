"""Miss reasons: what a trace says of why its requests did not hit more."""

from kvcore.lab.explaining.explain import explain
from kvcore.lab.explaining.explanation import Explanation, Lost, Summary
from kvcore.lab.explaining.reasons import CATEGORIES, WAYS, Eviction, Loss, Place, Reasons

__all__ = [
    "CATEGORIES",
    "WAYS",
    "Eviction",
    "Explanation",
    "Loss",
    "Lost",
    "Place",
    "Reasons",
    "Summary",
    "explain",
]
