"""Intervals of means over seeds, and of figures of recorded traffic."""

import json
from collections import Counter
from math import fsum, inf
from pathlib import Path

import attrs
import pytest
from helpers.commands import run_here

from kvcore import Request, sweep
from kvcore.request import Hints
from kvcore_lab.statistics import (
    SESSIONS,
    bootstrap,
    ratio,
    session_groups,
    share_interval,
    sums,
    t_quantile,
)
from kvcore_plugins.workload import Zipf

CHATS = Path(__file__).parents[2] / "examples" / "chats.jsonl"
"""Chats of 45 sessions, and 15 alone."""


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (4, 2.776), (20, 2.086), (30, 2.042), (120, 1.980)]
)
def test_quantiles_are_those_of_students_t(degrees, quantile):
    """Quantiles of 97.5 % are those of published tables."""
    assert t_quantile(degrees) == pytest.approx(quantile, abs=5e-4)


def test_without_a_run_or_a_trial_nothing_is_known():
    """The quantile of no degree of freedom is infinite; no trial leaves all from 0 to 1."""
    assert t_quantile(0) == inf
    assert share_interval(0, 0) == (0, 1)


def test_stretches_add_up_to_the_figure():
    """The parts of stretches add up to sum and divisor of a figure, if it has one."""
    parts = sums(range(100), 50)
    assert [len(column) for column in parts] == [20, 20]
    assert ratio(parts) == pytest.approx(4950 / 50)
    assert ratio(sums([1, 2, 3], [2, 2, 2])) == 1
    assert sums([1], 0) is sums([0], [0]) is None


def test_a_bootstrap_is_wide_where_stretches_differ():
    """Equal stretches have an interval without width; it covers the sum of others."""
    assert bootstrap(sums([0.5] * 20, 1)) == (pytest.approx(10), pytest.approx(10))
    low, high = bootstrap(sums([0.0] * 10 + [1.0] * 10, 1))
    assert low < 10 < high
    assert bootstrap(sums([0.0] * 10 + [1.0] * 10, 1)) == (low, high)


def test_the_interval_of_a_share_stays_within_0_and_1():
    """Where one group has most of the hits and of the look-ups, both are drawn with it."""
    groups = [*range(26)]
    hits, lookups = [1] * 25 + [500], [2] * 25 + [502]
    low, high = bootstrap(sums(hits, lookups, groups))
    assert 0.5 == low < ratio(sums(hits, lookups, groups)) <= high < 1


def test_a_policy_has_no_difference_to_itself():
    """Both figures of a difference have the same groups in each draw."""
    parts = sums(range(40), range(1, 41))
    assert bootstrap(parts, parts) == (0, 0)


def turns(sessions, count=3):
    """Return requests of sessions, which take turns."""
    return [
        Request(
            id=f"{session}/{turn}",
            session=f"s{session}",
            prompt_tokens=8,
            key_tokens=8,
            keys=[1],
        )
        for turn in range(count)
        for session in range(sessions)
    ]


def test_requests_of_a_session_are_in_one_group():
    """All turns of a session are in its group; many sessions share groups evenly."""
    groups = session_groups(turns(50))
    assert session_groups(iter(turns(50))) == groups
    assert list(groups) == [request.id for request in turns(50)]
    assert all(len({groups[f"{s}/{t}"] for t in range(3)}) == 1 for s in range(50))
    assert sorted(set(groups.values())) == list(range(50))
    sizes = Counter(session_groups(turns(500, count=1)).values())
    assert set(sizes) == set(range(SESSIONS))
    assert set(sizes.values()) == {2, 3}


def test_few_sessions_are_not_drawn():
    """Traffic without sessions, or with few, is drawn by stretches of time."""
    alone = [Request(id=n, prompt_tokens=8, key_tokens=8) for n in range(100)]
    assert session_groups(alone) == session_groups(turns(20)) == {}
    mixed = session_groups([*turns(5), *alone])
    assert len(set(mixed.values())) == 105


def test_a_figure_that_rests_on_a_session_has_a_wide_interval():
    """Where one session has all hits, drawn sessions show it, and stretches of time do not."""
    requests = turns(40, count=20)
    hits = [float(request.session == "s7") for request in requests]
    groups = list(session_groups(requests).values())
    looked_up = [1] * len(hits)
    low, high = bootstrap(sums(hits, looked_up, groups))
    assert (low, high) == (0, pytest.approx(3 / 40, abs=1 / 40))
    low, high = bootstrap(sums(hits, 20))
    assert (low, high) == (pytest.approx(1), pytest.approx(1))


@pytest.mark.parametrize("mode", ["compare", "simulate"])
@pytest.mark.parametrize(
    ("workload", "parts_of"), [("zipf:requests=90,rate=20", 20), (CHATS, 60)]
)
def test_figures_by_parts_add_up_to_those_of_a_sweep(tmp_path, mode, workload, parts_of):
    """The shares of sessions, or stretches, add up to the columns of rows, in both modes."""
    grid = tmp_path / "grid.toml"
    timed = 'slo = "ttft=0.05"\n' if mode == "simulate" else ""
    below = 'blocks = 200\ntier = "host:memory=1GiB"\n'
    grid.write_text(f'mode = "{mode}"\nworkload = "{workload}"\n{below}{timed}')
    done = run_here("sweep", grid, "--out", tmp_path / "out", "--jobs", 1, "--json")
    (row,) = json.loads(done.stdout)["rows"]
    lines = (tmp_path / "out" / "journal.jsonl").read_text().splitlines()
    line = next(found for found in map(json.loads, lines) if "result" in found)
    parts = line["result"]["shares"]
    assert "shares" not in row
    for column, added in parts.items():
        assert ratio(added) == pytest.approx(row[column]), column
        assert [len(sums) for sums in added] == [parts_of, parts_of]


@pytest.mark.parametrize("share", [None, 8])
def test_look_ups_of_parts_are_those_of_the_row(share):
    """The look-ups of parts add up to those of a row, with private blocks too."""
    hints = Hints(share=share)
    made = [attrs.evolve(request, hints=hints) for request in Zipf(requests=90)]
    done = sweep(mode="compare", workload=[made], blocks=200)
    (row,), (parts,) = done.rows, done.shares
    assert fsum(parts["hit_ratio_block"][1]) == row["lookup_blocks"]


def test_a_rejected_request_is_in_no_share_of_hits():
    """A request that no pool of this size holds looks nothing up, in shares as in the row."""
    huge = Request(id="huge", prompt_tokens=8000, key_tokens=16, keys=range(-500, 0))
    done = sweep(mode="simulate", workload=[[huge, *Zipf(requests=30)]], blocks=200)
    (row,), (parts,) = done.rows, done.shares
    assert (row["rejected"], ratio(parts["hit_ratio_token"])) == (1, row["hit_ratio_token"])


@pytest.mark.parametrize("tier", ["none", "host:memory=1GiB"])
def test_a_sweep_prints_intervals(tmp_path, tier):
    """`sweep --intervals` prints each policy with its interval, with a tier too."""
    grid = tmp_path / "grid.toml"
    grid.write_text(
        'mode = "compare"\nworkload = "zipf:requests=90"\nblocks = 200\n'
        f'eviction = ["lru", "lfu"]\ntier = "{tier}"\n'
    )
    done = run_here("sweep", grid, "--out", tmp_path / "out", "--jobs", 1, "--intervals")
    header = done.stdout.splitlines()[2].split("  ")
    assert [cell.strip() for cell in header if cell] == [
        *("eviction", "hits, of blocks", "95 %", "to the first", "95 %")
    ]


@pytest.mark.parametrize(
    ("successes", "low", "high"), [(0, 0, 0.2775), (5, 0.2366, 0.7634), (10, 0.7225, 1)]
)
def test_the_interval_of_a_share_is_wilsons(successes, low, high):
    """Of 10 trials, as tables have it: within 0 and 1 at both ends."""
    assert share_interval(successes, 10) == pytest.approx((low, high), abs=5e-5)
