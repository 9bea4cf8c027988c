"""Clusters: several servers under one clock, and the routers that pick one for a request."""

from kvcore.cluster.cluster import Cluster, Failure
from kvcore.cluster.result import ClusterResult
from kvcore.cluster.router import Dispatcher, PrefixView, Replica, Router
from kvcore.cluster.simulate import simulate_cluster
from kvcore.cluster.views import parse_view

__all__ = [
    "Cluster",
    "ClusterResult",
    "Dispatcher",
    "Failure",
    "PrefixView",
    "Replica",
    "Router",
    "parse_view",
    "simulate_cluster",
]
