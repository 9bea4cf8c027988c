"""Clusters: several servers under one clock, and the routers that pick one for a request."""

from kvcore.cluster.router import Replica, Router

__all__ = ["Replica", "Router"]
