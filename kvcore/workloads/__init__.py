"""Workloads: the contract, the files they read, and samples of them."""

from kvcore.workloads.base import Workload
from kvcore.workloads.sample import Texts

__all__ = [
    "Texts",
    "Workload",
]
