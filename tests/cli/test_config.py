"""Tests of `kvcore simulate --config`: options in TOML, and their order of precedence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.commands import error_of, json_of

SMALL = 'workload = "zipf:requests=20,prefix_tokens=64,suffix_tokens=32,output_tokens=8"\n'
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


@pytest.fixture
def document(tmp_path):
    """Return a function that runs a TOML text with flags, and returns the document."""

    def command(toml, *flags):
        path = tmp_path / "run.toml"
        path.write_text(toml)
        return json_of("simulate", "--config", path, *flags)

    return command


def test_keys_are_the_names_of_the_flags(document):
    """The keys of the file are the names of the flags, with `-` or `_` between words."""
    toml = f'{SMALL}max-seqs = 4\nblock_size = 32\nchunked = false\nslo = "ttft=2"\n'
    found = document(toml)
    assert found["config"]["batching"]["max_seqs"] == 4
    assert found["config"]["batching"]["chunked"] is False
    assert (found["pool"]["block_size"], found["slo"]["ttft_s"]) == (32, 2)


def test_rules_are_a_plugin_or_options_of_the_release_before(document):
    """`like` as text, as a table, as a flag, and former flags and keys give the same run."""
    rules = document(f'{SMALL}like = "vllm:lag=0,null_block=false"\n')["config"]
    assert rules["batching"]["ties"] == "first"
    assert rules["batching"].keys().isdisjoint({"lag", "null_block"})
    table = '[like]\nname = "vllm"\nlag = 0\nnull_block = false\n'
    assert document(SMALL + table)["config"] == rules
    with pytest.warns(FutureWarning, match="write like='vllm:lag=0,null_block=false'"):
        former = document(f'{SMALL}like = "vllm"\nnull_block = false\n', "--lag", 0)
    assert former["config"] == rules
    with pytest.warns(FutureWarning, match="--like kvcore:admit_after_preemption=false"):
        former = document(SMALL, "--no-admit-after-preemption")
    assert former["config"]["batching"]["admit_after_preemption"] is False


def test_the_configuration_file_is_not_overwritten(tmp_path):
    """`--trace` refuses to overwrite the file of `--config`."""
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    err = error_of("simulate", "--config", path, "--trace", path)
    assert path.read_text() == SMALL
    assert "--config and --trace name the same file" in err


def test_flags_override_the_file(document):
    """A flag on the command line overrides the key in the file."""
    found = document(f'{SMALL}max_seqs = 4\neviction = "fifo"\n', "--max-seqs", 7)
    assert found["config"]["batching"]["max_seqs"] == 7
    assert found["config"]["plugins"]["eviction"]["name"] == "fifo"


def test_a_flag_overrides_the_key_that_it_excludes(document):
    """`--blocks` on the command line overrides `memory` in the file, which it excludes."""
    assert document(f'{SMALL}memory = "40MiB"\n', "--blocks", 33)["pool"]["blocks"] == 33


def test_a_plugin_may_be_a_table(document):
    """A plugin may be a table of its name and its options, with values of TOML types."""
    toml = """[workload]
name = "zipf"
requests = 9
[scheduler]
name = "srpt"
preemptive = false
"""
    config = document(toml)["config"]
    assert config["workload"]["options"]["requests"] == 9
    assert config["plugins"]["scheduler"]["options"]["preemptive"] is False


def test_batching_and_slo_may_be_tables(document):
    """The options of batching and of the SLO may be keys of `[batching]` and `[slo]`."""
    found = document(f"{SMALL}[batching]\nmax_tokens = 512\n[slo]\nttft = 1.5\ndeadline = 9\n")
    assert found["config"]["batching"]["max_tokens"] == 512
    assert found["slo"]["ttft_s"] == 1.5
    assert (found["slo"]["tpot_s"], found["slo"]["deadline_s"]) == (None, 9)


def test_paths_are_relative_to_the_file(document, tmp_path, monkeypatch):
    """Paths in the file are relative to the file, not to the working directory.

    This holds for the workload, a plugin in a file, a file of a plugin, and the output.
    """
    (tmp_path / "mine.py").write_text("from kvcore_plugins.eviction import LFU\n")
    row = {"timestamp": 0, "input_length": 50, "output_length": 3, "hash_ids": [1]}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row))
    columns = "prefill_tokens,decode_sequences,context_tokens,seconds"
    (tmp_path / "grid.csv").write_text(f"{columns}\n0,0,0,0.5\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    document(
        'workload = "mine.jsonl"\nlatency = "table:path=grid.csv"\nout = "results"\n'
        'eviction = "mine.py:LFU:half_life=30"\n'
    )
    assert (tmp_path / "results" / "summary.json").exists()
    assert not list(elsewhere.iterdir())


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    """A file that is not UTF-8 is an error."""
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe")
    assert "run.toml: is not TOML: " in error_of("simulate", "--config", path)


def test_the_documented_file_runs(document):
    """The example file in the reference runs and has the options that it sets."""
    examples = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (example,) = (example for example in examples if example.startswith("# What arrives"))
    config = document(example)["config"]
    assert config["workload"]["name"] == "zipf"
    assert config["plugins"]["scheduler"]["name"] == "srpt"
