"""The prefill that hits save: tokens and seconds, in simulations, comparisons and reasons."""

import json

import pytest
from helpers.commands import run_here

from kvcore import simulate
from kvcore.models.catalogue import find_device, find_model
from kvcore.models.cost import PrefillCost
from kvcore_replay.savings import Savings, prefill_seconds

ZIPF = "zipf:requests=60,prefixes=5,rate=20"


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-4b"])
def test_seconds_are_the_sum_of_those_of_each_prompt(model):
    """The seconds of prompts are the sum of the costs of each, with windows too."""
    cost = PrefillCost.for_model(find_model(model), find_device("h100"))
    lengths = [1, 17, 5000, 5000, 0]
    each = sum(cost(0, length) for length in lengths)
    assert prefill_seconds(cost, lengths) == pytest.approx(each)


def test_a_simulation_says_what_its_hits_saved():
    """`simulate` prints tokens and seconds that hits saved, which `savings` of the JSON has."""
    done = run_here("simulate", ZIPF)
    savings = json.loads(run_here("simulate", ZIPF, "--json").stdout)["savings"]
    result = simulate(ZIPF)
    assert savings["tokens"] == sum(result.log.hit) > 0
    assert savings["prompt_tokens"] == sum(result.log.prompt)
    assert 0 < savings["saved_s"] < savings["prefill_s"]
    sentence = str(Savings(**savings))
    assert sentence in " ".join(done.stdout.split())
    assert sentence.startswith(f"Prefix caching saved {savings['tokens']:,} of ")


def test_tokens_from_tiers_are_saved_too():
    """Tokens that were loaded from a tier need no prefill either."""
    options = {"blocks": 400, "tier": "host:memory=8GiB"}
    flags = (text for name, value in options.items() for text in (f"--{name}", value))
    document = json.loads(run_here("simulate", ZIPF, *flags, "--json").stdout)
    log = simulate(ZIPF, **options).log
    assert sum(log.loaded) > 0
    assert document["savings"]["tokens"] == sum(log.hit) + sum(log.loaded)


def test_nothing_is_said_where_nothing_hits():
    """Without a prefix cache there is no sentence."""
    assert "saved" not in run_here("simulate", ZIPF, "--prefix", "none").stdout


def test_a_comparison_names_the_policy_that_saves_most():
    """`compare` says what the best policy saves, of the prefill of all prompts."""
    asked = ("compare", ZIPF, "--eviction", "lru,fifo,optimum", "--blocks", "50,500")
    document = json.loads(run_here(*asked, "--json").stdout)
    rows = [row for row in document["rows"] if row["eviction"] != "optimum"]
    best = max(rows, key=lambda row: row["saved_s"])
    assert best["saved_s"] < document["infinite"]["prefill_s"]
    report = " ".join(run_here(*asked).stdout.split())
    assert "Prefix caching saves up to " in report
    assert f"in all: {best['eviction']} with {best['blocks']:,} blocks." in report


def test_a_comparison_and_an_explanation_have_one_prefill(tmp_path):
    """`explain` says the prefill of a run that `compare` says: that of prompts, not of keys."""
    trace = tmp_path / "run.jsonl"
    log = ("compare", "mooncake", "--limit", "60", "--blocks", "400", "--eviction", "lru")
    compared = json.loads(run_here(*log, "--trace", str(trace), "--json").stdout)
    told = json.loads(run_here("explain", str(trace), "--summary", "--json").stdout)
    assert told["prompt_tokens"] == compared["infinite"]["lookup_blocks"] * 512
    assert told["prefill_s"] == pytest.approx(compared["infinite"]["prefill_s"], abs=1e-3)
    assert told["saved_s"] == pytest.approx(compared["rows"][0]["saved_s"], abs=1e-3)
    lost = sum(each["prefill_s"] for each in told["lost"].values())
    assert told["saved_s"] + lost == pytest.approx(told["prefill_s"])
    report = run_here("explain", str(trace), "--summary").stdout
    assert f"Of {told['prompt_tokens']:,} tokens of keys, " in report
