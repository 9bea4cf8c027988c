"""Tests that the tables in the how-to of routers are what `compare_routers` finds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvcore import simulate_cluster
from kvcore_lab.report.routers import OPTIMUM, SHARED
from kvcore_lab.router_comparison import compare_routers

PAGE = (Path(__file__).parents[2] / "docs/how-to/choose-a-router.md").read_text("utf-8")


def table(first):
    """Return the rows of the table with the first header `first`, by their first cells."""
    lines = PAGE.partition(f"| {first} |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines)
    return {name: cells for name, *cells in rows}


@pytest.mark.slow  # runs the whole bundled trace four times
def test_the_table_of_hits_by_replicas_is_current():
    """The last column of hits is that of a run of each router, and of a shared cache."""
    shown = table("share of prompt tokens that hit")
    pattern = r"^    kvcore routers --replicas (\d+,\S+) (.*)$"
    (command,) = re.findall(pattern, PAGE, re.MULTILINE)
    last = int(command[0].split(",")[-1])
    words = command[1].split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    found = compare_routers(
        "mooncake",
        given["--routers"],
        last,
        block_size=int(given["--block-size"]),
        view=given["--view"],
    )
    hits = {row.router: f"{row.hit_ratio:.1%}" for row in found.rows}
    (shared,) = found.shared
    hits |= {SHARED: f"{shared.hit_ratio:.1%}", OPTIMUM: f"{shared.optimum:.1%}"}
    assert hits == {name: cells[-1] for name, cells in shown.items()}


@pytest.mark.parametrize("view", table("`--view`"))
def test_the_table_of_hits_by_view_is_current(view):
    """The hits and the TTFT for each `--view` are those of a run."""
    options = {"replicas": 8, "router": "prefix-affinity", "block_size": 512}
    result = simulate_cluster(limit=3000, view=view, **options)
    hits, ttft, _ = table("`--view`")[view]
    mean = result.summary()["ttft_s"]["mean"]
    assert (f"{result.reuse_ratio.token:.1%}", f"{mean * 1000:.0f} ms") == (hits, ttft)
