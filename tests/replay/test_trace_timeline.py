"""The timeline of a trace: phases of requests, and the pool over time, on small traces."""

from __future__ import annotations

from array import array
from math import isnan

import pytest
from helpers import traces

from kvcore import TraceError
from kvcore_replay.timeline import Series, Timeline


def phases(timeline):
    """Return the phases of each request by its id, as (kind, start, end)."""
    found = {name: [] for name in timeline.requests.ids}
    for request, kind, start, end, _ in timeline.phases:
        found[timeline.requests.ids[request]].append((kind.name.lower(), start, end))
    return found


def test_a_recomputed_request_has_a_second_prefill(tmp_path):
    """A paused request resumes its phase; a recomputed one has a second prefill."""
    timeline = Timeline.read(traces.serve(tmp_path / "run.jsonl"))
    assert phases(timeline) == {
        "long": [
            *(("prefill", 0, 1), ("preempted", 1, 2), ("decode", 2, 4)),
            *(("preempted", 4, 5), ("prefill", 5, 9)),
        ],
        "huge": [],
        "short": [("prefill", 1, 2)],
        "silent": [("prefill", 4, 5)],
    }
    requests = timeline.requests
    assert requests.rejected == {1: "needs 9 blocks, the pool has 8"}
    assert list(requests.first_token) == [1, -1, 2, -1]
    assert list(requests.finish) == [9, -1, 2, 5]
    assert list(requests.output) == [6, 0, 1, 0]
    assert [*timeline.phases.requester][1] == requests.ids.index("short")
    assert list(zip(timeline.chunks.request, timeline.chunks.time, strict=True)) == [
        (0, 1), (2, 2), (3, 5),
    ]  # fmt: skip
    assert (timeline.complete, timeline.cut_reason, timeline.begin, timeline.end) == (
        True, None, 0, 9,
    )  # fmt: skip
    assert timeline.header["mode"] == "model"


def test_a_second_prefill_without_a_commit_ends_with_the_next_step(tmp_path):
    """The second prefill of a request without COMMIT ends with the next step."""
    lines = traces.lines(traces.serve(tmp_path / "run.jsonl"))
    at = next(n for n, line in enumerate(lines) if line["event"] == "FINISH" and n > 30)
    step = {"t": 7, "event": "FORK", "seq": 4, "child": 5}
    end = {"t": 8, "event": "FREE", "seq": 5, "runs": [], "reason": "close"}
    timeline = Timeline.read(
        traces.seal(tmp_path / "run.jsonl", [*lines[:at], step, end, *lines[at:]])
    )
    assert phases(timeline)["long"][-2:] == [("prefill", 5, 7), ("decode", 7, 9)]


def test_a_request_that_waits_for_a_tier_is_loading(tmp_path):
    """A request that waits for blocks from a tier is loading; the slots in use are counted."""
    timeline = Timeline.read(traces.serve_tiers(tmp_path / "run.jsonl"))
    kinds = [kind for kind, _, _ in phases(timeline)["again"]]
    assert kinds == ["loading", "prefill"]
    most = [(name, max(used)) for name, used in timeline.series.tiers.items()]
    assert most == [("host", 6), ("disk", 9)]


def test_an_untimed_request_ends_when_its_last_sequence_closes(tmp_path):
    """Without a clock a request ends when its last sequence closes, and may be opened again."""
    timeline = Timeline.read(traces.record(tmp_path / "run.jsonl"))
    assert phases(timeline) == {
        "first": [
            ("prefill", 1, 4),
            ("decode", 4, 9),
            ("preempted", 9, 22),
            ("prefill", 22, 23),
        ],
        "same": [("prefill", 5, 7), ("decode", 7, 10)],
        "twin": [("prefill", 6, 8), ("decode", 8, 11)],
        "parent": [("prefill", 12, 14), ("decode", 14, 18)],
        "last": [("prefill", 19, 20), ("decode", 20, 21)],
    }
    requests = timeline.requests
    assert list(requests.finish) == [23, 10, 11, 18, 21]
    assert set(requests.first_token) == {-1}
    assert list(timeline.chunks.time)[:2] == [2, 4]


def test_a_cut_trace_is_read_up_to_the_cut(tmp_path):
    """A cut ends the phases in progress with the last line; their requests are unfinished."""
    file = traces.serve(tmp_path / "run.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    cut = next(n for n, line in enumerate(lines) if b'"RESUME"' in line) + 1
    file.write_bytes(b"".join(lines[:cut]) + b"{")
    timeline = Timeline.read(file)
    assert not timeline.complete
    assert timeline.cut_reason == f"the file ends inside line {cut + 1}"
    assert phases(timeline)["long"] == [("prefill", 0, 1), ("preempted", 1, 2)]
    assert timeline.requests.finish[0] == -1
    assert (timeline.end, timeline.series.running[-1], timeline.lines) == (2, 1, cut)


@pytest.mark.parametrize("event", ["FREE", "FINISH", "PREEMPT", "EVICT"])
def test_a_line_of_an_unknown_request_names_file_and_line(event, tmp_path):
    """A line about an unknown request or span raises TraceError with file and line."""
    lines = traces.lines(traces.serve_tiers(tmp_path / "run.jsonl"))
    wrong = next(line for line in lines if line["event"] == event)
    wrong |= {name: 999 for name in ("request", "span", "seq") if name in wrong}
    with pytest.raises(TraceError, match=rf"run\.jsonl:{wrong['n'] + 1}: {event}: "):
        Timeline.read(traces.seal(tmp_path / "run.jsonl", lines))


def test_progress_adds_up_to_the_bytes_of_the_file(tmp_path, monkeypatch):
    """The callback for progress gets the bytes read, and all bytes of the file in sum."""
    monkeypatch.setattr("kvcore.progress.STRIDE", 8)
    ticks = []
    path = traces.serve(tmp_path / "run.jsonl")
    timeline = Timeline.read(path, tick=ticks.append)
    assert len(ticks) == timeline.lines // 8 + 1
    assert sum(ticks) == path.stat().st_size


def series(rows):
    """Return a series of `rows` rows with a single peak of `free` and one of `waiting`."""
    made = Series(tiers={"host": array("i", range(rows))})
    for row in range(rows):
        made.time.append(row * 10)
        made.free.append(100 + 50 * (row == 333))
        made.cached.append(100)
        made.private.append(300 - made.free[-1])
        made.waiting.append(7 * (row == 666))
        made.running.append(row % 5)
        made.lookup_blocks.append(row)
        made.hit_blocks.append(row // 2)
        made.evicted_blocks.append(row)
    return made


def test_a_thinned_series_keeps_its_peaks():
    """A thinned series keeps the peaks, the first and the last row."""
    whole = series(1000)
    thin = whole.thinned(50)
    assert len(thin) <= 50
    for peak in (333, 666):
        assert peak * 10 in thin.time
    assert (thin.time[0], thin.time[-1]) == (0, 9990)
    at = list(thin.time).index(3330)
    assert (thin.free[at], thin.tiers["host"][at], thin.evicted_blocks[at]) == (150, 333, 333)
    assert list(thin.time) == sorted(set(thin.time))


def test_the_hit_ratio_of_a_window_covers_its_lookups():
    """The hit ratio is that of the lookups within the window, and NaN without any."""
    made = Series()
    made.time.extend([0, 10, 20, 40])
    made.lookup_blocks.extend([0, 4, 8, 8])
    made.hit_blocks.extend([0, 4, 4, 4])
    assert list(made.hit_ratio(15))[1:3] == [1.0, 0.5]
    assert list(made.hit_ratio(10))[1:3] == [1.0, 0.0]
    assert isnan(made.hit_ratio(15)[0])
    assert isnan(made.hit_ratio(15)[3])
    assert list(made.hit_ratio())[1:] == [1.0, 0.5, 0.5]
