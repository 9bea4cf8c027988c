"""Tests of `kvcore calibrate`: the model it prints, its residuals and its errors."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from helpers.aic import fake_aic
from helpers.commands import error_of, stdout_of, words_of

from kvcore import Plugins
from kvcore.serving import StepWork

DOCS = Path(__file__).parents[3] / "docs"
HOW_TO = (DOCS / "how-to/calibrate.md").read_text("utf-8")
REFERENCE = (DOCS / "reference/cli.md").read_text("utf-8")

run = partial(stdout_of, "calibrate")


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """Write the file of steps of the how-to guide into the current folder; return its path."""
    monkeypatch.chdir(tmp_path)
    path = Path("steps.csv")
    path.write_text(re.search(r"```csv\n(.*?)```", HOW_TO, re.DOTALL)[1])
    return path


def test_the_output_is_that_of_the_how_to(steps):
    """The output is the one of the how-to guide, except for spaces and rules of the tables."""
    shown = re.findall(r"```text\n(.*?)```", HOW_TO, re.DOTALL)
    assert words_of(run(steps)) == words_of("".join(shown))


def test_json_is_alone_on_stdout_and_has_a_schema(steps):
    """With `--json` stdout is one document of schema 1, with the model and its fit."""
    document = json.loads(run(steps, "--json"))
    assert (document["schema"], document["steps"], document["rows"]) == (1, "steps.csv", 16)
    assert document["at_bound"] == []
    model = Plugins().build("latency", document["latency"])
    assert model.options() == document["fitted"]
    row = document["worst"][0]
    batch = StepWork(
        row["prefill_tokens"], (0,), row["decode_sequences"], (row["context_tokens"],)
    )
    assert model.duration(batch) / 1e12 == row["fitted_seconds"]
    errors = document["errors"][-1]
    assert (errors["steps"], errors["rows"]) == ("all", 16)
    assert errors["median"] < errors["held_out_median"] < abs(row["relative"])


def test_an_option_at_its_bound_is_reported(steps):
    """A fitted option at its bound is reported in the table and in the JSON document."""
    rows = steps.read_text().splitlines()
    faster = [
        f"{','.join(row.split(',')[:3])},{0.9 - i / 100}" for i, row in enumerate(rows[1:])
    ]
    steps.write_text("\n".join([rows[0], *faster]))
    assert "prefill" in json.loads(run(steps, "--json"))["at_bound"]
    assert "at its bound: other values fit worse" in run(steps)


def test_roofline_keeps_the_given_options(steps):
    """`--latency roofline` keeps the given options and adds the fitted ones to the first line.

    Fitted shares are printed in per cent.
    """
    printed = run(steps, "--latency", "roofline:model=llama-3.1-8b,device=h200")
    first, *rest = printed.splitlines()
    options = (
        "model=llama-3.1-8b,device=h200,tensor_parallel=4,codec=fp16,block_size=16,compute="
    )
    assert first.startswith(f"--latency roofline:{options}")
    assert any(line.split()[0] == "compute" and "%" in line for line in rest if line)
    assert Plugins().build("latency", first.split()[1]).device == "h200"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("steps.csv --latency roofline:compute=0.5", "compute is what the steps tell"),
        ("steps.csv --tensor-parallel 8", "--tensor-parallel describes what --from composes"),
        ("--from aic -o q.csv --latency linear", "--latency is fitted to STEPS"),
    ],
)
@pytest.mark.usefixtures("steps")
def test_a_value_that_would_be_ignored_is_refused(words, problem):
    """A value for an option that is fitted, or is of the other use of the verb, is an error."""
    assert problem in error_of("calibrate", *words.split())


def test_from_aic_writes_steps_and_prints_a_latency_model(tmp_path, monkeypatch):
    """`--from aic` writes a file of steps and prints the latency model that reads it."""
    calls = fake_aic(monkeypatch)
    monkeypatch.chdir(tmp_path)
    deployment = ["--model", "qwen3-32b", "--device", "h200", "--tensor-parallel", "2"]
    printed = run("--from", "aic", *deployment, "--engine", "sglang", "-o", "q.csv")
    assert printed == "--latency table:path=q.csv\n"
    assert calls[-1][0] == ("Qwen/Qwen3-32B", "h200_sxm", "sglang")
    latency = Plugins().build("latency", printed.split()[1])
    assert latency.duration(StepWork(0, (0,), 1, (1,))) / 1e9 == pytest.approx(3.01, rel=0.01)


def test_an_unknown_device_leaves_no_file(tmp_path, monkeypatch):
    """An unknown device is an error that names it, and no file is written."""
    fake_aic(monkeypatch)
    words = ("--from", "aic", "--device", "h1000", "-o", tmp_path / "q.csv")
    assert "device 'h1000'" in error_of("calibrate", *words)
    assert not list(tmp_path.iterdir())
