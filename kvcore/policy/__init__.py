"""The contracts a plugin fulfils: one base class a kind, and the span they speak of."""

from kvcore.policy.eviction import EvictionPolicy
from kvcore.policy.plugin import Plugin, broken, option_fields, overridden
from kvcore.policy.prefix import Match, PrefixCache
from kvcore.policy.recorder import Recorder
from kvcore.policy.score import ScoreEviction
from kvcore.policy.span import Shape, Span, root_span
from kvcore.policy.workload import Workload

__all__ = [
    "EvictionPolicy",
    "Match",
    "Plugin",
    "PrefixCache",
    "Recorder",
    "ScoreEviction",
    "Shape",
    "Span",
    "Workload",
    "broken",
    "option_fields",
    "overridden",
    "root_span",
]
