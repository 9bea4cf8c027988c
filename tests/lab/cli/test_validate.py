"""Tests of `kvcore validate`: its tables, JSON, CSV and plot, and its errors."""

import csv
import json
import re
import struct
from functools import partial
from pathlib import Path

import pytest
from helpers.commands import run_here, stdout_of, words_of

HOW_TO = (Path(__file__).parents[3] / "docs/how-to/validate.md").read_text("utf-8")

ROWS = """\
engine,model,device,tensor_parallel,weights_dtype,input_tokens,output_tokens,concurrency,rate,ttft,tpot
vllm,llama-3.1-8b,h100,1,,256,32,2,,0.02,0.01
vllm,llama-3.1-8b,h100,1,fp8,256,32,4,,0.02,0.005
trtllm,llama-3.1-8b,h200,1,fp8,256,32,,5,0.01,
trtllm,llama-9-8b,h200,1,fp8,256,32,,5,0.01,
"""

run = partial(stdout_of, "validate")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Change into a folder with a file of measured rows, and return the folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text(ROWS)
    return tmp_path


def test_prints_errors_by_group_worst_rows_and_reasons():
    """The output has errors by group, the worst row, and why a row was left out."""
    printed = run("rows.csv")
    lines = [line.split() for line in printed.splitlines()]
    assert printed.startswith("rows.csv: 3 rows simulated, 1 left out.")
    heads = {tuple(line[:2]) for line in lines}
    assert heads >= {("all", "3"), ("engine", "vllm"), ("device", "h200")}
    (every,) = (line for line in lines if line[:2] == ["all", "3"])
    assert len(every[2:]) == len(["signed", "absolute", "p90"] * 2), "of TTFT and of TPOT"
    assert all(error.endswith("%") for error in every[2:])
    assert "llama-3.1-8b in fp8 on 1 x h100 vllm" in printed
    assert "unknown model 'llama-9-8b'" in " ".join(printed.split())


def test_the_output_is_that_of_the_how_to(here):
    """The output is the one of the how-to guide, except for spaces and rules of the tables."""
    (here / "rows.csv").write_text(re.search(r"```csv\n(.*?)```", HOW_TO, re.DOTALL)[1])
    command = re.search(r"    kvcore validate (.*?)\n\n", HOW_TO, re.DOTALL)[1].split()
    shown = re.search(r"```text\n(.*?)```", HOW_TO, re.DOTALL)[1]
    assert words_of(run(*command)) == words_of(shown)


def test_the_printed_command_simulates_the_worst_row():
    """The printed command simulates the row with the largest error, with the same TPOT."""
    document = json.loads(run("rows.csv", "--json"))
    rows = [row for row in document["compared"] if "tpot_error" in row]
    worst = max(rows, key=lambda row: abs(row["tpot_error"]))
    words = " ".join(run("rows.csv").split()).partition("kvcore simulate ")[2].split()
    end = next(index for index, word in enumerate(words) if word == "left")
    summary = json.loads(run_here("simulate", *words[:end], "--json").stdout)
    assert summary["tpot_s"]["mean"] == worst["simulated_tpot"]


def test_json_is_one_document_with_every_row():
    """The document has errors of all rows and by group, and compared and omitted rows."""
    document = json.loads(run("rows.csv", "--json", "--by", "engine,model+device"))
    assert (document["schema"], document["source"], document["rows"]) == (1, "rows.csv", 3)
    assert document["errors"]["ttft"].keys() == {"rows", "signed", "absolute", "p90"}
    groups = [(group["by"], group["value"]) for group in document["groups"]]
    assert groups == [
        ("engine", "trtllm"),
        ("engine", "vllm"),
        ("model+device", "llama-3.1-8b h100"),
        ("model+device", "llama-3.1-8b h200"),
    ]
    assert document["groups"][0]["errors"]["tpot"] is None
    assert [each["rows"] for each in document["left_out"]] == [1]
    first = document["compared"][0]
    assert first["tpot_error"] == first["simulated_tpot"] / first["tpot"] - 1


def test_csv_has_a_line_for_each_row(here):
    """`--csv` has a line for each simulated row, with the relative error of each measure."""
    run("rows.csv", "--csv", "out.csv")
    with (here / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["line"] for row in rows] == ["2", "3", "4"]
    for row in rows[:2]:
        error = float(row["simulated_tpot"]) / float(row["tpot"]) - 1
        assert float(row["tpot_error"]) == error
    assert rows[2]["tpot_error"] == ""


@pytest.mark.parametrize("form", ["png", "svg"])
def test_the_plot_has_a_panel_for_each_measure(here, form):
    """`-o` draws a PNG or SVG with one panel for each measure side by side."""
    pytest.importorskip("matplotlib")
    run("rows.csv", "-o", f"errors.{form}", "--by", "engine")
    picture = (here / f"errors.{form}").read_bytes()
    if form == "png":
        width, height = struct.unpack(">II", picture[16:24])
        assert width > 2 * height
    else:
        assert picture.startswith(b"<?xml")


def test_like_none_simulates_by_kvcores_own_rules():
    """`--like none` simulates rows of vLLM by kvcore's own rules, so their TTFT differs."""
    vllm, own = (
        json.loads(run("rows.csv", "--json", "--where", "engine=vllm", *more))
        for more in ((), ("--like", "none"))
    )
    assert vllm["compared"][0]["simulated_ttft"] != own["compared"][0]["simulated_ttft"]


def test_a_column_may_be_given_twice():
    """Rows of any of the values are taken, given by one option or by two."""
    once, twice = (
        json.loads(run("rows.csv", "--json", *more))
        for more in (
            ("--where", "device=h100,h200"),
            ("--where", "device=h100", "--where", "device=h200"),
        )
    )
    del once["command"], twice["command"]
    assert (once["rows"], twice) == (3, once)


def test_columns_of_groups_may_have_spaces_between_them():
    """Spaces beside the commas of `--by` are no part of a name."""
    document = json.loads(run("rows.csv", "--json", "--by", "engine, device"))
    assert {group["by"] for group in document["groups"]} == {"engine", "device"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("none.csv",), "none.csv: cannot be read"),
        (("rows.csv", "--where", "device"), "write NAME=VALUE"),
        (("rows.csv", "--where", "devise=h100"), "there is no column 'devise'"),
        (
            ("rows.csv", "--where", "device=a30"),
            "none of 0 rows can be simulated: no row has device=a30",
        ),
        (("rows.csv", "--by", "devise"), "there is no column 'devise'"),
        (("rows.csv", "--csv", "rows.csv"), "cannot write rows.csv: the requests come from"),
        (("rows.csv", "--spread", "1"), "'--spread': 1.0 is not in the range 0<=x<1"),
        (("rows.csv", "--max-seqs", "0"), "max_seqs=0: a step has a token for each sequence"),
        (("rows.csv", "-o", "plot.gif"), "end it with one of .png, .svg, .pdf"),
        (("rows.csv", "--latency", "lineal"), "no latency plugin is named 'lineal'"),
    ],
)
def test_invalid_arguments_leave_files_unchanged(here, arguments, reason):
    """An invalid argument exits with code 2 and the reason; no file is written or changed."""
    extra = [] if "--csv" in arguments else ["--csv", "out.csv"]
    done = run_here("validate", *arguments, *extra)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert reason in done.stderr
    assert [each.name for each in here.iterdir()] == ["rows.csv"]
    assert (here / "rows.csv").read_text() == ROWS
