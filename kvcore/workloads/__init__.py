"""Workloads: the contract, the files they read, and workloads made of others."""

from kvcore.workloads.base import (
    Workload,
    check_keys,
    checked,
    exponential,
    json_fields,
    notes_of,
    poisson_arrivals,
)
from kvcore.workloads.files import file_digest, lines
from kvcore.workloads.selection import (
    PromptWorkload,
    RequestList,
    WorkloadSample,
    find_workload,
    given_workload,
    part_of,
    recognise,
)

__all__ = [
    "PromptWorkload",
    "RequestList",
    "Workload",
    "WorkloadSample",
    "check_keys",
    "checked",
    "exponential",
    "file_digest",
    "find_workload",
    "given_workload",
    "json_fields",
    "lines",
    "notes_of",
    "part_of",
    "poisson_arrivals",
    "recognise",
]
