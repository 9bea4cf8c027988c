"""Tests of the page of a trace: timeline, curves, events and the chosen request."""

import re

import pytest
from helpers import traces
from helpers.browser import NARROW, WIDE, drawn, tab, until

from kvcore_cli import main as frame
from kvcore_pages.playback import Window
from kvcore_pages.view import view_page
from kvcore_replay.timeline import NEVER, Timeline

OVERLOADED = (
    *(
        "simulate",
        "zipf:requests=300,rate=50,prefixes=20,prefix_tokens=256,suffix_tokens=64,output_tokens=64",
    ),
    *("--block-size", "16", "--blocks", "60"),
)

PHASES = """() => {
  const { playback, lives } = kvcore.sides[0];
  const { request, kind, start, end, whom } = lives.phases;
  const id = (number) => (number < 0 ? null : playback.requests.id[number]);
  return request.map((each, at) =>
    [id(each), kind[at], playback.times[start[at]], playback.times[end[at]], id(whom[at])])
    .filter(([, , from, to]) => to > from);
}"""

CHUNKS = """() => {
  const { playback, lives } = kvcore.sides[0];
  const { request, row } = lives.chunks;
  return row.map((each, at) => [playback.requests.id[request[at]], playback.times[each]]);
}"""

CURVES = """() => {
  const points = ({ x, y }) => [...x].map((time, at) => [Math.round(time * 1e9), y[at]]);
  const curves = [...document.querySelectorAll("#curves .plot")].flatMap((plot) => plot.data);
  return Object.fromEntries(curves.map((curve) => [curve.name, points(curve)]));
}"""

GAUGES = {"cached": "cached", "private": "private", "waiting": "waiting", "running": "running"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder for traces and pages."""
    return tmp_path_factory.mktemp("view")


def overload(path):
    """Record the trace of a simulated server that preempts, and return its path."""
    assert frame.run([*OVERLOADED, "--trace", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def overloaded(folder):
    """Return the paths of the trace of a server that preempts and of its page."""
    trace, page = overload(folder / "overloaded.jsonl"), folder / "overloaded.html"
    page.write_bytes(view_page([trace]))
    return trace, page


@pytest.fixture(scope="module")
def page(browser, overloaded):
    """Yield the page of that server, opened once; it must log no error."""
    with tab(browser) as found:
        page = found.open(overloaded[1])
        page.wait_for_selector("#curves[data-drawn]")
        yield page
        assert (found.complaints, found.requests) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "record",
    [overload, traces.serve_tiers, traces.compact, traces.record, traces.drop_blocks],
)
def test_phases_chunks_and_curves_are_those_of_the_timeline(browser, tmp_path, record):
    """Phases, chunks and curves of the page are those that `Timeline.read` finds."""
    trace, file = tmp_path / "trace.jsonl", tmp_path / "page.html"
    record(trace)
    file.write_bytes(view_page([trace]))
    timeline = Timeline.read(trace)
    ids = [*map(str, timeline.requests.ids), None]
    with tab(browser) as found:
        page = found.open(file)
        page.wait_for_selector("#curves[data-drawn]")
        assert page.evaluate(PHASES) == [
            [ids[request], kind, start, end, ids[whom]]
            for request, kind, start, end, whom in timeline.phases
        ]
        chunks = zip(timeline.chunks.request, timeline.chunks.time, strict=True)
        assert page.evaluate(CHUNKS) == [[ids[request], time] for request, time in chunks]
        curves = page.evaluate(CURVES)
        assert found.complaints == []
    series = timeline.series
    shown = {name: getattr(series, column) for name, column in GAUGES.items()} | series.tiers
    for name, column in shown.items():
        if name in ("waiting", "running") and timeline.header["mode"] == "untimed":
            continue
        expected = dict(zip(series.time, column, strict=True))
        assert 1 < len(curves[name]) <= 4 * 375 + 1, name
        begun = [point for point in curves[name] if point[0] >= series.time[0]]  # after HEADER
        assert all(expected[time] == value for time, value in begun), name
        assert {max(column), min(column)} <= {value for _, value in curves[name]}, name


def test_a_window_has_the_curves_of_the_whole_trace(browser, overloaded, tmp_path):
    """The curves of a window have the values of the whole trace.

    Requests and hits from before the window are counted.
    """
    whole, file = Timeline.read(overloaded[0]).series, tmp_path / "part.html"
    begin, end = 4 * 10**9, 9 * 10**9
    file.write_bytes(view_page([overloaded[0]], window=Window(begin, end)))
    with tab(browser) as found:
        page = found.open(file)
        page.wait_for_selector("#curves[data-drawn]")
        curves = page.evaluate(CURVES)
        assert found.complaints == []
    shown = {name: getattr(whole, column) for name, column in GAUGES.items()}
    for name, column in (shown | {"so far": whole.hit_ratio()}).items():
        expected = dict(zip(whole.time, column, strict=True))
        assert len(curves[name]) > 50, name
        assert all(begin <= time < end for time, _ in curves[name]), name
        assert all(expected[time] == pytest.approx(value) for time, value in curves[name]), name


def test_the_card_in_a_window_tells_what_was_before_it(browser, overloaded, tmp_path):
    """Of a request from before a window the card has the true time of its admission.

    Of one that had left it does not say that it will come.
    """
    requests, file = Timeline.read(overloaded[0]).requests, tmp_path / "part.html"
    begin = 4 * 10**9
    file.write_bytes(view_page([overloaded[0]], window=Window(begin, 9 * 10**9)))
    served = zip(requests.admitted, requests.finish, strict=True)
    shown = [0, next(row for row, (since, end) in enumerate(served) if since < begin < end)]
    with tab(browser) as found:
        page = found.open(file)
        for row in shown:
            page.evaluate("(request) => kvcore.choose({ side: kvcore.sides[0], request })", row)
            drawn(page)
            card = page.locator("#request-panel .life").text_content()
            assert "arrivedbefore the lines that are here" in card
            assert f"admitted{requests.admitted[row] / 1e9:,.3f} s" in card
            assert "has not arrived" not in card
            assert "first token" not in card.partition("Why")[0]


def test_hit_ratios_are_those_of_the_timeline(page, overloaded):
    """The curves of hit ratios, in all and of the last 60 s, are those of `Timeline`."""
    curves, series = page.evaluate(CURVES), Timeline.read(overloaded[0]).series
    for name, window in (("so far", None), ("of the last 60 s", 60 * 10**9)):
        expected = dict(zip(series.time, series.hit_ratio(window), strict=True))
        assert curves[name]
        assert all(expected[time] == pytest.approx(value) for time, value in curves[name])


def test_a_click_on_a_curve_sets_the_clock(page):
    """A click on a curve sets the clock to that time."""
    page.evaluate("kvcore.seek(kvcore.begin)")
    curve = page.locator(".curve").first
    inside = curve.bounding_box()["width"] - 54
    curve.click(position={"x": 44 + inside / 2, "y": 60})
    part = page.evaluate("(kvcore.time - kvcore.begin) / (kvcore.end - kvcore.begin)")
    assert part == pytest.approx(0.5, abs=0.01)


def test_the_card_has_the_text_of_explain(page, overloaded, capsys):
    """The card of a request has the text of `kvcore explain` and the first token's time."""
    timeline = Timeline.read(overloaded[0])
    for row in (0, 150, len(timeline.requests) - 1):
        name = timeline.requests.ids[row]
        page.fill("#request", str(name))
        page.keyboard.press("Tab")
        until(
            page,
            "start => document.querySelector('#why-0')?.textContent.startsWith(start)",
            arg=f"Request {name} ",
        )
        capsys.readouterr()
        assert frame.run(["explain", str(overloaded[0]), str(name)]) == 0
        paragraphs = page.locator("#why-0 p").all_text_contents()
        assert " ".join(" ".join(paragraphs).split()) == " ".join(
            capsys.readouterr().out.split()
        )
        first = timeline.requests.first_token[row]
        assert first != NEVER
        assert (
            f"first token{first / 1e9:,.3f} s"
            in page.locator("#request-panel dl").text_content()
        )


def test_ids_and_times_in_the_reasons_can_be_pressed(page):
    """A click on a request in the reasons chooses it, and one on a time sets the clock."""
    page.evaluate("kvcore.choose({ side: kvcore.sides[0], request: 250 })")
    drawn(page)
    names = page.locator("#why-0 .ref[title='Choose this request']")
    other = names.last.text_content()
    page.locator("#why-0 .ref[title='Go to this time']").first.click()
    entry = page.locator("#why-0 .ref[title='Go to this time']").first.text_content()
    seconds = page.evaluate("kvcore.time / 1e9")
    assert seconds == pytest.approx(float(entry.split()[0]), abs=0.001)
    names.last.click()
    until(page, "id => document.querySelector('#request').value === id", arg=other)


def test_the_log_has_a_sentence_for_each_kind_of_event(page, overloaded):
    """The log has a sentence for each kind of event, and marks the current event."""
    page.select_option(".log-panel select", "all")
    kinds = {}
    for line in traces.lines(overloaded[0]):
        kinds.setdefault(line["event"], line)
    assert {"EVICT", "PREEMPT", "HIT", "COMMIT", "FINISH"} <= set(kinds)
    for kind, line in kinds.items():
        page.evaluate("row => kvcore.seekRow(kvcore.sides[0], row)", line["n"])
        marked = page.locator(f".log li[data-row='{line['n']}'][aria-current]")
        marked.wait_for()
        entry = marked.text_content()
        assert f"{line['n'] + 1:,} " in entry
        assert kind in entry
        assert not re.search("undefined|NaN|null", entry)
    evict = kinds["EVICT"]
    page.evaluate("row => kvcore.seekRow(kvcore.sides[0], row)", evict["n"])
    marked = page.locator(f".log li[data-row='{evict['n']}'][aria-current]")
    blocks = sum(abs(count) for _, count in evict["runs"])
    assert f"{blocks} block" in marked.text_content()
    assert f"by {evict['by']} for request {evict['for']}" in marked.text_content()


def test_the_log_is_that_of_the_request_that_is_chosen(browser, tmp_path):
    """Of two requests with one number, on two sides, the log shows the one that is chosen."""
    events = traces.lines(traces.record(tmp_path / "trace.jsonl"))
    name = next(event["id"] for event in events if event["event"] == "REQUEST")
    renamed = [
        event
        | {field: "other" for field in ("id", "request", "for") if event.get(field) == name}
        for event in events
    ]
    other, file = traces.seal(tmp_path / "other.jsonl", renamed), tmp_path / "page.html"
    file.write_bytes(view_page([tmp_path / "trace.jsonl", other]))
    with tab(browser) as found:
        page = found.open(file)
        page.locator(".log-panel select").first.select_option("chosen")
        for side, shown in ((0, f"request {name} arrives"), (1, "There is no event of it.")):
            page.evaluate("(n) => kvcore.choose({ side: kvcore.sides[n], request: 0 })", side)
            drawn(page)
            assert shown in page.locator("#log-0").text_content()


def test_the_card_counts_the_blocks_of_the_prompt_alone(browser, tmp_path):
    """Where a key stands for many blocks, the card counts those that the prompt has."""
    trace, file = tmp_path / "trace.jsonl", tmp_path / "page.html"
    assert frame.run(["simulate", "--limit", "1", "--trace", str(trace)]) == 0
    (tokens,) = Timeline.read(trace).requests.prompt
    file.write_bytes(view_page([trace]))
    with tab(browser) as found:
        page = found.open(file)
        page.evaluate("kvcore.choose({ side: kvcore.sides[0], request: 0 })")
        drawn(page)
        assert f"Of the {-(-tokens // 16):,} blocks of its prompt" in page.inner_text("main")


def test_buttons_go_to_the_next_and_previous_eviction(page, overloaded):
    """The buttons go to the next and the previous event that the filter shows."""
    rows = [line["n"] for line in traces.lines(overloaded[0]) if line["event"] == "EVICT"]
    page.select_option(".log-panel select", "evictions")
    page.evaluate("kvcore.seekRow(kvcore.sides[0], 0)")
    following = page.get_by_role("button", name="Next eviction")
    for row in rows[:3]:
        following.click()
        assert page.evaluate("kvcore.sides[0].row") == row
        page.wait_for_selector(f".log li[data-row='{row}'][aria-current]")
    page.get_by_role("button", name="Previous eviction").click()
    assert page.evaluate("kvcore.sides[0].row") == rows[1]
    shown = page.locator(".log li code").all_text_contents()
    assert set(shown) == {"EVICT"}
    assert len(shown) <= 40


def test_keys_and_clicks_choose_requests_on_the_timeline(page):
    """Arrow keys point at requests, Enter or a click chooses one, and `+` zooms in."""
    page.evaluate("kvcore.seek((kvcore.begin + kvcore.end) / 2)")
    canvas = page.locator("canvas.timeline")
    canvas.focus()
    width = page.evaluate("kvcore.timelineWindow.width")
    page.keyboard.press("+")
    assert page.evaluate("kvcore.timelineWindow.width") == pytest.approx(width / 2)
    shown = "kvcore.panels.find((each) => each.window).shown.length > 1"
    until(page, f"() => !kvcore.due && {shown}")
    page.keyboard.press("ArrowDown")
    first = page.evaluate("kvcore.pointed.request")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("kvcore.pointed.request") != first
    page.keyboard.press("Enter")
    assert page.evaluate("kvcore.chosen.request") == page.evaluate("kvcore.pointed.request")
    until(
        page,
        "() => document.querySelector('#timeline-note-0').textContent.startsWith('Request ')",
    )
    shown = page.evaluate("""() => {
      const panel = kvcore.panels.find((each) => each.window);
      const { request, y, from, to } = panel.shown[0];
      const part = (Math.max(from, panel.window.start) + Math.min(to, panel.window.end)) / 2;
      const x = ((part - panel.window.start) / panel.window.width) * panel.canvas.clientWidth;
      return { request, position: { x, y: y + 3 } };
    }""")
    canvas.click(position=shown["position"])
    assert page.evaluate("kvcore.chosen.request") == shown["request"]


def test_timelines_follow_the_clock_to_the_end_of_the_longer_run(browser, overloaded, tmp_path):
    """The timelines of two runs show the clock's time, also after the first run has ended."""
    file = tmp_path / "page.html"
    file.write_bytes(view_page([traces.serve(tmp_path / "short.jsonl"), overloaded[0]]))
    with tab(browser) as found:
        page = found.open(file)
        page.evaluate("kvcore.seek(kvcore.end)")
        drawn(page)
        start, end, now = page.evaluate("""() => {
          const { start, end } = kvcore.timelineWindow;
          return [start, end, kvcore.time];
        }""")
    assert start <= now <= end


@pytest.mark.slow
@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "dark"), (NARROW, "light")])
def test_ids_that_look_like_markup_are_shown_as_text(browser, tmp_path, size, scheme):
    """Ids that look like markup are text in the panels of both traces.

    Nothing is wider than the window, and direction marks are replaced.
    """
    bad = "<script>alert(1)</script><img src=x onerror=alert(1)>\u202e" + 300 * "L"
    events = []
    for line in traces.lines(traces.serve_tiers(tmp_path / "plain.jsonl")):
        changed = {
            name: f"{bad}{value}" if name in ("id", "request", "for") else value
            for name, value in line.items()
        }
        events.append(changed | ({"by": bad} if "by" in line else {}))
    events[0]["plugins"]["eviction"]["name"] = bad
    files = [
        traces.seal(tmp_path / name, events) for name in ("a<b>.jsonl", f"{'c' * 200}.jsonl")
    ]
    file = tmp_path / "page.html"
    file.write_bytes(view_page(files))
    with tab(browser, size, scheme=scheme) as found:
        page = found.open(file)
        page.wait_for_selector("#curves[data-drawn]")
        page.evaluate("kvcore.choose({ side: kvcore.sides[0], request: 1 })")
        page.evaluate("kvcore.seek(kvcore.end)")
        drawn(page)
        shown = bad.replace("\u202e", "\ufffd")
        assert shown in page.locator("#why-0").text_content()
        assert shown in page.locator("#log-1").text_content()
        assert page.locator("main script, main img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert found.complaints == []
