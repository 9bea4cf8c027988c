"""Registers the mode of several servers, and the routers."""

from __future__ import annotations

from kvcore import hookimpl
from kvcore.hookspecs import Mode


@hookimpl
def kvcore_modes() -> dict[str, Mode]:
    """Return the mode of several servers."""
    return {
        "cluster": Mode(
            parts="kvcore_cluster.config:ClusterParts",
            report="kvcore_cluster.report:report_of",
            options="kvcore_cluster.options:ClusterOptions",
            chosen_by=("replicas", "fail", "autoscale", "disaggregate"),
            refusal="this is for one server: leave it out, or call kvcore.simulate_cluster",
            missing="one server gets all requests: give --replicas too",
        )
    }


@hookimpl
def kvcore_routers() -> dict[str, str]:
    """Return the routers."""
    return {
        "dynamo": "kvcore_cluster.router.dynamo:Dynamo",
        "least-requests": "kvcore_cluster.router.least_requests:LeastRequests",
        "llm-d": "kvcore_cluster.router.llm_d:LLMD",
        "lmetric": "kvcore_cluster.router.lmetric:LMetric",
        "loadaware": "kvcore_cluster.router.loadaware:LoadAware",
        "mooncake": "kvcore_cluster.router.mooncake:Mooncake",
        "power-of-two": "kvcore_cluster.router.random:PowerOfTwo",
        "preble": "kvcore_cluster.router.preble:Preble",
        "prefix-affinity": "kvcore_cluster.router.affinity:PrefixAffinity",
        "random": "kvcore_cluster.router.random:Random",
        "round-robin": "kvcore_cluster.router.round_robin:RoundRobin",
        "session": "kvcore_cluster.router.session:SessionAffinity",
        "sglang": "kvcore_cluster.router.sglang:SGLang",
    }
