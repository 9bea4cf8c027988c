"""Tests of `kvcore view`: its page, clock, windows, untrusted input and server."""

import errno
import os
import re
from http.client import HTTPConnection
from threading import Thread

import pytest
from helpers import traces
from helpers.browser import NARROW, WIDE, tab, until
from helpers.commands import run_here
from helpers.kv_events import batch, stored
from helpers.kv_events import record as record_events
from helpers.untrusted import poison, record_rejection, recovered

from kvcore import read_events
from kvcore.errors import InputError
from kvcore_cli import main as frame
from kvcore_pages.playback import Window
from kvcore_pages.server import PageServer
from kvcore_pages.view import view_page
from kvcore_replay.check.trace import replay

SERVED = (
    *("simulate", "zipf:requests=150,rate=40,prefixes=15,prefix_tokens=256,suffix_tokens=64"),
    *("--block-size", "16", "--blocks", "90"),
)
COUNTS = ("free", "cached", "private", "spans", "hit-ratio-so-far")
VISIT = """([at, step]) => {
  const side = kvcore.sides[at];
  const { length, requests } = side.playback;
  kvcore.seekRow(side, Math.floor(((length - 1) * step) / 11));
  kvcore.choose({ side, request: step % requests.id.length });
}"""

UNNAMED = """() => [...document.querySelectorAll("button, input, select, canvas, [tabindex]")]
  .filter((each) => !(each.ariaLabel || each.getAttribute("aria-labelledby")
    || each.labels?.length || each.textContent.trim() || each.title))
  .map((each) => each.outerHTML.slice(0, 200))"""

CONTRASTS = """() => {
  const light = (hex) => {
    const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255);
    const [r, g, b] = parts.map((c) =>
      (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(`--${name}`).trim();
  return ["ink", "soft"].flatMap((ink) => ["ground", "panel"].map((ground) => {
    const [low, high] = [light(value(ink)), light(value(ground))].sort((a, b) => a - b);
    return [ink, ground, (high + 0.05) / (low + 0.05)];
  }));
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder for traces and pages."""
    return tmp_path_factory.mktemp("view")


def serve(path):
    """Record the trace of a small simulated server with a clock at `path`."""
    assert frame.run([*SERVED, "--trace", str(path)]) == 0


@pytest.fixture(scope="module")
def served(folder):
    """Return the trace of a small simulated server."""
    serve(folder / "served.jsonl.gz")
    return folder / "served.jsonl.gz"


@pytest.fixture(scope="module")
def page(browser, folder, served):
    """Yield the page of that server, opened once; it must log no error and fetch nothing."""
    file = folder / "served.html"
    done = run_here("view", served, "-o", file)
    assert done.returncode == 0, done.stderr
    with tab(browser) as found:
        yield found.open(file)
        assert (found.complaints, found.requests) == ([], [])


def row_is(page, row):
    """Wait until the page shows the state after a row, and return its time in ns."""
    until(page, f"() => kvcore.sides[0].row === {row} && !kvcore.due")
    return page.evaluate("() => kvcore.time")


def shown(page):
    """Return the counts that the page shows."""
    look = (
        "(names) => names.map((name) => document.getElementById(`count-0-${name}`).innerText)"
    )
    return page.evaluate(look, COUNTS)


def counted(trace, time):
    """Return the counts of `kvcore replay --at`, as the page writes them."""
    report = replay(trace, time)
    ratio = report.hit["ratio"]["block"]
    pool = [f"{report.pool[name]:,}" for name in ("free", "cached", "private", "spans")]
    return [*pool, "none" if ratio is None else f"{100 * ratio:.1f}%"]


def check_counts(page, trace, begin, end):
    """Compare the counts of the page with a replay at ten times, in a mixed order."""
    for part in (0, 7, 3, 9, 1, 5, 2, 8, 4, 6):
        time = begin + (end - begin) * part // 9
        page.evaluate("(time) => kvcore.seek(time)", time)
        until(page, "() => !kvcore.due")
        assert shown(page) == counted(trace, time), time


def test_a_window_has_the_counts_of_a_replay_and_a_notice(browser, served, tmp_path):
    """The page of a window has the counts of a replay of the whole trace.

    The page and stderr name the lines of the window.
    """
    file = tmp_path / "part.html"
    done = run_here("view", served, "-o", file, "--window", "1:2.5", "--events", "400")
    assert done.returncode == 0
    notice = re.search(r"kvcore: (served.*--events N one of more lines\.)", done.stderr)[1]
    with tab(browser) as found:
        page = found.open(file)
        assert page.inner_text(".notice").endswith(notice)
        begin, end = page.evaluate("() => [kvcore.begin, kvcore.end]")
        assert 10**9 <= begin < end < 2.5 * 10**9
        check_counts(page, served, begin, end)
        first, rows = page.evaluate(
            "() => [kvcore.sides[0].playback.about.first, kvcore.sides[0].playback.length]"
        )
        assert 0 < rows <= 400
        assert f"lines {first + 1:,} to {first + rows:,}, from" in notice
        assert found.complaints == []


def test_the_whole_trace_needs_no_notice(page):
    """The page of a whole trace has no notice of lines left out."""
    assert page.locator("main > .notice").count() == 0


def test_the_keyboard_moves_the_clock(page):
    """Arrow keys move the clock by events, page keys by hundredths, Home and End to the ends.

    Space plays and pauses.
    """
    page.evaluate("() => { document.activeElement.blur(); kvcore.seek(kvcore.begin); }")
    last = page.evaluate("() => kvcore.sides[0].playback.length - 1")
    begin = row_is(page, page.evaluate("() => kvcore.sides[0].row"))
    start = page.evaluate("() => kvcore.sides[0].row")
    page.keyboard.press("ArrowRight")
    row_is(page, start + 1)
    page.keyboard.press("ArrowLeft")
    row_is(page, start)
    page.keyboard.press("End")
    end = row_is(page, last)
    page.keyboard.press("PageUp")
    until(page, "(time) => Math.abs(kvcore.time - time) < 2", arg=end - (end - begin) / 100)
    page.keyboard.press("Home")
    page.keyboard.press("PageDown")
    until(page, "(time) => Math.abs(kvcore.time - time) < 2", arg=begin + (end - begin) / 100)
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    until(page, "() => kvcore.playing && kvcore.time > kvcore.begin")
    assert page.inner_text("#play") == "Pause"
    page.keyboard.press(" ")
    until(page, "() => !kvcore.playing")


def test_the_scrubber_and_a_typed_time_set_the_clock(page):
    """The scrubber and a typed time set the clock; typed text that is no number is ignored."""
    page.locator("#scrubber").fill("1000")
    until(page, "() => Math.abs(kvcore.time - (kvcore.begin + kvcore.end) / 2) < 2")
    page.locator("#when").fill("1.25")
    page.keyboard.press("Enter")
    until(page, "() => kvcore.time === 1.25e9")
    page.locator("#when").fill("soon")
    page.keyboard.press("Enter")
    assert page.evaluate("() => kvcore.time") == 1.25e9


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_the_page_fits_and_has_names_and_contrast(browser, page, folder, size, scheme):
    """The page fits its window, every control has a name, and text has enough contrast."""
    del page  # the fixture has written the file
    with tab(browser, size, scheme=scheme) as found:
        opened = found.open(folder / "served.html")
        opened.evaluate("() => kvcore.seek(kvcore.end / 2)")
        wide, inner = opened.evaluate(
            "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide <= inner
        assert opened.evaluate(UNNAMED) == []
        low = [each for each in opened.evaluate(CONTRASTS) if each[2] < 4.5]
        assert low == []


def test_on_a_phone_all_counts_are_in_sight(browser, page, folder):
    """No count of the pool is cut off at the side of a phone, the hit ratio least of all."""
    del page  # the fixture has written the file
    with tab(browser, NARROW) as found:
        opened = found.open(folder / "served.html")
        cells = opened.locator("#counts td").all()
        assert len(cells) == 5
        for cell in cells:
            box = cell.bounding_box()
            assert 0 <= box["x"] <= box["x"] + box["width"] <= NARROW[0]
        title = cells[-1].evaluate("cell => getComputedStyle(cell, '::before').content")
        assert title == '"hit ratio so far"'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("records", "kept"),
    [
        # Strings that select behaviour, a tier or a request cannot be any text, and limits of
        # steps are no lists.
        (
            [record_rejection],
            {
                "evict",
                "exclusive",
                ("Header", "batching"),
                ("Header", "engine"),
                ("Offload", "from"),
                ("Preempt", "for"),
            },
        ),
        ([traces.drop_blocks, recovered], {"run", ("Header", "batching")}),
    ],
    ids=["one", "two"],
)
def test_no_string_of_a_trace_is_markup(browser, tmp_path, records, kept):
    """Markup and control characters in every string of a trace are shown as text."""
    files = [tmp_path / f"{made.__name__} <img src=x onerror=alert(1)>" for made in records]
    refused = [poison(made(file)) for made, file in zip(records, files, strict=True)]
    assert set().union(*refused) == kept
    done = run_here("view", *files, "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert b"alert(1)" not in (tmp_path / "page.html").read_bytes().split(b"</title>")[1]
    with tab(browser, NARROW) as found:
        page = found.open(tmp_path / "page.html")
        page.wait_for_selector("#curves[data-drawn]")
        for step in range(12):
            page.evaluate(VISIT, [step % len(records), step])
            until(page, "() => !kvcore.due")
        assert page.locator("img, iframe, main script, main style, [onerror]").count() == 0
        assert "<script>alert(1)</script>" in page.inner_text("main")
        wide, inner = page.evaluate(
            "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide <= inner
        assert (found.complaints, found.requests) == ([], [])


def test_equal_traces_give_equal_pages(served, page, folder):
    """Equal traces give the same bytes of a page."""
    del page
    assert view_page([served]) == (folder / "served.html").read_bytes()


@pytest.mark.parametrize("damage", ["cut", "wrong"])
def test_a_trace_that_is_refused_leaves_no_page(tmp_path, damage):
    """A cut or invalid trace has the exit code and error of `replay`, and leaves no page."""
    trace = traces.record(tmp_path / "trace.jsonl")
    raw = trace.read_bytes().splitlines(keepends=True)
    if damage == "cut":
        trace.write_bytes(b"".join(raw[:-5]))
    else:
        lines = traces.lines(trace)
        next(line for line in lines if line["event"] == "EVICT")["age"] += 1
        traces.seal(trace, lines)
    replayed = run_here("replay", trace)
    done = run_here("view", trace, "-o", tmp_path / "page.html")
    assert (done.returncode, done.stderr) == (replayed.returncode, replayed.stderr)
    assert done.returncode == 1
    assert [each.name for each in tmp_path.iterdir()] == ["trace.jsonl"]


NO_TRACES = {
    "workload": lambda file: file.write_bytes(b'{"id": 1, "prompt_tokens": 3}\n'),
    "recording": lambda file: record_events(file, batch(stored(1, size=4))),
    "text": lambda file: file.write_text("block hits\n"),
    "empty": lambda file: file.write_bytes(b""),
}


@pytest.mark.parametrize("what", NO_TRACES)
def test_a_file_that_is_no_trace_is_refused(tmp_path, what):
    """A file that is no trace exits with code 1 and the reason, and leaves no page."""
    file = tmp_path / "requests.jsonl"
    NO_TRACES[what](file)
    done = run_here("view", file, "-o", tmp_path / "page.html")
    assert done.returncode == 1
    no_trace = "not a kvcore trace: its first line is no HEADER; `kvcore simulate FILE`"
    assert ("the file is empty" if what == "empty" else no_trace) in done.stderr
    assert list(tmp_path.iterdir()) == [file]


def test_a_time_that_no_page_can_show_is_refused(tmp_path):
    """A trace with a time beyond 2^53 ns is an error that names the limit."""
    events = traces.lines(traces.serve(tmp_path / "run.jsonl"))
    for event in events[1:]:
        event["t"] += 2**53
    file = traces.seal(tmp_path / "late.jsonl", events)
    done = run_here("view", file, "-o", tmp_path / "page.html")
    assert done.returncode == 1
    assert "its time in ns goes beyond 2^53" in done.stderr


@pytest.mark.parametrize(
    "words", [("view", "-o"), ("report", "-o"), ("export", "--to", "perfetto", "--out")]
)
def test_a_file_name_that_is_not_utf8_gives_valid_output(words, tmp_path):
    """A trace whose file name is not UTF-8 gives output that is valid UTF-8."""
    file = traces.serve(tmp_path / os.fsdecode(b"\xff.jsonl"))
    done = run_here(words[0], file, *words[1:], tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out").read_text("utf-8")


def test_a_page_does_not_overwrite_its_trace(served):
    """`-o` refuses to overwrite the trace."""
    before = served.read_bytes()
    done = run_here("view", served, "-o", served)
    assert done.returncode == 2
    assert "name another file" in done.stderr
    assert served.read_bytes() == before


def test_a_full_disk_leaves_no_page(served, tmp_path, monkeypatch):
    """A full disk exits with code 3 and the reason, and leaves no page."""

    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvcore.files.AtomicFile.finish", full)
    done = run_here("view", served, "-o", tmp_path / "page.html")
    assert done.returncode == 3
    assert "No space left" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def server():
    """Yield a server that serves one page."""
    with PageServer(b"<!doctype html>page") as running:
        Thread(
            target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        yield running
        running.shutdown()


def asked(server, path="/", method="GET", **headers):
    """Return the status, the body and the headers of an answer of the server."""
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers


def test_the_server_has_one_page(server):
    """The server answers GET and HEAD of `/` with its page, and no other request.

    Headers keep the page out of frames of other pages.
    """
    status, body, headers = asked(server)
    assert (status, body) == (200, server.page)
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert server.server_address[0] == "127.0.0.1"
    assert asked(server, "/etc/passwd")[0] == 404
    assert asked(server, "/../")[0] == 404
    assert asked(server, method="POST")[0] == 501
    status, body, headers = asked(server, method="HEAD")
    assert (status, body, int(headers["Content-Length"])) == (200, b"", len(server.page))


def test_a_reset_connection_is_not_printed(capfd):
    """A connection that a browser resets is not printed, and a bug of the server is."""
    with PageServer(b"page") as server:
        for error in (ConnectionResetError(), ZeroDivisionError()):
            try:
                raise error
            except type(error):
                server.handle_error(None, ("127.0.0.1", 1))
    printed = capfd.readouterr().err
    assert "ZeroDivisionError" in printed
    assert "ConnectionResetError" not in printed


def test_the_server_refuses_other_host_names(server):
    """The server refuses a request whose host name is not its own."""
    port = server.server_address[1]
    assert asked(server, Host=f"localhost:{port}")[0] == 200
    assert asked(server, Host="evil.example")[0] == 421
    assert asked(server, Host=f"evil.example:{port}")[0] == 421


def test_ctrl_c_ends_the_server(served, monkeypatch):
    """Ctrl-C ends `view --serve` with exit code 130, after its address is printed."""

    def interrupted(_self):
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", interrupted)
    done = run_here("view", served, "--serve")
    assert done.returncode == 130
    assert re.match(r"http://127\.0\.0\.1:\d+/ \(Ctrl-C ends it\)\n", done.stdout)


def test_a_port_in_use_is_an_error(server):
    """A port in use is an error that suggests `--port 0`."""
    port = server.server_address[1]
    with pytest.raises(InputError, match=rf"^port {port} of .*; --port 0 takes a free one$"):
        PageServer(b"", port)


def test_a_window_ends_between_two_times(served):
    """A window of limited length ends between two times, not among lines of one time."""
    from kvcore_pages.playback import Playback  # noqa: PLC0415

    times = [event.t for event in read_events(served)]
    rows = len(Playback(served, window=Window(max_rows=500)).rows["kind"])
    assert 400 < rows <= 500
    assert times[rows] > times[rows - 1]


@pytest.mark.slow
def test_help_prints_each_default_once(capsys):
    """The help page prints each default once."""
    assert frame.run(["view", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "[default: 1000000; x>=1]" in " ".join(printed.split())
    assert printed.count("[default: 1000000") == 1
