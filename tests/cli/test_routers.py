"""Tests of `kvcore routers`: what it prints and draws, and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from kvcore.cli import main as frame
from kvcore.plugins import Plugins

SMALL = "zipf:requests=60,prefixes=6,prefix_tokens=64,suffix_tokens=16,output_tokens=4,rate=50"


@pytest.fixture
def routers(capsys):
    """Return a function that runs `kvcore routers`: code, stdout and stderr."""

    def run(*arguments):
        code = frame.run(["routers", SMALL, "--jobs", "1", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_all_installed_routers_are_compared(routers):
    """By default all installed routers are compared, on eight servers."""
    code, printed, _ = routers("--json", "--blocks", 60)
    document = json.loads(printed)
    assert (code, document["schema"]) == (0, 1)
    assert {row["router"] for row in document["rows"]} == set(Plugins().names("router"))
    assert {row["replicas"] for row in document["rows"]} == {8}
    assert [each["blocks"] for each in document["shared"]] == [480]


def test_the_table_has_rows_for_routers_and_shared_caches(routers):
    """The table has rows for each number of servers, for routers and for one shared cache."""
    code, printed, _ = routers("--replicas", "2,4", "--routers", "round-robin", "--blocks", 60)
    assert code == 0
    assert " ".join(printed.split()).startswith(
        "zipf: 60 requests to llama-3-8b on 2 or 4 replicas"
    )
    for words in ("2   round-robin", "4   one shared cache", "4   optimum of one cache"):
        assert words in printed


def test_options_come_from_a_file(routers, tmp_path):
    """Options come from a TOML file, in which tables of servers are one cluster.

    The command line overrides them.
    """
    path = tmp_path / "fleet.toml"
    path.write_text(
        'routers = "round-robin"\n[[replicas]]\nblocks = 50\n[[replicas]]\nblocks = 90\n'
    )
    document = json.loads(routers("--config", path, "--json")[1])
    assert [each["blocks"] for each in document["shared"]] == [140]
    document = json.loads(
        routers("--config", path, "--replicas", 3, "--blocks", 9, "--json")[1]
    )
    assert [each["blocks"] for each in document["shared"]] == [27]
    path.write_text('routers = "round-robin"\nreplicas = [2, 4]\nblocks = 9\n')
    document = json.loads(routers("--config", path, "--json")[1])
    assert [each["blocks"] for each in document["shared"]] == [18, 36]


def test_standard_input_is_read_with_one_job_only(tmp_path):
    """Standard input is read with one job; more jobs and other pipes are errors."""
    row = '{"timestamp": %d, "input_length": 600, "output_length": 2, "hash_ids": [1, %d]}\n'
    text = "".join(row % (number, number + 2) for number in range(9))
    os.mkfifo(tmp_path / "pipe")
    found = []
    for words in (["-"], ["-", "--jobs", "2"], [tmp_path / "pipe"]):
        writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(text,))
        if words[0] != "-":
            writer.start()
        program = [sys.executable, "-m", "kvcore", "routers", *words, "--routers", "random"]
        found.append(
            subprocess.run(program, input=text, capture_output=True, text=True, check=False)
        )
    writer.join()
    assert [done.returncode for done in found] == [0, 2, 2]
    assert "WORKLOAD -: other processes cannot read it" in found[1].stderr
    assert "WORKLOAD pipe: a pipe is read from - alone" in found[2].stderr


def test_failures_of_replicas_cost_no_request(routers):
    """Failures of replicas cost no request, with any router."""
    failed = "--fail", "replica=1,at=0.1", "--fail", "replica=2,at=0.2,for=0.3"
    document = json.loads(routers("--replicas", 3, "--blocks", 60, *failed, "--json")[1])
    assert document["config"]["fail"] == ["replica=1,at=0.1", "replica=2,at=0.2,for=0.3"]
    assert {row["router"] for row in document["rows"]} == set(Plugins().names("router"))
    assert all(row["rejected"] == 0 for row in document["rows"])


def test_a_plot_is_drawn(routers, tmp_path):
    """`--plot` draws the routers and the shared cache over the number of servers."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "routers.svg"
    assert routers("--replicas", "2,3", "--blocks", 60, "--plot", path)[0] == 0
    assert "one shared cache" in path.read_text()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--replicas", "1,000"], "--replicas '1,000': 1,000 is a list of 1 and 0"),
        (["--replicas", 0], "replicas: 0 is out of range"),
        (["--routers", "roundrobin"], "router: no router plugin is named 'roundrobin'"),
        (["--view", "all"], "view: 'all' is no view"),
        (["--blocks", 9, "--memory", "1GiB"], "--blocks and --memory both say"),
    ],
)
def test_invalid_options_are_refused(routers, options, why):
    """An invalid option is an error with the reason, before anything runs."""
    code, printed, printed_error = routers(*options)
    assert (code, printed) == (2, "")
    assert why in printed_error


def test_an_engine_sets_the_options_that_are_not_given(routers):
    """As in `kvcore simulate`; what is given wins."""
    one = "--routers", "round-robin", "--replicas", 2, "--blocks", 60
    _, printed, _ = routers(*one, "--like", "vllm", "--max-seqs", 9, "--json")
    config = json.loads(printed)["config"]
    assert (config["batching"]["max_seqs"], config["batching"]["null_block"]) == (9, True)
    assert config["plugins"]["prefix"]["name"] == "hashed"


def test_a_file_may_name_the_workload(tmp_path, capsys):
    """And all other options; a path is relative to the file."""
    (tmp_path / "few.jsonl").write_text('{"prompt": "a b c", "output_tokens": 3}\n' * 3)
    path = tmp_path / "routers.toml"
    path.write_text('workload = "few.jsonl"\nreplicas = [2]\nrouters = "round-robin"\n')
    assert frame.run(["routers", "--config", str(path), "--jobs", "1"]) == 0
    assert capsys.readouterr().out.startswith("chat: 3 requests to llama-3-8b on 2 replicas")


def test_the_report_says_what_served(routers):
    """The options of the replicas, which no column has."""
    options = "--eviction", "fifo", "--slo", "ttft=2", "--fail", "replica=1,at=0.1"
    code, printed, _ = routers(
        "--replicas", "2", "--routers", "round-robin", "--blocks", 60, *options
    )
    told = " ".join(printed.split())
    assert code == 0
    assert "60 blocks of 16 tokens (tokens counting); scheduler fcfs; eviction fifo; " in told
    assert told.endswith("slo ttft=2; seed 0; fail replica=1,at=0.1.")
