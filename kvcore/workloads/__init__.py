"""Workloads: the contract, the files they read, and workloads made of others."""

from kvcore.workloads.base import Workload, checked, recognise
from kvcore.workloads.files import file_digest, lines
from kvcore.workloads.sample import PromptWorkload, WorkloadSample, part_of

__all__ = [
    "PromptWorkload",
    "Workload",
    "WorkloadSample",
    "checked",
    "file_digest",
    "lines",
    "part_of",
    "recognise",
]
