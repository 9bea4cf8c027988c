"""Workloads: the contract, the files they read, and workloads made of others."""

from kvcore.workloads.base import Workload, check_keys, checked, json_fields, recognise
from kvcore.workloads.files import file_digest, lines
from kvcore.workloads.sample import PromptWorkload, WorkloadSample, part_of

__all__ = [
    "PromptWorkload",
    "Workload",
    "WorkloadSample",
    "check_keys",
    "checked",
    "file_digest",
    "json_fields",
    "lines",
    "part_of",
    "recognise",
]
