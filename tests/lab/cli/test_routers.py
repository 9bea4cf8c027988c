"""Tests of `kvcore routers`: what it prints and draws, and its errors."""

from __future__ import annotations

import os
import threading
from functools import partial

from helpers.commands import as_process, json_of, run_here, stdout_of

from kvcore.plugins import Plugins

SMALL = "zipf:requests=60,prefixes=6,prefix_tokens=64,suffix_tokens=16,output_tokens=4,rate=50"

OPTIONS = ("routers", SMALL, "--jobs", 1)
routers = partial(stdout_of, *OPTIONS)
report = partial(json_of, *OPTIONS)


def test_all_installed_routers_are_compared():
    """By default all installed routers are compared, on eight servers."""
    document = report("--blocks", 60)
    assert document["schema"] == 1
    assert {row["router"] for row in document["rows"]} == set(Plugins().names("router"))
    assert {row["replicas"] for row in document["rows"]} == {8}
    assert [each["blocks"] for each in document["shared"]] == [480]


def test_the_table_has_rows_for_routers_and_shared_caches():
    """The table has rows for each number of servers, for routers and for one shared cache."""
    printed = routers("--replicas", "2,4", "--routers", "round-robin", "--blocks", 60)
    assert " ".join(printed.split()).startswith(
        "zipf: 60 requests to llama-3.1-8b on 2 or 4 replicas"
    )
    for words in ("2   round-robin", "4   one shared cache", "4   optimum of one cache"):
        assert words in printed


def test_options_come_from_a_file(tmp_path):
    """Options come from a TOML file, in which tables of servers are one cluster.

    The command line overrides them.
    """
    path = tmp_path / "fleet.toml"
    path.write_text(
        'routers = "round-robin"\n[[replicas]]\nblocks = 50\n[[replicas]]\nblocks = 90\n'
    )
    document = report("--config", path)
    assert [each["blocks"] for each in document["shared"]] == [140]
    document = report("--config", path, "--replicas", 3, "--blocks", 9)
    assert [each["blocks"] for each in document["shared"]] == [27]
    path.write_text('routers = "round-robin"\nreplicas = [2, 4]\nblocks = 9\n')
    document = report("--config", path)
    assert [each["blocks"] for each in document["shared"]] == [18, 36]


def test_standard_input_is_read_with_one_job_only(tmp_path):
    """Standard input is read with one job; more jobs and other pipes are errors."""
    row = '{"timestamp": %d, "input_length": 600, "output_length": 2, "hash_ids": [1, %d]}\n'
    text = "".join(row % (index, index + 2) for index in range(9))
    os.mkfifo(tmp_path / "pipe")
    found = []
    for words in (["-"], ["-", "--jobs", "2"], [tmp_path / "pipe"]):
        writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(text,))
        if words[0] != "-":
            writer.start()
        found.append(as_process("routers", *words, "--routers", "random", input=text))
    writer.join()
    assert [done.returncode for done in found] == [0, 2, 2]
    assert "WORKLOAD -: other processes cannot read it" in found[1].stderr
    assert "WORKLOAD pipe: a pipe is read from - alone" in found[2].stderr


def test_failures_of_replicas_cost_no_request():
    """Failures of replicas cost no request, with any router."""
    failed = "--fail", "replica=1,at=0.1", "--fail", "replica=2,at=0.2,for=0.3"
    document = report("--replicas", 3, "--blocks", 60, *failed)
    assert document["config"]["fail"] == ["replica=1,at=0.1", "replica=2,at=0.2,for=0.3"]
    assert {row["router"] for row in document["rows"]} == set(Plugins().names("router"))
    assert all(row["rejected"] == 0 for row in document["rows"])


def test_a_file_may_name_the_workload(tmp_path):
    """And all other options; a path is relative to the file."""
    (tmp_path / "few.jsonl").write_text('{"prompt": "a b c", "output_tokens": 3}\n' * 3)
    path = tmp_path / "routers.toml"
    path.write_text('workload = "few.jsonl"\nreplicas = [2]\nrouters = "round-robin"\n')
    done = run_here("routers", "--config", path, "--jobs", 1)
    assert done.stdout.startswith("chat: 3 requests to llama-3.1-8b on 2 replicas")


def test_the_report_says_what_served():
    """The options of the replicas, which no column has."""
    options = "--eviction", "fifo", "--slo", "ttft=2", "--fail", "replica=1,at=0.1"
    printed = routers("--replicas", "2", "--routers", "round-robin", "--blocks", 60, *options)
    told = " ".join(printed.split())
    assert "60 blocks of 16 tokens (tokens counting); eviction fifo; prefix " in told
    assert told.endswith("slo ttft=2; seed 0; fail replica=1,at=0.1.")
