"""Tests of `kvcore run`: what it computes, prints and writes, and its errors."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
from helpers.commands import error_of, run_here, stdout_of

from kvcore_engine.backend import TorchCPU

pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")

SMALL = "zipf:requests=12,prefixes=3,prefix_tokens=64,suffix_tokens=32,output_tokens=4"
FAST = ("--latency", "linear", "--memory", "4MiB")

run = partial(stdout_of, "run")
refused = partial(error_of, "run")


def between(path):
    """Return the lines of a trace between its header and END."""
    return path.read_bytes().splitlines()[1:-1]


@pytest.mark.slow
def test_the_bundled_trace_is_computed():
    """Without a workload `run` computes the bundled trace, with shorter prompts."""
    document = json.loads(run("--limit", 5, "--json"))
    workload = document["config"]["workload"]
    assert (document["completed"], workload["name"]) == (5, "mooncake")
    assert workload["options"]["shrink"] > 1


def test_the_report_names_generator_backend_dtype_and_part():
    """The report names the generator, the backend, the dtype and the part of the workload."""
    printed = run(SMALL, *FAST, "--limit", 3, "--block-size", 16)
    (line,) = (line for line in printed.splitlines() if line.startswith("Computed:"))
    assert {"transformer", "torch-cpu", "fp32", "3"} <= set(re.findall(r"[\w-]+", line))


def test_the_report_says_how_much_attention_reads():
    """The report has the share of the texts that attention reads, if it is not all of them."""
    sparse = ("--retention", "quest:budget=32,dense_layers=0")
    printed = run(SMALL, *FAST, "--limit", 3, "--block-size", 16, *sparse)
    assert "Attention of 9 generated tokens read " in printed
    assert "Attention of" not in run(SMALL, *FAST, "--limit", 3, "--block-size", 16)


def test_the_whole_workload_is_computed_in_full_length():
    """`--limit 0 --shrink 1` computes the whole workload."""
    document = json.loads(run(SMALL, *FAST, "--limit", 0, "--shrink", 1, "--json"))
    assert document["completed"] == 12


def outputs(*prompts, tokens):
    """Return what continues each prompt by some tokens."""
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    document = json.loads(run(*words, "--max-output", tokens, "--json", *FAST))
    return document["outputs"]


def test_prompts_are_continued():
    """`--prompt` continues each prompt by the tokens that are asked for."""
    found = outputs("one", "two", tokens=3)
    assert [(output["prompt"], len(output["tokens"])) for output in found] == [
        ("one", 3),
        ("two", 3),
    ]


def test_the_output_has_16_tokens_unless_it_is_told_how_many():
    """Without `--max-output` a prompt is continued by 16 tokens."""
    (output,) = json.loads(run("--prompt", "one", "--json", *FAST))["outputs"]
    assert len(output["tokens"]) == 16


def test_equal_prompts_have_equal_outputs():
    """The output of a prompt depends on the prompt alone."""
    first, second = outputs("one two", "one two", tokens=16)
    assert first == second


def test_runs_that_generate_the_same_write_equal_outputs(tmp_path):
    """`outputs.jsonl` of `--out` is the same for other policies, and not for a coarse codec."""
    for name, options in (
        ("lru", ("--eviction", "lru")),
        ("mru", ("--eviction", "mru")),
        ("kivi", ("--codec", "kivi:bits=2")),
    ):
        run(SMALL, "--blocks", 64, "--block-size", 16, *options, "--out", tmp_path / name)
    lru, mru, kivi = (
        (tmp_path / name / "outputs.jsonl").read_text() for name in ("lru", "mru", "kivi")
    )
    assert lru == mru != kivi
    assert all(json.loads(line)["output_ids"] for line in lru.splitlines())


def test_the_report_of_prompts_has_their_outputs():
    """Without `--json` a prompt is printed with its output below."""
    (output,) = outputs("one two", tokens=3)
    printed = run("--prompt", "one two", "--max-output", 3, *FAST)
    assert printed.splitlines()[:2] == ["> one two", " ".join(map(str, output["tokens"]))]


def test_a_simulation_of_a_trace_has_equal_decisions(tmp_path):
    """A simulation of the trace of a run makes the same decisions, line by line."""
    ran, simulated = tmp_path / "run.jsonl", tmp_path / "simulated.jsonl"
    more = ("--latency", "linear", "--blocks", 64, "--block-size", 16)
    run(SMALL, *more, "--trace", ran)
    stdout_of("replay", ran)
    done = run_here("simulate", ran, *more, "--trace", simulated)
    assert done.returncode == 0
    assert "the file names the model tiny" in done.stderr
    assert between(ran)
    assert between(ran) == between(simulated)


def test_measured_steps_are_calibrated(tmp_path):
    """`calibrate` reads the step times that a run measures under the wall clock."""
    path = tmp_path / "steps.csv"
    printed = run(SMALL, *FAST, "--clock", "wall", "--step-times", path)
    assert "measured seconds" in printed
    assert stdout_of("calibrate", path).startswith("--latency linear:step=")


def test_options_come_from_a_file(tmp_path):
    """A configuration file may have all options of `run`."""
    path = tmp_path / "run.toml"
    path.write_text(
        f'workload = "{SMALL}"\nlimit = 2\ndtype = "fp64"\nblocks = 64\n'
        '[generator]\nname = "transformer"\nlayers = 1\n'
    )
    config = json.loads(run("--config", path, "--json"))["config"]
    assert config["plugins"]["generator"]["options"]["layers"] == 1
    assert config["codec"] == "fp64"
    assert config["bytes_per_block"] == 16 * 2 * (16 + 16) * 8


def test_a_file_may_have_options_of_other_runs(tmp_path):
    """A file may have options of workloads, prompts and the wall clock, whatever is run."""
    path = tmp_path / "run.toml"
    path.write_text(
        f'workload = "{SMALL}"\nlimit = 2\nmax_output = 3\nblocks = 64\n'
        'stop_at_eos = true\nstep_times = "steps.csv"\n'
    )
    assert json.loads(run("--config", path, "--json"))["completed"] == 2
    (output,) = json.loads(run("--config", path, "--prompt", "a", "--json"))["outputs"]
    assert len(output["tokens"]) == 3
    assert not (tmp_path / "steps.csv").exists()


def test_a_prompt_that_is_not_utf8_is_refused():
    """A prompt that is not UTF-8 is an error that names it."""
    assert "prompt '\\udcff' is not UTF-8" in refused("--prompt", "\udcff")


def test_too_little_memory_exits_3():
    """A pool that does not fit in memory exits with code 3 and an error about blocks."""
    error = refused("--blocks", 2**31 - 1, "--prompt", "a", code=3)
    assert "the pool of K/V 16 TiB, and torch-cpu has" in error


def test_without_torch_the_error_names_what_to_install(monkeypatch):
    """Without torch `run` exits with code 3 and what to install."""
    reason = "needs torch: pip install 'kvcore[torch]'"
    monkeypatch.setattr(TorchCPU, "unavailable", lambda: reason)
    assert refused(code=3).endswith(f"cannot work here: {reason}\n")


def test_a_failed_run_leaves_no_trace(tmp_path):
    """A run that fails writes no trace."""
    path = tmp_path / "run.jsonl"
    refused("--blocks", 2**31 - 1, "--prompt", "a", "--trace", path, code=3)
    assert list(tmp_path.iterdir()) == []


TIER = "disk:path={},memory=16MiB,write=through,load=always,latency=0"


def test_a_second_run_recovers_the_blocks_on_disk(tmp_path):
    """A second run recovers the blocks of the first from its disk tier and loads them."""
    words = SMALL, "--seed", 1, "--tier", TIER.format(tmp_path), "--json", *FAST
    first, second = (json.loads(run(*words)) for _ in range(2))
    (disk,) = second["tiers"]
    assert first["tiers"][0]["recovered_blocks"] == 0
    assert disk["recovered_blocks"] == first["tiers"][0]["used_blocks"] > 0
    assert second["loaded_tokens"] > first["loaded_tokens"] == 0
    assert disk["errors"] == 0


def test_a_second_run_from_disk_has_the_same_output(tmp_path):
    """A second run that loads K/V from disk has the same output.

    Another generator loads nothing.
    """
    words = "--prompt", "the cat sat on the mat " * 20, "--tier", TIER.format(tmp_path)
    first, second = (json.loads(run(*words, "--json", *FAST)) for _ in range(2))
    assert second["outputs"] == first["outputs"]
    assert second["loaded_tokens"] > 100
    other = json.loads(run(*words, "--json", *FAST, "--generator", "transformer:seed=1"))
    assert other["loaded_tokens"] == 0


def test_a_disk_tier_without_a_path_is_refused():
    """A disk tier without a path is an error, since a run needs a place for K/V."""
    error = refused(SMALL, "--tier", "disk:memory=1MiB")
    assert "tier disk: a run on tensors needs a directory: disk:path=DIR,memory=..." in error
