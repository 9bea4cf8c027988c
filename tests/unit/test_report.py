"""A comparison as text, as a table and as CSV."""

from __future__ import annotations

import csv
import io

import attrs
import pytest

from kvcore.analysis import Comparison, Infinite, Row, Source
from kvcore.models.cost import default_prefill_cost
from kvcore.report import ComparisonReport, setup, write_csv


def row(eviction, blocks, hits, *, best=None, **options):
    """Return the row of a policy that hits `hits` of 100 blocks."""
    ratio = hits / 100
    return Row(
        eviction=eviction,
        options=options,
        blocks=blocks,
        block_size=16,
        requests=7,
        lookup_blocks=100,
        hit_blocks=hits,
        hit_ratio={"block": ratio, "token": ratio, "request": None},
        evicted_blocks=3,
        share_of_optimum=None if best is None else hits / best,
        wall_s=0.5,
    )


def comparison(*rows, hits=60):
    """Return a comparison of `rows` in which an infinite cache hits `hits` of 100 blocks."""
    ratio = {"block": hits / 100, "token": hits / 100, "request": hits / 100}
    return Comparison(
        workload=Source(name="toy", digest="00", requests=1234, key_tokens=16, options={}),
        accounting="keys",
        rows=list(rows),
        infinite=Infinite(
            distinct_blocks=40, lookup_blocks=100, hit_blocks=hits, hit_ratio=ratio
        ),
    )


def report(*rows, **options):
    """Return the report of a comparison of `rows`."""
    return ComparisonReport(comparison(*rows, **options))


BOTH = (
    row("lru", 10, 20, best=50),
    row("lru", 1000, 30, best=60),
    row("optimum", 10, 50, best=50, bypass=False),
    row("optimum", 1000, 60, best=60, bypass=False),
)


def test_the_table_is_of_policies_by_sizes():
    """A cell is the hit ratio and its share of the optimum; the last row is `infinite`."""
    assert report(*BOTH).headers == ["eviction", "   10", "1,000"]
    assert report(*BOTH).rows == [
        ["lru", "20.0% (40%)", "30.0% (50%)"],
        ["optimum", "50.0%", "60.0%"],
        ["infinite", "60.0%", "60.0%"],
    ]


def test_sizes_given_in_bytes_are_named_so():
    """For pools given in bytes, headers and winners name their size in bytes."""
    rows = row("lru", 10, 20), row("fifo", 10, 10)
    told = ComparisonReport(comparison(*rows), {10: "40 GiB"})
    assert told.headers == ["eviction", "40 GiB"]
    assert "by the pool's K/V memory" in told.headline
    assert "Most hits: lru with 40 GiB." in told.reading


def test_namesakes_are_told_apart_by_their_options():
    """Options are in the table if they differ between rows of a policy, and else below it."""
    told = report(
        row("lfu", 10, 20, half_life=300.0, unit="s", decay=None),
        row("lfu", 10, 25, half_life=60.0, unit="s", decay=None),
    )
    assert [cells[0] for cells in told.rows] == [
        "lfu:half_life=300",
        "lfu:half_life=60",
        "infinite",
    ]
    assert told.reading.endswith("Options: lfu unit=s.")


def test_the_headline_says_what_was_measured():
    """The headline names workload, requests, lookups, block size and accounting."""
    assert report(*BOTH).headline == (
        "toy: 1,234 requests look up 100 blocks of 16 tokens (keys counting).\n"
        "The share of these that hit, by blocks in the pool; in brackets, the share of the "
        "optimum's hits."
    )


def test_one_of_a_thing_is_singular():
    """A single request, block or token is written in the singular."""
    one = comparison(attrs.evolve(row("lru", 1, 0), block_size=1), row("fifo", 1, 1))
    one = attrs.evolve(
        one,
        workload=attrs.evolve(one.workload, requests=1),
        infinite=attrs.evolve(one.infinite, lookup_blocks=1),
    )
    told = ComparisonReport(one)
    assert told.headline.startswith("toy: 1 request looks up 1 block of 1 token (keys")
    assert "Most hits: fifo with 1 block." in told.reading


@pytest.mark.parametrize(
    ("count", "reason"),
    [
        ("keys", "The requests have no keys"),
        ("tokens", "The requests have no keys, or none that fills a block"),
    ],
)
def test_the_headline_of_nothing_to_look_up(count, reason):
    """Without lookups the headline is the number of requests and the reason."""
    nothing = comparison(row("lru", 10, 0), hits=0)
    empty = attrs.evolve(nothing.infinite, lookup_blocks=0)
    told = ComparisonReport(attrs.evolve(nothing, accounting=count, infinite=empty))
    assert told.empty
    assert told.headline == f"toy: 1,234 requests.\n{reason}: there is nothing to look up."


def test_the_options_name_the_cost_of_computing_again():
    """If `cost` takes part, the reading names the model and device of its recompute cost."""
    cost = default_prefill_cost()
    rows = comparison(row("lfu", 10, 20, unit="s"), row("cost", 10, 20))
    told = ComparisonReport(rows, recompute=cost)
    assert told.reading.endswith(
        "Options: lfu unit=s; cost: recompute cost of llama-3-8b on h100."
    )


def test_the_headline_speaks_of_the_optimum_only_if_it_was_run():
    """Without an optimum the headline explains no brackets."""
    assert report(row("lru", 10, 20)).headline.endswith("by blocks in the pool.")


def test_the_reading_names_the_winner_of_each_size():
    """The reading lists the sizes that each policy wins; a size with a tie is not listed."""
    told = report(
        row("lru", 10, 20),
        row("lru", 20, 30),
        row("lru", 30, 30),
        row("fifo", 10, 10),
        row("fifo", 20, 31),
        row("fifo", 30, 30),
    )
    assert "Most hits: lru with 10 blocks; fifo with 20 blocks." in told.reading


def test_one_policy_wins_nothing():
    """A single policy beside the optimum has no winner."""
    assert "Most hits" not in report(*BOTH).reading


def test_the_reading_says_where_the_optimum_has_all():
    """The reading names the smallest pool in which the optimum hits all that can hit."""
    assert "With 1,000 blocks the optimum hits all that can hit" in report(*BOTH).reading


def test_the_reading_of_nothing_shared():
    """If no requests share a block, the reading is that nothing can hit."""
    told = report(row("lru", 10, 0), hits=0)
    assert told.reading == ("No request shares a block with an earlier one: nothing can hit.")


def test_the_reading_of_a_prefix_cache_that_shares_nothing():
    """If the prefix cache shares nothing, the reading names it instead of the requests."""
    told = ComparisonReport(comparison(row("lru", 10, 0), hits=0), prefix="none")
    assert told.reading == "With prefix cache 'none' nothing can hit."


def test_no_lookups_no_ratio():
    """A hit ratio without lookups is a dash."""
    nothing = row("lru", 10, 0)
    nothing.hit_ratio["block"] = None
    assert report(nothing).rows[0] == ["lru", "    –"]


def test_csv_has_a_row_a_row():
    """The CSV has all fields; options are JSON, and missing values are empty."""
    file = io.StringIO()
    write_csv(comparison(row("lfu", 10, 20, half_life=1.5), row("lru", 10, 30, best=60)), file)
    first, second = csv.DictReader(file.getvalue().splitlines())
    assert first == {
        "workload": "toy",
        "count": "keys",
        "eviction": "lfu",
        "options": '{"half_life": 1.5}',
        "blocks": "10",
        "block_size": "16",
        "requests": "7",
        "lookup_blocks": "100",
        "hit_blocks": "20",
        "hit_ratio_block": "0.2",
        "hit_ratio_token": "0.2",
        "hit_ratio_request": "",
        "evicted_blocks": "3",
        "share_of_optimum": "",
        "reused_blocks": "",
        "reuse_ratio_block": "",
        "reuse_ratio_token": "",
        "reuse_ratio_request": "",
        "wall_s": "0.5",
    }
    assert second["share_of_optimum"] == "0.5"


def test_the_setup_has_every_option_but_for_those_that_repeat_the_deployment():
    """The setup has every option that does not repeat the deployment, as commands take it.

    A model given as figures is written by its name.
    """
    plugins = {
        "eviction": {"name": "lfu", "options": {"half_life": 60.0, "unit": None}},
        "latency": {
            "name": "roofline",
            "options": {
                "model": {"name": "mine", "layers": 2},
                "device": "a40",
                "compute": 0.5,
            },
        },
    }
    header = {
        "kvcore": "1.2",
        "mode": "model",
        "count": "tokens",
        "block_size": 16,
        "blocks": 1000,
        "plugins": plugins,
        "workload": {"name": "zipf", "options": {"requests": 3}},
        "model": {"name": "mine", "codec": "fp8"},
        "device": {"name": "h100", "count": 2},
        "batching": {"chunked": True},
        "rate_scale": 2.0,
        "slo": {"ttft": 1_500_000_000},
        "seed": 0,
    }
    assert setup(header) == (
        "Setup: kvcore 1.2 by the model's clock; workload zipf:requests=3; "
        "mine in fp8 on 2 x h100; 1,000 blocks of 16 tokens (tokens counting); "
        "eviction lfu:half_life=60.0; latency roofline:device=a40, compute=0.5; "
        "chunked true; rate_scale 2.0; slo ttft=1.5; seed 0."
    )
    assert "; slo none; " in setup(header | {"slo": {}})


def test_the_setup_of_a_header_with_little_in_it():
    """The setup of a trace written by hand omits missing fields and keeps a model's text."""
    header = {
        "kvcore": "1.2",
        "mode": "untimed",
        "count": "keys",
        "block_size": 4,
        "blocks": 1,
        "plugins": {},
        "workload": None,
        "seed": None,
        "model": "my own",
    }
    assert setup(header) == (
        "Setup: kvcore 1.2 without a clock; my own; 1 block of 4 tokens (keys counting)."
    )
