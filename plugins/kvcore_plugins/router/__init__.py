"""Built-in routers."""

from kvcore_plugins.router.least_requests import LeastRequests
from kvcore_plugins.router.round_robin import RoundRobin

__all__ = ["LeastRequests", "RoundRobin"]
