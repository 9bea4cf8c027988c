"""Conformance kits for plugin authors, and the drivers and strategies they are made of.

A library without hooks, imported as `kvcore.testing`. Needs the extra `testing`: pytest and
hypothesis. To read, in this order::

    plugin.py      what all kits check
    harness.py     random calls of a cache as data: repeated, shrunk, and driven
    eviction.py, prefix.py, retention.py, scheduler.py, rules.py, latency.py, drafter.py,
    checkpoint.py, codec.py, workload.py, tier.py, router.py, generator.py, backend.py   the
                   kit of that kind
    hosted.py      a small engine that owns its blocks, for the kit of eviction policies
    dense.py       attention over plain tensors, which paged K/V is compared with
    gpu/           all that needs a GPU in one command: `python -m kvcore.testing.gpu`
    assertions.py  pytest's rewriting of the asserts in kits
"""

import kvcore_testing.assertions  # noqa: F401 - before the kits, whose asserts it has rewritten
from kvcore_testing.backend import BackendTests
from kvcore_testing.checkpoint import CheckpointTests
from kvcore_testing.codec import CodecTests
from kvcore_testing.drafter import DrafterTests
from kvcore_testing.eviction import EvictionPolicyTests
from kvcore_testing.generator import GeneratorTests
from kvcore_testing.harness import (
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
from kvcore_testing.latency import LatencyModelTests
from kvcore_testing.prefix import PrefixIndexTests
from kvcore_testing.retention import RetentionPolicyTests, held_tokens
from kvcore_testing.router import RouterTests, Routing
from kvcore_testing.rules import RulesTests
from kvcore_testing.scheduler import STEP, SchedulerTests, ToyServer, watched
from kvcore_testing.tier import TierTests
from kvcore_testing.workload import WorkloadTests

__all__ = [
    "COMPACTIONS",
    "EVEN",
    "FORKS",
    "STEP",
    "BackendTests",
    "CheckpointTests",
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
    "RulesTests",
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
