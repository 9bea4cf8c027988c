"""Clusters: several servers under one clock, and the routers that pick one for a request."""

from kvcore.moved import former
from kvcore.serving.router import Replica, Router

__all__ = ["Replica", "Router"]

__getattr__ = former(__name__)
