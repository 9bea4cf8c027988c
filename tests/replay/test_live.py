"""The live view of a trace: its lines, its playback in time, and its drawing."""

from __future__ import annotations

import io
from itertools import pairwise
from math import inf

import pytest
from helpers import traces
from helpers.commands import run_here
from rich.console import Console
from rich.live import Live

from kvcore import KVCache, Trace, read_events
from kvcore.units import NS_PER_S
from kvcore_replay.check.trace import check_trace
from kvcore_replay.cli.live import FRAME_SECONDS, Lines, Picture, Player
from kvcore_replay.report.live import PARTS, LiveView, clock
from kvcore_replay.timeline import Timeline


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the trace of a busy server, with evictions, preemptions and a queue."""
    path = tmp_path_factory.mktemp("live") / "run.jsonl"
    zipf = "zipf:requests=60,prefixes=12,prefix_tokens=256,suffix_tokens=300,output_tokens=90"
    small = [f"{zipf},rate=60", "--blocks", "220", "--block-size", "16"]
    assert run_here("simulate", *small, "--trace", path).returncode == 0
    return path


def viewed(path, until=inf):
    """Return the view of a trace after its lines up to a time in ns."""
    header, *lines = read_events(path)
    view = LiveView(header)
    for line in lines:
        if line.t <= until:
            view.take(line)
    return view


def text_of(lines):
    """Return the lines of a view as texts."""
    return ["".join(text for text, _ in line) for line in lines]


@pytest.mark.parametrize("seconds", [0, 0.4, 1.1, 2, 9])
def test_the_view_equals_a_replay(recorded, seconds):
    """At any time the view has the blocks, hits, requests and queue of a replay."""
    time = int(seconds * NS_PER_S)
    view, report = viewed(recorded, time), check_trace(recorded, time)
    pool = view.pool()
    assert pool["private"] == report.pool["private"]
    assert pool["shared"] + pool["cached"] == report.pool["cached"]
    assert pool["free"] == report.pool["free"]
    assert (view.finished, view.rejected) == (report.finished, report.rejected)
    series = Timeline.read(recorded).series
    row = max(n for n, each in enumerate(series.time) if each <= time)
    lines = text_of(view.lines(80, 24, ""))
    queue = f"queue     waiting {series.waiting[row]:,}   running {series.running[row]:,}"
    assert queue in lines
    ratio = report.hit["ratio"]["block"]
    shown = "-" if ratio is None else f"{ratio:.1%}"
    (hits,) = (line for line in lines if line.startswith("hits "))
    assert hits.endswith(f"   in all {shown}")


def test_blocks_count_as_shared_while_a_sequence_holds_them(tmp_path):
    """Cached blocks count as `shared` while a sequence holds them, and then as `cached`."""
    path = traces.record(tmp_path / "run.jsonl")
    assert viewed(path, 4).pool() == {"private": 1, "shared": 3, "cached": 0, "free": 4}
    assert viewed(path).pool() == {"private": 0, "shared": 0, "cached": 5, "free": 3}


@pytest.mark.parametrize("height", [1, 4, 8, 11, 12, 24, 60])
@pytest.mark.parametrize("width", [1, 20, 71, 80, 200])
def test_the_view_fits_the_terminal(recorded, width, height):
    """The view has no more lines than rows, and its bar is as wide as the terminal."""
    view = viewed(recorded, NS_PER_S)
    lines = view.lines(width, height, "halfway")
    texts = text_of(lines)
    assert len(texts) <= height
    assert "halfway" in "".join(texts)
    bars = [line for line in lines if [part for _, part in line] == list(PARTS)]
    assert len(bars) == (height > 1)
    for bar in bars:
        assert sum(len(text) for text, _ in bar) == width
        assert all(set(text) <= {PARTS[part]} for text, part in bar)
    if width >= 80:
        assert max(map(len, texts)) <= width


def test_the_view_has_the_hit_ratio_of_the_last_minute(tmp_path):
    """The view shows the hit ratio of the last minute beside that of the whole trace."""
    path = tmp_path / "run.jsonl"
    cache_lines(path, [(0, "abc"), (1, "abc"), (100, "xyz"), (130, "pqr")])
    hits = next(each for each in text_of(viewed(path).lines(80, 24, "")) if "hits" in each)
    assert hits == "hits      last 60 s 0.0%   in all 25.0%"
    early = text_of(viewed(path, 2 * NS_PER_S).lines(80, 24, ""))
    assert "hits      last 60 s 50.0%   in all 50.0%" in early


def cache_lines(path, asks):
    """Record the trace of prompts that a cache serves in turn, at the given seconds."""
    with Trace(path) as trace:
        cache = KVCache(8, traces.BLOCK, trace=trace, accounting="keys")
        for index, (second, name) in enumerate(asks):
            now = second * NS_PER_S
            seq = cache.open(traces.ask(index, name), None, now)
            cache.commit(seq, seq.request.prompt_tokens - seq.hit_blocks * traces.BLOCK, now)
            cache.close(seq, now)


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (
            traces.serve,
            [
                "request huge arrives: 36 tokens",
                "request huge rejected: needs 9 blocks, the pool has 8",
                "request long: first token",
                "request long preempted (pause) for request short",
                "request long runs again",
                "request long preempted (recompute)",
                "request short finished: 1 token",
                "request short admitted: 2 of 3 blocks hit",
                "request long admitted again: 3 of 3 blocks hit",
            ],
        ),
        (traces.serve_tiers, ["request again waits for"]),
        (traces.record, ["4 blocks evicted for request last, aged 5 ns"]),
        (traces.drop_blocks, ["dropped by the retention policy"]),
    ],
)
def test_events_are_described_in_words(tmp_path, make, texts):
    """The view describes the last events in words, with their times."""
    view = viewed(make(tmp_path / "run.jsonl"))
    described = view.last_events(500)
    assert view.last_events(3) == described[-3:]
    for text in texts:
        assert any(text in each for each in described), (text, described)
    assert all(each.startswith("0:00.0  ") for each in described)


def test_times_are_shown_as_a_clock():
    """Times are shown to tenths of a second, with hours only if there are any."""
    times = [0, 99_999_999, 61 * NS_PER_S, 3_725 * NS_PER_S + 10**8]
    assert list(map(clock, times)) == ["0:00.0", "0:00.0", "1:01.0", "1:02:05.1"]


class Clock:
    """A clock whose time moves only by its waits."""

    def __init__(self):
        self.now = 1000.0
        self.waits = []

    def __call__(self):
        """Return the time."""
        return self.now

    def wait(self, seconds):
        """Move the clock by `seconds`, and record the wait."""
        self.waits.append(seconds)
        self.now += seconds


class Drawn:
    """A display that records the time of the view and the progress in each frame."""

    def __init__(self, clock):
        self._clock, self._last = clock, -inf
        self.frames = []

    def due(self, view):
        """Return True if the last frame is older than a frame's duration."""
        del view
        return self._clock() - self._last >= FRAME_SECONDS

    def draw(self, view, progress):
        """Record a frame."""
        self._last = self._clock()
        self.frames.append((view.now, progress))


def played(path, speed, **settings):
    """Play a trace; return the clock and the frames."""
    now = Clock()
    shown = Drawn(now)
    player = Player(shown, speed, clock=now, wait=now.wait, **settings)
    for event in read_events(path):
        player.show(event)
    player.draw()
    return now, shown.frames


def test_playback_takes_the_time_of_the_trace(recorded):
    """Playback takes the trace's time divided by the speed, and the view never goes back."""
    timeline = Timeline.read(recorded)
    end = timeline.end
    time, frames = played(recorded, 0.5, end=end)
    assert time.now - 1000 == pytest.approx((end - timeline.begin) / NS_PER_S / 0.5)
    times = [time for time, _ in frames]
    assert times == sorted(times)
    assert len(set(times)) > 40
    # A frame is at most two waits after the one before it.
    assert max(after - before for before, after in pairwise(times)) < 0.11 * NS_PER_S
    assert frames[len(frames) // 2][1].startswith(f"of {clock(end)}  ")
    assert frames[-1][1].endswith("100%, 0 s left  x0.5")


def test_playback_sleeps_between_frames(recorded):
    """Playback sleeps at most one frame at a time, and draws no more often than that."""
    time, frames = played(recorded, 1)
    assert max(time.waits) <= FRAME_SECONDS
    assert len(frames) <= (time.now - 1000) / FRAME_SECONDS + 2
    assert len(time.waits) < 1500


def drawn(path, width, height, *, colour="truecolor"):
    """Return the output of a terminal for the picture of a trace."""
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, width=width, height=height, color_system=colour
    )
    with Live(console=console, auto_refresh=False) as live:
        Picture(live, Clock()).draw(viewed(path), "done")
    return file.getvalue()


def test_a_picture_fits_its_terminal(recorded):
    """The picture has fewer rows than the terminal, and each is cropped to its width."""
    for width, height in [(80, 24), (30, 10), (9, 3)]:
        rows = drawn(recorded, width, height, colour=None).split("\n")
        # The picture is drawn a second time at the end, from its first row on.
        shown = [row for row in rows if "\x1b" not in row]
        assert len(rows) <= 2 * (height - 1)
        assert max(map(len, shown)) <= width


def test_texts_of_a_trace_control_no_terminal(tmp_path):
    """Control characters in an id of a trace are shown as numbers."""
    bad = "a\x1b[31m\x9b2J\u202e"
    path = traces.write(tmp_path / "run.jsonl", traces.ask(bad, "ab"))
    picture = drawn(path, 80, 24, colour=None)
    assert "request a<U+001B>[31m<U+009B>2J<U+202E> arrives" in picture
    assert not {"\x1b[31m", "\x9b", "\u202e"} & set(picture)
    assert "\x1b[31m" not in picture


def test_lines_are_printed_by_the_time_of_the_trace(recorded):
    """`Lines` prints a line for each period of the trace's time, whatever the clock."""
    file = io.StringIO()
    player = Player(Lines(file, 0.5), inf, clock=Clock())
    for event in read_events(recorded):
        player.show(event)
    lines = file.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == [
        *("0:00.5", "0:01.0", "0:01.5", "0:02.0", "0:02.5"),
    ]
    assert all("waiting" in line and line.isprintable() for line in lines)
