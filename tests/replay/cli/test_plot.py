"""Tests of `kvcore plot`, and of `--plot` of other verbs: their plots and errors."""

from __future__ import annotations

import json
import re
import shutil
from itertools import cycle

import pytest
from helpers import traces
from helpers.commands import run_here

from kvcore import simulate

pytest.importorskip("matplotlib")

SMALL = "zipf:requests=60,prefixes=4,rate=40"

KINDS = ("occupancy", "hits", "ages", "timeline", "latency")

MAGIC = {"png": b"\x89PNG", "svg": b"<?xml"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a trace `run.jsonl`, and the result of the same run in `out`."""
    folder = tmp_path_factory.mktemp("plots")
    simulate(SMALL, trace=folder / "run.jsonl").write(folder / "out")
    return folder


def drawn(*words, cwd, form="svg"):
    """Run a verb that draws `x.FORM`, require success, and return its stdout."""
    done = run_here(*words, cwd=cwd)
    told = done.stderr.replace("kvcore: the plan is in plan-results/plan.json\n", "")
    assert (done.returncode, told) == (0, "")
    assert (cwd / f"x.{form}").read_bytes().startswith(MAGIC[form])
    return done.stdout


def refused(*words, cwd, code=2):
    """Run a verb that fails with `code`, require that no file is added, and return stderr."""
    before = sorted(cwd.iterdir())
    done = run_here(*words, cwd=cwd)
    assert (done.returncode, done.stdout) == (code, "")
    assert sorted(cwd.iterdir()) == before
    return done.stderr


@pytest.mark.parametrize(("kind", "form"), [*zip(KINDS, cycle(MAGIC), strict=False)])
def test_a_trace_has_plots_of_all_kinds(kind, form, folder, tmp_path):
    """Each kind of plot is drawn from a trace, in the format that the file's name ends with.

    Formats alternate: what writes them knows nothing of the kind.
    """
    words = "plot", folder / "run.jsonl", "--kind", kind, "-o", f"x.{form}"
    assert drawn(*words, cwd=tmp_path, form=form) == ""


def test_the_folder_of_a_result_is_drawn_from_its_trace(tmp_path):
    """Plots are drawn from the folder of `simulate --out`, under the name of its workload."""
    run_here("simulate", SMALL, "--out", "out", "--no-search", cwd=tmp_path)
    for kind in ("occupancy", "latency"):
        drawn("plot", "out", "--kind", kind, "-o", "x.svg", cwd=tmp_path)
    found = (tmp_path / "x.svg").read_text()
    assert "zipf, 60 requests" in found
    words = "plot", "out/trace.jsonl.gz", "--kind", "latency", "-o", "x.svg"
    drawn(*words, cwd=tmp_path)
    assert captioned(found) == captioned((tmp_path / "x.svg").read_text())


def captioned(svg):
    """Return the words of the caption of a plot."""
    lines = re.findall("<!-- (.*) -->", svg)
    first = next(n for n, line in enumerate(lines) if line.startswith("Setup: "))
    return " ".join(lines[first:])


def test_a_result_without_a_trace_has_latencies(folder, tmp_path):
    """A result without a trace has a plot of latencies; another kind is an error."""
    drawn("plot", folder / "out", "--kind", "latency", "-o", "x.svg", cwd=tmp_path)
    printed_error = refused(
        "plot", folder / "out", "--kind", "hits", "-o", "y.svg", cwd=tmp_path
    )
    assert "has no trace.jsonl.gz, which --kind hits is drawn from" in printed_error


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("requests.jsonl", "tpot_s", "nan"),
        ("requests.jsonl", "ttft_s", 1e308),
        ("summary.json", "rejected", [1]),
        ("summary.json", "itl_s", {"mean": 0.01}),
        ("summary.json", "itl_s", {"mean": 0.01, "pfoo": 0.01}),
        ("summary.json", "itl_s", {"p101": 0.01}),
    ],
)
def test_a_result_whose_figures_are_none_of_a_run_is_refused(
    folder, tmp_path, file, name, value
):
    """A text for a time, a time beyond all and a list for a number are refused in one line."""
    shutil.copytree(folder / "out", tmp_path / "out")
    path = tmp_path / "out" / file
    first, *rest = path.read_text().split("\n") if file.endswith("l") else [path.read_text()]
    path.write_text("\n".join([json.dumps(json.loads(first) | {name: value}), *rest]))
    words = "plot", "out", "--kind", "latency", "-o", "x.svg"
    assert "are not those of a run" in refused(*words, cwd=tmp_path)


def test_without_a_clock_there_are_no_latencies(tmp_path):
    """`--kind latency` is an error for a trace without a clock."""
    traces.record(tmp_path / "run.jsonl")
    words = "plot", "run.jsonl", "--kind", "latency", "-o", "x.png"
    assert "it has no clock" in refused(*words, cwd=tmp_path)


def test_a_cut_trace_is_drawn_up_to_the_cut(tmp_path):
    """A cut trace is drawn up to the cut, with a notice; ages need the whole trace."""
    file = traces.serve(tmp_path / "run.jsonl")
    file.write_bytes(file.read_bytes()[:-400])
    done = run_here("plot", "run.jsonl", "--kind", "hits", "-o", "x.svg", cwd=tmp_path)
    assert done.returncode == 0
    assert "run.jsonl: incomplete: the file ends" in done.stderr
    words = "plot", "run.jsonl", "--kind", "ages", "-o", "y.svg"
    assert "incomplete" in refused(*words, cwd=tmp_path, code=1)


def test_a_damaged_trace_draws_nothing(tmp_path):
    """A trace with an invalid event exits with code 1 and draws no file."""
    file = traces.serve(tmp_path / "run.jsonl")
    file.write_bytes(file.read_bytes().replace(b'"FINISH"', b'"FINISHED"'))
    words = "plot", "run.jsonl", "--kind", "hits", "-o", "x.png"
    error = refused(*words, cwd=tmp_path, code=1)
    assert re.search(r"run\.jsonl:\d+: unknown event 'FINISHED'", error)


SWEEP = """mode = "compare"
workload = "zipf:requests=40,prefixes=4"
eviction = ["lru", "lfu"]
blocks = [160, 400]
"""

VERBS = {
    "compare": ("compare", SMALL, "--eviction", "lru,lfu", "--blocks", "160,400"),
    "sweep": ("sweep", "grid.toml", "--jobs", "1"),
    "plan": (
        *("plan", "zipf:requests=40,prefixes=4,rate=4", "--slo", "ttft=0.2", "--jobs", "1"),
        *("--tier", "none", "--tensor-parallel", "1", "--max-gpus", "1"),
    ),
    "curve": ("curve", SMALL, "--sizes", "4", "--jobs", "1"),
}


@pytest.fixture
def grid(tmp_path):
    """Return a folder that contains the file of a small sweep."""
    (tmp_path / "grid.toml").write_text(SWEEP)
    return tmp_path


@pytest.mark.parametrize("words", VERBS.values(), ids=VERBS)
def test_verbs_with_a_table_draw_a_plot_beside_it(words, grid):
    """With `--plot` a verb draws a file and prints its table as well."""
    assert "Setup: " in drawn(*words, "--plot", "x.svg", cwd=grid)


def test_a_plane_is_drawn(grid):
    """`curve --tier` draws the plane of pool and tier sizes with `--plot`."""
    tier = ("--tier", "host:memory=1GiB", "--model", "llama-3.1-8b", "--sizes", "3")
    words = "curve", SMALL, *tier, "--jobs", "1", "--plot", "x.png"
    assert "host RAM / pool" in drawn(*words, cwd=grid, form="png")


def test_the_demonstration_is_drawn(tmp_path):
    """`demo cache --plot` draws the step times and the K/V of each cache."""
    pytest.importorskip("torch")
    drawn("demo", "cache", "--output", "6", "--plot", "x.svg", cwd=tmp_path)
    found = (tmp_path / "x.svg").read_text()
    assert "<!-- time of a step, median -->" in found
    assert "<!-- dense -->" in found


@pytest.mark.parametrize("words", VERBS.values(), ids=VERBS)
def test_an_unknown_ending_is_refused_before_the_run(words, grid):
    """A plot with an unknown ending is an error before the run, and no file is written."""
    assert "--plot x.gif: a name says" in refused(*words, "--plot", "x.gif", cwd=grid)


@pytest.mark.parametrize("words", VERBS.values(), ids=VERBS)
def test_without_matplotlib_nothing_is_run(words, grid, monkeypatch):
    """Without matplotlib `--plot` exits with code 3, and nothing is run or written."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    printed_error = refused(*words, "--plot", "x.png", cwd=grid, code=3)
    assert "a plot needs matplotlib" in printed_error


def test_a_sweep_of_two_numeric_axes_needs_plot_axis(grid):
    """A sweep of two numeric axes needs `--plot-axis` to draw a plot, for which alone it is."""
    (grid / "grid.toml").write_text(f"{SWEEP}block_size = [8, 16]\n")
    words = "sweep", "grid.toml", "--jobs", "1", "--plot", "x.svg"
    assert "choose one of them with --plot-axis" in refused(*words, cwd=grid)
    assert "give --plot FILE too" in refused(*words[:4], "--plot-axis", "blocks", cwd=grid)
    drawn(*words, "--plot-axis", "blocks", cwd=grid)


@pytest.mark.parametrize("verb", [("plot", "--kind", "latency"), ("report",)])
def test_an_empty_path_is_not_the_working_directory(verb, tmp_path):
    """An empty path is an error, even if the working directory holds a result."""
    (tmp_path / "summary.json").write_text("{}")
    done = run_here(*verb, "", "-o", "out.svg", cwd=tmp_path)
    assert done.returncode == 2
    assert "empty path" in done.stderr
    assert not (tmp_path / "out.svg").exists()
