"""All that needs a GPU, in one command: conformance, the engine, checks, and the benchmark.

It prints how near the memory's bandwidth attention, store, copy and swap come. Skipped where
there is no GPU.
"""

from __future__ import annotations

import pytest

from kvcore_plugins.backend import TorchCUDA

pytest.importorskip("torch")

from kvcore.testing.gpu.__main__ import main


def test_gpu() -> None:
    """Every part of the command succeeds."""
    reason = TorchCUDA.unavailable()
    if reason:
        pytest.skip(reason)
    assert main([]) == 0
