"""Conformance kits for plugin authors, and the drivers and strategies they are made of.

Needs the extra `testing`: pytest and hypothesis.
"""

import kvcore.testing.assertions  # noqa: F401 - before the kits, whose asserts it has rewritten
from kvcore.testing.backend import BackendTests
from kvcore.testing.codec import CodecTests
from kvcore.testing.drafter import DrafterTests
from kvcore.testing.eviction import EvictionPolicyTests
from kvcore.testing.generator import GeneratorTests
from kvcore.testing.harness import (
    COMPACTIONS,
    EVEN,
    FORKS,
    Decision,
    Driver,
    RecordingPolicy,
    Step,
    Traffic,
    cache_machine,
    random_requests,
    random_steps,
    replay,
    request_lists,
    requests,
    snapshot,
    step_lists,
    steps,
)
from kvcore.testing.latency import LatencyModelTests
from kvcore.testing.prefix import PrefixIndexTests
from kvcore.testing.retention import RetentionPolicyTests, held_tokens
from kvcore.testing.router import RouterTests, Routing
from kvcore.testing.scheduler import STEP, SchedulerTests, ToyServer, watched
from kvcore.testing.tier import TierTests
from kvcore.testing.workload import WorkloadTests

__all__ = [
    "COMPACTIONS",
    "EVEN",
    "FORKS",
    "STEP",
    "BackendTests",
    "CodecTests",
    "Decision",
    "DrafterTests",
    "Driver",
    "EvictionPolicyTests",
    "GeneratorTests",
    "LatencyModelTests",
    "PrefixIndexTests",
    "RecordingPolicy",
    "RetentionPolicyTests",
    "RouterTests",
    "Routing",
    "SchedulerTests",
    "Step",
    "TierTests",
    "ToyServer",
    "Traffic",
    "WorkloadTests",
    "cache_machine",
    "held_tokens",
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
