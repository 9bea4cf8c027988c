"""Tests of `kvcore demo cache`: its JSON document, its text and its errors."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
from helpers.commands import error_of, json_of, stdout_of

from kvcore.plugins.manager import Plugins
from kvcore_lab.demo.one_head import WORKED_EXAMPLE

needs_torch = pytest.mark.skipif(
    Plugins().get("generator", "transformer").unavailable() is not None, reason="needs torch"
)

printed = partial(stdout_of, "demo")
report = partial(json_of, "demo", "cache")


@needs_torch
def test_json_is_alone_on_stdout_and_complete():
    """The JSON document has options, model and tokens, and the counts of each cache by step."""
    document = report()
    assert document["schema"] == 1
    assert (document["prompt_tokens"], document["output"]) == (10, 100)
    assert (document["block_size"], document["seed"], document["dtype"]) == (16, 0, "fp64")
    assert document["model"]["layers"] == 2
    assert (document["generator"]["name"], document["backend"]["name"]) == (
        "transformer",
        "torch-cpu",
    )
    assert len(document["tokens"]) == 100
    caches = {cache["cache"]: cache for cache in document["caches"]}
    assert {name: cache["token_projections"] for name, cache in caches.items()} == {
        "none": 5_950,
        "dense": 109,
        "paged": 109,
    }
    for cache in caches.values():
        assert len(cache["step_seconds"]) == len(cache["step_kv_bytes"]) == 100
    assert all(a <= b for a, b in pairwise(caches["paged"]["step_kv_bytes"]))


@needs_torch
def test_json_has_the_worked_example():
    """The JSON document has all numbers of the worked example, unrounded."""
    head = report("--output", "1")["one_head"]
    assert head["scores"] == [2, 1, 0, -1]
    assert head["total"] == WORKED_EXAMPLE.total
    assert head["output"] == WORKED_EXAMPLE.output


@needs_torch
def test_the_same_options_give_the_same_tokens():
    """The same seed gives the same tokens, and another seed gives others."""
    first, second, other = (report("--output", "9", "--seed", seed) for seed in ("3", "3", "4"))
    assert first["tokens"] == second["tokens"] != other["tokens"]


@needs_torch
def test_the_text_has_counts_times_and_the_worked_example():
    """The text states equal outputs, explains the counts, and ends the example with 7.711."""
    text = printed("cache", "--prompt-tokens", "4", "--output", "6")
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


def test_without_torch_the_error_names_what_to_install(monkeypatch):
    """Without torch the demo ends with exit code 3 and what to install."""
    transformer = Plugins().get("generator", "transformer")
    monkeypatch.setattr(transformer, "unavailable", lambda: "needs torch: install it")
    error = error_of("demo", "cache", code=3)
    assert "cannot work here: needs torch" in error


def test_no_demo_prints_the_list_of_them():
    """`kvcore demo` alone prints the list of the demos."""
    out = printed()
    assert "cache   Generate the same tokens" in out
    assert "paging  Serve WORKLOAD in contiguous memory, and in blocks.\n" in out
