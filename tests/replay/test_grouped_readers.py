"""Timelines, live views, plots and exports of traces with cache groups."""

import re

import orjson
import pytest
from helpers.grouped_traces import grouped_run

from kvcore import TraceError, read_events
from kvcore_replay.check.trace import check_trace
from kvcore_replay.export import event_batches
from kvcore_replay.report.checks import trace_sections
from kvcore_replay.report.live import LiveView
from kvcore_replay.report.perfetto import PerfettoTrace
from kvcore_replay.state.groups import GroupState
from kvcore_replay.state.residency import rebuild_residency
from kvcore_replay.timeline import Timeline

SEEDS = range(6)


@pytest.fixture(scope="module", params=SEEDS)
def recorded(request, tmp_path_factory):
    """Return a trace, and the result of its run."""
    path = tmp_path_factory.mktemp("groups") / "trace.jsonl"
    return path, grouped_run(request.param, path)[0]


def test_a_timeline_has_the_blocks_of_each_group(recorded):
    """At each time the blocks of the groups are the cached and the private ones."""
    series = Timeline.read(recorded[0]).series
    for row in range(len(series)):
        used = sum(blocks[row] for blocks in series.groups.values())
        assert used == series.cached[row] + series.private[row] == 90 - series.free[row]
    thinned = series.thinned(12)
    assert [*thinned.groups] == [*series.groups]
    assert {len(blocks) for blocks in thinned.groups.values()} == {len(thinned)}


def test_a_timeline_has_the_times_of_the_run(recorded):
    """Times of first tokens and ends are those of the run, and each chunk is there once."""
    path, result = recorded
    timeline = Timeline.read(path)
    requests, log = timeline.requests, result.log
    ends = dict(zip(log.ids, zip(log.first_token, log.finish, strict=True), strict=True))
    for row, name in enumerate(requests.ids):
        if row not in requests.rejected:
            assert (requests.first_token[row], requests.finish[row]) == ends[int(name)]
    chunks = list(zip(timeline.chunks.request, timeline.chunks.time, strict=True))
    assert len(set(chunks)) == len(chunks)


def test_the_live_view_has_the_groups(recorded):
    """The view has the parts of the pool, and the share that each group has of it."""
    header, *lines = read_events(recorded[0])
    view, state = LiveView(header), GroupState(header)
    for line in lines[:-1][: len(lines) // 2]:
        view.take(line)
        state.apply(line)
    assert sum(view.pool().values()) == header.blocks
    assert view.pool()["shared"] == sum(
        block.holders > 0 for block in state.blocks.values() if block.name is not None
    )
    text = "\n".join("".join(piece for piece, _ in line) for line in view.lines(100, 30, ""))
    (shares,) = re.findall(r"^groups .*$", text, re.MULTILINE)
    assert shares.count("%") == len(state.groups)
    assert f"0 ({state.groups[0].kind}" in shares


def test_evictions_are_described_with_their_groups(recorded):
    """Evictions at one time for one request are one event in words, with its groups."""
    header, *lines = read_events(recorded[0])
    view, found = LiveView(header), []
    for line in lines:
        view.take(line)
        found += view.last_events(1)
    assert any(re.search(r"blocks? of cache groups 0.* evicted for request", t) for t in found)


def test_the_occupancy_plot_has_a_part_for_each_group(recorded):
    """The plot shows the blocks of each group, and the free ones."""
    pytest.importorskip("matplotlib")
    from kvcore_replay.report import plots  # noqa: PLC0415 - needs matplotlib

    timeline = Timeline.read(recorded[0])
    drawn = plots.occupancy(timeline, "svg").decode()
    for name in timeline.series.groups:
        assert f"group {name}" in drawn


def test_the_check_has_a_table_of_the_groups(recorded):
    """The report on a check has a row for each group, and none for spans."""
    counts, groups, *_ = trace_sections(check_trace(recorded[0]))
    assert "spans" not in [row[0] for row in counts.rows]
    assert [row[0] for row in groups.rows] == [str(n) for n in range(len(groups.rows))]
    assert groups.rows


def test_perfetto_gets_evictions_and_counters_of_groups(recorded):
    """The tracks have the group of each eviction, and how many blocks each group has."""
    document = PerfettoTrace(recorded[0])
    shown = orjson.loads(b"".join(document))["traceEvents"]
    evictions = [each for each in shown if each.get("name") == "evict"]
    assert len(evictions) == document.counts["evictions"] > 0
    assert all("group" in eviction["args"] for eviction in evictions)
    assert any(each.get("name") == "groups" for each in shown)


@pytest.mark.parametrize("read", [lambda path: list(event_batches(path)), rebuild_residency])
def test_what_knows_spans_alone_refuses_groups(read, recorded):
    """Exports and statistics that need spans refuse the trace at its first line."""
    with pytest.raises(TraceError, match=r":1: HEADER: it has cache groups.* spans alone"):
        read(recorded[0])
