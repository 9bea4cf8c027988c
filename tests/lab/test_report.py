"""A comparison as text, as a table and as CSV."""

from __future__ import annotations

import csv
import io

import attrs
import pytest

from kvcore.config.options import read_option
from kvcore.models.cost import default_prefill_cost
from kvcore.trace.fields import slo_field
from kvcore_cli.report.tables import setup, slo_times
from kvcore_lab.comparison import Comparison, Infinite, Row, Source
from kvcore_lab.report.comparison import ComparisonReport, residency_sections, write_csv


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
        saved_s=1.25,
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
            distinct_blocks=40,
            lookup_blocks=100,
            hit_blocks=hits,
            hit_ratio=ratio,
            prefill_s=5.0,
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


def test_the_table_has_a_row_per_policy_and_a_column_per_size():
    """A cell is the hit ratio and its share of the optimum; the last row is `infinite`."""
    assert report(*BOTH).table.headers == ["eviction", "   10", "1,000"]
    assert report(*BOTH).table.rows == [
        ["lru", "20.0% (40%)", "30.0% (50%)"],
        ["optimum", "50.0%", "60.0%"],
        ["infinite", "60.0%", "60.0%"],
    ]


def test_pools_given_in_bytes_are_named_by_their_bytes():
    """For pools given in bytes, headers and winners name their size in bytes."""
    rows = row("lru", 10, 20), row("fifo", 10, 10)
    shown = ComparisonReport(comparison(*rows), {10: "40 GiB"})
    assert shown.table.headers == ["eviction", "40 GiB"]
    assert "by the pool's K/V memory" in shown.headline
    assert "Most hits: lru with 40 GiB." in shown.reading


def test_rows_with_tiers_have_the_unit_of_the_others():
    """Where checkpoint policies are compared, hits of pool and tiers are of tokens too."""
    found = attrs.evolve(
        row("lru", 10, 20),
        checkpoint="chunk",
        reused_blocks=30,
        reuse_ratio={"block": 0.3, "token": 0.45, "request": None},
    )
    (cells,) = (cells for name, *cells in report(found).table.rows if name.endswith("+ tiers"))
    assert cells == ["45.0%"]


def test_rows_of_one_policy_differ_by_their_options():
    """Options are in the table if they differ between rows of a policy, and else below it."""
    shown = report(
        row("lfu", 10, 20, half_life=300.0, unit="s", decay=None),
        row("lfu", 10, 25, half_life=60.0, unit="s", decay=None),
    )
    assert [cells[0] for cells in shown.table.rows] == [
        "lfu:half_life=300",
        "lfu:half_life=60",
        "infinite",
    ]
    assert shown.reading.endswith("Options: lfu unit=s.")


def test_the_headline_names_workload_lookups_and_accounting():
    """The headline names workload, requests, lookups, block size and accounting."""
    assert report(*BOTH).headline == (
        "toy: 1,234 requests look up 100 blocks of 16 tokens (keys counting).\n"
        "The share of these that hit, by blocks in the pool; in brackets, the share of the "
        "optimum's hits."
    )


def test_a_single_item_is_in_the_singular():
    """A single request, block or token is written in the singular."""
    one = comparison(attrs.evolve(row("lru", 1, 0), block_size=1), row("fifo", 1, 1))
    one = attrs.evolve(
        one,
        workload=attrs.evolve(one.workload, requests=1),
        infinite=attrs.evolve(one.infinite, lookup_blocks=1),
    )
    shown = ComparisonReport(one)
    assert shown.headline.startswith("toy: 1 request looks up 1 block of 1 token (keys")
    assert "Most hits: fifo with 1 block." in shown.reading


@pytest.mark.parametrize(
    ("count", "reason"),
    [
        ("keys", "The requests have no keys"),
        ("tokens", "The requests have no keys, or none that fills a block"),
    ],
)
def test_the_headline_without_lookups_has_the_reason(count, reason):
    """Without lookups the headline is the number of requests and the reason."""
    nothing = comparison(row("lru", 10, 0), hits=0)
    empty = attrs.evolve(nothing.infinite, lookup_blocks=0)
    shown = ComparisonReport(attrs.evolve(nothing, accounting=count, infinite=empty))
    assert shown.empty
    start = f"toy: 1,234 requests.\n{reason}: there is nothing to look up."
    assert shown.headline.startswith(start)
    assert ("texts, token ids and hashes of blocks do" in shown.headline) is (count == "keys")


ALIKE = (
    row("lru", 10, 79),
    attrs.evolve(row("lfu", 10, 79), hit_ratio={"block": 0.7904, "token": 0.7904}),
)
"""Policies whose figures are shown as one."""

READINGS = {
    "the sizes that each policy wins": (
        report(
            *(row("lru", blocks, hits) for blocks, hits in ((10, 20), (20, 30), (30, 30))),
            *(row("fifo", blocks, hits) for blocks, hits in ((10, 10), (20, 31), (30, 30))),
        ),
        "Most hits: lru with 10 blocks; fifo with 20 blocks; lru and fifo with 30 blocks.",
    ),
    "all winners of a tie as it is shown": (
        report(*ALIKE, row("fifo", 10, 70)),
        "Most hits: lru and lfu with 10 blocks.",
    ),
    "no names if all win": (
        report(*ALIKE, row("fifo", 10, 79)),
        "Most hits: all with 10 blocks.",
    ),
    "the smallest pool in which the optimum hits all": (
        report(*BOTH),
        (
            "With 1,000 blocks the optimum hits all that can hit: from there on, policies lack "
            "foresight, not memory."
        ),
    ),
    "it by its memory, where sizes are memory": (
        ComparisonReport(comparison(*BOTH), {10: "1 GiB", 1000: "64 GiB"}),
        (
            "With 64 GiB the optimum hits all that can hit: from there on, policies lack "
            "foresight, not memory."
        ),
    ),
    "that no requests share a block": (
        report(row("lru", 10, 0), hits=0),
        "No request shares a block with an earlier one: nothing can hit.",
    ),
    "a prefix cache that shares nothing": (
        ComparisonReport(comparison(row("lru", 10, 0), hits=0), prefix="none"),
        "With prefix cache 'none' nothing can hit.",
    ),
    "model and device of the recompute cost": (
        ComparisonReport(
            comparison(row("lfu", 10, 20, unit="s"), row("cost", 10, 20)),
            recompute=default_prefill_cost(),
        ),
        "Options: lfu unit=s; cost: recompute cost of llama-3.1-8b on h100.",
    ),
}


@pytest.mark.parametrize(("shown", "sentence"), READINGS.values(), ids=READINGS)
def test_the_reading_names(shown, sentence):
    """The reading has a line on what the rows of a comparison show."""
    assert sentence in shown.reading.splitlines()


def test_a_policy_alone_is_not_explained():
    """A single policy has no winner, and without an optimum there are no brackets."""
    assert "Most hits" not in report(*BOTH).reading
    assert report(row("lru", 10, 20)).headline.endswith("by blocks in the pool.")


def test_a_hit_ratio_without_lookups_is_a_dash():
    """A hit ratio without lookups is a dash."""
    nothing = row("lru", 10, 0)
    nothing.hit_ratio["block"] = None
    assert report(nothing).table.rows[0] == ["lru", "    –"]


def test_the_csv_has_all_fields_of_a_row():
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
        "saved_s": "1.25",
        "evicted_blocks": "3",
        "share_of_optimum": "",
        "reused_blocks": "",
        "reuse_ratio_block": "",
        "reuse_ratio_token": "",
        "reuse_ratio_request": "",
        "wall_s": "0.5",
    }
    assert second["share_of_optimum"] == "0.5"


def test_the_csv_tells_checkpoint_policies_apart():
    """Rows of one eviction have the names of their checkpoint policies; a bound has none."""
    kept = [attrs.evolve(row("lru", 10, 20), checkpoint=name) for name in ("chunk", None)]
    write_csv(comparison(*kept), file := io.StringIO())
    found = [line["checkpoint"] for line in csv.DictReader(file.getvalue().splitlines())]
    assert found == ["chunk", ""]


def test_blocks_rest_in_each_tier_by_its_name_and_size():
    """A tier below the pool has rows of its own, and its memory is what would help it."""
    ages = dict.fromkeys(["age_at_hit_s", "age_at_eviction_s", "lifetime_s"])
    counts = {"stored_blocks": 100, "never_hit_blocks": 90, "restored_blocks": 80}
    rested = ages | counts | {"evicted_blocks": {"capacity": 100}, "thrashing": True}
    shown = attrs.evolve(
        row("lru", 10, 20),
        residency={"gpu": rested | {"thrashing": False}, "host": rested},
        tiers=[{"tier": "host", "slots": 30, "memory_bytes": 1 << 30}],
    )
    table, reading = residency_sections(comparison(shown))
    assert [cells[0] for cells in table.rows] == ["lru", "lru (host)"]
    assert "stored again before another 30 had gone" in reading
    assert "Twice its memory (2 GiB)" in reading


def test_the_setup_omits_options_that_repeat_the_deployment():
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


@pytest.mark.parametrize("times", ["ttft=1234.56789", "ttft=30,tpot=0.1", "deadline=1000000"])
def test_times_of_an_slo_are_written_as_on_the_command_line(times):
    """All digits of an SLO are written, and no exponent."""
    assert slo_times(slo_field(read_option("slo", times))) == times


def test_the_setup_of_a_header_with_missing_fields():
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
