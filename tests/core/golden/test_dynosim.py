"""The serving loop against recorded reports of DynoSim.

`tox -e bench-dynamo` compares the records with DynoSim itself.
"""

from __future__ import annotations

import pytest
from peers.dynosim import RECORDED, serve

from kvcore_plugins.workload import Mooncake

BUNDLED = [recorded for recorded in RECORDED if recorded.trace == "conversation"]
PREEMPTIONS = {(5859, 512): 44, (187_488, 16): 27}
"""Preemptions of kvcore, by number and size of the blocks."""


@pytest.mark.parametrize("recorded", [each for each in BUNDLED if not each.preempts], ids=str)
def test_figures_without_preemption_equal_those_of_dynosim(recorded):
    """Without preemptions every mean and percentile equals DynoSim's to nine digits.

    The whole trace is served, because DynoSim reports totals only.
    """
    pool = recorded.blocks, recorded.block_size
    figures, preemptions = serve(Mooncake(), *pool, preempts=False)
    assert preemptions == 0
    assert figures == pytest.approx(recorded.report, rel=1e-9)


@pytest.mark.parametrize("recorded", [each for each in BUNDLED if each.preempts], ids=str)
def test_figures_with_preemption_are_close_to_those_of_dynosim(recorded):
    """With DynoSim's preemption emulated, all figures are within 0.1 % of DynoSim's.

    DynoSim does not report its number of preemptions; those of kvcore are recorded here.
    """
    pool = recorded.blocks, recorded.block_size
    figures, preemptions = serve(Mooncake(), *pool, preempts=True)
    assert preemptions == PREEMPTIONS[pool]
    assert figures == pytest.approx(recorded.report, rel=1e-3)
