"""Two runs side by side, for people."""

import attrs
import pytest

from kvcore.analysis import Change, RequestOutcome, RunSummary, WhatIf
from kvcore.report import WhatIfReport
from kvcore.report.whatif import run_rows

RATIOS = {"block": 0.25, "token": 0.2, "request": None}
HIT = {"lookup_blocks": 40, "hit_blocks": 10, "self_hit_blocks": 0, "ratio": RATIOS}
SPREAD = {"mean": 1.0, "p50": 0.5, "p99": 4.0}
UNTIMED = RunSummary(
    config={"blocks": 9, "eviction": {"name": "lru", "options": {}}},
    requests=3,
    completed=3,
    rejected=0,
    hit=HIT,
    evicted_blocks=7,
    forgotten_blocks=0,
    compactions=0,
    compacted_tokens=0,
    preemptions={"pause": 0, "recompute": 0},
    ttft_s=None,
    tpot_s=None,
    e2e_s=None,
    queue_s=None,
    simulated_s=None,
    throughput_tokens_s=None,
    goodput=None,
    slo_met=None,
)
TIMED = attrs.evolve(
    UNTIMED, ttft_s=SPREAD, e2e_s=SPREAD, queue_s=SPREAD, throughput_tokens_s=100.0
)
CHANGES = [
    Change(
        "a",
        64,
        RequestOutcome(16, 2_000_000, rejected=False),
        RequestOutcome(48, 1_000_000, rejected=False),
    ),
    Change(
        "b",
        64,
        RequestOutcome(32, 1_000_000, rejected=False),
        RequestOutcome(0, 3_000_000, rejected=False),
    ),
    Change(
        "c",
        64,
        RequestOutcome(0, None, rejected=True),
        RequestOutcome(0, 9_000_000, rejected=False),
    ),
]


def report(before, after, changes=(), *, timed=False, here="1"):
    """Return the report of two runs."""
    found = WhatIf(
        file="t.jsonl",
        header={
            "mode": "untimed",
            "count": "tokens",
            "workload": {"name": "mine", "options": {}},
        },
        kvcore="1",
        here=here,
        workload="mine",
        timed=timed,
        recorded=before,
        rerun=after,
        changes=list(changes),
    )
    return WhatIfReport(found)


def test_what_was_different_is_told():
    """A line for each part of the configuration that differs, as the command line has it."""
    config = {"blocks": 8192, "eviction": {"name": "lfu", "options": {"unit": "s", "x": None}}}
    told = report(UNTIMED, attrs.evolve(UNTIMED, config=config)).headline
    assert told.splitlines() == [
        "mine: 3 requests of t.jsonl.",
        "blocks: 8,192 instead of 9",
        "eviction: lfu:unit=s instead of lru",
    ]


def test_all_that_was_run_again_is_told():
    """The setup has what is as recorded and what is not, and the version that ran it."""
    config = {"blocks": 8, "block_size": 16, "eviction": {"name": "lfu", "options": {"x": 1}}}
    told = report(UNTIMED, attrs.evolve(UNTIMED, config=config), here="2").setup
    assert told == (
        "Setup: kvcore 2 without a clock; workload mine; 8 blocks of 16 tokens (tokens "
        "counting); eviction lfu:x=1."
    )


def test_nothing_different_is_told():
    """A run again as recorded says so."""
    assert "nothing was to be different" in report(UNTIMED, UNTIMED).headline


def test_another_version_is_told():
    """Policies of another version may decide otherwise, whatever was asked."""
    told = report(UNTIMED, UNTIMED, here="2").headline
    assert "Recorded by kvcore 1; this is 2" in told


def test_changes_are_in_the_unit_of_the_value():
    """Shares change by points, counts by their difference; equal and unknown are told."""
    hit = HIT | {"hit_blocks": 4, "ratio": RATIOS | {"block": 0.1}}
    rows = report(UNTIMED, attrs.evolve(UNTIMED, hit=hit)).rows
    assert rows == [
        ["hit ratio by block", "25.0%", "10.0%", "-15.0 points"],
        ["hit ratio by token", "20.0%", "20.0%", "="],
        ["hit ratio by request", "–", "–", "–"],
        ["blocks hit", "10", "4", "-6"],
        ["blocks evicted", "7", "7", "="],
    ]


def test_times_change_in_percent():
    """Of a run with a clock there are times; what neither run has is a dash."""
    after = attrs.evolve(TIMED, ttft_s=SPREAD | {"mean": 0.5}, goodput=2.0, slo_met=0.5)
    rows = {name: cells for name, *cells in report(TIMED, after, timed=True).rows}
    assert rows["TTFT, mean"] == ["1 s", "500 ms", "-50.0%"]
    assert rows["TTFT, p99"] == ["4 s", "4 s", "="]
    assert rows["TPOT, mean"] == ["–", "–", "–"]
    assert rows["goodput, requests/s"] == ["–", "2", "–"]
    assert rows["rejected"] == ["0", "0", "="]


@pytest.mark.parametrize("factor", [0.9999, 1.0001])
def test_next_to_no_change_has_no_sign(factor):
    """What rounds to nothing is told from what is the same, and is no `-0.0%`."""
    hit = HIT | {"ratio": RATIOS | {"block": 0.25 * factor}}
    after = attrs.evolve(TIMED, hit=hit, ttft_s=SPREAD | {"mean": factor})
    rows = {row[0]: row[-1] for row in report(TIMED, after, timed=True).rows}
    assert rows["hit ratio by block"] == rows["TTFT, mean"] == "≈"
    assert rows["hit ratio by token"] == rows["TTFT, p99"] == "="


def test_goodput_has_rows_where_it_is_judged():
    """Without an SLO in either run there is nothing to say of it."""
    names = [row[0] for row in report(TIMED, TIMED, timed=True).rows]
    assert "within the SLO" not in names


def test_who_fared_better_and_worse():
    """Requests are counted and listed, those that changed most first."""
    told = report(TIMED, TIMED, CHANGES, timed=True)
    assert told.verdict == (
        "1 request hit more, 1 less. The first token comes earlier for 1, later for 1. Served "
        "only now: 1; rejected only now: 0."
    )
    tables = {headers[0]: rows for headers, rows in told.tables}
    assert tables == {
        "gained hits": [["a", "64", "16", "48", "2 ms", "1 ms"]],
        "lost hits": [["b", "64", "32", "0", "1 ms", "3 ms"]],
        "first token earlier": [["a", "64", "16", "48", "2 ms", "1 ms"]],
        "first token later": [["b", "64", "32", "0", "1 ms", "3 ms"]],
    }


@pytest.mark.parametrize("timed", [True, False])
def test_headers_fit_their_rows(timed):
    """Every table has a header for each cell, no two of them alike."""
    for headers, rows in report(TIMED, TIMED, CHANGES, timed=timed).tables:
        assert len(set(headers)) == len(headers) == len(rows[0])


def test_compactions_are_told_where_one_run_has_some():
    """As rows; of two runs without any nothing is said."""
    after = attrs.evolve(UNTIMED, compactions=2, compacted_tokens=1500)
    rows = {name: cells for name, *cells in report(UNTIMED, after).rows}
    assert rows["compactions"] == ["0", "2", "+2"]
    assert rows["tokens forgotten"] == ["0", "1,500", "+1,500"]


def test_several_runs_differ_from_the_first():
    """Each has its value and its change; more than ten times as much is a factor."""
    runs = [
        attrs.evolve(TIMED, throughput_tokens_s=speed, evicted_blocks=evicted)
        for speed, evicted in ((100.0, 7), (4_200.0, 9), (None, 7))
    ]
    rows = {row[0]: row[1:] for row in run_rows(runs, timed=True)}
    assert rows["generated tokens/s"] == ["100", "4,200", "42 times", "–", "–"]
    assert rows["blocks evicted"] == ["7", "9", "+2", "7", "="]


def test_one_run_has_no_changes():
    """A row is its name and its value."""
    assert {len(row) for row in run_rows([TIMED], timed=True)} == {2}


def test_an_slo_that_was_different_is_told_in_seconds():
    """A trace has ns, and the command line seconds."""
    told = report(
        attrs.evolve(UNTIMED, config={"slo": {}}),
        attrs.evolve(UNTIMED, config={"slo": {"ttft": 1_500_000_000, "tpot": 10**8}}),
    ).headline
    assert "slo: ttft=1.5,tpot=0.1 instead of none" in told.splitlines()


def test_a_limit_that_was_different_is_told_alone():
    """The others of a step are as recorded."""
    caps = {"max_tokens": 8192, "max_seqs": 256, "chunked": True}
    told = report(
        attrs.evolve(UNTIMED, config={"batching": caps}),
        attrs.evolve(UNTIMED, config={"batching": {**caps, "max_seqs": 9}}),
    ).headline
    assert told.splitlines()[1:] == ["max seqs: 9 instead of 256"]
