"""Registers the mode of several servers, and the routers."""

from __future__ import annotations

from kvcore import hookimpl
from kvcore.hookspecs import Mode


@hookimpl
def kvcore_modes() -> dict[str, Mode]:
    """Return the mode of several servers."""
    return {
        "cluster": Mode(
            parts="kvcore.config.cluster:ClusterParts",
            report="kvcore.report.cluster:report_of",
            options="kvcore.config.cluster_options:ClusterOptions",
            chosen_by=("replicas", "fail", "autoscale", "disaggregate"),
            refusal="this is for one server: leave it out, or call kvcore.simulate_cluster",
            missing="one server gets all requests: give --replicas too",
        )
    }


@hookimpl
def kvcore_routers() -> dict[str, str]:
    """Return the routers."""
    return {
        "dynamo": "kvcore_plugins.router.dynamo:Dynamo",
        "least-requests": "kvcore_plugins.router.least_requests:LeastRequests",
        "llm-d": "kvcore_plugins.router.llm_d:LLMD",
        "lmetric": "kvcore_plugins.router.lmetric:LMetric",
        "loadaware": "kvcore_plugins.router.loadaware:LoadAware",
        "mooncake": "kvcore_plugins.router.mooncake:Mooncake",
        "power-of-two": "kvcore_plugins.router.random:PowerOfTwo",
        "preble": "kvcore_plugins.router.preble:Preble",
        "prefix-affinity": "kvcore_plugins.router.affinity:PrefixAffinity",
        "random": "kvcore_plugins.router.random:Random",
        "round-robin": "kvcore_plugins.router.round_robin:RoundRobin",
        "session": "kvcore_plugins.router.session:SessionAffinity",
        "sglang": "kvcore_plugins.router.sglang:SGLang",
    }
