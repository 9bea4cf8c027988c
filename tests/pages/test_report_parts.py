"""The parts of a report page: charts with their numbers, commands, and axes of a sweep."""

import gzip
import re
from base64 import b64decode
from itertools import pairwise
from pathlib import Path

from helpers.traces import BLOCK, ask

from kvcore import KVCache, Trace
from kvcore.sections import Panel
from kvcore_pages import shell
from kvcore_pages.report import _labels
from kvcore_pages.report_documents import seen_grid
from kvcore_pages.report_parts import (
    Axis,
    Line,
    chart,
    command,
    distributions,
    panel_lines,
    recorded,
    settings,
    table,
)
from kvcore_pages.report_runs import Run
from kvcore_replay.untimed import replay

TIME, SHARE = Axis("time", "s"), Axis("share", "%")


def test_a_distribution_on_a_logarithmic_axis_counts_zeros():
    """Times of 0, which a logarithmic axis cannot show, count in the curve and the table."""
    axis = Axis("time", "s", log=True)
    (part,) = distributions("", "", axis, {"TTFT": [2.0, 0.0, 1.0, 0.0], "none": []})
    (line,) = part["lines"]
    assert (line["x"], line["y"]) == ([1.0, 2.0], [75.0, 100.0])
    assert 0 <= line["label_at"] < 2
    rows = dict(part["numbers"]["rows"])
    assert (rows["50%"], rows["75%"], rows["100%"]) == ("0 ns", "1 s", "2 s")


def test_a_long_line_has_a_short_table_with_both_ends():
    """The table of a long chart has few rows, with both ends.

    A step line holds its value, and a point that a line lacks is empty.
    """
    steps = Line("held", [0, 1000], [10.0, 20.0], "blue", step=True)
    points = Line("seen", range(1000), [*map(float, range(1000))], "orange")
    (part,) = chart("", "", TIME, SHARE, [steps, points])
    rows = part["numbers"]["rows"]
    assert len(rows) == 24
    assert rows[0] == ["0 ns", "10.0%", "0.0%"]
    assert rows[-1] == ["1,000 s", "20.0%", ""]
    assert {row[1] for row in rows[1:-1]} == {"10.0%"}


def test_the_evictions_over_time_are_all_of_a_run(tmp_path):
    """The rates of evictions add up to all, also in a run shorter than two ns a window."""
    path, distinct = tmp_path / "t.jsonl", (chr(33 + n) * 4 for n in range(79))
    with Trace(path) as trace:
        cache = KVCache(8, BLOCK, trace=trace)
        replay([ask(n, text, arrival=n) for n, text in enumerate(distinct)], cache)
    parts = (part for part in Run.of_trace(path).parts() if part.get("title") == "Evictions")
    (line,) = next(parts)["lines"]
    lengths = [end - begin for begin, end in pairwise(line["x"])]
    evicted = sum(rate * length for rate, length in zip(line["y"][:-1], lengths, strict=True))
    assert round(evicted) == (79 - 2) * 4


def test_an_empty_chart_or_table_makes_no_part():
    """An empty chart or table makes no part of the report."""
    assert chart("", "", TIME, SHARE, [Line("none", [], [], "blue")]) == []
    assert table("", ["a"], []) == []


def test_commands_are_quoted_for_a_shell():
    """Commands are quoted for a shell, whatever the names of files and plugins are."""
    words = ["kvcore", "explain", "a b.jsonl", "--eviction", "x; rm"]
    assert command(*words)["text"] == "kvcore explain 'a b.jsonl' --eviction 'x; rm'"


def test_options_of_a_recorded_command_stand_before_its_arguments():
    """Behind `--` all words are arguments: options are put before it."""
    document = {"command": ["kvcore", "compare", "--blocks", "9", "--", "-log"]}
    wanted = ["kvcore", "compare", "--blocks", "9", "--json", "--", "-log"]
    assert recorded(document, "--json") == wanted


def test_settings_omit_options_that_were_not_set():
    """Settings omit options that were not set, and the coefficients of a latency model."""
    header = {
        "n": 0,
        "mode": "model",
        "tiers": [],
        "latency": {"compute": {"token_ps": 3.5}},
        "plugins": {"latency": {"name": "roofline", "options": {"compute": 0.5}}},
        "slo": {"ttft": 30 * 10**9, "tpot": None},
        "workload": {"name": "zipf", "options": {"requests": 9}, "digest": "d1"},
    }
    assert dict(settings(header)) == {
        "mode": "model",
        "latency": "roofline:compute=0.5",
        "slo": "ttft=30 s",
        "workload": "zipf:requests=9",
        "workload digest": "d1",
    }


def test_pool_sizes_that_follow_from_other_options_are_no_axis():
    """Pool sizes are no axis of a sweep if other options distinguish all its cells."""
    rows = [
        {"codec": codec, "blocks": blocks} for codec, blocks in (("fp16", 10), ("int8", 20))
    ]
    assert seen_grid("simulate", rows).varied == ["codec"]
    rows += [row | {"blocks": 99} for row in rows]
    assert seen_grid("simulate", rows).varied == ["codec", "blocks"]


def test_labels_of_files_are_the_shortest_distinct_path_ends():
    """Files of the same name are labelled with their folders, and repeated files numbered."""
    assert _labels(["a/x.json", "a/y.json"]) == ["x.json", "y.json"]
    assert _labels(["a/run", "b/run"]) == [str(Path("a/run")), str(Path("b/run"))]
    assert _labels(["a/run", "a/run"]) == ["run", "run (2)"]
    assert _labels(["a", "a (2)", "a"]) == ["a", "a (2)", "a (3)"]


def test_data_of_a_page_is_the_same_by_each_python(monkeypatch):
    """The header of compressed data names one system, whichever Python has compressed it."""
    made, pack = shell._block("x", {"a": 1}), gzip.compress

    def newer(*given, **options):
        packed = pack(*given, **options)
        return packed[:9] + b"\xff" + packed[10:]

    monkeypatch.setattr("gzip.compress", newer)
    assert shell._block("x", {"a": 1}) == made
    assert gzip.decompress(b64decode(re.search(">(.*)<", made)[1])) == b'{"a":1}'


def test_a_policy_has_the_colour_that_it_has_in_plots():
    """Common policies have one colour each on all pages; the others have what is left."""
    points = ((1, 0.1), (2, 0.2))
    panel = Panel("hits", dict.fromkeys(("mine", "arc", "lru", "optimum"), points), str)
    colours = {line.name: line.colour for line in panel_lines(panel, {})}
    assert colours == {"mine": "orange", "arc": "green", "lru": "blue", "optimum": "ink"}
