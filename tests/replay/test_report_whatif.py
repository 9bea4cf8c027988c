"""The report of a run beside the same run with other options."""

import attrs
import pytest

from kvcore_replay.recorded_run import RunSummary
from kvcore_replay.report.whatif import WhatIfReport, run_rows
from kvcore_replay.what_if import Change, RequestOutcome, WhatIf

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
    """Return the report on the runs `before` and `after`."""
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


def test_the_headline_has_a_line_per_changed_option():
    """The headline has a line per changed option, as the command line takes it."""
    config = {"blocks": 8192, "eviction": {"name": "lfu", "options": {"unit": "s", "x": None}}}
    headline = report(UNTIMED, attrs.evolve(UNTIMED, config=config)).headline
    assert headline.splitlines() == [
        "mine: 3 requests of t.jsonl.",
        "blocks: 8,192 instead of 9",
        "eviction: lfu:unit=s instead of lru",
    ]


def test_the_setup_has_options_and_version_of_the_second_run():
    """The setup has the options of the second run, and the version that ran it."""
    config = {"blocks": 8, "block_size": 16, "eviction": {"name": "lfu", "options": {"x": 1}}}
    setup = report(UNTIMED, attrs.evolve(UNTIMED, config=config), here="2").setup
    assert setup == (
        "Setup: kvcore 2 without a clock; workload mine; 8 blocks of 16 tokens (tokens "
        "counting); eviction lfu:x=1."
    )


def test_the_headline_names_both_versions_of_kvcore():
    """The headline names both versions of kvcore if they differ."""
    headline = report(UNTIMED, UNTIMED, here="2").headline
    assert "Recorded by kvcore 1; this is 2" in headline


def test_changes_are_in_the_unit_of_the_value():
    """Shares change by points and counts by their difference.

    Equal values are marked `=`, and unknown ones are dashes.
    """
    hit = HIT | {"hit_blocks": 4, "ratio": RATIOS | {"block": 0.1}}
    rows = report(UNTIMED, attrs.evolve(UNTIMED, hit=hit)).table.rows
    assert rows == [
        ["hit ratio by block", "25.0%", "10.0%", "-15.0 points"],
        ["hit ratio by token", "20.0%", "20.0%", "="],
        ["hit ratio by request", "–", "–", "–"],
        ["blocks hit", "10", "4", "-6"],
        ["blocks evicted", "7", "7", "="],
    ]


def test_times_change_in_percent():
    """Timed runs have rows of times, which change in percent; unknown values are dashes."""
    after = attrs.evolve(TIMED, ttft_s=SPREAD | {"mean": 0.5}, goodput=2.0, slo_met=0.5)
    rows = {name: cells for name, *cells in report(TIMED, after, timed=True).table.rows}
    assert rows["TTFT, mean"] == ["1 s", "500 ms", "-50.0%"]
    assert rows["TTFT, p99"] == ["4 s", "4 s", "="]
    assert rows["TPOT, mean"] == ["–", "–", "–"]
    assert rows["goodput, requests/s"] == ["–", "2", "–"]
    assert rows["rejected"] == ["0", "0", "="]


@pytest.mark.parametrize("factor", [0.9999, 1.0001])
def test_a_change_that_rounds_to_0_has_a_mark_of_its_own(factor):
    """A change that rounds to 0 is marked `≈`, and equal values are marked `=`."""
    hit = HIT | {"ratio": RATIOS | {"block": 0.25 * factor}}
    after = attrs.evolve(TIMED, hit=hit, ttft_s=SPREAD | {"mean": factor})
    rows = {row[0]: row[-1] for row in report(TIMED, after, timed=True).table.rows}
    assert rows["hit ratio by block"] == rows["TTFT, mean"] == "≈"
    assert rows["hit ratio by token"] == rows["TTFT, p99"] == "="


def test_requests_with_better_or_worse_results_are_listed():
    """Requests with more or fewer hits, or a first token earlier or later, are listed."""
    compared = report(TIMED, TIMED, CHANGES, timed=True)
    assert compared.verdict == (
        "1 request hit more, 1 less. The first token comes earlier for 1, later for 1. Served "
        "only now: 1; rejected only now: 0."
    )
    tables = {table.headers[0]: table.rows for table in compared.tables}
    assert tables == {
        "gained hits": [["a", "64", "16", "48", "2 ms", "1 ms"]],
        "lost hits": [["b", "64", "32", "0", "1 ms", "3 ms"]],
        "first token earlier": [["a", "64", "16", "48", "2 ms", "1 ms"]],
        "first token later": [["b", "64", "32", "0", "1 ms", "3 ms"]],
    }


def test_compactions_have_rows_if_one_run_has_any():
    """If one run has compactions, there are rows for them and for the tokens removed."""
    after = attrs.evolve(UNTIMED, compactions=2, compacted_tokens=1500)
    rows = {name: cells for name, *cells in report(UNTIMED, after).table.rows}
    assert rows["compactions"] == ["0", "2", "+2"]
    assert rows["tokens forgotten"] == ["0", "1,500", "+1,500"]


def test_several_runs_differ_from_the_first():
    """Each run has its value and its change from the first run.

    A change to more than ten times the value, or to less than a tenth of it, is a factor.
    """
    runs = [
        attrs.evolve(TIMED, throughput_tokens_s=speed, evicted_blocks=evicted)
        for speed, evicted in ((100.0, 7), (4_200.0, 9), (None, 7), (2.0, 7))
    ]
    rows = {row[0]: row[1:] for row in run_rows(runs, timed=True)}
    speeds = ["100", "4,200", "42 times", "–", "–", "2", "50 times less"]
    assert rows["generated tokens/s"] == speeds
    assert rows["blocks evicted"] == ["7", "9", "+2", "7", "=", "7", "="]


def test_one_block_in_billions_is_a_change():
    """A count that changes by one has changed, however large it is."""
    runs = [attrs.evolve(UNTIMED, evicted_blocks=10**10 + more) for more in (0, 1, 0)]
    rows = {row[0]: row[1:] for row in run_rows(runs, timed=False)}
    assert rows["blocks evicted"][2::2] == ["+1", "="]


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


def test_memory_of_a_tier_is_told_with_its_unit():
    """Bytes of a tier are GiB, as on the command line."""
    tier = {"name": "host", "options": {"memory": 64 * 2**30, "load": None}}
    told = report(
        attrs.evolve(UNTIMED, config={"tiers": []}),
        attrs.evolve(UNTIMED, config={"tiers": [tier]}),
    ).headline
    assert "tiers: host:memory=64GiB instead of none" in told.splitlines()
