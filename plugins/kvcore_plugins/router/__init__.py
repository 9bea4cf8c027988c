"""Built-in routers."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred_plugins

if TYPE_CHECKING:
    from kvcore_plugins.router.affinity import PrefixAffinity
    from kvcore_plugins.router.dynamo import Dynamo
    from kvcore_plugins.router.least_requests import LeastRequests
    from kvcore_plugins.router.llm_d import LLMD
    from kvcore_plugins.router.lmetric import LMetric
    from kvcore_plugins.router.loadaware import LoadAware
    from kvcore_plugins.router.mooncake import Mooncake
    from kvcore_plugins.router.preble import Preble
    from kvcore_plugins.router.random import PowerOfTwo, Random
    from kvcore_plugins.router.round_robin import RoundRobin
    from kvcore_plugins.router.session import SessionAffinity
    from kvcore_plugins.router.sglang import SGLang
else:
    from kvcore_cluster.hooks import kvcore_routers

    __getattr__, __dir__ = deferred_plugins(__name__, kvcore_routers())

__all__ = [
    "LLMD",
    "Dynamo",
    "LMetric",
    "LeastRequests",
    "LoadAware",
    "Mooncake",
    "PowerOfTwo",
    "Preble",
    "PrefixAffinity",
    "Random",
    "RoundRobin",
    "SGLang",
    "SessionAffinity",
]
