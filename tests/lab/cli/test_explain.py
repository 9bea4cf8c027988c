"""Tests of `kvcore explain`: what it explains and prints, and its errors."""

from __future__ import annotations

import json
from functools import partial

import pytest
from helpers import serving
from helpers.commands import run_here, stdout_of
from helpers.traces import record, serve

from kvcore_lab.comparison import compare_policies
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
    shown = " ".join(run_here("explain", path, asked, "--blocks", 99).stdout.split())
    assert f"{words}: there is nothing to look up. --accounting tokens counts" in shown
    assert "0 hit" not in shown


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("--summary", "No prompt fills a block of 16 tokens (the longest has 8)"),
        ("1", "The prompt fills no block of 16 tokens (it has 8)"),
    ],
)
def test_texts_shorter_than_a_block_are_told_from_requests_without_keys(tmp_path, asked, words):
    """Of short texts the report has their tokens and an option that makes blocks smaller."""
    path = tmp_path / "short.jsonl"
    path.write_text('{"messages":[{"role":"user","content":"hello there"}]}\n' * 3)
    shown = " ".join(run_here("explain", path, asked, "--blocks", 99).stdout.split())
    assert f"{words}: there is nothing to look up. With key_tokens=N" in shown
    assert "no keys" not in shown


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
    (row,) = compare_policies(workload, "fifo", 20).rows
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
    (row,) = compare_policies(workload, "lru", 40, accounting="tokens", block_size=8).rows
    assert shown["hit_tokens"] == row.hit_blocks * 8 > 0
    shown = json.loads(run(*arguments, "--prefix", "none", "--json"))
    assert (shown["prefix"], shown["hit_tokens"]) == ("none", 0)


def test_without_a_source_the_trace_of_kvcore_is_explained():
    """`explain --summary` alone is about the trace that comes with kvcore, as `compare` is."""
    printed = run("--summary", "--limit", "50", "--blocks", "500")
    assert printed.startswith("mooncake: 50 requests in 500 blocks")


@pytest.fixture
def log(tmp_path):
    """Return the path of a log of four chats, of which the third has failed."""
    rows = (
        {
            "ts": 1_763_600_000 + index,
            "user_id": f"user-{index % 2}",
            "request": {"messages": [{"role": "user", "content": f"Question {index}. " * 9}]},
            "response": {"id": f"chatcmpl-{index}", "choices": []},
            "status": 429 if index == 2 else 200,
        }
        for index in range(4)
    )
    path = tmp_path / "log.jsonl"
    first, *others = map(json.dumps, rows)
    # A blank line is a row, and so is one that cannot be read.
    path.write_text("\n".join(["", first, "{", *others]) + "\n")
    return path


@pytest.mark.parametrize("options", [("--blocks", 99), ("--price", "openai")])
def test_a_request_may_have_the_id_of_its_log(log, options):
    """An id in a row of the log names the request of this row, by its number in JSON."""
    shown, other = (
        json.loads(run_here("explain", log, request, *options, "--json").stdout)
        for request in ("chatcmpl-3", "5")
    )
    assert str(shown["request"]) == "5"
    assert other | {"command": shown["command"]} == shown


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("user-1", "request 'user-1': 2 requests have this id: give one of 3, 5"),
        ("chatcmpl-2", "row 4 of {log}, from 0, was left out"),
        (
            "42",
            "Its 3 ids: 1, 3, 5; or user_id such as user-0; or response.id such as chatcmpl-0",
        ),
    ],
)
def test_an_id_that_names_no_request_is_an_error_with_the_ids(log, asked, words):
    """An id of several rows, of a row that was left out, or of none is an error."""
    done = run_here("explain", log, asked, "--blocks", 99)
    assert done.returncode == 2
    assert words.format(log=log) in " ".join(done.stderr.split())


def test_a_table_has_ids_too(tmp_path):
    """In a table of lengths a row is named by its column of ids."""
    rows = "".join(f"{index},call-{index},900,5\n" for index in range(4))
    (tmp_path / "log.csv").write_text("time,request_id,input,output\n" + rows)
    done = run_here("explain", tmp_path / "log.csv", "call-2", "--blocks", 99, "--json")
    assert json.loads(done.stdout)["request"] == 2


def test_a_trace_says_where_its_numbers_are_from(log, tmp_path):
    """A trace has no ids of its log: the error says which file has them, and how to ask."""
    run_here("simulate", log, "--trace", tmp_path / "run.jsonl")
    done = run_here("explain", tmp_path / "run.jsonl", "chatcmpl-3")
    assert f"rows of {log}, which `kvcore explain {log} ID --blocks N` takes ids of" in (
        " ".join(done.stderr.split())
    )


def test_a_log_of_block_ids_has_ids_too(tmp_path):
    """In a log of Mooncake's format a row is named by its field of ids."""
    rows = (
        {"timestamp": n, "input_length": 600, "output_length": 3, "hash_ids": [1, n + 2]}
        for n in range(3)
    )
    text = "".join(
        json.dumps(row | {"req_id": f"call-{n}"}) + "\n" for n, row in enumerate(rows)
    )
    (tmp_path / "log.jsonl").write_text(text)
    done = run_here("explain", tmp_path / "log.jsonl", "call-2", "--blocks", 99, "--json")
    assert json.loads(done.stdout)["request"] == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("1", "--blocks", 99), "1 is one request"),
        (("--summary", "--price", "openai"), "--price has none"),
    ],
)
def test_rankings_are_of_a_summary_alone(log, options, words):
    """`--top` is refused where there is no ranking."""
    done = run_here("explain", log, *options, "--top", 3)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
