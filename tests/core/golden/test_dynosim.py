"""The serving loop against recorded reports of DynoSim.

`tox -e bench-dynamo` compares the records with DynoSim itself.
"""

from __future__ import annotations

import pytest
from peers.dynosim import RECORDED, WORKLOADS, serve

BUNDLED = [recorded for recorded in RECORDED if recorded.trace in WORKLOADS]


@pytest.mark.parametrize("recorded", BUNDLED, ids=str)
def test_figures_are_those_of_dynosim(recorded):
    """Reuse, and means and percentiles of TTFT, TPOT and latency are within 0.05 %.

    The whole workload is served, because DynoSim reports totals only.
    """
    pool = recorded.blocks, recorded.block_size
    figures, _ = serve(WORKLOADS[recorded.trace], *pool)
    assert figures == pytest.approx(recorded.report, rel=5e-4)
