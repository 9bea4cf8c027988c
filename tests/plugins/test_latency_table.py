"""The latency model `table`: times at the points of a grid, between and beyond them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore import InputError, Plugins
from kvcore.serving import StepWork
from kvcore_plugins.latency import Table

HEADER = "prefill_tokens,decode_sequences,context_tokens,seconds"
# In milliseconds: 1 + prefill / 100, twice that with 10 sequences, 1 more at 1,000 tokens.
GRID = """
0,0,0,0.001
0,0,1000,0.002
0,10,0,0.002
0,10,1000,0.003
100,0,0,0.002
100,0,1000,0.003
100,10,0,0.004
100,10,1000,0.005
400,0,0,0.005
400,0,1000,0.006
400,10,0,0.010
400,10,1000,0.011
"""


@pytest.fixture
def table(tmp_path):
    """Return a function that builds a model from the text of a grid."""

    def make(grid=GRID, header=HEADER):
        path = tmp_path / "grid.csv"
        path.write_text(f"{header}\n{grid.strip()}\n")
        return Table(path)

    return make


def milliseconds(model, prefill, decode, context):
    """Return the time of a step in milliseconds."""
    return model.duration(StepWork(prefill, (0,), decode, (context,))) / 10**9


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((0, 0, 0), 1),
        ((400, 10, 1000), 11),
        ((50, 0, 0), 1.5),
        ((200, 0, 0), 3),
        ((0, 5, 0), 1.5),
        ((0, 0, 250), 1.25),
        # Between 2 + 0.5 and 3 + 0.5 at 5 of 10 sequences: (1.5 + 3) / 2 + 0.5.
        ((50, 5, 500), 2.75),
    ],
)
def test_times_are_linear_between_grid_points(table, counts, expected):
    """Times are those of the grid's points, and linear between them in each column."""
    assert milliseconds(table(), *counts) == expected


def test_beyond_the_grid_the_steepest_slope_continues(table):
    """Beyond the grid time grows by the steepest slope at its border.

    Beyond 400 tokens it is 6 ms per 300 tokens, for all numbers of sequences.
    """
    assert milliseconds(table(), 700, 10, 0) == 10 + 6
    assert milliseconds(table(), 700, 0, 0) == 5 + 6


def test_beyond_the_grid_growth_adds_up_over_columns(table):
    """Beyond the grid in two columns, the growth of both is added.

    It is 5 ms per 10 sequences and 1 ms per 1,000 context tokens.
    """
    assert milliseconds(table(), 0, 20, 3000) == 3 + 5 + 2


def test_linear_times_let_the_simulator_jump(table):
    """A grid whose times are linear in the context is one line, and the model jumps."""
    model = table()
    assert model.jumps
    assert set(model.pieces(StepWork(context=(500,)))) == {(10**9, 10**6)}


@pytest.mark.parametrize(
    "grid",
    [
        "0,1,0,0.001\n0,1,10,0.003\n0,1,20,0.004",
        "0,1,0,0.001\n0,1,10,0.003\n0,2,0,0.002\n0,2,10,0.003",
    ],
    ids=["with context", "with sequences"],
)
def test_falling_slopes_do_not_jump(table, grid):
    """A grid with falling slopes returns a flat line, and the model does not jump."""
    model = table(grid)
    assert not model.jumps
    assert model.pieces(StepWork(0, (0,), 1, (5,))) == ((2_000_000_000, 0),)


def test_rising_slopes_jump_along_the_highest_line(table):
    """With rising slopes the highest line is the interpolated time, and the model jumps."""
    model = table("0,1,0,0.001\n0,1,10,0.002\n0,1,20,0.004")
    assert model.jumps
    assert [milliseconds(model, 0, 1, c) for c in (0, 5, 10, 15, 20, 30)] == [
        1,
        1.5,
        2,
        3,
        4,
        6,
    ]


def test_pairs_are_a_column_where_they_vary(table):
    """Attended pairs are a column of the grid where they vary."""
    model = table(
        "0,1,0,0.001,0\n0,1,0,0.002,100\n10,1,0,0.003,0\n10,1,0,0.004,100",
        f"{HEADER},attended_pairs",
    )
    assert model.duration(StepWork(5, (50,), 1, (0,))) == 2_500_000_000


def test_a_grid_of_the_package_is_chosen_by_the_deployment():
    """With only `engine`, the grid is that of the run's model, device and parallelism."""
    run = {"model": "llama-3-70b", "device": "h200", "tensor_parallel": 4, "codec": "fp16"}
    model = Plugins().build("latency", "table:engine=vllm", run)
    named = Table(engine="vllm", model="llama-3.1-70b", device="h200", tensor_parallel=4)
    step = StepWork(0, (0,), 64, (64 * 4096,))
    assert model.jumps
    assert model.duration(step) == named.duration(step)
    assert model.coefficients()["source"] == "AIConfigurator"


def test_a_deployment_without_a_grid_names_the_nearest():
    """A deployment without a grid raises InputError with the nearest ones and a command."""
    with pytest.raises(InputError) as caught:
        Table(engine="vllm", model="llama-3.1-70b", device="h100", tensor_parallel=3)
    message = str(caught.value)
    assert "no step times of engine=vllm,model=llama-3.1-70b,device=h100,tensor_par" in message
    assert "nearest are engine=vllm,model=llama-3.1-70b,device=h100,tensor_para" in message
    assert "kvcore calibrate --from aic" in message


def test_coefficients_are_axes_and_digest(table):
    """The coefficients of a grid are its axes and a digest."""
    coefficients = table().coefficients()
    assert len(coefficients.pop("digest")) == 32
    assert coefficients == {
        "prefill_tokens": [0, 100, 400],
        "decode_sequences": [0, 10],
        "context_tokens": [0, 1000],
    }


def test_a_grid_with_a_hole_is_refused(table):
    """An incomplete grid raises InputError with its first missing point."""
    with pytest.raises(InputError) as caught:
        table(GRID.replace("100,0,1000,0.003\n", ""))
    assert str(caught.value).endswith(
        "grid.csv: no row with prefill_tokens=100, decode_sequences=0, context_tokens=1000; "
        "the grid needs one for each combination of the values in its columns, 12 in all"
    )


def test_a_point_given_twice_is_refused(table):
    """A point given twice raises InputError with both lines."""
    with pytest.raises(InputError) as caught:
        table(GRID + "0,0,0,0.001")
    assert (
        "grid.csv:14: prefill_tokens=0, decode_sequences=0, context_tokens=0 is in line 2"
        in (str(caught.value))
    )


def test_a_grid_that_falls_is_refused(table):
    """A point with more work and less time raises InputError with both lines."""
    with pytest.raises(InputError) as caught:
        table(GRID.replace("100,10,0,0.004", "100,10,0,0.0019"))
    assert (
        "grid.csv:8: prefill_tokens=100, decode_sequences=10, context_tokens=0 takes less than "
        "prefill_tokens=0 in line 4"
    ) in str(caught.value)


def test_the_grid_on_the_reference_page_can_be_read(table):
    """The grid on the reference page can be read."""
    page = Path(__file__).parents[2] / "docs/reference/latency.md"
    grid = page.read_text("utf-8").split("```csv\n")[1].split("```")[0]
    header, _, rows = grid.partition("\n")
    assert milliseconds(table(rows, header), 0, 1, 200_000) == 5.95
