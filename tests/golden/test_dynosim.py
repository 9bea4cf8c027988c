"""The serving loop against recorded reports of DynoSim.

`tox -e bench-dynamo` compares the records with DynoSim itself.
"""

from __future__ import annotations

import pytest
from peers.dynosim import RECORDED, serve

from kvcore_plugins.workload import Mooncake

BUNDLED = [recorded for recorded in RECORDED if recorded.trace == "conversation"]


@pytest.mark.parametrize("recorded", [each for each in BUNDLED if not each.preempts], ids=str)
def test_without_preemption(recorded):
    """Without preemptions every mean and percentile equals DynoSim's to nine digits.

    The whole trace is served, because DynoSim reports totals only.
    """
    pool = recorded.blocks, recorded.block_size
    figures, preemptions = serve(Mooncake(), *pool, preempts=False)
    assert preemptions == 0
    assert figures == pytest.approx(recorded.report, rel=1e-9)


@pytest.mark.parametrize("recorded", [each for each in BUNDLED if each.preempts], ids=str)
def test_with_preemption(recorded):
    """With DynoSim's preemption emulated, all figures are within 0.1 % of DynoSim's."""
    pool = recorded.blocks, recorded.block_size
    figures, preemptions = serve(Mooncake(), *pool, preempts=True)
    assert preemptions > 20
    assert figures == pytest.approx(recorded.report, rel=1e-3)
