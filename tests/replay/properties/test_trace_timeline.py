"""The timeline of a trace against the log of its run, and against replays."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis.strategies as st
from helpers.schedulers import SCHEDULERS
from helpers.serving import servers, tiered_servers
from hypothesis import given

from kvcore_replay.check.trace import check_trace
from kvcore_replay.timeline import GAUGES, Kind, Timeline


@given(server=servers() | tiered_servers(), scheduler=st.sampled_from(SCHEDULERS))
def test_a_timeline_equals_the_log_of_its_run(server, scheduler):
    """A timeline has the times, phases and counts of a run, at ten of its times.

    Runs have preemption, growth, expiry, and tiers below some of the pools.
    """
    run = server.run(scheduler)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.jsonl"
        file.write_bytes(run.trace)
        timeline = Timeline.read(file)
        check_times(timeline, run.result.log)
        check_phases(timeline)
        series = timeline.series
        for row in range(0, len(series), -(-len(series) // 10)):
            check_row(series, row, check_trace(file, at=series.time[row]))
        for gauge in GAUGES:
            seen = [getattr(each, gauge) for each in (series, series.thinned(12))]
            assert len({(min(column), max(column)) for column in seen}) == 1


def check_times(timeline, log):
    """Check that the requests have the times of the run's log."""
    requests, rows = timeline.requests, {name: row for row, name in enumerate(log.ids)}
    assert sorted(map(str, requests.ids)) == sorted(map(str, log.ids))
    order = [rows[name] for name in requests.ids]
    for name in ("arrival", "admitted", "first_token", "finish", "prompt"):
        column = getattr(log, name)
        assert list(getattr(requests, name)) == [column[row] for row in order], name
    reasons = [log.reasons.get(row) for row in order]
    assert [requests.rejected.get(row) for row in range(len(requests))] == reasons


def check_phases(timeline):
    """Check that phases are contiguous, and that decoding starts after the first token."""
    requests, phases = timeline.requests, timeline.phases
    ends = list(requests.arrival)
    for request, kind, start, end, whom in phases:
        assert start == ends[request] < end
        assert kind is Kind.PREEMPTED or whom == -1
        assert kind is not Kind.DECODE or start >= requests.first_token[request] >= 0
        assert kind is not Kind.QUEUED or end <= requests.admitted[request]
        ends[request] = end
    assert list(phases.start) == sorted(phases.start)
    for request, finish in enumerate(requests.finish):
        assert ends[request] == finish or request in requests.rejected


def check_row(series, row, report):
    """Check a row against the replay of the trace up to its time."""
    pool = {name: getattr(series, name)[row] for name in ("free", "cached", "private")}
    assert pool == {name: report.pool[name] for name in pool}
    hits = {name: getattr(series, name)[row] for name in ("lookup_blocks", "hit_blocks")}
    assert hits == {name: report.hit[name] for name in hits}
    used = {tier["tier"]: tier["used_blocks"] for tier in report.tiers}
    assert {name: column[row] for name, column in series.tiers.items()} == used
    present = report.requests - report.finished - report.rejected
    assert series.waiting[row] + series.running[row] == present
