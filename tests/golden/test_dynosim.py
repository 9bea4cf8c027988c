"""The loop against what DynoSim has reported; `tox -e bench-dynamo` asks DynoSim again."""

from __future__ import annotations

import pytest
from peers.dynosim import RECORDED, serve

from kvcore_plugins.workload import Mooncake

BUNDLED = [recorded for recorded in RECORDED if recorded.trace == "conversation"]


@pytest.mark.parametrize("recorded", [each for each in BUNDLED if not each.preempts], ids=str)
def test_without_preemption(recorded):
    """With options alone every mean and percentile is DynoSim's, to nine digits.

    The whole trace is served: DynoSim reports no more than totals.
    """
    pool = recorded.blocks, recorded.block_size
    figures, preemptions = serve(Mooncake(), *pool, preempts=False)
    assert preemptions == 0
    assert figures == pytest.approx(recorded.report, rel=1e-9)


@pytest.mark.parametrize("recorded", [each for each in BUNDLED if each.preempts], ids=str)
def test_with_preemption(recorded):
    """With its preemption laid over, reuse, means and percentiles are within 0.1 % of it."""
    pool = recorded.blocks, recorded.block_size
    figures, preemptions = serve(Mooncake(), *pool, preempts=True)
    assert preemptions > 20
    assert figures == pytest.approx(recorded.report, rel=1e-3)
