"""All checks that need a GPU, in one command: conformance, the engine and the benchmark.

It prints the share of the memory's bandwidth that attention, store, copy and swap reach. The
test is skipped where there is no GPU.
"""

from __future__ import annotations

import pytest

from kvcore_engine.backend import TorchCUDA

pytest.importorskip("torch")

from kvcore.testing.gpu.__main__ import main


def test_every_part_of_the_gpu_command_succeeds() -> None:
    """Every part of the GPU command succeeds."""
    reason = TorchCUDA.unavailable()
    if reason:
        pytest.skip(reason)
    assert main([]) == 0
