"""Tests of `kvcore plan`: its output, its exit codes, and its resumption after Ctrl-C."""

from __future__ import annotations

import json
import signal
import sys

import pytest
from helpers.commands import run_here, running
from helpers.sweeps import wait_for

from kvcore_lab.statistics import share_interval

SMALL = (
    *("zipf:requests=40,prefixes=4,rate=4", "--slo", "ttft=0.2", "--tier", "none"),
    *("--tensor-parallel", "1,2", "--max-gpus", "2"),
)
"""A search of a few small simulations."""


@pytest.fixture
def planned(tmp_path):
    """Return a function that runs `kvcore plan` in this process, with one job."""
    return lambda *words: run_here("plan", *words, "--jobs", "1", cwd=tmp_path)


def test_fleets_are_printed_from_the_best_one_with_the_limit(planned, tmp_path):
    """The table lists fleets from the best one, and is followed by the limit.

    The JSON document is written to the output folder.
    """
    done = planned(*SMALL)
    written = "kvcore: the plan is in plan-results/plan.json\n"
    assert (done.returncode, done.stderr) == (0, written)
    assert done.stdout.startswith("zipf:requests=40,rate=4.0,prefixes=4: 40 requests to")
    assert "Take 1 replica on 1 x h100" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith("  2.67")]
    assert rows[0][:3] == ["1", "1", "1"]
    assert "1 x vllm serve meta-llama/Llama-3.1-8B" in done.stdout
    assert "\nLimit: " in done.stdout
    document = json.loads((tmp_path / "plan-results" / "plan.json").read_bytes())
    assert document["plans"][0]["gpus"] == 1


def test_json_is_the_document_that_is_written(planned, tmp_path):
    """`--json` prints the document that is written, with sizes and shares as numbers."""
    done = planned(*SMALL, "--json", "--out", "mine")
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "mine" / "plan.json").read_bytes())
    best = document["plans"][0]
    assert (best["replicas"], best["tensor_parallel"], best["host_bytes"]) == (1, 1, 0)
    assert best["pool_bytes"] == best["blocks"] * 2**21
    assert best["slo_met"] == best["met"] / best["judged"] >= 0.99
    assert best["slo_met_interval"] == list(share_interval(best["met"], best["judged"]))
    assert document["limit"]["verdict"] in {"capacity", "policy", "content", "compute", "none"}
    assert document["percentile"] == 99


def test_host_ram_is_searched_by_default(planned):
    """By default each replica has a host tier of 1 TiB; `--tier none` removes it."""
    without = json.loads(planned(*SMALL, "--json").stdout)["setup"]["tier"]
    words = [word for word in SMALL if word not in ("--tier", "none")]
    found = json.loads(planned(*words, "--json", "--out", "host").stdout)["setup"]["tier"]
    assert (without, found) == ("none", "host:memory=1TiB")


def test_pools_of_layers_have_no_tier_by_default(planned):
    """Below pools of layers there is no tier by default, and one that is given is refused."""
    words = ["zipf:requests=20,prefixes=4,rate=4", "--like", "sglang", "--model", "gpt-oss-20b"]
    words += ["--tensor-parallel", "1", "--max-gpus", "1", "--json"]
    done = planned(*words)
    assert json.loads(done.stdout)["setup"]["tier"] == "none"
    refused = planned(*words, "--tier", "host:memory=1TiB", "--out", "host")
    assert "tier: the K/V of gpt-oss-20b is in pools of their own" in refused.stderr


def test_no_fleet_is_exit_code_1(planned):
    """If no fleet meets the SLO, the exit code is 1 and a limit is printed."""
    done = planned(*SMALL, "--slo", "ttft=0.001")
    assert done.returncode == 1
    assert "No fleet of up to 2 GPUs does." in done.stdout
    assert "Limit: compute" in done.stdout


def test_a_configuration_file_may_have_options_of_plan(planned, tmp_path):
    """A file of `--config` may have the options of `plan`."""
    (tmp_path / "plan.toml").write_text(
        'slo = "ttft=0.2"\nreplicas = "2"\nmax_gpus = 2\ntensor_parallel = 1\ntier = ["none"]\n'
    )
    done = planned("zipf:requests=30,rate=4", "--config", "plan.toml", "--json")
    (best,) = json.loads(done.stdout)["plans"]
    assert (best["replicas"], best["gpus"]) == (2, 2)


def test_numbers_in_a_file_may_be_a_list(planned, tmp_path):
    """Several numbers in a file may be a TOML list or text; another value is an error."""
    file = tmp_path / "plan.toml"
    words = ("zipf:requests=30,rate=4", "--config", "plan.toml", "--json", "--max-gpus", "2")
    found = []
    for numbers in ("[1, 2]", '"1,2"'):
        file.write_text(f'slo = "ttft=0.2"\ntensor_parallel = {numbers}\ntier = ["none"]\n')
        found.append(json.loads(planned(*words).stdout)["plans"])
    assert found[0] == found[1]
    file.write_text('tensor_parallel = [1, "x"]\n')
    assert "plan.toml: tensor_parallel: expected a whole number" in planned(*words).stderr


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured_processes")
def test_an_interrupted_search_is_resumed(tmp_path):
    """After Ctrl-C a second run keeps the journal and simulates the remaining cells only.

    Its document is the one of an uninterrupted run.
    """
    words = ("zipf:requests=250,rate=4", *SMALL[1:], "--jobs", "1", "--json")
    command = [sys.executable, "-m", "kvcore", "plan", *words, "--out", "stopped"]
    journal = tmp_path / "stopped" / "journal.jsonl"
    with running(command, cwd=tmp_path) as process:
        wait_for(2, journal, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out) == (130, "")
    assert "run it again to go on" in err
    kept = journal.read_bytes()
    resumed = run_here("plan", *words, "--out", "stopped", cwd=tmp_path)
    assert journal.read_bytes().startswith(kept)
    cells = [json.loads(line).get("cell") for line in journal.read_bytes().splitlines()]
    assert len(cells) - cells.count(None) == len({*cells} - {None}), "none ran twice"
    assert resumed.stdout == run_here("plan", *words, "--out", "whole", cwd=tmp_path).stdout


def test_an_engine_sets_the_options_that_are_not_given(planned):
    """As in `kvcore simulate`, in which the fleet serves as it was planned."""
    words = ["zipf:requests=40,prefixes=4,rate=4", "--slo", "ttft=0.2", "--like", "vllm"]
    (tensor_parallel, seqs) = (["--tensor-parallel", "1"], ["--max-seqs", "9"])
    more = ["--tier", "none", "--max-gpus", "1", *tensor_parallel, *seqs, "--json"]
    document = json.loads(planned(*words, *more).stdout)
    setup, best = document["setup"], document["plans"][0]
    assert (setup["prefix"], setup["like"], setup["max_seqs"]) == ("hashed", "vllm", 9)
    pool = ["--blocks", str(best["blocks"]), *tensor_parallel, *seqs]
    served = json.loads(run_here("simulate", *words, *pool, "--json").stdout)
    assert served["ttft_s"] == best["ttft_s"]


def test_a_part_of_the_workload_is_planned_for(planned):
    """A window is one value, not two."""
    words = (*SMALL, "--max-gpus", "1", "--tensor-parallel", "1", "--json")
    document = json.loads(planned(*words, "--window", "1:5").stdout)
    assert document["setup"]["window"] == "1:5"
    assert 0 < document["requests"] < 40


def test_a_file_may_name_the_workload(planned, tmp_path):
    """As text, whose path is relative to the file, or as a table; flags are options too."""
    (tmp_path / "plan.toml").write_text(
        'tier = "none"\ntensor_parallel = [1]\nmax_gpus = 1\nslo = {ttft = 2}\n'
        'chunked = false\n[workload]\nname = "zipf"\nrequests = 20\n'
    )
    done = planned("--config", "plan.toml")
    assert done.returncode == 0
    assert done.stdout.startswith("zipf:requests=20: 20 requests to")
    assert "; chunked false; watermark 0.01; " in " ".join(done.stdout.split())


@pytest.mark.parametrize("options", [("--slo", "none"), ("--tensor-parallel", "3")])
def test_a_refused_plan_leaves_no_folder(planned, tmp_path, options):
    """The folder of a plan is made after its options are checked."""
    done = planned(*SMALL, *options)
    assert (done.returncode, [*tmp_path.iterdir()]) == (2, [])


def test_a_plan_says_how_sure_it_is(planned):
    """It shows the requests that decide it, an interval, and the error of the roofline."""
    text = " ".join(planned(*SMALL).stdout.split())
    assert ": 100.0% do, 40 of 40 (95% interval: 91.2% to 100.0%)." in text
    assert "Few requests: one is 2.50% of the 40 that were judged;" in text
    assert "mean TTFT is 32% too early in the median, and 39% off" in text
    many = planned(
        *("zipf:requests=1000,prefixes=1,rate=4", "--slo", "ttft=9", "--tier", "none"),
        *("--tensor-parallel", "1", "--max-gpus", "1", "--latency", "linear"),
    )
    assert many.returncode == 0
    assert "Few requests" not in many.stdout
    assert "too early" not in many.stdout


def test_what_no_command_starts_is_named(planned):
    """Below the commands are the policies that they do not set, as in the document."""
    words = (*SMALL, "--scheduler", "slo", "--eviction", "slru")
    expected = (
        "scheduler slo (vLLM has fcfs, and priority with lower values first)",
        "eviction slru (docs/how-to/deploy-in-vllm.md)",
    )
    text = " ".join(planned(*words).stdout.split())
    assert f"Not in this command: {', '.join(expected)}." in text
    assert json.loads(planned(*words, "--json").stdout)["not_in_start"] == [*expected]
