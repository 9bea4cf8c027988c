"""The grid of a sweep: the order of its cells, duplicates, impossible axes and cells."""

from __future__ import annotations

import pytest

from kvcore import SLO, InputError
from kvcore_lab.sweep import Grid, Plan
from kvcore_lab.sweep.grid import axes_of


def test_the_last_axis_changes_fastest():
    """Cells come in the order of the fields, whatever the order of the arguments."""
    grid = Grid("compare", eviction=["lru", "lfu"], blocks=[10, 20], workload=["zipf", "weka"])
    cells = [(str(cell.workload), cell.blocks, str(cell.eviction)) for cell in grid]
    assert cells == [
        (workload, blocks, eviction)
        for workload in ("zipf", "weka")
        for blocks in (10, 20)
        for eviction in ("lru", "lfu")
    ]


def test_equal_values_of_an_axis_count_once():
    """Equal values of an axis count once, even if they are written in different units."""
    grid = Grid("compare", memory=["1GiB", 2**30, "1024MiB"], eviction=["lru", "lru"])
    assert grid.axes == {"memory": (2**30,), "eviction": grid.axes["eviction"]}
    assert len(list(grid)) == 1


def test_only_simulate_has_axes_that_concern_time():
    """Only `simulate` has axes that concern time, and only `compare` has `accounting`."""
    timed, untimed = set(axes_of("simulate")), set(axes_of("compare"))
    assert timed - untimed >= {"scheduler", "latency", "slo", "rate_scale", "max_seqs"}
    assert untimed - timed == {"accounting"}


@pytest.mark.parametrize(
    ("mode", "axes", "reason"),
    [
        ("replay", {}, "mode: 'replay' is not known; there are: simulate, compare"),
        ("simulate", {"seed": True}, "seed: expected a whole number, not true"),
        ("simulate", {"chunked": 1}, "chunked: expected true or false, not 1"),
        ("simulate", {"blocks": 3, "memory": "1GiB"}, "both say how large the pool is"),
    ],
)
def test_impossible_axes_are_refused(mode, axes, reason):
    """Unknown modes, axes and values raise InputError that names the axis and the reason."""
    with pytest.raises(InputError) as refused:
        Grid(mode, **axes)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("mode", "axes", "reason"),
    [
        ("compare", {"blocks": 9, "block_size": [16, 17]}, "block_size: workload zipf: "),
        ("compare", {"memory": "1KiB"}, "memory: 1 KiB is less than a block"),
        (
            "simulate",
            {"drafter": ["none", "acceptance"], "retention": ["none", "window:tokens=64"]},
            "drafter 'acceptance' with retention 'window'",
        ),
        ("simulate", {"autoscale": "nobody"}, "autoscale: 'nobody' is no planner"),
        ("compare", {"blocks": 9, "accounting": "bytes"}, "accounting: 'bytes' is not one of"),
        ("compare", {"blocks": 9, "eviction": "lfu:half=3"}, "eviction: eviction plugin 'lfu'"),
        (
            "compare",
            {"blocks": 9, "eviction": "optimum:by=3"},
            "eviction: bound plugin 'optimum'",
        ),
        ("compare", {"blocks": 9, "prefix": "tree"}, "prefix: no prefix plugin"),
        ("simulate", {"eviction": "optimum"}, "eviction: no eviction plugin is named"),
        ("simulate", {"model": "llama-3.1-405b"}, "tensor_parallel: llama-3.1-405b on 4 x"),
    ],
)
def test_an_impossible_cell_is_refused_before_any_cell_runs(mode, axes, reason):
    """One impossible cell is refused when the plan is made.

    The error begins with the name of the field.
    """
    with pytest.raises(InputError) as refused:
        Plan.from_grid(Grid(mode, workload="zipf", **axes))
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"accounting": ["keys", "tokens"]}, "accounting: the optimum"),
        ({"prefix": "none"}, "prefix: "),
    ],
)
def test_the_optimum_is_refused_in_modes_where_it_is_no_bound(axes, reason):
    """A sweep refuses the optimum with accounting by tokens and without a prefix index."""
    with pytest.raises(InputError, match=reason):
        Plan.from_grid(Grid("compare", workload="zipf", blocks=9, eviction="optimum", **axes))


def test_a_row_has_the_options_of_its_cell():
    """A row has the pool in blocks and in bytes, and the options and plugins as text."""
    grid = Grid(workload="zipf", memory="1GiB", slo=[SLO(ttft_ns=10**9), None])
    first, second = Plan.from_grid(grid).rows
    assert (first["blocks"], first["pool_bytes"]) == (512, 2**30)
    assert (first["slo"], second["slo"]) == ("ttft=1", "none")
    assert (first["scheduler"], first["block_size"]) == ("fcfs", 16)


def test_a_row_has_the_pool_that_was_asked_for():
    """With the block that an engine never uses: a run of the row is the same run again."""
    (row,) = Plan.from_grid(Grid(workload="zipf", blocks=800, like="vllm")).rows
    assert (row["blocks"], row["pool_bytes"]) == (800, 800 * 2**21)
    (row,) = Plan.from_grid(Grid(workload="zipf", memory="1GiB", like="vllm")).rows
    assert row["pool_bytes"] == 2**30


def test_a_window_in_ns_is_one_value():
    """Several are texts, or tuples in a list."""
    window = (0, 5 * 10**9)
    assert Grid(workload="zipf", window=window).axes["window"] == (window,)
    assert len(Grid(workload="zipf", window=["0:5", (0, 9 * 10**9)]).axes["window"]) == 2
    assert len(Grid(workload="zipf", window=("0:5", "5:9")).axes["window"]) == 2


def test_policies_in_files_are_named_by_their_classes(tmp_path):
    """A file is named as its class, with options; two of one name are told apart by paths."""
    source = """
from kvcore import ScoreEviction

class Mine(ScoreEviction):
    name = "mine"

    def __init__(self, weight: int = 1):
        super().__init__()
        self.weight = weight

    def score(self, span, now):
        return span.hit_count * self.weight
"""
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    for path in (first, second):
        path.write_text(source)
    values = [f"{first}", f"{first}:Mine:weight=2", "lru"]
    rows = Plan.from_grid(Grid("compare", workload="zipf", blocks=9, eviction=values)).rows
    assert [row["eviction"] for row in rows] == ["mine", "mine:weight=2", "lru"]
    values = [f"{first}", f"{second}"]
    rows = Plan.from_grid(Grid("compare", workload="zipf", blocks=9, eviction=values)).rows
    assert [row["eviction"] for row in rows] == values
