"""Tests of `kvcore compare`: what it runs, prints and writes, and its errors."""

from __future__ import annotations

import csv
import errno
import json
import re
from functools import partial
from pathlib import Path

import pytest
from helpers.commands import error_of, json_of, run_here, stdout_of

from kvcore.units import format_seconds
from kvcore_cli import main as frame

SMALL = "zipf:requests=60,prefixes=6,prefix_tokens=64,suffix_tokens=32"
MIB = 2**20

run = partial(stdout_of, "compare")
report = partial(json_of, "compare")
refused = partial(error_of, "compare")


def mooncake(path, *rows):
    """Write a file of Mooncake's format from rows of (milliseconds, keys); return its path."""
    lines = [
        json.dumps(
            {
                "timestamp": time,
                "input_length": 512 * len(keys),
                "output_length": 1,
                "hash_ids": keys,
            }
        )
        for time, keys in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_savings_are_told_for_each_policy_and_pool():
    """--savings adds the prefill that hits save, its share, and the time of a request."""
    options = ("--eviction", "lru,fifo", "--blocks", "20,40")
    document = report(SMALL, *options)
    out = run(SMALL, *options, "--savings")
    table = out[out.index("prefill saved") :]
    for row in document["rows"]:
        part = row["saved_s"] / document["infinite"]["prefill_s"]
        cells = [row["eviction"], str(row["blocks"]), format_seconds(row["saved_s"])]
        line = rf"{' +'.join(map(re.escape, cells))} +{part:.1%} +[0-9.]+\n"
        assert re.search(line, table)
    assert "prefill saved" not in run(SMALL, *options)


def test_the_default_workload_is_the_bundled_trace():
    """Without a workload the bundled trace is compared, with its known numbers of hits."""
    lru, optimum = report("--eviction", "lru,optimum", "--blocks", "5859")["rows"]
    assert (lru["requests"], lru["lookup_blocks"], lru["hit_blocks"]) == (12031, 288500, 39258)
    assert lru["hit_ratio"]["block"] == lru["hit_ratio"]["token"] == 39258 / 288500
    assert lru["share_of_optimum"] == 39258 / 101431
    assert (optimum["hit_blocks"], optimum["block_size"]) == (101431, 512)


def test_the_table_is_readable():
    """The table has a row for each default policy, the optimum and the infinite cache."""
    lines = run(SMALL).splitlines()
    assert lines[0] == "zipf: 60 requests look up 360 blocks of 16 tokens (keys counting)."
    policies = [line.split()[0] for line in lines[5:13]]
    assert policies == ["lru", "fifo", "lfu", "slru", "cost", "random", "optimum", "infinite"]
    assert lines[13].startswith("infinite: a cache that never evicts")


def test_memory_is_divided_by_the_bytes_of_a_block():
    """`--memory` is divided by the bytes of a block: 2 MiB for 16 tokens of Llama 3.1 8B."""
    document = report(SMALL, "--eviction", "lru", "--memory", "21MiB,42MiB")
    assert [row["blocks"] for row in document["rows"]] == [10, 21]
    assert document["memory"] == {
        "model": "llama-3.1-8b",
        "codec": "fp16",
        "bytes_per_block": 2 * MIB,
        "budgets": [{"bytes": 21 * MIB, "blocks": 10}, {"bytes": 42 * MIB, "blocks": 21}],
    }


def test_memory_is_divided_by_model_codec_and_block_size():
    """`--memory` is divided by the bytes of a block of this model, codec and block size."""
    options = ["--model", "mistral-7b", "--codec", "fp32", "--block-size", "4"]
    document = report(SMALL, "--eviction", "lru", "--memory", "4MiB", *options)
    assert [(row["blocks"], row["block_size"]) for row in document["rows"]] == [(4, 4)]


def test_the_prefix_cache_can_be_chosen():
    """With `--prefix none` no block hits, and the document names the prefix cache."""
    document = report(SMALL, "--eviction", "lru", "--blocks", "20", "--prefix", "none")
    assert (document["infinite"]["hit_blocks"], document["prefix"]) == (0, "none")


def test_the_table_states_version_workload_and_prefix_cache():
    """The last lines state the version, the workload with its options, and the prefix cache."""
    _, _, setup = run(SMALL, "--eviction", "lru", "--prefix", "none").partition(
        "Setup: kvcore "
    )
    assert "zipf:requests=" in setup
    assert setup.endswith("prefix none.\n")


def test_without_sharing_nothing_can_hit():
    """With `--prefix none` there is no optimum, and the output states that nothing can hit."""
    out = run(SMALL, "--prefix", "none", "--blocks", "20")
    assert "optimum" not in out
    assert "With prefix cache 'none' nothing can hit." in out


def test_the_output_names_the_model_and_device_of_recompute_costs():
    """The output names the model and device of recompute costs if policy `cost` is compared."""
    arguments = [SMALL, "--blocks", "20", "--model", "llama-2-7b", "--eviction"]
    assert "cost: recompute cost of llama-2-7b on h100." in run(*arguments, "lru,cost")
    assert "recompute cost" not in run(*arguments, "lru")


def test_requests_without_keys_have_no_table(tmp_path):
    """For requests without keys the output has what would have keys, and no table."""
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    )
    done = run_here("compare", path, "--eviction", "lru")
    words = " ".join(done.stdout.split())
    assert done.stderr.startswith("kvcore: azure: prompts are not known, so nothing hits")
    assert words.startswith("azure: 1 request. The requests have no keys: there is nothing to")
    assert words.endswith("texts, token ids and hashes of blocks do.")


@pytest.mark.parametrize("accounting", ["keys", "tokens"])
def test_texts_shorter_than_a_block_are_told_from_requests_without_keys(tmp_path, accounting):
    """Of short texts the output has the longest and an option that makes blocks smaller."""
    path = tmp_path / "short.jsonl"
    path.write_text('{"messages":[{"role":"user","content":"hello there"}]}\n' * 3)
    done = run_here("compare", path, "--eviction", "lru", "--accounting", accounting)
    words = " ".join(done.stdout.split())
    assert "No prompt fills a block of 16 tokens (the longest has 8): there is" in words
    assert "With key_tokens=N of the workload" in words
    assert "have no keys" not in words


def test_the_error_for_a_dangling_link_names_its_target(tmp_path):
    """The error for a workload that is a dangling link names the target of the link."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    assert f"No such file or directory: it is a link to {tmp_path}/nowhere" in refused(
        str(link)
    )


def test_an_unsearchable_folder_is_reported_as_unreadable(monkeypatch):
    """A workload in a folder that cannot be searched is reported as unreadable, not missing."""

    def lstat(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "lstat", lstat)
    assert "secret/rows: cannot be read: Permission denied" in refused("secret/rows")


def test_csv_has_the_rows_of_the_document(tmp_path):
    """`--csv` writes a line for each row of the document, with the same hit ratios in full."""
    path = tmp_path / "rows.csv"
    document = report(
        SMALL, "--eviction", "lru,optimum", "--blocks", "9,20", "--csv", str(path)
    )
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["hit_ratio_block"]) for line in lines] == [
        row["hit_ratio"]["block"] for row in document["rows"]
    ]


def test_a_bad_row_leaves_the_files_as_they_were(tmp_path):
    """A workload with a bad row leaves an existing CSV file unchanged and writes no trace."""
    workload = mooncake(tmp_path / "rows", (0, [1]), (5, [1]), (6, [-1]))
    old = tmp_path / "rows.csv"
    old.write_text("old")
    error = refused(
        str(workload), "--eviction", "lru", "--blocks", "9", "--csv", str(old),
        "--trace", str(tmp_path / "trace.jsonl"),
    )  # fmt: skip
    assert f"{workload}:3: field 'hash_ids[0]': expected an integer" in error
    assert old.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"rows", "rows.csv"}


def test_a_key_under_two_parents_is_refused(tmp_path):
    """A key that follows two different keys is an error with its place and a remedy."""
    rows = str(mooncake(tmp_path / "rows", (0, [1, 2]), (5, [3, 2])))
    error = refused(rows, "--eviction", "lru")
    assert f"({rows}): request 1, number 2: key 2 stands after key 3, in an earlier" in error
    assert "equal keys must mean equal prefixes" in error
    assert "option chain=true" in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["curve", "--eviction", "lfu", "--sizes", "2"],
        ["simulate"],
        ["explain", "--summary", "--blocks", "9"],
    ],
)
def test_every_verb_refuses_keys_under_two_parents(capsys, tmp_path, arguments):
    """`curve`, `simulate` and `explain` refuse a key that follows two different keys."""
    verb, *options = arguments
    rows = str(mooncake(tmp_path / "rows", (0, [1, 2]), (5, [3, 2])))
    assert frame.run([verb, rows, *options]) == 2
    assert f"({rows}): request 1, number 2: key 2 stands after key 3" in capsys.readouterr().err


def test_check_looks_at_all_keys(tmp_path, monkeypatch):
    """`--check` examines all requests, not only the first ones that are always checked."""
    monkeypatch.setattr("kvcore.workloads.base.CHECKED_REQUESTS", 1)
    arguments = [
        str(mooncake(tmp_path / "rows", (0, [1, 2]), (5, [3, 2]))),
        "--eviction",
        "lru",
    ]
    assert "infinite" in run(*arguments)
    assert "equal keys must mean equal prefixes" in refused(*arguments, "--check")


def test_check_accepts_consistent_keys():
    """`--check` accepts a workload whose keys are consistent."""
    assert "infinite" in run(SMALL, "--check", "--eviction", "lru")


def test_the_earlier_name_of_accounting_works_with_a_notice(capsys):
    """The earlier option `--count` prints a notice and has the results of `--accounting`."""
    documents = []
    for flag in ("--count", "--accounting"):
        flags = [flag, "tokens", "--eviction", "lru", "--blocks", "40", "--json"]
        assert frame.run(["compare", "zipf:requests=20", *flags]) == 0
        out, err = capsys.readouterr()
        notice = "kvcore: --count is called --accounting now; use that\n"
        assert err == (notice if flag == "--count" else "")
        document = json.loads(out)
        for row in document["rows"]:
            del row["wall_s"]
        assert document.pop("command")[3] == flag
        documents.append(document)
    assert documents[0] == documents[1]
