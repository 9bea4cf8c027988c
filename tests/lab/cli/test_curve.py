"""Tests of `kvcore curve`: what it prints and writes, and its errors."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from functools import partial
from time import sleep

import pytest
from helpers.commands import stdout_of

pytest.importorskip("numba")
pytest.importorskip("matplotlib")

SMALL = "zipf:requests=60,prefixes=6,prefix_tokens=64,suffix_tokens=32"

run = partial(stdout_of, "curve", "--jobs", 1)


def test_the_table_has_a_row_for_each_size():
    """The table has a row for each pool size and a column for each policy."""
    lines = run(SMALL, "--sizes", "10,50").splitlines()
    assert lines[0].startswith("zipf: 60 requests look up 360 blocks of 16 tokens (keys")
    assert lines[2].split() == ["blocks", "of", "all", "lru", "lfu", "optimum"]
    assert [line.split()[0] for line in lines[4:6]] == ["10", "50"]
    assert lines[6].startswith("A cache that never evicts holds")


def test_the_last_of_a_number_of_sizes_is_the_footprint():
    """With a number of sizes, the last is the footprint, with an infinite cache's hits."""
    document = json.loads(run(SMALL, "--sizes", "5", "--json"))
    bound = document["infinite"]
    for curve in document["curves"]:
        assert curve["points"][-1]["blocks"] == bound["distinct_blocks"]
        assert curve["points"][-1]["hit_blocks"] == bound["hit_blocks"]
        assert curve["points"][-1]["hit_ratio"] == bound["hit_ratio"] < 1


def test_token_accounting_has_no_optimum():
    """With `--accounting tokens` the default policies are `lru` and `lfu`."""
    document = json.loads(run(SMALL, "--sizes", "4,40", "--accounting", "tokens", "--json"))
    assert [curve["eviction"] for curve in document["curves"]] == ["lru", "lfu"]
    assert not any(curve["every_size"] for curve in document["curves"])


@pytest.mark.parametrize(("name", "magic"), [("c.png", b"\x89PNG"), ("c.SVG", b"<?xml")])
def test_out_draws_a_picture_and_prints_nothing(tmp_path, name, magic):
    """`--out` draws a picture in the format of its ending, and nothing is printed."""
    out = tmp_path / name
    assert run(SMALL, "--sizes", "4", "--out", str(out)) == ""
    assert out.read_bytes().startswith(magic)


def test_out_writes_the_numbers(tmp_path):
    """`--out` writes the same numbers as CSV and JSON, and `--json` prints them as well."""
    table, document = tmp_path / "c.csv", tmp_path / "c.json"
    run(SMALL, "--sizes", "4,40", "--out", str(table))
    printed = run(SMALL, "--sizes", "4,40", "--out", str(document), "--json")
    curves = json.loads(document.read_bytes())["curves"]
    assert json.loads(printed)["curves"] == curves
    rows = list(csv.DictReader(table.read_text().splitlines()))
    points = [point for curve in curves for point in curve["points"]]
    assert [int(row["hit_blocks"]) for row in rows] == [p["hit_blocks"] for p in points]
    assert [float(row["hit_ratio"]) for row in rows] == [p["hit_ratio"] for p in points]


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured_processes")
def test_ctrl_c_ends_all_processes(tmp_path):
    """Ctrl-C ends all processes with exit code 130 and one message, and leaves no file."""
    out = tmp_path / "c.csv"
    begun = tmp_path / "c.csv.part"
    options = ["--eviction", "lfu", "--sizes", "200", "--jobs", "2", "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-m", "kvcore", "curve", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as run:
        while not begun.exists():
            assert run.poll() is None
            sleep(0.01)
        sleep(0.1)  # by now the file is open, even on a busy machine
        os.killpg(run.pid, signal.SIGINT)
        printed, complaints = run.communicate()
    assert (run.returncode, printed, complaints) == (130, b"", b"kvcore: interrupted\n")
    assert not list(tmp_path.iterdir())


TIER = (SMALL, "--tier", "host:memory=256MiB", "--sizes", "3")
"""The arguments of a plane, which has three sizes of the pool and four of the tier."""


def test_a_plane_has_tables_of_hits_and_of_saved_time():
    """A plane has a table of hits and one of saved time, by size of tier and of pool."""
    text = run(*TIER)
    rows = [line.split("  ") for line in text.splitlines() if "%" in line and "MiB  " in line]
    assert len(rows) == 2 * 3
    assert text.count(" none  ") == 2
    assert "Pool and tier taken for one LRU cache of both sizes" in text


@pytest.mark.parametrize("exact", [(), ("--exact",)])
def test_json_of_a_plane_has_a_point_for_each_pair_of_sizes(exact):
    """The document of a plane has a point with counts for each pair of pool and tier size.

    Without `--exact` a larger tier never has fewer hits.
    """
    document = json.loads(run(*TIER, "--json", *exact))
    points = document["points"]
    assert (len(points), document["exact"]) == (12, bool(exact))
    assert document["tier"]["name"] == "host"
    for point in points:
        hits = point["hit_blocks"] + point["loaded_blocks"]
        assert point["hit_ratio"] == pytest.approx(hits / document["lookup_blocks"])
        assert point["saved_ratio"] == pytest.approx(point["saved_s"] / document["prefill_s"])
    if not exact:
        found = [point["hit_blocks"] + point["found_blocks"] for point in points[::3]]
        assert found == sorted(found)


@pytest.mark.parametrize(
    ("name", "magic"), [("plane.png", b"\x89PNG"), ("plane.svg", b"<?xml")]
)
def test_a_plane_is_drawn(tmp_path, name, magic):
    """A plane is drawn as PNG or SVG, with the same bytes each time."""
    written = [tmp_path / "one" / name, tmp_path / "two" / name]
    for path in written:
        path.parent.mkdir()
        assert run(*TIER, "--out", str(path)) == ""
    one, two = (path.read_bytes() for path in written)
    assert one.startswith(magic)
    assert one == two


def test_a_plane_is_written_as_rows(tmp_path):
    """The CSV of a plane has a row for each point, with sizes in blocks and in bytes."""
    path = tmp_path / "plane.csv"
    run(*TIER, "--out", str(path))
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert all(int(row["pool_bytes"]) == int(row["pool_blocks"]) * 2**21 for row in rows)


def test_the_table_of_a_plane_names_the_tier():
    """The head of the table of a plane names the tier."""
    assert "disk / pool" in run(SMALL, "--tier", "disk:memory=256MiB", "--sizes", "3")
