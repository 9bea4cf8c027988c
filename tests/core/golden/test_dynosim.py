"""The serving loop against recorded reports of DynoSim.

`tox -e bench-dynamo` compares the records with DynoSim itself.
"""

from __future__ import annotations

import pytest
from peers.dynosim import RECORDED, WORKLOADS, serve

BUNDLED = [r for r in RECORDED if r.trace in WORKLOADS and r.blocks not in (5859, 187_488)]
"""Records of bundled workloads: of the pools for the conversation, one with each block size."""


@pytest.mark.parametrize("recorded", BUNDLED, ids=str)
def test_figures_are_those_of_dynosim(recorded):
    """Reuse, and means and percentiles of TTFT, TPOT and latency are within 0.05 %.

    The whole workload is served, because DynoSim reports totals only.
    """
    pool = recorded.blocks, recorded.block_size
    figures, _ = serve(WORKLOADS[recorded.trace], *pool)
    assert figures == pytest.approx(recorded.report, rel=5e-4)
