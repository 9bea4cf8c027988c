"""The report on the residency of blocks: figures, and advice on thrashing."""

from __future__ import annotations

from kvcore_cli.report.simulation import thrashing
from kvcore_lab.comparison import compare_policies
from kvcore_lab.report.comparison import residency_sections
from kvcore_plugins.eviction import LRU, MRU
from kvcore_plugins.workload import Zipf

RESTED = {
    "thrashing": True,
    "evicted_blocks": {"capacity": 900, "expired": 100},
    "never_hit_blocks": 750,
    "restored_blocks": 1200,
    "age_at_hit_s": {"blocks": 30},
}


def test_the_warning_of_thrashing_has_its_figures():
    """The warning of thrashing has its figures and the pool size that would avoid it."""
    text = thrashing({"gpu": RESTED}, 64)
    for part in ("THRASHING (gpu)", "75% of the 1,000", "1,200", "30 hit", "--blocks 128"):
        assert part in text


def test_the_warning_of_thrashing_without_a_hit():
    """The warning of thrashing counts 0 hit blocks if there is no age at a hit."""
    assert "only 0 hit" in thrashing({"gpu": RESTED | {"age_at_hit_s": None}}, 64)


def test_the_table_has_a_row_for_each_policy_and_pool():
    """The table has a row per policy and pool, and the reading names the clock of the ages."""
    table, reading = residency_sections(
        compare_policies(Zipf(requests=80), [LRU, MRU], [40, 90], residency=True)
    )
    assert [row[:2] for row in table.rows] == [
        [name, size] for name in ("lru", "mru") for size in ("40", "90")
    ]
    assert {len(row) for row in table.rows} == {len(table.headers)}
    assert "in the workload's own time" in reading


def test_compare_measures_residency_on_request_only():
    """`compare` measures residency only if asked to, and never for the optimum."""
    rows = compare_policies(Zipf(requests=20), ["lru", "optimum"], 40, residency=True).rows
    assert [row.residency is None for row in rows] == [False, True]
    assert compare_policies(Zipf(requests=20), LRU, 40).rows[0].residency is None
