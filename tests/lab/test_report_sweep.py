"""The report of a sweep as text, and its rows in files."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import attrs
import pytest

from kvcore import InputError, PluginError
from kvcore_lab.report.sweep import SweepReport, check_table, write_table
from kvcore_lab.sweep import Grid, Sweep

COLUMNS = {
    "saturated": None,
    "goodput": None,
    "ttft_s_mean": None,
    "hit_ratio_token": None,
    "error": None,
}


def untimed(grid, *hits, best=None):
    """Return a sweep without a clock whose cells have the hit ratios `hits`."""
    rows = [
        {
            "workload": str(cell.workload),
            "blocks": cell.blocks,
            "pool_bytes": cell.memory,
            "eviction": str(cell.eviction),
            "chunked": True,
            **({"seed": cell.seed} if "seed" in grid.axes else {}),
            "hit_ratio_block": share,
            "share_of_optimum": share / best if best and share is not None else None,
            "error": None if share is not None else "it broke",
        }
        for cell, share in zip(grid, hits, strict=True)
    ]
    return Sweep(grid, rows, found=0, ran=len(rows))


def timed(grid, *results):
    """Return a simulated sweep whose cells have the columns `results`."""
    rows = [
        {"scheduler": str(cell.scheduler), "eviction": str(cell.eviction), **COLUMNS, **result}
        for cell, result in zip(grid, results, strict=True)
    ]
    return Sweep(grid, rows, found=1, ran=len(rows) - 1)


def test_each_workload_has_a_row_with_the_best_policy():
    """A row is the best policy for one workload, in the order of the grid.

    The optimum does not compete.
    """
    grid = Grid(
        "compare", workload=["zipf", "weka"], blocks=1000, eviction=["lru", "lfu", "optimum"]
    )
    report = SweepReport(untimed(grid, 0.25, 0.5, 0.8, 0.3, 0.1, 0.8, best=0.8))
    assert report.table.headers == ["workload", "most hits", "of blocks", "of the optimum"]
    rows = [["zipf", "lfu", "50.0%", "62.5%"], ["weka", "lru", "30.0%", "37.5%"]]
    assert report.table.rows == rows
    assert report.headline == (
        "6 cells (2 x workload, 3 x eviction), replayed without a clock."
    )
    assert report.reading == (
        "Each row: the best by eviction, all else being equal; those within 1% of it are named "
        "with it."
    )


def test_a_tie_names_one_policy_and_counts_the_others():
    """A tie names one policy and the number of others, or states that all are equal."""
    grid = Grid("compare", blocks=[1000, 2000], eviction=["lru", "lfu", "fifo"])
    rows = SweepReport(untimed(grid, 0.5, 0.5, 0.1, 0.2, 0.2, 0.2)).table.rows
    assert rows == [["1,000", "lru and 1 more", "50.0%"], ["2,000", "all alike", "20.0%"]]


def test_cells_within_one_per_cent_of_the_best_are_named_after_it():
    """A cell within 1 % of the best is named with it, and the value is that of the best."""
    grid = Grid("compare", workload="zipf", blocks=1000, eviction=["lru", "lfu", "arc"])
    assert SweepReport(untimed(grid, 0.496, 0.5, 0.49)).table.rows == [
        ["lfu and 1 more", "50.0%"]
    ]


def test_a_simulation_has_a_best_by_each_measure():
    """A simulation has a best by each measure: the least of times, and the most of others."""
    grid = Grid("simulate", scheduler=["fcfs", "srpt"], eviction="lru", seed=1)
    report = SweepReport(
        timed(
            grid,
            {"goodput": 3.0, "ttft_s_mean": 0.5, "hit_ratio_token": 0.1},
            {"goodput": 2.0, "ttft_s_mean": 0.25, "hit_ratio_token": 0.2},
        )
    )
    assert report.table.rows == [["fcfs", "3", "srpt", "250 ms", "srpt", "20.0%"]]
    assert report.headline == "2 cells (2 x scheduler), simulated. 1 was there already."


def test_no_cell_without_goodput_is_the_best():
    """Where the most goodput is printed as 0, no policy has it."""
    grid = Grid("simulate", scheduler=["fcfs", "srpt"], eviction="lru", seed=1)
    report = SweepReport(timed(grid, {"goodput": 0.0}, {"goodput": 0.0001}))
    assert report.table.rows == [["–", "0"]]


def test_the_reading_counts_saturated_cells():
    """The reading counts saturated cells, whose times depend on the length of the workload."""
    grid = Grid("simulate", max_seqs=[1, 2])
    report = SweepReport(timed(grid, {"saturated": False}, {"saturated": True}))
    assert report.reading == (
        "Saturated: 1 cell, whose queue grows for as long as requests arrive; their times "
        "tell how long the workload is."
    )


def test_the_setup_of_several_engines_has_common_options_only():
    """If cells follow several engines, the setup has only the options that all cells share."""
    grid = Grid("simulate", like=["vllm", "sglang"], max_tokens=64)
    same = {"max_tokens": 64, "chunked": True}
    sweep = timed(grid, {**same, "steps": "mixed"}, {**same, "steps": "prefill-first"})
    setup = SweepReport(sweep).setup
    assert "max_tokens 64; chunked true" in setup
    assert "steps" not in setup


def seeded(*hits):
    """Return a sweep of two policies, each with the hit ratios of three seeds."""
    grid = Grid("compare", blocks=[10], seed=[0, 1, 2], eviction=["lru", "lfu"])
    return SweepReport(untimed(grid, *hits))


def test_seeds_are_folded_to_means_with_intervals():
    """Each policy has its mean over seeds, and its paired difference to the first policy."""
    report = seeded(0.1, 0.2, 0.2, 0.3, 0.3, 0.1)
    (table,) = report.tables
    assert table.headers == [
        *("eviction", "hits, of blocks", "± 95 %", "seeds", "to the first", "± 95 % ", "better")
    ]
    assert table.rows == [
        ["lru", "20.0%", "24.8 points", "3", "–", "–", "–"],
        ["lfu", "20.0%", "24.8 points", "3", "+0.0 points", "43.0 points", "2 of 3"],
    ]
    assert report.reading.startswith("Means over seeds")
    assert "seed" not in report.setup
    (table,) = seeded(*[0.2, 0.1999] * 3).tables
    assert table.rows[1][4] == "+0.0 points"  # there is no zero below 0


def test_a_chart_has_a_band_of_the_seeds():
    """A line of a chart is the mean over seeds, with the interval as its band."""
    grid = Grid("compare", blocks=[10, 20], seed=[0, 1], eviction=["lru"])
    (panel,) = SweepReport(untimed(grid, 0.1, 0.3, 0.4, 0.4)).chart("blocks").panels
    assert panel.lines == {"most hits": [(10, 0.2), (20, 0.4)]}
    (low, high), narrow = panel.bands["most hits"]
    assert low < 0.1
    assert high > 0.3
    assert narrow == (0.4, 0.4)


def test_a_chart_has_the_bands_of_a_bootstrap():
    """With intervals a line of a chart has those of its table, and its axis the block size."""
    grid = Grid("compare", blocks=[10, 20], eviction=["lru"])
    parts = [
        {"hit_ratio_block": ([low, high] * 10, [1] * 20)} for low, high in ((0, 1), (1, 1))
    ]
    rows = [row | {"block_size": 64} for row in untimed(grid, 0.5, 1.0).rows]
    report = SweepReport(Sweep(grid, rows, 0, 2, parts), intervals=True)
    chart = report.chart("blocks")
    (panel,) = chart.panels
    (low, high), narrow = panel.bands["most hits"]
    assert 0 < low < 0.5 < high < 1
    assert narrow == (1, 1)
    assert report.tables[0].rows[0][-3] == f"{low:.1%} to {high:.1%}"
    assert chart.across == "pool, blocks of 64 tokens"
    assert attrs.evolve(report, intervals=False).chart("blocks").panels[0].bands == {}


def test_a_chart_has_a_panel_for_each_workload():
    """Workloads have panels of their own; blocks of several sizes are counted in tokens."""
    grid = Grid("compare", workload=["zipf", "weka"], blocks=[10, 20], eviction=["lru", "lfu"])
    sweep = untimed(grid, *(n / 10 for n in range(8)))
    for row in sweep.rows:
        row["block_size"] = 16 if row["workload"] == "zipf" else 64
    report = SweepReport(sweep)
    chart = report.chart("blocks")
    assert [panel.label for panel in chart.panels] == [
        *("zipf: hits, of blocks", "weka: hits, of blocks")
    ]
    assert [list(panel.lines) for panel in chart.panels] == [["lru", "lfu"]] * 2
    assert [at for at, _ in chart.panels[1].lines["lru"]] == [640, 1280]
    assert chart.across == "pool, tokens"
    assert report.table.headers[:3] == ["workload", "blocks", "block_size"]
    assert "block_size" not in report.setup


def test_intervals_are_by_a_bootstrap_over_stretches():
    """With intervals each policy has one, and one of its difference to the first policy."""
    grid = Grid("compare", blocks=[10], eviction=["lru", "lfu"])
    rows = untimed(grid, 0.2, 0.4).rows
    parts = [{"hit_ratio_block": ([share] * 20, [1] * 20)} for share in (0.2, 0.4)]
    report = SweepReport(Sweep(grid, rows, 0, 2, parts), intervals=True)
    (table,) = report.tables
    assert table.rows == [
        ["lru", "20.0%", "20.0% to 20.0%", "–", "–"],
        ["lfu", "40.0%", "40.0% to 40.0%", "+20.0 points", "+20.0 to +20.0 points"],
    ]
    assert "bootstrap over 20 stretches" in report.reading


def test_figures_of_statistics_keep_their_zeros():
    """Figures below one another have equal digits, and a unit of an interval stands once."""
    grid = Grid("simulate", eviction=["lru", "lfu"])
    values = {"goodput": 4.2, "ttft_s_mean": 1.5}
    parts = [{name: ([v] * 20, [1] * 20) for name, v in values.items()} for _ in range(2)]
    rows = timed(grid, values, values).rows
    goodput, ttft = SweepReport(Sweep(grid, rows, 0, 2, parts), intervals=True).tables
    assert goodput.rows[1] == ["lfu", "4.20", "4.20 to 4.20", "+0.00", "+0.00 to +0.00"]
    assert ttft.rows[0] == ["lru", "1.50 s", "1.50 to 1.50 s", "–", "–"]


def test_measures_that_no_cell_has_are_left_out():
    """A measure that no cell has, such as goodput without an SLO, is left out."""
    grid = Grid("simulate", eviction=["lru", "lfu"])
    report = SweepReport(timed(grid, {"ttft_s_mean": 1.0}, {"ttft_s_mean": 2.0}))
    assert report.table.headers == ["least TTFT", "mean"]
    assert report.table.rows == [["lru", "1 s"]]


def test_failed_cells_do_not_compete():
    """Failed cells do not compete; if all cells of a row have failed, it has no best."""
    grid = Grid("compare", memory=[2**30, 2**31], eviction=["lru", "lfu"])
    report = SweepReport(untimed(grid, None, 0.5, None, None))
    assert report.table.rows == [["1 GiB", "lfu", "50.0%"], ["2 GiB", "–", "–"]]
    assert report.headline.endswith("3 cells failed.")


def test_a_sweep_over_sizes_alone_has_no_winners():
    """A sweep over sizes alone has no winners, and no text to explain them."""
    grid = Grid("compare", blocks=[10, 20])
    report = SweepReport(untimed(grid, 0.1, 0.2))
    assert report.reading == ""
    assert report.table.headers == ["blocks", "hits, of blocks"]
    assert report.table.rows == [["10", "10.0%"], ["20", "20.0%"]]


@pytest.fixture
def sweep():
    """Return a sweep with a failed cell."""
    return untimed(Grid("compare", blocks=[10, 20]), 1 / 3, None)


def test_csv_has_a_column_for_each_field(sweep, tmp_path):
    """The CSV has every field, ratios in full precision, and empty cells for missing values."""
    write_table(sweep, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert list(first) == list(sweep.rows[0])
    assert (float(first["hit_ratio_block"]), first["chunked"]) == (1 / 3, "true")
    assert (second["hit_ratio_block"], second["error"]) == ("", "it broke")


def test_parquet_has_the_rows(sweep, tmp_path):
    """The Parquet file has the rows of the sweep, with nulls for missing values."""
    polars = pytest.importorskip("polars", reason="Parquet needs polars")
    write_table(sweep, tmp_path / "t.parquet")
    assert polars.read_parquet(tmp_path / "t.parquet").to_dicts() == sweep.rows


def test_parquet_needs_polars(tmp_path, monkeypatch):
    """Without polars, the error for a Parquet file gives the install command before any run."""
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(PluginError, match=r"pip install 'kvcore\[lab\]'"):
        check_table(tmp_path / "t.parquet")


def test_other_files_are_refused():
    """The error for another file type lists the supported ones."""
    with pytest.raises(InputError, match=r"t\.txt: .*one of \.csv, \.json, \.parquet"):
        check_table(Path("t.txt"))


def test_an_unfinished_table_of_a_killed_sweep_is_replaced(sweep, tmp_path):
    """An unfinished table of a killed sweep is replaced."""
    (tmp_path / "t.csv.part").write_text("half")
    write_table(sweep, tmp_path / "t.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_an_option_that_is_left_out_is_none_in_the_table():
    """As it is written in the file of the sweep."""
    grid = Grid("simulate", retention=["none", "h2o:budget=512"], seed=1)
    results = ({"goodput": 2.0, "retention": None}, {"goodput": 1.0, "retention": "h2o"})
    assert SweepReport(timed(grid, *results)).table.rows[0][0] == "none"


@pytest.mark.parametrize("earlier", [False, True])
def test_over_tiers_the_share_of_the_optimum_is_of_what_is_reused(earlier):
    """A table of reuse over tiers shows its share; in earlier documents it had the one name."""
    grid = Grid("compare", blocks=90, tier=["none", "host:memory=1GiB"], eviction="lru")
    sweep = untimed(grid, 0.2, 0.2, best=0.8)
    for row, cell in zip(sweep.rows, grid, strict=True):
        row |= {"tier": str(cell.tier), "reuse_ratio_block": 0.5}
        row["share_of_optimum" if earlier else "reuse_share_of_optimum"] = 0.625
    assert [row[-1] for row in SweepReport(sweep).table.rows] == ["62.5%"] * 2
