"""Tests of `--price` of `compare`, `simulate`, `replay` and `explain`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import json_of as document
from helpers.commands import run_here

from kvcore_replay.pricing import PRICES

LOG = Path(__file__).parents[3] / "examples" / "api_log.jsonl.gz"
SMALL = "zipf:requests=50,prefixes=5,prefix_tokens=64,suffix_tokens=32,rate=50"
BILLS = ["price", "uncached", "api", "reported", "run"]


def test_simulate_and_replay_agree(tmp_path):
    """The bill of a run is the bill of its trace, and of its trace run again."""
    trace = tmp_path / "trace.jsonl"
    arguments = ("simulate", SMALL, "--blocks", "60", "--no-search", "--trace", trace)
    simulated = document(*arguments, "--price", "openai,min_tokens=0,step=1")["bill"]
    assert list(simulated) == BILLS
    assert simulated["run"]["read_tokens"] > 0
    price = ("--price", "openai,min_tokens=0,step=1")
    assert document("replay", trace, *price)["bill"] == simulated
    again = document("whatif", trace, "--scheduler", "fcfs", *price)
    assert again["recorded"]["bill"] == again["rerun"]["bill"] == simulated
    assert "bill" not in document("whatif", trace, "--scheduler", "fcfs")["recorded"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", SMALL, "--eviction", "lru", "--blocks", "20"),
        ("simulate", SMALL, "--blocks", "60", "--no-search"),
        ("explain", SMALL, "--summary"),
    ],
)
def test_tables_have_dollars_and_prices(arguments):
    """The text has the bills in USD, the prices and the rule of the API."""
    done = run_here(*arguments, "--price", "deepseek")
    text = " ".join(done.stdout.split())
    assert done.returncode == 0
    assert "USD" in text
    assert "by the API's rule" in text
    assert "Prices: deepseek-flash" in text


def test_whatif_prints_the_bills_of_both_runs(tmp_path):
    """`whatif` prints the bill of the recorded run, and that of the new run below it."""
    trace = tmp_path / "trace.jsonl"
    run_here("compare", SMALL, "--eviction", "lru", "--blocks", "20", "--trace", trace)
    done = run_here("whatif", trace, "--eviction", "lfu", "--price", "xai")
    rows = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert {"with this cache", "what if"} <= set(rows)
    replayed = run_here("replay", trace, "--price", "xai").stdout
    assert "with this cache" in replayed
    assert all("A trace has neither the usage" in text for text in (done.stdout, replayed))
    refused = run_here("replay", trace, "--price", "xai", "--at", 1)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--price bills the whole trace" in refused.stderr


def test_explain_finds_the_miss_reasons_of_an_api_log():
    """`explain` of the example log has reasons of misses, and reported and expected hits."""
    found = json.loads(
        run_here("explain", LOG, "--price", "anthropic", "--summary", "--json").stdout
    )
    lost = {reason: row["stopped"] for reason, row in found["lost"].items() if row["tokens"]}
    assert lost.pop("unmarked") == 2  # keys of 18 tokens of text end in other places
    assert lost == {"new": 11, "edited": 4, "undetermined": 1, "lapsed": 1, "evicted": 1}
    assert found["read_tokens"] == found["bill"]["reported"]["read_tokens"]
    assert found["expected_tokens"] > found["read_tokens"]
    printed = run_here("explain", LOG, "--price", "anthropic", "8").stdout
    assert "system[0], after token 166" in " ".join(printed.split())


def test_price_list_prints_all_prices():
    """`--price list` prints all prices, without any other argument."""
    done = run_here("explain", "--price", "list")
    assert done.returncode == 0
    assert {line.split()[0] for line in done.stdout.splitlines()[2:]} == set(PRICES)


def test_nothing_is_imported_without_prices():
    """A simulation without `--price` does not import the modules of prices and bills."""
    code = (
        "import sys; from kvcore_cli.main import run; "
        f"run(['simulate', {SMALL!r}, '--no-search', '--residency']); "
        "print([m for m in sys.modules if 'pricing' in m or 'billing' in m or 'logged' in m "
        "or 'chat_log' in m or 'prompt_misses' in m], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stderr == "[]\n"
