"""Tests that the tables in the how-to of routers are what `compare_routers` finds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvcore import simulate_cluster
from kvcore.analysis.routers import compare_routers
from kvcore.report.routers import OPTIMUM, SHARED

PAGE = (Path(__file__).parents[2] / "docs/how-to/choose-a-router.md").read_text("utf-8")


def table(first):
    """Return the rows of the table with the first header `first`, by their first cells."""
    lines = PAGE.partition(f"| {first} |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines)
    return {name: cells for name, *cells in rows}


@pytest.mark.slow  # runs the whole bundled trace eight times
def test_the_table_of_hits_by_replicas_is_current():
    """The first and last columns of hits are those of a run of each router and shared cache."""
    shown = table("share of prompt tokens that hit")
    pattern = r"^    kvcore routers --replicas (\d+,\S+) (.*)$"
    (command,) = re.findall(pattern, PAGE, re.MULTILINE)
    first, *_, last = (int(number) for number in command[0].split(","))
    words = command[1].split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    found = compare_routers(
        "mooncake",
        given["--routers"],
        [first, last],
        block_size=int(given["--block-size"]),
        view=given["--view"],
    )
    hits = {name: [] for name in shown}
    for row in found.rows:
        hits[row.router].append(f"{row.hit_ratio:.1%}")
    for shared in found.shared:
        hits[SHARED].append(f"{shared.hit_ratio:.1%}")
        hits[OPTIMUM].append(f"{shared.optimum:.1%}")
    assert hits == {name: [cells[0], cells[-1]] for name, cells in shown.items()}


@pytest.mark.slow  # runs the whole bundled trace six times
@pytest.mark.parametrize("view", table("`--view`"))
def test_the_table_of_hits_by_view_is_current(view):
    """The hits and the TTFT for each `--view` are those of a run."""
    result = simulate_cluster(replicas=8, router="prefix-affinity", block_size=512, view=view)
    hits, ttft, _ = table("`--view`")[view]
    mean = result.summary()["ttft_s"]["mean"]
    assert (f"{result.reuse_ratio.token:.1%}", f"{mean * 1000:.0f} ms") == (hits, ttft)
