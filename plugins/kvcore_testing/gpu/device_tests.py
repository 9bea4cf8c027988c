"""Tests of a backend on a device, for the command; pytest does not collect them otherwise.

Environment variables name the backend, and the one that it is compared with.
"""

from __future__ import annotations

import os
from time import time
from typing import Any

import pytest

import kvcore
from kvcore import Backend, Plugins
from kvcore_testing.backend import BackendTests

BACKEND, OTHER = "KVCORE_TESTED_BACKEND", "KVCORE_OTHER_BACKEND"
"""Environment variables with the tested backend, and the one that it must agree with."""

UNTIL = "KVCORE_TESTED_UNTIL"
"""Environment variable with the time, in seconds since 1970, after which no test begins."""

LATE = "no time was left"
"""Why tests are skipped after that."""

SMALL = "transformer:layers=2,hidden=64,heads=8,kv_heads=2,head_dim=16,vocab_size=97"

ENGINES: dict[str, dict[str, Any]] = {
    "room": {"blocks": 400},
    "crowded": {"blocks": 24, "max_tokens": 64, "max_seqs": 4},
    "evicting": {"blocks": 40, "eviction": "random", "seed": 0},
    "window": {"blocks": 400, "retention": "window:tokens=24,sinks=2"},
    "weighed": {"blocks": 400, "retention": "h2o:budget=24"},
    "int8": {"blocks": 400, "codec": "int8"},
    "fp8": {"blocks": 400, "codec": "fp8-e4m3"},
    "kivi": {"blocks": 400, "codec": "kivi:bits=4"},
    "drafts": {"blocks": 400, "drafter": "prompt-lookup"},
    "tier": {"blocks": 24, "tier": "host:memory=1GiB"},
}
"""Options of runs of the engine, by name."""


@pytest.fixture(autouse=True)
def in_time() -> None:
    """Skip a test that would begin too late, so that the results of the others are told."""
    if time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(LATE)


class TestConformance(BackendTests):
    """The kit that every backend passes, on this one."""

    def make(self) -> Backend:
        """Return the tested backend."""
        return built(BACKEND)


def built(variable: str) -> Backend:
    """Return the backend that an environment variable names."""
    backend: Backend = Plugins().build("backend", os.environ[variable])
    return backend


def outputs(variable: str, **options: Any) -> dict[Any, Any]:
    """Return the tokens that a run generates."""
    done = kvcore.run(
        "mooncake",
        limit=12,
        generator=SMALL,
        backend=os.environ[variable],
        dtype="fp32",
        block_size=16,
        **options,
    )
    outputs_of_run: dict[Any, Any] = done.outputs
    return outputs_of_run


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_twin(options: dict[str, Any]) -> None:
    """The engine generates the same tokens on the device as on the other backend."""
    got, expected = (outputs(variable, **options) for variable in (BACKEND, OTHER))
    assert got == expected
