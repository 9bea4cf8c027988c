"""Tests of `kvcore demo cache`: its JSON document, its text and its errors."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from kvcore.cli.main import run
from kvcore.demo import WORKED_EXAMPLE
from kvcore.plugins.manager import Plugins

needs_torch = pytest.mark.skipif(
    Plugins().get("generator", "transformer").unavailable() is not None, reason="needs torch"
)


def printed(capsys, *arguments):
    """Run `kvcore demo`, require success and an empty stderr, and return stdout."""
    assert run(["demo", *arguments]) == 0
    out, err = capsys.readouterr()
    assert not err
    return out


def refused(capsys, *arguments):
    """Run `kvcore demo`, require an empty stdout, and return the exit code and stderr."""
    code = run(["demo", *arguments])
    out, err = capsys.readouterr()
    assert not out
    return code, err


@needs_torch
def test_json_is_alone_on_stdout_and_complete(capsys):
    """The JSON document has options, model and tokens, and the counts of each cache by step."""
    document = json.loads(printed(capsys, "cache", "--json"))
    assert document["schema"] == 1
    assert (document["prompt_tokens"], document["output"]) == (10, 100)
    assert (document["block_size"], document["seed"], document["dtype"]) == (16, 0, "fp64")
    assert document["model"]["layers"] == 2
    assert (document["generator"]["name"], document["backend"]["name"]) == (
        "transformer",
        "torch-cpu",
    )
    assert len(document["tokens"]) == 100
    caches = {each["cache"]: each for each in document["caches"]}
    assert {name: each["token_projections"] for name, each in caches.items()} == {
        "none": 5_950,
        "dense": 109,
        "paged": 109,
    }
    for each in caches.values():
        assert len(each["step_seconds"]) == len(each["step_kv_bytes"]) == 100
    assert all(a <= b for a, b in pairwise(caches["paged"]["step_kv_bytes"]))


@needs_torch
def test_json_has_the_worked_example(capsys):
    """The JSON document has all numbers of the worked example, unrounded."""
    head = json.loads(printed(capsys, "cache", "--output", "1", "--json"))["one_head"]
    assert head["scores"] == [2, 1, 0, -1]
    assert head["total"] == WORKED_EXAMPLE.total
    assert head["output"] == WORKED_EXAMPLE.output


@needs_torch
def test_the_same_options_give_the_same_tokens(capsys):
    """The same seed gives the same tokens, and another seed gives others."""
    first, second, other = (
        json.loads(printed(capsys, "cache", "--output", "9", "--seed", seed, "--json"))
        for seed in ("3", "3", "4")
    )
    assert first["tokens"] == second["tokens"] != other["tokens"]


@needs_torch
def test_the_text_has_counts_times_and_the_worked_example(capsys):
    """The text states equal outputs, explains the counts, and ends the example with 7.711."""
    text = printed(capsys, "cache", "--prompt-tokens", "4", "--output", "6")
    words = " ".join(text.split())
    assert "equal in all three" in words
    assert "4 + 5 + ... + 9 = 39." in words
    assert "4 + 5 = 9, 4 times fewer." in words
    assert "The output is [7.711, 0]." in words
    rows = [line.split() for line in text.splitlines()]
    assert [row[1] for row in rows if row[:1] in (["none"], ["dense"], ["paged"])][:3] == [
        "39",
        "9",
        "9",
    ]


@needs_torch
def test_lines_fit_80_columns(capsys):
    """No line of the text is longer than 80 columns."""
    text = printed(capsys, "cache")
    assert max(map(len, text.splitlines())) <= 80


@needs_torch
@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--output", "0", "it must be at least 1"),
        ("--prompt-tokens", "0", "it must be at least 1"),
        ("--block-size", "0", "it must be at least 1"),
        ("--output", "many", "expected a whole number, such as 8192, 8k or 1e5, not 'many'"),
    ],
)
def test_bad_numbers_are_refused(capsys, option, value, problem):
    """A number that is too small or no number is an error with exit code 2."""
    code, error = refused(capsys, "cache", option, value)
    assert code == 2
    assert problem in error


def test_without_torch_the_error_names_what_to_install(capsys, monkeypatch):
    """Without torch the demo ends with exit code 3 and what to install."""
    transformer = Plugins().get("generator", "transformer")
    monkeypatch.setattr(transformer, "unavailable", lambda: "needs torch: install it")
    code, error = refused(capsys, "cache")
    assert code == 3
    assert "cannot work here: needs torch" in error


def test_no_demo_prints_the_list(capsys):
    """`kvcore demo` without a name prints the list of demos."""
    out = printed(capsys)
    assert "cache   Generate the same tokens" in out
    assert "paging  Serve WORKLOAD in contiguous memory, and in blocks.\n" in out


def test_an_unknown_demo_is_a_usage_error(capsys):
    """An unknown demo is a usage error that suggests the nearest name."""
    code, error = refused(capsys, "cahce")
    assert code == 2
    assert "No such command 'cahce'. Did you mean 'cache'?; try `kvcore demo --help`" in error
