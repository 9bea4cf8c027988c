"""Explanations of misses as text: a sentence for every reason."""

from __future__ import annotations

import pytest
from helpers.caches import Mortal
from helpers.traces import BLOCK, ask

from kvcore import KVCache, Trace
from kvcore_plugins.eviction import LRU
from kvcore_replay.misses.explain import explain
from kvcore_replay.report.misses import RequestReport, SummaryReport
from kvcore_replay.untimed import replay


@pytest.fixture
def explained(tmp_path):
    """Return a function that replays requests 1 ns apart, and explains their misses."""

    def make(*requests, blocks=8, eviction=None, accounting="tokens"):
        file = tmp_path / "trace.jsonl"
        for now, request in enumerate(requests):
            request.arrival = request.arrival or now
        with Trace(file) as trace:
            eviction = LRU() if eviction is None else eviction
            cache = KVCache(
                blocks, BLOCK, eviction=eviction, accounting=accounting, trace=trace
            )
            replay(requests, cache)
        return explain(file, source="run")

    return make


def report_lines(explanation, name):
    """Return the lines of the report on a request."""
    return str(RequestReport(explanation, explanation.of(name))).splitlines()


def test_an_eviction_is_reported_with_policy_time_and_requests(explained):
    """A miss by eviction names the policy, the last user and the request that evicted it.

    It also has the time of the eviction, and how long before this use that was.
    """
    explanation = explained(
        ask("a", "ab"), ask("thief", "pqrstu"), ask("b", "ab", 9, arrival=2 * 10**9), blocks=6
    )
    assert report_lines(explanation, "b")[:3] == [
        "Request b of run: arrived at 2 s, admitted at 2 s as sequence 3.",
        "Of 9 tokens, 0 hit and 9 missed:",
        (
            "- from token 0 to 8 (8 tokens, 130 us of prefill): capacity. Used last by request "
            "a. Evicted at 1 ns by lru for request thief, 2 s before this use and 1 ns "
            "after they were stored or hit last, with 0 hits. The optimum would not have had "
            "them."
        ),
    ]
    assert report_lines(explanation, "b")[-1].startswith(
        "The optimum evicts the block whose next"
    )


def test_losses_that_differ_only_in_evictions_are_one_line(explained):
    """Losses that differ only in their evictions are one line, with the first and the last."""
    scan = [ask("x", "xyzu"), ask("y", "m"), ask("z", "n")]
    explanation = explained(ask("a", "abcd"), *scan, ask("b", "abcd", 17))
    evicted = [line for line in report_lines(explanation, "b") if "Used last" in line]
    assert len(explanation.of("b").losses) > 1 == len(evicted)
    assert "Evicted from 2 ns (by lru for request y) to 3 ns (for request z)" in evicted[0]


def test_an_expired_block_is_reported_with_its_idle_time(explained):
    """An expired block is reported with the time of the drop and the time since its use."""
    explanation = explained(ask("a", "ab"), ask("b", "ab", 9, arrival=50), eviction=Mortal())
    assert (
        "Used last by request a. Expired; dropped at 50 ns, 0 ns before this use and 50 ns "
        "after they were stored or hit last."
    ) in "\n".join(report_lines(explanation, "b"))


def test_each_cause_of_a_compulsory_miss_has_a_sentence(explained):
    """A compulsory miss has a sentence for each cause.

    It continues a prompt, differs from one, starts with other text, or ends within a block.
    """
    explanation = explained(
        ask("one", "ab"),
        ask("more", "abcd"),
        ask("other", "abxy"),
        ask("third", "abpq"),
        ask("new", "z", salt="s"),
        ask("cut", "abcdx", 18),
        blocks=99,
        accounting="keys",
    )
    words = {
        name: report_lines(explanation, name)[2] for name in ("more", "other", "new", "cut")
    }
    assert words["more"].endswith("Goes on where request one ends, as no request did before.")
    assert words["other"].endswith(
        "Parts from request more between tokens 8 and 12; 2 requests part here, 50% into their "
        "prompts."
    )
    assert "Of other salts there were 4; whether one has the same text cannot" in words["new"]
    assert "Its last key covers a part of a block" in words["cut"]


def test_a_trace_without_requests_has_an_empty_summary(explained):
    """The summary of a trace without requests has no rows."""
    explanation = explained()
    report = SummaryReport.from_explanation(explanation, explanation.summary())
    assert [each.rows for each in (report.table, report.places, report.requests)] == [[]] * 3
    assert "Of 0 prompt tokens, 0 hit (0.0%) and 0 missed." in report.headline


def test_the_summary_counts_tokens_that_other_salts_may_hold(explained):
    """The summary names the number of tokens that may be cached under other salts."""
    explanation = explained(ask("a", "ab", salt="x"), ask("b", "pq", salt="y"))
    report = SummaryReport.from_explanation(explanation, explanation.summary())
    assert "8 tokens came after requests of other salts" in report.notes


def test_rankings_of_different_lengths_are_side_by_side(explained):
    """The two rankings are side by side; the shorter one has empty cells at its end."""
    explanation = explained(
        *(ask(name, name) for name in "abc"),
        ask("thief", "pqrstu"),
        *(ask(name.upper(), name, 5) for name in "abc"),
        blocks=6,
    )
    rows = SummaryReport.from_explanation(explanation, explanation.summary()).requests.rows
    assert [row[0] for row in rows] == ["A", "B", "C"]
    assert [row[2:] for row in rows] == [["thief", "12"], ["", ""], ["", ""]]
