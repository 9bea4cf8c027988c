"""Tests of `kvcore explain`: what it explains and prints, and its errors."""

from __future__ import annotations

import json
from functools import partial

import pytest
from helpers import serving
from helpers.commands import stdout_of
from helpers.traces import record, serve

from kvcore_lab.comparison import compare
from kvcore_plugins.workload import Zipf

SMALL = "zipf:requests=60,prefixes=6,prefix_tokens=64,suffix_tokens=32"

run = partial(stdout_of, "explain")


@pytest.fixture
def trace(tmp_path):
    """Return the path of a recorded trace."""
    return record(tmp_path / "trace.jsonl")


def test_a_request_is_explained_in_sentences(trace):
    """Without `--json` a request is explained in sentences, with its arrival and its losses."""
    shown = " ".join(run(trace, "same").split())
    assert shown.startswith(f"Request same of {trace}: arrived at")
    assert "Parts from request first between tokens 8 and 12" in shown


def test_a_summary_is_tables_with_the_rule_of_the_optimum():
    """Without `--json` a summary has its tables and states the rule of the optimum."""
    out = run(SMALL, "--summary", "--blocks", 12)
    for words in ("lost ", "compulsory", "parting at token", "lost for it", "deepest first"):
        assert words in out


def test_a_run_with_a_clock_counts_rejected_and_readmitted_requests(tmp_path):
    """The summary of a run with a clock counts rejected and readmitted requests.

    It does not mention the optimum, since no miss is due to an eviction.
    """
    shown = " ".join(run(serve(tmp_path / "served.jsonl"), "--summary").split())
    assert "1 rejected" in shown
    assert "1 admitted again after preemption" in shown
    assert "optimum" not in shown


@pytest.mark.parametrize("asked", ["--summary", "late"])
def test_a_run_with_a_clock_states_the_rule_of_the_optimum(tmp_path, asked):
    """For a run with a clock the report states that the optimum replays requests one by one."""
    requests = [
        serving.ask("early", 0, 8, keys=[1, 2]),
        serving.ask("thief", 100, 16, keys=[5, 6, 7, 8]),
        serving.ask("late", 200, 12, keys=[1, 2, 3]),
    ]
    (tmp_path / "run.jsonl").write_bytes(serving.serve(requests, blocks=4).trace)
    shown = " ".join(run(tmp_path / "run.jsonl", asked).split())
    assert "deepest first among equals" in shown
    assert "This run had a clock; the optimum replays its requests one after another" in shown


@pytest.mark.parametrize(
    ("asked", "words"), [("--summary", "The requests have no keys"), ("3", "It has no keys")]
)
def test_requests_without_keys_have_a_reason_and_no_hits(tmp_path, asked, words):
    """For requests without keys the report has the reason and an option, and no hits."""
    path = tmp_path / "lengths.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:17:0{second}.0,374,44\n" for second in range(5))
    )
    shown = " ".join(run(path, asked, "--blocks", 99).split())
    assert f"{words}: there is nothing to look up. --accounting tokens counts" in shown
    assert "0 hit" not in shown


def test_rejected_and_preempted_requests_are_explained(tmp_path):
    """A rejected request has the reason, and a preempted one how often it was readmitted."""
    file = serve(tmp_path / "served.jsonl")
    shown = " ".join(run(file, "huge").split())
    assert shown.endswith("was turned away: needs 9 blocks, the pool has 8.")
    assert json.loads(run(file, "huge", "--json"))["state"] == "rejected"
    assert "admitted again 1 time" in " ".join(run(file, "long").split())


def test_a_workload_is_replayed_first():
    """A workload is replayed with the given pool and policy, with the hits of `compare`."""
    shown = json.loads(run(SMALL, "--summary", "--blocks", 20, "--eviction", "fifo", "--json"))
    workload = Zipf(requests=60, prefixes=6, prefix_tokens=64, suffix_tokens=32)
    (row,) = compare(workload, "fifo", 20).rows
    assert shown["hit_tokens"] == row.hit_blocks * row.block_size
    assert (shown["source"], shown["eviction"], shown["blocks"]) == ("zipf", "fifo", 20)
    assert sum(lost["tokens"] for lost in shown["lost"].values()) == shown["missed_tokens"]


def test_a_workload_has_the_accounting_and_block_size_of_compare():
    """`explain` of a workload has the accounting, block size and prefix cache of `compare`."""
    arguments = (
        SMALL,
        "--summary",
        "--blocks",
        40,
        "--accounting",
        "tokens",
        "--block-size",
        8,
    )
    shown = json.loads(run(*arguments, "--json"))
    assert (shown["count"], shown["block_size"]) == ("tokens", 8)
    workload = Zipf(requests=60, prefixes=6, prefix_tokens=64, suffix_tokens=32)
    (row,) = compare(workload, "lru", 40, accounting="tokens", block_size=8).rows
    assert shown["hit_tokens"] == row.hit_blocks * 8 > 0
    shown = json.loads(run(*arguments, "--prefix", "none", "--json"))
    assert (shown["prefix"], shown["hit_tokens"]) == ("none", 0)


def test_without_a_source_the_trace_of_kvcore_is_explained():
    """`explain --summary` alone is about the trace that comes with kvcore, as `compare` is."""
    printed = run("--summary", "--limit", "50", "--blocks", "500")
    assert printed.startswith("mooncake: 50 requests in 500 blocks")
