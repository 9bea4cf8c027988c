"""The loss of quality by bounded or coded K/V, compared with small reference computations."""

import sys
from contextlib import contextmanager
from functools import cache
from importlib import import_module

import pytest

torch = pytest.importorskip("torch", reason="runs compute on torch")

from kvcore import (  # noqa: E402
    InputError,
    PluginError,
    Plugins,
    PolicyError,
    ScoreRetention,
    hookimpl,
)
from kvcore.testing.dense import Text, attention, loaded, next_batch  # noqa: E402
from kvcore_engine.generator import Transformer  # noqa: E402
from kvcore_lab.quality import FULL, divergence, measure  # noqa: E402

SMALL = {"prompt_tokens": 96, "tokens": 12, "texts": 2, "needles": 0, "block_size": 4}
WORDS = " ".join(f"word{index % 37}" for index in range(400))


class Oracle(ScoreRetention):
    """A retention policy that keeps the tokens at `places`."""

    name = "oracle"
    places = ()

    def score(self, held):
        """Return 1 for the positions in `places`, and 0 for others."""
        return torch.isin(held.positions, torch.tensor(self.places)).double()


class Hooks:
    """Hooks that register `Oracle`."""

    @hookimpl
    def kvcore_retention_policies(self):
        """Return the class."""
        return [Oracle]


@cache
def rows(retention, generator="transformer", codec="fp32", **options):
    """Return the rows of a small comparison."""
    return measure(generator, retention=retention, codec=codec, **(SMALL | options)).rows


def only(found, retention, budget=None):
    """Return the only row of a policy and a budget."""
    (row,) = [r for r in found if r.retention == retention and r.budget == budget]
    return row


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_all_tokens_in_the_computed_type_lose_nothing(dtype):
    """Keeping all tokens in the computed type gives losses of exactly 0."""
    (row,) = measure("transformer", codec=dtype, dtype=dtype, **SMALL).rows
    assert (row.attention_error, row.kl, row.kl_p95, row.top1) == (0, 0, 0, 1)
    assert (row.share, row.budget, row.needle) == (1, None, None)


def test_divergence_equals_its_definition():
    """`divergence` is the sum of p log(p / q), and 0 for equal logits, however large."""
    p, q = [0.5, 0.25, 0.25], [0.125, 0.125, 0.75]
    found = divergence(torch.tensor([p, q]).log() + 7, torch.tensor([q, q]).log() - 3)
    by_hand = 0.5 * 1.3862943611 + 0.25 * 0.6931471806 + 0.25 * -1.0986122887
    assert found.tolist() == pytest.approx([by_hand, 0], abs=1e-6)
    assert divergence(*[torch.tensor([[1e4, -1e4]])] * 2).tolist() == [0]


def test_a_window_equals_dense_attention_over_the_same_tokens():
    """With blocks of one token, `window:tokens=20` equals dense attention over 20 tokens."""
    kept, prompt = 20, 96
    generator = loaded(Plugins().build("generator", "transformer"), "fp32")
    ids = [generator.encode(WORDS)[:108], generator.encode(WORDS)[-108:]]
    errors, apart, same = torch.zeros(2, 2), [], []
    for tokens in ids:
        full, bounded = (dense(generator, tokens, prompt, each) for each in (None, kept))
        for (wanted, right), (logits, found) in zip(full, bounded, strict=True):
            for layer in range(2):
                errors[layer, 0] += (found[layer] - right[layer]).square().sum()
                errors[layer, 1] += right[layer].square().sum()
            chances = wanted.double().softmax(-1)
            apart.append(float((chances * (chances / logits.double().softmax(-1)).log()).sum()))
            same.append(int(wanted.argmax()) == int(logits.argmax()))
    row = only(rows(f"window:tokens={kept}", text=WORDS, block_size=1), "window:tokens=20")
    assert row.attention_error == pytest.approx(
        float((errors[:, 0] / errors[:, 1]).sqrt().mean()), rel=1e-4
    )
    assert row.kl == pytest.approx(sum(apart) / len(apart), rel=1e-4)
    assert row.kl_p95 == pytest.approx(float(torch.tensor(apart).quantile(0.95)), rel=1e-3)
    assert row.top1 == sum(same) / len(same)
    # 2 layers of 2 heads of 16 numbers, K and V, in 4 bytes.
    contexts = range(prompt + 1, prompt + 13)
    assert row.bytes_per_token == pytest.approx(
        sum(512 * kept / context for context in contexts) / 12
    )


def test_bytes_count_tokens_not_yet_coded():
    """Bytes per token count tokens not yet coded.

    A block of 4 takes 448 bytes in 2 bits with its grids, and each other token 512.
    """
    _, row = rows("full", codec="fp32,kivi", tokens=3)
    steps = ((25 * 448 + waiting * 512) / (96 + waiting) for waiting in (1, 2, 3))
    assert row.bytes_per_token == pytest.approx(sum(steps) / 3)


def dense(generator, tokens, prompt, kept):
    """Yield logits and attention of each step after `prompt`, with the last `kept` tokens."""
    held, seen = {}, {}

    def attend(layer, queries, keys, values, **_):
        before = held.get(layer)
        if before is not None:
            keys, values = (
                torch.cat(pair) for pair in zip(before, (keys, values), strict=True)
            )
        seen[layer] = attention(queries, keys, values)
        held[layer] = keys[-(kept or 0) :], values[-(kept or 0) :]
        return seen[layer]

    text = Text(tokens[:prompt])
    generator.logits(next_batch([text], [prompt]), attend)
    text.computed = prompt
    for token in tokens[prompt:]:
        text.tokens.append(token)
        logits = generator.logits(next_batch([text], [1]), attend)
        text.computed += 1
        yield logits[0], dict(seen)


def test_a_larger_budget_loses_less():
    """A larger budget of the same policy has less of every loss."""
    found = rows("random", budgets=(0.2, 0.5, 0.9))
    few, some, most = (only(found, "random", budget) for budget in (0.2, 0.5, 0.9))
    for field in ("attention_error", "kl"):
        assert getattr(few, field) > getattr(some, field) > getattr(most, field) > 0
    assert few.top1 <= some.top1 <= most.top1 < 1


def test_a_budget_is_bytes_whatever_the_codec():
    """A budget is a share of bytes: in fp16 it keeps twice as many tokens as in fp32.

    A budget that keeps all tokens has no row.
    """
    found = rows("random", codec="fp32,fp16", budgets=(0.25, 0.75))
    assert [(row.codec, row.budget) for row in found] == [
        ("fp32", None),
        ("fp32", 0.75),
        ("fp16", None),
        ("fp16", 0.25),
        ("fp32", 0.25),
    ]
    shorter, longer = found[3:]
    assert shorter.kl < longer.kl
    # Up to two blocks of four tokens, of 96 tokens in all, may exceed the budget.
    assert 0.2 < shorter.share < 0.25 + 8 / 96
    assert 0.2 < longer.share < 0.25 + 8 / 96


def test_a_policy_that_selects_pages_reads_its_budget_and_keeps_everything():
    """`quest` keeps all bytes, and those of summaries, and reads about its budget.

    What is read counts the summaries; a token of 12 in 96 more than a block is its own page.
    """
    found = rows("quest:page=4,dense_layers=0,random", budgets=(0.5,), tokens=4)
    full, quest = only(found, FULL), only(found, "quest:page=4,dense_layers=0", 0.5)
    # The summary of 4 tokens takes as much as one of them, for 24 pages of 100 tokens.
    assert full.bytes_per_token * 1.2 < quest.bytes_per_token < full.bytes_per_token * 1.25
    assert 0.45 < quest.read_share < 0.5 + 4 / 96
    assert full.read_bytes_per_token == 512
    # A policy that drops tokens reads all that it keeps.
    dropping = only(found, "random", 0.5)
    assert dropping.read_share == pytest.approx(dropping.share, rel=0.1)


def test_a_policy_with_a_size_is_measured_once_at_that_size():
    """A policy whose text sets its size is measured once, at that size."""
    found = rows("window:tokens=10,random:budget=0.5,window:tokens=10", budgets=(0.1, 0.2))
    assert [row.retention for row in found] == [FULL, "random:budget=0.5", "window:tokens=10"]
    assert {row.budget for row in found} == {None}


def test_every_needle_is_found_if_all_tokens_are_kept():
    """With all tokens kept, every needle at every depth is found, announced or not."""
    for announced in (True, False):
        (row,) = rows(FULL, needles=6, announced=announced)
        assert row.needle == 1
        assert [depth for depth, _ in row.needle_by_depth] == pytest.approx(
            [(index + 0.5) / 6 for index in range(6)]
        )


def test_a_random_tenth_of_the_tokens_answers_a_tenth():
    """A tenth of the tokens kept at random answers about a tenth of 128 questions."""
    found = rows("random", prompt_tokens=400, texts=8, needles=16, budgets=(0.1,))
    assert 0.02 < only(found, "random", 0.1).needle < 0.22


def test_an_oracle_finds_all_needles_and_its_opposite_none(monkeypatch):
    """All needles are found if exactly their values are kept, and none if all else is."""
    plugins = Plugins(extra=[Hooks()])
    options = SMALL | {"needles": 4, "announced": False, "prompt_tokens": 100, "texts": 3}
    # 92 other tokens, with needles inserted at one eighth, three eighths, and so on.
    values = [int(92 * (index + 0.5) / 4) + 2 * index + 1 for index in range(4)]
    for places, share in ((values, 1), (set(range(100)) - {*values}, 0)):
        monkeypatch.setattr(Oracle, "places", [*places])
        found = measure(
            "induction", retention="oracle", budgets=(0.3,), plugins=plugins, **options
        ).rows
        assert only(found, "oracle", 0.3).needle == share


def test_policies_that_see_the_question_keep_the_answer():
    """`h2o` keeps the answers of all announced questions, and of less than half of others."""
    options = {"prompt_tokens": 300, "texts": 4, "needles": 8, "budgets": (0.15,)}
    seen = only(rows("h2o", **options), "h2o", 0.15)
    unseen = only(rows("h2o", announced=False, **options), "h2o", 0.15)
    assert seen.needle == 1
    assert unseen.needle < 0.5


def test_dropping_tokens_beyond_every_attention_window_is_no_loss():
    """Tokens beyond the reach of every layer are dropped first, which loses nothing."""
    found = rows("knorm,h2o,random", "transformer:window=8", budgets=(0.2,))
    assert {row.retention for row in found} == {FULL, "knorm", "h2o", "random"}
    assert all(row.kl < 1e-12 and row.top1 == 1 for row in found), found
    assert max(row.share for row in found[1:]) < 0.4


def test_equal_seeds_give_equal_rows():
    """Equal seeds give equal rows, and another seed gives other texts."""
    assert (
        rows("window:tokens=20")
        == measure("transformer", retention="window:tokens=20", codec="fp32", **SMALL).rows
    )
    assert rows("window:tokens=20") != rows("window:tokens=20", seed=1)


def test_a_hugging_face_model_is_measured(tmp_path):
    """A Hugging Face model is measured like other generators, and for its own needles."""
    pytest.importorskip("transformers", reason="needs transformers")
    tiny = import_module("helpers.hugging").tiny
    tiny("llama").save_pretrained(tmp_path)
    found = measure(
        f"huggingface:model={tmp_path}",
        retention="h2o,window",
        codec="fp32,fp16",
        budgets=(0.3,),
        **(SMALL | {"needles": 4}),
    )
    assert (found.generator, found.needle_generator) == ("huggingface", "huggingface")
    full = only(found.rows[:1], FULL)
    assert (full.kl, full.top1) == (0, 1)
    assert all(row.kl > 0 for row in found.rows if row.budget)
    # A model with random weights copies no needles.
    assert full.needle < 0.5


def test_a_frame_has_a_row_per_result(monkeypatch):
    """`to_frame` returns a polars frame with a row per result, or an error without polars."""
    found = measure("transformer", retention="window", codec="fp32", budgets=(0.5,), **SMALL)
    polars = pytest.importorskip("polars")
    frame = found.to_frame()
    assert isinstance(frame, polars.DataFrame)
    assert frame["retention"].to_list() == [FULL, "window"]
    assert "needle_by_depth" not in frame.columns
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(PluginError, match="needs polars"):
        found.to_frame()


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"tokens": 0}, "must be 1 or more"),
        ({"needles": -1}, "needles=-1: give 0 or more"),
        ({"texts": 0}, "must be 1 or more"),
        ({"needle": 3}, "no option 'needle' .did you mean 'needles'"),
        ({"generator": "transformr"}, "did you mean 'transformer'"),
        (
            {"retention": "window:sinks=few"},
            "'window' takes an integer, not 'few'",
        ),
        ({"retention": "full:budget=3"}, "'full' has no option 'budget'"),
        ({"dtype": "fp7"}, "generator 'transformer' cannot compute in 'fp7'"),
        (
            {"retention": "window:positions=cache", "codec": "fp16"},
            "codec 'fp16' would round its keys anew with every rotation: take fp32",
        ),
    ],
)
def test_impossible_options_are_refused(options, wrong):
    """Impossible options raise InputError that names the option or plugin."""
    with pytest.raises(InputError, match=wrong):
        measure(**({"generator": "transformer"} | SMALL | options))


def test_a_failing_generator_is_named(monkeypatch):
    """An exception in a generator raises PolicyError that names it; NaN raises InputError."""

    def logits(*_):
        return 1 / 0

    monkeypatch.setattr(Transformer, "logits", logits)
    with pytest.raises(PolicyError, match=r"transformer.*logits\(\).*division by zero"):
        measure("transformer", codec="fp32", **SMALL)
    nan = torch.full((2, 512), float("nan"))
    monkeypatch.setattr(Transformer, "logits", lambda *_: nan)
    monkeypatch.setattr(Transformer, "encode", lambda _, text: [*text.encode()])
    for text in (None, WORDS):
        with pytest.raises(InputError, match="NaN in fp32: take another dtype"):
            measure("transformer", codec="fp32", text=text, **SMALL)


def test_progress_adds_up_to_the_announced_total():
    """The ticks of progress add up to the announced total."""
    remaining = []

    @contextmanager
    def progress(_name, total):
        remaining.append(-total)
        yield remaining.append

    rows_ = measure(
        "transformer",
        retention="window",
        codec="fp32",
        budgets=(0.5,),
        progress=progress,
        **(SMALL | {"needles": 2}),
    ).rows
    assert len(rows_) == 2
    assert min(remaining) < 0 < max(remaining)
    assert sum(remaining) == 0


@pytest.mark.parametrize(("needles", "after"), [(0, 12), (8, 16)])
def test_texts_beyond_the_positions_of_a_model_are_refused(needles, after):
    """A generator with fewer positions than a text or its questions need raises InputError."""

    class Short(Transformer):
        name = "short"
        positions = 95 + after

    short = Short()
    options = SMALL | {"needles": needles, "needle_generator": short}
    with pytest.raises(InputError, match=f"96 prompt .* and {after} .* 'short' has .* pos"):
        measure(short, retention="window", codec="fp32", **options)
