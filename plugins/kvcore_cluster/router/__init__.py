"""Built-in routers."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred_plugins

if TYPE_CHECKING:
    from kvcore_cluster.router.affinity import PrefixAffinity
    from kvcore_cluster.router.dynamo import Dynamo
    from kvcore_cluster.router.least_requests import LeastRequests
    from kvcore_cluster.router.llm_d import LLMD
    from kvcore_cluster.router.lmetric import LMetric
    from kvcore_cluster.router.loadaware import LoadAware
    from kvcore_cluster.router.mooncake import Mooncake
    from kvcore_cluster.router.preble import Preble
    from kvcore_cluster.router.random import PowerOfTwo, Random
    from kvcore_cluster.router.round_robin import RoundRobin
    from kvcore_cluster.router.session import SessionAffinity
    from kvcore_cluster.router.sglang import SGLang
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
