"""Tests of `kvcore quality`: what it prints and draws, and its errors."""

import json
from functools import partial

import pytest
from helpers.commands import stdout_of

pytest.importorskip("torch", reason="runs compute on torch")

SMALL = ("--prompt-tokens", 64, "--tokens", 4, "--texts", 1, "--needles", 2, "--codec", "fp32")

POLICIES = ("h2o", "snapkv", "window", "random")

quality_output = partial(stdout_of, "quality", *SMALL)


def test_the_table_has_a_row_for_each_policy_and_budget():
    """The table has a row for each policy and budget, the largest share of bytes first.

    The sentences below name the least divergence and the questions.
    """
    text = quality_output("--retention", "h2o,random", "--budget", "0.2,0.6")
    lines = text.splitlines()
    assert lines[0].startswith("transformer: 1 text of 64 + 4 tokens, against")
    (header,) = [index for index, line in enumerate(lines) if line.startswith("retention")]
    found = [line.split()[:3] for line in lines[header + 2 : header + 7]]
    assert found[0][:2] == ["full", "fp32"]
    assert [row[2] for row in found[1:]] == ["60%", "60%", "20%", "20%"]
    assert "needles" in lines[header]
    assert "Least divergence: " in text
    assert "Needles: 2 questions announced about each of 1 prompt" in text.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ("--codec fp32,int8", {("full", "fp32"), ("full", "int8")}),
        ("--retention window --budget 0.5", {("full", "fp16"), ("window", "fp16")}),
        ("--codec fp32 --budget 0.5", {("full", "fp32")} | {(p, "fp32") for p in POLICIES}),
    ],
)
def test_what_is_not_asked_for_is_not_measured(options, rows):
    """Codecs alone are measured without policies, unless there are budgets for them.

    Policies alone are measured in one codec.
    """
    document = json.loads(stdout_of("quality", *SMALL[:-2], *options.split(), "--json"))
    assert {(row["retention"], row["codec"]) for row in document["rows"]} == rows


def test_budgets_that_hold_all_tokens_have_a_sentence():
    """A budget that holds all tokens of a codec has no row, and a sentence states it."""
    text = quality_output("--codec", "fp32,fp16", "--retention", "window", "--budget", "0.6")
    assert "All tokens take no more, so nothing goes: fp16 at 60%." in text
    assert text.count("60%") == 2


def test_the_first_row_holds_all_tokens():
    """The first row of the document holds all tokens, and all bytes; others hold a share."""
    document = json.loads(quality_output("--retention", "tova", "--budget", "0.5", "--json"))
    full, bounded = document["rows"]
    assert (full["kl"], full["top1"], full["needle"]) == (0, 1, 1)
    assert full["needle_by_depth"] == [[0.25, 1], [0.75, 1]]
    assert 0 < bounded["share"] < 1
    assert full["bytes_per_token"] == document["full_bytes_per_token"]


@pytest.mark.parametrize(("name", "magic"), [("q.png", b"\x89PNG"), ("q.SVG", b"<?xml")])
def test_plot_draws_a_picture(tmp_path, name, magic):
    """`--plot` draws a picture in the format of its ending, and the table is still printed."""
    pytest.importorskip("matplotlib")
    assert "full" in quality_output("--retention", "window", "--plot", name, cwd=tmp_path)
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_a_text_replaces_the_drawn_one(tmp_path):
    """`--text` replaces the drawn text by a file, so that `--seed` changes nothing.

    Without `--text` another seed gives other results.
    """
    (tmp_path / "text").write_text(" ".join(map(str, range(100))))
    given = ("--generator", "transformer:seed=5", "--retention", "window", "--needles", 0)
    read, drawn = (
        [
            json.loads(quality_output(*given, *text, "--seed", seed, "--json", cwd=tmp_path))
            for seed in (0, 1)
        ]
        for text in (["--text", "text"], [])
    )
    assert read[0]["rows"] == read[1]["rows"]
    assert drawn[0]["rows"] != drawn[1]["rows"]
