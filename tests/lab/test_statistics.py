"""Intervals of means over seeds, and of figures of recorded traffic."""

import json

import pytest
from helpers.commands import run_here

from kvcore_lab.statistics import bootstrap, stretches, t_quantile


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (4, 2.776), (20, 2.086), (30, 2.042), (120, 1.980)]
)
def test_quantiles_are_those_of_students_t(degrees, quantile):
    """Quantiles of 97.5 % are those of published tables."""
    assert t_quantile(degrees) == pytest.approx(quantile, abs=5e-4)


def test_stretches_add_up_to_the_figure():
    """The shares of stretches add up to the sum over the total, if there is one."""
    parts = stretches(range(100), 50)
    assert len(parts) == 20
    assert sum(parts) == pytest.approx(4950 / 50)
    assert sum(stretches([1, 2, 3], 6)) == pytest.approx(1)
    assert stretches([1], 0) is None


def test_a_bootstrap_is_wide_where_stretches_differ():
    """Equal stretches have an interval without width; it covers the sum of others."""
    low, high = bootstrap([0.5] * 20)
    assert low == high == 10
    low, high = bootstrap([0.0] * 10 + [1.0] * 10)
    assert low < 10 < high
    assert bootstrap([0.0] * 10 + [1.0] * 10) == (low, high)


@pytest.mark.parametrize("mode", ["compare", "simulate"])
def test_figures_by_stretches_add_up_to_those_of_a_sweep(tmp_path, mode):
    """The figures in a journal add up to the columns of the rows, in both modes."""
    grid = tmp_path / "grid.toml"
    timed = 'tier = "host:memory=1GiB"\nslo = "ttft=0.05"\n' if mode == "simulate" else ""
    grid.write_text(
        f'mode = "{mode}"\nworkload = "zipf:requests=90,rate=20"\nblocks = 400\n{timed}'
    )
    done = run_here("sweep", grid, "--out", tmp_path / "out", "--jobs", 1, "--json")
    (row,) = json.loads(done.stdout)["rows"]
    lines = (tmp_path / "out" / "journal.jsonl").read_text().splitlines()
    line = next(found for found in map(json.loads, lines) if "result" in found)
    parts = line["result"]["stretches"]
    assert "stretches" not in row
    for column, shares in parts.items():
        assert sum(shares) == pytest.approx(row[column]), column


def test_a_sweep_prints_intervals(tmp_path):
    """`sweep --intervals` prints each policy with its interval."""
    grid = tmp_path / "grid.toml"
    grid.write_text(
        'mode = "compare"\nworkload = "zipf:requests=90"\nblocks = 200\n'
        'eviction = ["lru", "lfu"]\n'
    )
    done = run_here("sweep", grid, "--out", tmp_path / "out", "--jobs", 1, "--intervals")
    header = done.stdout.splitlines()[2].split("  ")
    assert [cell.strip() for cell in header if cell] == [
        *("eviction", "hits, of blocks", "95 %", "to the first", "95 %")
    ]
