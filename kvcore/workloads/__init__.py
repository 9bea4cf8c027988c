"""Workloads: the contract, the files they read, and workloads made of others."""

from kvcore.workloads.base import Workload, check_keys, checked, json_fields
from kvcore.workloads.files import file_digest, lines
from kvcore.workloads.selection import (
    PromptWorkload,
    WorkloadSample,
    find_workload,
    part_of,
    recognise,
)

__all__ = [
    "PromptWorkload",
    "Workload",
    "WorkloadSample",
    "check_keys",
    "checked",
    "file_digest",
    "find_workload",
    "json_fields",
    "lines",
    "part_of",
    "recognise",
]
