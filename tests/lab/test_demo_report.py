"""The report of what a cache saves."""

import attrs

from kvcore.models.spec import ModelSpec
from kvcore_lab.demo.caching import CachingReport, Generation

MODEL = ModelSpec(
    name="tiny",
    layers=2,
    query_heads=4,
    kv_heads=1,
    head_dim=16,
    hidden_size=64,
    parameters=1,
)


def report(steps=100, prompt=10):
    """Return the report of three generations with made-up times."""
    naive, cached = prompt * steps + steps * (steps - 1) // 2, prompt + steps - 1
    tokens = tuple(range(steps))
    slower = tuple((step + 1) / 1_000 for step in range(steps))
    flat, rising = (1 / 1_000,) * steps, tuple(range(1_024, 1_024 * (steps + 1), 1_024))
    return CachingReport(
        [
            Generation("none", tokens, naive, slower, (0,) * steps, ()),
            Generation("dense", tokens, cached, flat, (2_048,) * steps, ()),
            Generation("paged", tokens, cached, flat, rising, ()),
        ],
        MODEL,
        "fp64",
        prompt,
        16,
    )


def test_the_headline_shows_that_outputs_are_equal():
    """The headline has the model and the first tokens that all three generated."""
    assert report().headline == (
        "tiny: 2 layers with 4 query heads and 1 K/V head, in fp64.\n"
        "10 prompt tokens, then 100 new ones: equal in all three, "
        "0 1 2 3 4 5 6 7 8 9 10 11 ..."
    )


def test_rows_have_projections_and_bytes():
    """A row has the projections, and the bytes after the first and the last step."""
    assert report().table.rows == [
        ["none", "5,950", "0 B", "0 B"],
        ["dense", "109", "2 KiB", "2 KiB"],
        ["paged", "109", "1 KiB", "100 KiB"],
    ]


def test_a_short_sum_is_printed_whole():
    """A sum of up to three terms is printed whole, without dots."""
    assert "10 + 11 + 12 = 33." in report(steps=3).reading
    assert "10 + 11 = 21." in report(steps=2).reading


def test_a_single_step_reports_no_saving():
    """With a single generated token the text reports no saving."""
    assert "10 = 10. With one" in report(steps=1).reading
    assert "times fewer" not in report(steps=1).reading


def test_times_are_medians_of_quarters():
    """A row of times has the median of each quarter of the steps, and a line of bars."""
    times = report().times
    assert times.headers == ["time of a step", "1–25", "26–50", "51–75", "76–100", ""]
    assert times.rows[0][:5] == ["none", "13 ms", "38 ms", "63 ms", "88 ms"]
    assert times.rows[1][:5] == ["dense", "1 ms", "1 ms", "1 ms", "1 ms"]


def test_bars_share_one_scale():
    """The bars of all rows have one scale: the slowest step of all has the full bar."""
    none, dense, _ = (row[-1] for row in report().times.rows)
    assert (none[0], none[-1]) == ("▁", "█")
    assert list(none) == sorted(none)
    assert dense == "▁" * 20


def test_a_slow_step_of_a_short_output_does_not_flatten_the_bars():
    """With 40 tokens too a bar is the median of steps, which one slow step does not move."""
    made = report(steps=40)
    slow = list(made.generations[2].step_seconds)
    slow[17] = 10.0
    generations = [*made.generations[:2], attrs.evolve(made.generations[2], step_seconds=slow)]
    slowed = attrs.evolve(made, generations=generations)
    assert slowed.times.rows == made.times.rows


def test_few_steps_have_a_column_each():
    """With three steps the table of times has a column for each step."""
    assert report(steps=3).times.headers == ["time of a step", "1", "2", "3", ""]
    assert [len(row[-1]) for row in report(steps=3).times.rows] == [3, 3, 3]
