"""The report of a simulation: its warnings, its headline and its amounts."""

from __future__ import annotations

import pytest
from helpers.configs import CONFIG

from kvcore_cli.report.simulation import SimulationReport, sparkline

SPREAD = {"mean": 1.5, "p50": 1.0, "p90": 2.0, "p95": 2.5, "p99": 0.0125}
SATURATION = {"saturated": True, "why": "3 requests/s come and 2/s are served"}


def summary(**changes):
    """Return the summary of a run, with some values changed."""
    timeline = {"t_s": [0.0, 1.0], "active": [0, 5], "cached": [0, 2], "free": [10, 3]}
    return {
        "requests": 3,
        "completed": 3,
        "rejected": 0,
        "offered_load": 0.5,
        "saturation": None,
        "simulated_s": 10.0,
        "wall_s": 0.002,
        "steps": 1,
        **dict.fromkeys(("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s"), SPREAD),
        "throughput_tokens_s": 12.0,
        "goodput": 0.25,
        "slo": {
            "ttft_s": 30.0,
            "tpot_s": None,
            "deadline_s": 60.0,
            "own": 0,
            "judged": 3,
            "met": 0.75,
        },
        "preemptions": {"pause": 1, "recompute": 2},
        "pins": {"refused_blocks": 0, "yielded": 0},
        "forgotten_blocks": 0,
        "compactions": 0,
        "compacted_tokens": 0,
        "deferred_compactions": 0,
        "evicted_blocks": 1,
        "hit": {
            "lookup_blocks": 4,
            "hit_blocks": 1,
            "self_hit_blocks": 0,
            "ratio": {"block": 0.25, "token": 0.2, "request": 0.5},
        },
        "residency": None,
        "pool": {
            "block_size": 16,
            "blocks": 10,
            "active": {"mean": 2.5, "peak": 5},
            "cached": {"mean": 1.0},
            "timeline": timeline,
        },
        **changes,
    }


def amounts(**changes):
    """Return the amounts in the report of a run, by name."""
    report = SimulationReport(summary(**changes), CONFIG)
    return {name: amount for name, amount in report.amounts if name}


def test_compactions_are_reported_if_there_are_any():
    """Compactions, if any, are reported with the tokens removed and the times deferred."""
    assert "compactions" not in amounts()
    compactions = amounts(compactions=2, compacted_tokens=1500)["compactions"]
    assert compactions == "2 removed 1,500 tokens"
    compactions = amounts(deferred_compactions=3)["compactions"]
    assert compactions == "0 removed 0 tokens, 3 times put off without room"


@pytest.mark.parametrize("found", [None, SATURATION | {"saturated": False}])
def test_there_is_no_warning_of_a_queue_that_does_not_grow(found):
    """There is no warning unless the queue is found to grow, whatever the load is."""
    report = SimulationReport(summary(offered_load=2.0, saturation=found), CONFIG)
    assert report.warning == ""


@pytest.mark.parametrize(
    ("load", "much"),
    [(1.6, "at least 1.60 times what"), (0.97, "more than"), (None, "more than")],
)
def test_a_queue_that_grows_is_warned_of(load, much):
    """A growing queue is warned of with the reason, and with the load if it is known."""
    report = SimulationReport(summary(offered_load=load, saturation=SATURATION), CONFIG)
    first, _, rest = report.warning.partition(": ")
    assert first == "SATURATED"
    assert rest.startswith(f"mine asks for {much} 2 x h100 can do: {SATURATION['why']}. The ")


def test_the_warning_has_the_share_that_misses_the_slo():
    """The warning names the share of requests that miss the SLO.

    With `searching` it announces the options that would sustain the load.
    """
    slo = summary()["slo"] | {"met": 0.0}
    figures = summary(saturation=SATURATION, slo=slo)
    warning = SimulationReport(figures, CONFIG, searching=True).warning
    assert "; 100% of the requests miss the SLO." in warning
    assert warning.endswith("The search for what would hold is below.")


def test_unknown_outputs_are_explained_in_the_headline():
    """If no request has a first token, the headline explains why, and amounts are left out."""
    unknown = dict.fromkeys(("ttft_s", "tpot_s", "itl_s", "throughput_tokens_s", "goodput"))
    report = SimulationReport(summary(**unknown), CONFIG)
    assert "outputs are unknown: no completed request asks for any." in report.headline
    assert not {"throughput", "goodput", "within the SLO"} & {row[0] for row in report.amounts}


def test_the_share_within_the_slo_is_of_judged_requests():
    """The share within the SLO is that of the judged requests, whose number is shown."""
    slo = summary()["slo"] | {"judged": 2}
    assert amounts(slo=slo)["within the SLO"] == "75.0% of 2 judged (TTFT 30 s, E2E 60 s)"


@pytest.mark.parametrize(
    ("scale", "times"),
    [(1e-9, "1e-09"), (0.0125, "0.0125"), (0.5, "0.5"), (2, "2"), (1234.5, "1,234")],
)
def test_the_headline_has_the_rate_however_slow(scale, times):
    """A run at another rate says so with three digits, and never at 0 times the rate."""
    headline = SimulationReport(summary(), CONFIG | {"rate_scale": scale}).headline
    assert f" {times} times as fast as recorded," in " ".join(headline.split())


def test_the_headline_names_workload_model_and_devices():
    """The headline has workload, model, devices, pool, load and outcome."""
    assert SimulationReport(summary(), CONFIG).headline.splitlines() == [
        "mine: 3 requests to llama-3.1-8b on 2 x h100, in 10 simulated seconds.",
        "Pool: 10 blocks of 16 tokens, 160 tokens in all, 20 MiB in fp16.",
        "Load: at least 0.50 of what this deployment can do.",
        "3 completed, none rejected.",
    ]


def test_the_headline_says_where_the_pool_is_the_limit():
    """With a low load and a full pool, a TTFT that is mostly waiting is explained."""
    spread = dict.fromkeys(("p50", "p90", "p95", "p99"), 1.0)
    times = {"ttft_s": spread | {"mean": 353.0}, "queue_s": spread | {"mean": 352.0}}
    full = summary()["pool"] | {"active": {"mean": 8.0, "peak": 10}}
    said = "The pool is the limit, not compute: of a mean TTFT of 353 s, 352 s are waiting"
    assert said in SimulationReport(summary(**times, pool=full), CONFIG).headline
    for other in (
        {"pool": full | {"active": {"mean": 1.0, "peak": 10}}},
        {"offered_load": 1.5},
        {"queue_s": spread | {"mean": 100.0}},
    ):
        changed = {"pool": full, **times, **other}
        assert "limit" not in SimulationReport(summary(**changed), CONFIG).headline


def test_the_headline_has_the_reason_of_rejections():
    """The headline gives the reason of the first rejection."""
    report = SimulationReport(
        summary(completed=1, rejected=2), CONFIG, refusal="it is too long"
    )
    assert report.headline.endswith("1 completed, 2 rejected; the first: it is too long.")


def test_times_have_a_unit_each():
    """Times have three digits and a suitable unit each."""
    rows = SimulationReport(summary(), CONFIG).times
    assert rows[0] == ["TTFT", "1.5 s", "1 s", "2 s", "2.5 s", "12.5 ms"]
    assert [name for name, *_ in rows] == ["TTFT", "TPOT", "ITL", "E2E", "queueing"]


def test_amounts_are_goodput_hits_evictions_and_pool_usage():
    """The amounts are goodput, hits, preemptions, evictions and the use of the pool."""
    found = amounts()
    assert found["goodput"] == "0.25 requests/s within the SLO"
    assert found["within the SLO"] == "75.0% (TTFT 30 s, E2E 60 s)"
    assert found["prefix hits"] == "25.0% of 4 blocks"
    assert found["preemptions"] == "1 paused, 2 recomputed"
    assert found["evicted"] == "1 block"
    assert found["pool in use"] == "25.0%, 10.0% cached"
    assert found["at its peak"] == "50.0%"


def test_amounts_that_are_not_known_are_left_out():
    """Unknown amounts are left out, such as goodput without an SLO or hits without lookups."""
    hit = summary()["hit"] | {"lookup_blocks": 0}
    pool = summary()["pool"] | {"active": {"mean": None, "peak": 0}}
    found = amounts(goodput=None, throughput_tokens_s=None, hit=hit, pool=pool)
    assert not {"goodput", "within the SLO", "throughput", "prefix hits", "pool in use"} & {
        *found
    }


def test_blocks_found_again_after_a_preemption_are_no_prefix_hits():
    """Blocks of a preempted request that it finds again are not counted as prefix hits."""
    hit = summary()["hit"] | {"self_hit_blocks": 7}
    assert amounts(hit=hit)["own blocks again"] == "7 found after preemption"


@pytest.mark.parametrize(
    ("ttft", "own", "label"),
    [
        (None, 2, "their own"),
        (5.0, 1, "TTFT 5 s; 1 by their own"),
        (5.0, 3, "their own"),
        (5.0, 0, "TTFT 5 s"),
    ],
)
def test_requests_with_an_slo_are_counted_beside_the_slo_of_the_run(ttft, own, label):
    """The number of requests with an SLO of their own is shown beside the SLO of the run.

    If all requests have one, or the run has none, the share is marked "their own".
    """
    slo = {"ttft_s": ttft, "tpot_s": None, "deadline_s": None}
    slo |= {"own": own, "judged": 3, "met": 0.5}
    assert amounts(slo=slo)["within the SLO"] == f"50.0% ({label})"


def test_residency_has_times_in_seconds_and_hits():
    """Residency has times in seconds and hits as numbers, and omits what is unknown."""
    rested = {"age_at_hit_s": SPREAD, "hits_at_eviction": SPREAD}
    rested |= dict.fromkeys(("age_at_eviction_s", "lifetime_s"))
    rows = SimulationReport(summary(residency={"gpu": rested}), CONFIG).resting
    assert rows == [
        ["since last use, at a hit", "1.5 s", "1 s", "2 s", "2.5 s", "12.5 ms"],
        ["hits, at eviction", "1.5", "1", "2", "2.5", "0.01"],
    ]
    assert SimulationReport(summary(), CONFIG).resting == []


def test_a_sparkline_is_a_step_function():
    """A bar of a sparkline is the share that holds in the middle of its interval."""
    assert sparkline([0.0, 2.0, 4.0], [0.0, 1.0, 0.5], 4) == "▁▁██"
    assert sparkline([5.0], [0.5], 3) == "▅▅▅"
    assert sparkline([], [], 3) == ""
