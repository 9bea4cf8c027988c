"""Tests that the pages on sweeps have the examples, their output, and all keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.commands import run_here

from kvcore_lab.sweep.cells import RESULTS, SHARES
from kvcore_lab.sweep.grid import sweep_keys

ROOT = Path(__file__).parents[2]
HOW_TO = (ROOT / "docs" / "how-to" / "sweeps.md").read_text("utf-8")
REFERENCE = (ROOT / "docs" / "reference" / "sweep.md").read_text("utf-8")


def shown(language):
    """Return the fenced blocks of the how-to in a language."""
    return re.findall(rf"```{language}\n(.*?)```", HOW_TO, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1], ids=["sweep.toml", "sweep_timed.toml"])
def test_the_how_to_shows_the_output_of_the_example(place, tmp_path):
    """The how-to shows the example file, a command, and the output of that command."""
    name = ("sweep.toml", "sweep_timed.toml")[place]
    text = (ROOT / "examples" / name).read_text("utf-8")
    assert shown("toml")[place] == text
    (tmp_path / name).write_text(text)
    flags, *_ = re.findall(rf"^    kvcore sweep {name}(.*)$", HOW_TO, re.MULTILINE)
    done = run_here("sweep", name, *flags.split(), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == shown("text")[place]


def test_the_reference_has_every_key():
    """The reference has every key of the file of a sweep."""
    for key in sweep_keys():
        assert f"`{key}`" in REFERENCE, key


def test_the_reference_has_every_column():
    """The reference has every column of the results.

    For a column of a distribution it has the name of the time and of the statistic.
    """
    for column in [*RESULTS["simulate"], *RESULTS["compare"], *SHARES, "pool_bytes"]:
        time, _, part = column.rpartition("_s_")
        if time and part:
            assert f"`{time}_s`" in REFERENCE, column
            assert f"`{part}`" in REFERENCE, column
        else:
            assert f"`{column}`" in REFERENCE, column
