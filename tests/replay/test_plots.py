"""Plots of traces and results: the texts in their SVG, and their errors."""

from __future__ import annotations

import re
import sys
from xml.dom.minidom import parseString

import attrs
import orjson
import pytest
from helpers import traces
from hypothesis import given
from hypothesis import strategies as st

from kvcore import InputError, KVCache, PluginError, Trace, simulate
from kvcore_replay.report import plots
from kvcore_replay.report.figure import log_ticks
from kvcore_replay.state.residency import rebuild_residency
from kvcore_replay.timeline import Kind, Timeline

pytest.importorskip("matplotlib")

TRACED = {"occupancy": plots.occupancy, "hits": plots.hits, "timeline": plots.timeline}


def texts(svg):
    """Return the texts of an SVG, which are in comments."""
    return set(re.findall("<!-- (.*?) -->", svg.decode(), re.DOTALL))


def drawn(draw, *given):
    """Return the texts of a plot drawn as SVG."""
    return texts(draw(*given, "svg"))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Return the timeline of a small server with a pause, a recompute and a rejection."""
    return Timeline.read(traces.serve(tmp_path_factory.mktemp("served") / "run.jsonl"))


@pytest.fixture(scope="module")
def result():
    """Return a small simulation."""
    return simulate("zipf:requests=60,prefixes=4,rate=40", slo="ttft=0.5,tpot=0.02")


@pytest.mark.parametrize("draw", TRACED.values(), ids=TRACED)
def test_a_plot_is_a_reproducible_png(draw, served):
    """A plot is a PNG, with the same bytes in each call."""
    picture = draw(served, "png")
    assert picture.startswith(b"\x89PNG")
    assert picture == draw(served, "png")


def test_the_occupancy_plot_has_uses_and_peaks(served):
    """The occupancy plot shows blocks by use, and the peaks of waiting and running requests."""
    found = drawn(plots.occupancy, served)
    assert {"private", "cached", "free", "blocks of 4 tokens"} <= found
    assert {"running (at most 1)", "waiting (at most 1)", "time, ns"} <= found
    assert "Pool of 4 requests, 1 rejected" in found
    assert any(text.startswith("Setup: kvcore ") for text in found)


def test_the_hits_plot_labels_both_ratios(tmp_path):
    """The hits plot labels both ratios with their last values."""
    with Trace(tmp_path / "run.jsonl") as trace:
        cache = KVCache(8, traces.BLOCK, trace=trace)
        for now in range(100):
            seq = cache.open(traces.ask(now, "ab"), None, now)
            cache.commit(seq, seq.tokens - seq.computed, now)
            cache.close(seq, now)
    found = drawn(plots.hits, Timeline.read(tmp_path / "run.jsonl"))
    assert {"since the start: 49.5%", "in the last 10 ns: 50.0%"} <= found
    assert "of 200 blocks looked up that hit" in found


def test_many_requests_are_counted(served, monkeypatch):
    """A timeline of many requests has counts instead of rows."""
    monkeypatch.setattr(plots, "ROWS", 3)
    found = drawn(plots.timeline, served)
    assert any("too many for rows" in text for text in found)
    assert "2 first tokens, dots; 2 preemptions, crosses" in found
    assert not found & {"long", "short"}


def test_counts_of_phases_add_up(served, monkeypatch):
    """The mean counts of a phase, times the width of their bins, are the time spent in it."""
    monkeypatch.setattr(plots, "BINS", 7)
    span = served.end - served.begin
    for kind, means in plots._means(served, served.begin, span).items():
        spent = sum(end - begin for _, of, begin, end, _ in served.phases if of is kind)
        assert sum(means) * span / 7 == pytest.approx(spent)
        assert min(means) >= -1e-9
    assert plots._means(served, served.begin, span).keys() == {
        Kind.PREFILL, Kind.DECODE, Kind.PREEMPTED,
    }  # fmt: skip


def test_distributions_of_ages_have_their_percentiles(tmp_path):
    """Each distribution of ages has its median, its 99th percentile and its blocks."""
    file = traces.record(tmp_path / "run.jsonl")
    residency = rebuild_residency(file)
    found = drawn(plots.ages, residency, Timeline.read(file).header)
    ages = residency.age_at_eviction.percentiles()
    wanted = (
        f"since last use, at eviction: p50 {ages['p50']} ns, p99 {ages['p99']} ns (6 blocks)"
    )
    assert wanted in found


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("occupancy", "free"),
        ("hits", "Nothing was looked up."),
        ("timeline", "There are no requests."),
    ],
)
def test_plots_of_a_trace_without_requests(kind, text, tmp_path):
    """Without requests the occupancy plot shows a free pool; others show a sentence."""
    with Trace(tmp_path / "run.jsonl") as trace:
        KVCache(8, traces.BLOCK, trace=trace)
    found = drawn(TRACED[kind], Timeline.read(tmp_path / "run.jsonl"))
    assert text in found
    assert not found & {"private", "cached", "prefill", "since the start"}


def test_ages_without_hits_or_evictions_are_a_sentence(tmp_path):
    """The ages plot of a trace without hits or evictions is a sentence."""
    with Trace(tmp_path / "run.jsonl") as trace:
        KVCache(8, traces.BLOCK, trace=trace)
    header = {**traces.CACHE, "kvcore": "1", "mode": "untimed"}
    found = drawn(plots.ages, rebuild_residency(tmp_path / "run.jsonl"), header)
    assert "No block was hit, and none was evicted." in found


def test_the_plot_of_a_cut_trace_is_marked_incomplete(tmp_path):
    """The plot of an incomplete trace says that it is incomplete."""
    file = traces.serve(tmp_path / "run.jsonl")
    file.write_bytes(file.read_bytes()[:-400])
    found = drawn(plots.occupancy, Timeline.read(file))
    assert any(text.startswith("Incomplete: the file ends") for text in found)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("$x$ \\frac{", "$x$ \\frac{"),
        ("<script>", "&lt;script&gt;"),
        ("\x1b[31m\u202e", "\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}"),
        ("漢字", "漢字"),
        ("-->", "- -&gt;"),
    ],
)
def test_texts_of_a_trace_are_drawn_as_plain_text(name, text, tmp_path):
    """Ids in a trace are drawn as plain text: no formulas, markup or controls."""
    with Trace(tmp_path / "run.jsonl") as trace:
        cache = KVCache(8, traces.BLOCK, trace=trace)
        seq = cache.open(traces.ask(name, "ab"), None, 1)
        cache.commit(seq, 8, 2)
        cache.close(seq, 3)
    picture = plots.timeline(Timeline.read(tmp_path / "run.jsonl"), "svg")
    assert text in texts(picture)
    svg = picture.decode()
    assert "<script" not in svg
    assert "\x1b" not in svg
    assert "\u202e" not in svg
    assert parseString(svg).documentElement.tagName == "svg"  # noqa: S318 - ours


def test_long_names_leave_room_for_the_plot(served):
    """A long name is cut in the title, and the caption has a bounded number of lines."""
    header = orjson.loads(orjson.dumps(served.header))
    header["workload"] = {"name": 500 * "L", "options": {"path": 5000 * "x"}}
    found = drawn(plots.occupancy, attrs.evolve(served, header=header))
    assert f"Pool of {57 * 'L'}..., 4 requests, 1 rejected" in found
    assert sum(len(text) > 100 for text in found) < 12


def test_a_trace_without_a_clock_has_no_timeline_or_latencies(tmp_path):
    """A trace without a clock raises InputError for a timeline and for latencies."""
    with Trace(tmp_path / "run.jsonl") as trace:
        cache = KVCache(8, traces.BLOCK, trace=trace)
        cache.close(cache.open(traces.ask("a", "ab"), None, 1), 1)
    timeline = Timeline.read(tmp_path / "run.jsonl")
    with pytest.raises(
        InputError, match=r"requests take no time in it.* as `kvcore simulate --trace`"
    ):
        plots.timeline(timeline, "png")
    with pytest.raises(InputError, match="it has no clock"):
        plots.Latencies.from_timeline(timeline)


def test_a_trace_and_its_result_have_the_same_latencies(tmp_path):
    """A trace and its result, also read from files, have the same latencies.

    Only results have the gaps between tokens.
    """
    file, out = tmp_path / "run.jsonl", tmp_path / "out"
    result = simulate("zipf:requests=60,prefixes=4,rate=40", slo="ttft=0.5", trace=file)
    result.write(out)
    traced, kept = (
        plots.Latencies.from_timeline(Timeline.read(file)),
        plots.Latencies.of_result(result),
    )
    read = plots.Latencies.read(out)
    assert read.samples == kept.samples
    for name, times in kept.samples.items():
        assert sorted(traced.samples[name]) == pytest.approx(sorted(times))
    assert traced.expected == kept.expected == read.expected == {"TTFT": 0.5}
    assert read.gaps == kept.gaps
    assert {f"p{percent:g}": time for percent, time in read.gaps.items()} == {
        name: time for name, time in result.itl.as_dict().items() if name != "mean"
    }
    assert "ITL, percentiles as recorded" in drawn(plots.latency, read)


def test_an_slo_outside_the_axis_is_a_label(served):
    """An SLO outside of the axis is a label, not a line."""
    found = plots.Latencies.from_timeline(served)
    for limit, wanted in ((1.0, "SLO 1 s, beyond this axis"), (1e-12, "before this axis")):
        texts = drawn(plots.latency, attrs.evolve(found, expected={"E2E": limit}))
        assert any(wanted in text for text in texts)


def test_latencies_without_an_admission_are_a_sentence(tmp_path):
    """The latency plot without an admitted request is a sentence."""
    with Trace(tmp_path / "run.jsonl", mode="model") as trace:
        KVCache(8, traces.BLOCK, trace=trace)
        trace.request(traces.ask("huge", "h", 99), 0)
        trace.reject(0, request="huge", why="too long")
    found = drawn(
        plots.latency, plots.Latencies.from_timeline(Timeline.read(tmp_path / "run.jsonl"))
    )
    assert "No request was admitted." in found


@pytest.mark.parametrize(
    ("summary", "requests"), [(None, ""), ("{", ""), ("{}", ""), ("[]", "{}"), ("{}", "{")]
)
def test_a_folder_that_is_no_result_is_refused(summary, requests, tmp_path):
    """A folder that holds no valid result raises InputError with its name."""
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
        (tmp_path / "requests.jsonl").write_text(requests)
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        plots.Latencies.read(tmp_path)


def test_without_matplotlib_the_error_names_the_package(served, monkeypatch):
    """Without matplotlib a plot raises PluginError that names the package to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PluginError, match=r"a plot needs matplotlib .*'kvcore\[lab\]'"):
        plots.occupancy(served, "png")


@given(st.floats(1e-9, 1e6), st.floats(1.15, 1e5))
def test_a_logarithmic_axis_has_ticks(low, ratio):
    """A logarithmic axis has at least two ticks, sorted, and all on the axis."""
    ticks = log_ticks(low, low * ratio)
    assert len(ticks) > 1
    assert ticks == sorted(ticks)
    assert low <= ticks[0] < ticks[-1] <= low * ratio


def test_a_window_without_lookups_at_any_point_has_no_line(tmp_path):
    """A window in which no point has lookups has no line, only the hits since the start."""
    times = [0, *[1] * 100, 3000, 4000]
    with Trace(tmp_path / "run.jsonl") as trace:
        cache = KVCache(8, traces.BLOCK, trace=trace)
        for index, now in enumerate(times):
            seq = cache.open(traces.ask(index, "ab" if now == 1 else ""), None, now)
            cache.commit(seq, seq.tokens - seq.computed, now)
            cache.close(seq, now)
    found = drawn(plots.hits, Timeline.read(tmp_path / "run.jsonl"))
    assert "since the start: 49.5%" in found
    assert not any("in the last" in text for text in found)
