"""Conformance kits for plugin authors, and the drivers and strategies they are made of.

Needs the extra `testing`: pytest and hypothesis.
"""

import kvcore.testing.assertions  # noqa: F401 - before the kits, whose asserts it has rewritten
from kvcore.testing.backend import BackendTests
from kvcore.testing.driver import Decision, Driver, Witness, replay, snapshot
from kvcore.testing.eviction import EvictionPolicyTests
from kvcore.testing.generator import GeneratorTests
from kvcore.testing.latency import LatencyModelTests
from kvcore.testing.machine import cache_machine
from kvcore.testing.prefix import PrefixCacheTests
from kvcore.testing.retention import RetentionPolicyTests
from kvcore.testing.scheduler import SchedulerTests
from kvcore.testing.server import STEP, ToyServer, watched
from kvcore.testing.strategies import request_lists, requests, step_lists, steps
from kvcore.testing.traffic import (
    EVEN,
    FORKS,
    Step,
    Traffic,
    random_requests,
    random_steps,
)
from kvcore.testing.workloads import WorkloadTests

__all__ = [
    "EVEN",
    "FORKS",
    "STEP",
    "BackendTests",
    "Decision",
    "Driver",
    "EvictionPolicyTests",
    "GeneratorTests",
    "LatencyModelTests",
    "PrefixCacheTests",
    "RetentionPolicyTests",
    "SchedulerTests",
    "Step",
    "ToyServer",
    "Traffic",
    "Witness",
    "WorkloadTests",
    "cache_machine",
    "random_requests",
    "random_steps",
    "replay",
    "request_lists",
    "requests",
    "snapshot",
    "step_lists",
    "steps",
    "watched",
]
