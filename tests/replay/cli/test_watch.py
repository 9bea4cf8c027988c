"""Tests of `kvcore watch`, and of `--live`, which shows a run in the same way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers import traces
from helpers.commands import run_here

from kvcore import KVCache, Trace
from kvcore.units import NS_PER_S
from kvcore_replay.cli.live import Player

SMALL = [
    "zipf:requests=60,prefixes=12,prefix_tokens=256,suffix_tokens=300,output_tokens=90,rate=2"
]
SMALL += ["--blocks", "220", "--block-size", "16"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the trace of a simulation of half a minute."""
    path = tmp_path_factory.mktemp("watch") / "run.jsonl.gz"
    assert run_here("simulate", *SMALL, "--trace", path).returncode == 0
    return path


def times(done):
    """Return the times of the printed lines."""
    return [line.split()[0] for line in done.stdout.splitlines()]


def test_a_pipe_has_a_line_every_ten_seconds(recorded):
    """In a pipe `watch` prints a line every ten seconds of the trace and one for its end."""
    done = run_here("watch", recorded)
    assert (done.returncode, done.stderr) == (0, "")
    assert times(done)[:3] == ["0:10.0", "0:20.0", "0:30.0"]
    assert len(times(done)) == 4
    assert all(line.isprintable() for line in done.stdout.splitlines())


def test_events_before_from_are_not_waited_for(monkeypatch, recorded):
    """Events before `--from` are shown at once, and later ones at the speed of `--speed`."""
    waits = []
    player = partial(Player, clock=lambda: sum(waits), wait=waits.append)
    monkeypatch.setattr("kvcore_replay.cli.live.Player", player)
    command = ("watch", recorded, "--to", "12", "--every", "4", "--speed", "2")
    whole = run_here(*command)
    assert sum(waits) == pytest.approx(12 / 2, abs=0.5)
    waits.clear()
    part = run_here(*command, "--from", "5")
    assert sum(waits) == pytest.approx((12 - 5) / 2, abs=0.5)
    assert (part.returncode, times(part)) == (0, ["0:04.0", "0:08.0", "0:11.9"])
    assert times(whole) == times(part)


def test_a_cut_trace_is_shown_up_to_the_cut(tmp_path, recorded):
    """A cut trace is shown up to the cut, and ends with the error of `replay`."""
    path = tmp_path / "run.jsonl.gz"
    path.write_bytes(recorded.read_bytes()[:-2000])
    done = run_here("watch", path)
    assert done.returncode == 1
    assert times(done)[0] == "0:10.0"
    assert done.stderr == run_here("replay", path).stderr


def test_a_contradictory_event_is_refused(tmp_path):
    """An event that contradicts those before it is an error with its line."""
    path = traces.serve(tmp_path / "run.jsonl")
    lines = traces.lines(path)
    number, hit = next((n, line) for n, line in enumerate(lines, 1) if line["event"] == "HIT")
    hit["span"] = 999
    done = run_here("watch", traces.seal(path, lines))
    assert done.returncode == 1
    assert f"run.jsonl:{number}: HIT: no span 999 is cached" in done.stderr


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_trace_that_is_written_is_followed(tmp_path, monkeypatch, ending):
    """A trace is followed while it is written, even as a `.part` file, until it is closed."""
    path = tmp_path / f"run.jsonl{ending}"
    trace = Trace(path)
    cache = KVCache(8, traces.BLOCK, trace=trace, accounting="keys")

    def served():
        for second, text in enumerate("abcdef"):
            now = 10 * second * NS_PER_S
            seq = cache.open(traces.ask(text, text), None, now)
            cache.commit(seq, seq.request.prompt_tokens, now)
            cache.close(seq, now)
            trace.flush()
            yield
        trace.close()
        yield

    steps = served()
    monkeypatch.setattr(Player, "idle", lambda _: next(steps))
    done = run_here("watch", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert times(done) == ["0:10.0", "0:20.0", "0:30.0", "0:40.0", "0:50.0", "0:50.0"]
    assert next(steps, "ended") == "ended"


def replace(part):
    """Put a copy of a file in its place."""
    copy = shutil.copy(part, f"{part}-1")
    Path(copy).replace(part)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such locks")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (partial(os.truncate, length=9), "cut"),
        (Path.unlink, "removed or replaced"),
        (replace, "removed or replaced"),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_followed_trace_that_is_taken_away_is_an_error(
    tmp_path, monkeypatch, ending, change, why
):
    """A trace that is taken from its writer is shown up to there, and the error tells it."""
    part = tmp_path / f"run.jsonl{ending}.part"
    trace = Trace(part.with_suffix(""))
    KVCache(8, traces.BLOCK, trace=trace, accounting="keys").open(traces.ask("a", "a"), None, 0)
    trace.flush()
    steps = iter([change, lambda _: pytest.fail("it waits on")])
    monkeypatch.setattr(Player, "idle", lambda _: next(steps)(part))
    done = run_here("watch", part.with_suffix(""))
    trace.discard()
    assert done.returncode == 1
    assert f"{part}: incomplete: the file was {why} while it was written" in done.stderr


def test_live_prints_the_lines_of_watch(tmp_path, recorded):
    """`--live` prints on stderr what `watch` prints of the trace, whose bytes are unchanged."""
    path = tmp_path / "run.jsonl.gz"
    done = run_here("simulate", *SMALL, "--live", "--trace", path)
    assert done.returncode == 0
    assert done.stderr == run_here("watch", recorded).stdout
    assert path.read_bytes() == recorded.read_bytes()


def test_live_shows_a_hybrid_model(tmp_path):
    """`--live` shows a run with cache groups as `watch` shows its trace."""
    path = tmp_path / "run.jsonl"
    about = ("zipf:requests=5", "--model", "gemma-3-12b", "--blocks", "600")
    done = run_here("simulate", *about, "--live", "--trace", path)
    assert (done.returncode, done.stderr) == (0, run_here("watch", path).stdout)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such terminals")
@pytest.mark.usefixtures("unmeasured_processes")
def test_an_interrupt_leaves_the_terminal_as_it_was(recorded):
    """Ctrl-C ends `watch` on a terminal with exit code 130 and shows the cursor again."""
    here, there = os.openpty()
    command = [sys.executable, "-m", "kvcore", "watch", str(recorded), "--speed", "0.001"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(
        command,
        stdin=there,
        stdout=there,
        stderr=there,
        env=environment,
        start_new_session=True,
    ) as process:
        os.close(there)
        shown = b""
        while b"running" not in shown:
            shown += os.read(here, 1 << 16)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                if not (more := os.read(here, 1 << 16)):
                    break
            except OSError:  # raised on Linux when the other side is closed
                break
            shown += more
        assert process.wait() == 130
    os.close(here)
    text = shown.decode()
    assert "queue     waiting" in text
    assert "x0.001" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.endswith("kvcore: interrupted\r\n")
