"""The value of knowing the next requests of the bundled trace: from LRU to the optimum."""

from __future__ import annotations

import pytest

from kvcore_lab.comparison import compare_policies
from kvcore_plugins.eviction import Lookahead
from kvcore_plugins.workload import Mooncake

SIZES = (1_000, 5_859)
WINDOWS = (0, 64, 1_000, "all")


@pytest.mark.slow
def test_hits_of_lookahead_go_from_lru_to_the_optimum():
    """Without known requests `lookahead` hits like LRU, with all of them like the optimum.

    With 64 and 1,000 known requests its hits are in between.
    """
    found = compare_policies(
        Mooncake(), [lambda n=n: Lookahead(requests=n) for n in WINDOWS], SIZES
    )
    hits = {
        window: [row.hit_blocks for row in found.rows if row.options["requests"] == window]
        for window in WINDOWS
    }
    assert hits == {
        0: [12_847, 39_258],
        64: [16_979, 46_988],
        1_000: [51_705, 86_684],
        "all": [51_705, 101_431],
    }
