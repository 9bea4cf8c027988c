"""Messages and limits of servers: few messages, whatever happens how often."""

import asyncio
import io
import json
import os
import signal
import sys
from datetime import UTC, datetime, timedelta

import pytest
from helpers.online_scenes import sentence

from kvcore_online.supervision import (
    Messages,
    announce,
    connection_limit,
    log_as_json,
    report_errors,
    signalled,
    stopped,
    supervised,
    warn,
)

resource = pytest.importorskip("resource", reason="needs limits of processes")


def test_each_kind_of_message_is_printed_at_its_first_tenth_and_hundredth_time(capsys):
    """Messages of two kinds do not hide each other; repeated ones say how often they came."""
    messages = Messages()
    for _ in range(100):
        messages.warn("it failed")
        messages.warn("it failed again", "another")
    lines = capsys.readouterr().err.splitlines()
    assert list(map(sentence, lines)) == [
        f"kvcore: {said}{times}"
        for times in ("", " (10 times)", " (100 times)")
        for said in ("it failed", "it failed again")
    ]


def test_messages_of_ever_new_kinds_are_bounded(capsys):
    """Of kinds beyond the first ones, few messages are printed, and nothing is kept."""
    messages = Messages()
    for index in range(256 + 1_000):
        messages.warn(f"error {index}")
    assert len(messages._counts) == 256 + 1
    assert len(capsys.readouterr().err.splitlines()) == 256 + 4


def test_a_job_that_fails_is_told_and_started_again(monkeypatch, capsys):
    """Each failure of a job is a line, and a call; a second later the job starts again."""
    failures, pauses = [], []

    async def pause(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", pause)

    async def job():
        raise asyncio.CancelledError if len(failures) == 2 else OSError("gone")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(supervised("a watch", job, lambda: failures.append("gone")))
    lines = capsys.readouterr().err.splitlines()
    said = "kvcore: a watch failed, and starts again: OSError: gone"
    assert list(map(sentence, lines)) == [said] * 2
    assert pauses == [1, 1]


ANY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "wanted", "files", "raised", "connections"),
    [
        ((1_024, 4_096), 10_000, 1, 4_096, 3_840),
        ((1_024, ANY), 2_000, 2, 4_256, 2_000),
        ((8_192, 8_192), 100, 1, None, 100),
        ((356, 356), 100, 1, None, 100),
        ((48, 48), 100, 1, 48, 24),
        ((ANY, ANY), 10**6, 2, None, 10**6),
    ],
)
def test_connections_stay_below_the_limit_of_open_files(
    monkeypatch, limits, wanted, files, raised, connections
):
    """The limit is raised as far as is needed and allowed; some files stay free."""
    set_limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: set_limits.append(new))
    assert connection_limit(wanted, files) == connections
    assert set_limits == ([] if raised is None else [(raised, limits[1])])


def test_a_limit_of_open_files_that_cannot_be_raised_holds(monkeypatch):
    """If the system refuses to raise the limit, connections stay below the one there is."""

    def refused(_, new):
        raise OSError(new)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, 4_096))
    monkeypatch.setattr(resource, "setrlimit", refused)
    assert connection_limit(10_000) == 768


def test_a_line_begins_with_its_time_of_day_and_zone(capsys):
    """A message is a line with the time at which it was printed, in ISO 8601."""
    before = datetime.now(UTC)
    warn("it \x1bfailed")
    (line,) = capsys.readouterr().err.splitlines()
    time, _, said = line.partition(" kvcore: ")
    assert before - timedelta(milliseconds=1) <= datetime.fromisoformat(time)
    assert datetime.fromisoformat(time) <= datetime.now(UTC)
    assert said == "it <U+001B>failed"


def test_messages_as_json_are_an_object_a_line(capsys):
    """With `--log-json` a line is an object with time, level and message, whatever that is."""
    log_as_json(as_json=True)
    try:
        warn('a "b"\n\x1b[31m')
        warn("\udcff.jsonl is full")
        announce("tiny at http://127.0.0.1:8001", "127.0.0.1")
    finally:
        log_as_json(as_json=False)
    lines = list(map(json.loads, capsys.readouterr().err.splitlines()))
    assert [(line["level"], line["message"]) for line in lines] == [
        ("warning", 'a "b"\n\x1b[31m'),
        ("warning", r"\udcff.jsonl is full"),
        ("info", "tiny at http://127.0.0.1:8001; Ctrl-C ends"),
    ]
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)


@pytest.mark.parametrize(
    ("host", "is_open"),
    [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True)],  # noqa: S104
)
def test_an_address_that_is_no_loopback_prints_a_warning(host, is_open, capsys):
    """A server that listens prints a warning for an address that is no loopback alone."""
    announce("tiny", host)
    said = [sentence(line) for line in capsys.readouterr().err.splitlines()]
    warned = [f"kvcore: {host} is no loopback: whoever reaches it can use it"]
    assert said == [*warned * is_open, "kvcore: tiny; Ctrl-C ends"]


class Buffered(io.StringIO):
    """A stream that shows what was flushed."""

    shown = ""

    def flush(self):
        """Show all."""
        self.shown = self.getvalue()


def test_a_message_is_shown_at_once(monkeypatch):
    """A line does not wait in a buffer; a closed stream raises nothing."""
    stream = Buffered()
    monkeypatch.setattr(sys, "stderr", stream)
    warn("it failed")
    assert sentence(stream.shown) == "kvcore: it failed\n"

    def broken(_):
        raise BrokenPipeError

    monkeypatch.setattr(stream, "write", broken)
    warn("it failed")
    for closed in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", closed)
        if closed is not None:
            closed.close()
        warn("it failed")


def test_errors_of_the_loop_are_lines(capsys):
    """A report of asyncio is a line, with the error if there is one."""

    async def main():
        report_errors(Messages())
        loop = asyncio.get_running_loop()
        loop.call_exception_handler({"message": "no socket"})
        loop.call_exception_handler({"message": "no socket", "exception": OSError("full")})

    asyncio.run(main())
    lines = capsys.readouterr().err.splitlines()
    assert list(map(sentence, lines)) == ["kvcore: no socket", "kvcore: no socket: full"]


@pytest.mark.parametrize("again", [False, True])
def test_a_further_signal_ends_what_a_server_waits_for(again):
    """`stop` is waited for; a signal that comes meanwhile aborts what it waits for."""
    aborted = []

    async def main():
        free, signals = asyncio.Event(), asyncio.Event()
        signals.set()  # by the signal that ends the server
        asyncio.get_running_loop().call_soon(signals.set if again else free.set)

        def abort():
            aborted.append(True)
            free.set()

        await stopped(free.wait(), signals, abort)
        assert free.is_set()
        assert len(asyncio.all_tasks()) == 1 + (not again)

    asyncio.run(main())
    assert aborted == [True] * again


@pytest.mark.parametrize("closed", [False, True])
def test_a_hangup_rotates_unless_the_terminal_was_closed(monkeypatch, closed):
    """SIGHUP to a daemon, or sent by hand, rotates; that of a closed terminal ends."""

    async def main():
        rotated = asyncio.Event()
        monkeypatch.setattr("os.isatty", lambda _: True)
        with signalled(rotated.set) as ending:
            monkeypatch.setattr("os.isatty", lambda _: not closed)
            os.kill(os.getpid(), signal.SIGHUP)
            async with asyncio.timeout(10):
                await (ending if closed else rotated).wait()
            return ending.is_set(), rotated.is_set()

    assert asyncio.run(main()) == (closed, not closed)


def test_signals_set_an_event_and_are_given_back():
    """Ctrl-C, SIGTERM and SIGHUP set the event; afterwards the handlers before hold again."""

    def other(*_):
        """Do nothing, as the handler of a program that has one of its own."""

    before = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), other)
    first = {number: signal.signal(number, other) for number in before}

    async def main():
        with signalled() as ending:
            for number in before:
                os.kill(os.getpid(), number)
                async with asyncio.timeout(10):
                    await ending.wait()
                ending.clear()

    asyncio.run(main())
    assert {number: signal.signal(number, first[number]) for number in before} == before
