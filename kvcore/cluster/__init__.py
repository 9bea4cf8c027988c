"""Clusters: several servers under one clock, and the routers that pick one for a request."""

from kvcore.cluster.router import Replica, Router
from kvcore.lazy import former

__all__ = ["Replica", "Router"]

__getattr__ = former(__name__)
