"""`explain` with lower tiers: blocks that were loaded, recomputed, unreadable or dropped."""

import pytest
from helpers.traces import BLOCK, TIERS, ask, lines, seal, serve_tiers

from kvcore.units import format_seconds
from kvcore_replay.misses.explain import explain
from kvcore_replay.report.misses import RequestReport, SummaryReport

SLOW = [tier.replace("load=always", "load=cost") for tier in TIERS]


def losses(explanation, request):
    """Return the segments of a request: reason, first token, tokens, tier, ns to load."""
    return [
        (loss.category, loss.first, loss.tokens, loss.tier, loss.load_ns)
        for loss in explanation.of(request).losses
    ]


def report_of(explanation, request):
    """Return the report of a request."""
    return str(RequestReport(explanation, explanation.of(request)))


def left(path):
    """Record a request that comes again after a tier has dropped its blocks."""
    requests = [
        ask("a", "abcd", output_tokens=1, arrival=0),
        ask("b", "efgh", output_tokens=1, arrival=100),
        ask("c", "ijkl", output_tokens=1, arrival=200),
        ask("again", "abcd", output_tokens=1, arrival=300),
    ]
    return serve_tiers(path, ("host:memory=4000,load=always",), requests, blocks=4)


def test_a_loaded_segment_has_its_times(tmp_path):
    """A loaded segment has the time of its load, and the prefill that it saved."""
    explanation = explain(serve_tiers(tmp_path / "trace.jsonl"))
    assert losses(explanation, "again") == [
        ("loaded", 0, 4, "host", 6),
        ("loaded", 4, 12, "disk", 26),
        ("compulsory", 16, 4, None, None),
    ]
    prefill = format_seconds(explanation.cost(4, 12))
    text = report_of(explanation, "again")
    assert f"Lower tier disk: loaded in 26 ns instead of at least {prefill} of prefill." in text
    assert "Of 20 tokens, 0 hit and 20 missed, of which 16 came from lower tiers:" in text


def test_a_recomputed_segment_has_its_tier_and_load_time(tmp_path):
    """A recomputed segment has the tier that held it, and the time of its load."""
    explanation = explain(serve_tiers(tmp_path / "trace.jsonl", SLOW))
    assert losses(explanation, "again") == [
        ("recomputed", 0, 4, "host", 6),
        ("recomputed", 4, 12, "disk", 26),
        ("compulsory", 16, 4, None, None),
    ]
    text = report_of(explanation, "again")
    assert "In lower tier disk, but recomputing was cheaper: to load them would have" in text


def test_the_rest_of_a_partial_load_is_recomputed(tmp_path):
    """If only a part was loaded, the rest is `recomputed`, with the time of loading it too."""
    path = serve_tiers(tmp_path / "trace.jsonl")
    events = lines(path)[:42]
    events[33] |= {"blocks": 2, "done": 324}
    del events[34:]
    seal(path, events)
    assert losses(explain(path), "again") == [
        ("loaded", 0, 4, "host", 6),
        ("loaded", 4, 8, "disk", 24),
        ("recomputed", 12, 4, "disk", 26),
        ("compulsory", 16, 4, None, None),
    ]


def test_a_load_of_what_a_tier_without_loads_has_too_is_one(tmp_path):
    """Blocks of two tiers, of which the farther one loads all, are one load, counted once."""
    tiers = (TIERS[0].replace("load=always", "load=never"), *TIERS[1:])
    explanation = explain(path := serve_tiers(tmp_path / "trace.jsonl", tiers))
    (load,) = (line for line in lines(path) if line["event"] == "LOAD_START")
    took = load["done"] - load["t"]
    assert losses(explanation, "again")[0] == ("loaded", 0, 16, "disk", took)
    assert explanation.summary().load_s == took / 1e9


def test_with_load_never_segments_are_recomputed(tmp_path):
    """With load=never a segment in a tier is `recomputed`, and the report gives the reason."""
    never = [tier.replace("load=always", "load=never") for tier in TIERS]
    explanation = explain(serve_tiers(tmp_path / "trace.jsonl", never))
    assert losses(explanation, "again")[0] == ("recomputed", 0, 4, "host", None)
    assert "from which nothing is loaded (load=never)" in report_of(explanation, "again")


def test_blocks_that_a_tier_failed_to_deliver_are_unreadable(tmp_path):
    """Blocks that a tier held and could not deliver are `unreadable`."""
    path = serve_tiers(tmp_path / "trace.jsonl")
    events = lines(path)[:37]
    events[36] |= {"blocks": 1}
    explanation = explain(seal(path, events))
    assert losses(explanation, "again")[1:3] == [
        ("loaded", 4, 4, "disk", 26),
        ("unreadable", 8, 8, "disk", 26),
    ]
    assert "Lower tier disk had them, but they could not be" in report_of(explanation, "again")


def test_a_load_by_the_wall_clock_ends_at_its_line(tmp_path):
    """By the wall clock a load takes the time from the admission to its LOAD."""
    path = serve_tiers(tmp_path / "trace.jsonl")
    events = lines(path)
    events[0]["mode"] = "wall"
    assert losses(explain(seal(path, events)), "again")[0] == ("loaded", 0, 4, "host", 26)


def test_a_dropped_segment_has_the_time_and_beneficiary_of_the_drop(tmp_path):
    """Blocks that a tier has dropped have the time, reason and beneficiary of the DROP."""
    explanation = explain(left(tmp_path / "trace.jsonl"))
    (loss,) = explanation.of("again").losses[:1]
    assert (loss.category, loss.tier, loss.tokens) == ("capacity", None, 3 * BLOCK)
    drop = loss.drop
    assert (drop.tier, drop.time, drop.reason, drop.beneficiary) == (
        "host",
        200,
        "capacity",
        "b",
    )
    text = "They left lower tier host at 200 ns (capacity) for blocks of request b."
    assert text in report_of(explanation, "again")


@pytest.mark.parametrize("tiers", [(), TIERS, SLOW])
def test_every_missed_token_has_one_reason(tmp_path, tiers):
    """With or without tiers, the losses of a prompt add up to the tokens that missed."""
    explanation = explain(serve_tiers(tmp_path / "trace.jsonl", tiers))
    for reasons in explanation.requests.values():
        at = reasons.hit
        for loss in reasons.losses:
            assert (loss.first, loss.tokens > 0) == (at, True)
            at = loss.end
        assert at == reasons.tokens
    summary = explanation.summary()
    assert sum(lost.tokens for lost in summary.categories.values()) == summary.missed_tokens


def test_the_summary_sums_loads_and_saved_prefill(tmp_path):
    """The summary has the time of all loads, and the prefill that they saved."""
    explanation = explain(serve_tiers(tmp_path / "trace.jsonl"))
    summary = explanation.summary()
    loaded = summary.categories["loaded"]
    saved = explanation.cost(0, 4) + explanation.cost(4, 12)
    assert (loaded.tokens, loaded.seconds, summary.load_s) == (16, pytest.approx(saved), 32e-9)
    note = "Lower tiers: 16 tokens were loaded in 32 ns in all, queues included, instead of"
    assert note in SummaryReport.from_explanation(explanation, summary).notes
    assert summary.as_dict()["load_s"] == 32e-9


def test_the_json_of_a_segment_has_tier_load_and_drop(tmp_path):
    """The JSON of a segment has the tier, the seconds of its load, and the DROP."""
    explanation = explain(serve_tiers(tmp_path / "a.jsonl"))
    host = explanation.request_dict(explanation.of("again"))["losses"][0]
    assert (host["tier"], host["load_s"], host["drop"]) == ("host", 6e-9, None)
    explanation = explain(left(tmp_path / "b.jsonl"))
    drop = explanation.request_dict(explanation.of("again"))["losses"][0]["drop"]
    assert {name: drop[name] for name in ("tier", "reason", "for")} == {
        "tier": "host",
        "reason": "capacity",
        "for": "b",
    }
