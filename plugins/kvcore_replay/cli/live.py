"""The live view of a trace that is read or written: on a terminal, or as lines in a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TextIO, TypeAlias

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvcore.config import RunParts
from kvcore.errors import InputError
from kvcore.hookspecs import Running
from kvcore.trace import Trace
from kvcore.trace.events import Event, Header, decode
from kvcore.units import NS_PER_S
from kvcore.untrusted import escaped
from kvcore_cli.output import done_so_far
from kvcore_cli.served import trace_path
from kvcore_plugins.traces.expansion import Expansion
from kvcore_replay.report.live import LiveView
from kvcore_replay.report.live import clock as clock_text

FRAME_SECONDS = 0.1
"""Real time between two pictures."""

LINE_SECONDS = 10.0
"""Default number of seconds of the trace between two lines in a pipe."""

STYLES = {
    "private": "bright_white on blue",
    "shared": "black on yellow",
    "cached": "black on cyan",
    "free": "bright_black",
}
"""Styles of the parts of a pool, which have letters too."""


class Picture:
    """A display that is drawn in place on a terminal, ten times a second."""

    def __init__(self, live: Live, clock: Callable[[], float]) -> None:
        self._live, self._clock = live, clock
        self._drawn = -inf

    def due(self, view: LiveView) -> bool:
        """Return True if the last picture is older than `FRAME_SECONDS`."""
        return self._clock() - self._drawn >= FRAME_SECONDS

    def draw(self, view: LiveView, progress: str) -> None:
        """Draw the view as large as the terminal."""
        self._drawn = self._clock()
        width, height = self._live.console.size
        picture = Text()
        # A line in the last row would make the terminal scroll.
        for line in view.lines(width, height - 1, progress):
            row = Text(no_wrap=True)
            for text, part in line:
                row.append(escaped(text), STYLES.get(part))
            row.truncate(width)
            picture.append_text(row).append("\n")
        picture.rstrip()
        self._live.update(picture, refresh=True)


class Lines:
    """A display of lines, at intervals of the time of the trace."""

    def __init__(self, file: TextIO, seconds: float) -> None:
        self._file, self._step = file, round(seconds * NS_PER_S)
        self._next: int | None = None

    def due(self, view: LiveView) -> bool:
        """Return True if the time of the next line is reached."""
        if self._next is None:
            self._next = self._time_after(view)
        return view.now >= self._next

    def draw(self, view: LiveView, progress: str) -> None:
        """Write a line."""
        self._next = self._time_after(view)
        self._file.write(f"{escaped(view.line())}\n")
        self._file.flush()

    def _time_after(self, view: LiveView) -> int:
        """Return the time (ns) of the first line after that of the view."""
        return view.now - view.now % self._step + self._step


Display: TypeAlias = Picture | Lines
"""Shows a live view with its progress in words."""


@contextmanager
def display(file: TextIO, seconds: float = LINE_SECONDS) -> Iterator[Display]:
    """Open a display on `file`; a terminal is restored in any case."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not file.isatty() or console.is_dumb_terminal:
        yield Lines(file, seconds)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield Picture(live, monotonic)


class Player:
    """Shows events at the speed of a clock, or as fast as they are read.

    Args:
        shown: the display.
        speed: seconds of the trace in a second; infinite: no event is waited for.
        begin: time (ns) before which no event is waited for.
        end: time (ns) of the end of the trace; None if it is not known.
        requests: number of requests of the trace, if `end` is not known; None if it is not
            known either.
        clock, wait: functions that return the time in seconds, and that sleep.
    """

    def __init__(
        self,
        shown: Display,
        speed: float,
        *,
        begin: int = 0,
        end: int | None = None,
        requests: int | None = None,
        clock: Callable[[], float] = monotonic,
        wait: Callable[[float], None] = sleep,
    ) -> None:
        self._screen, self._speed, self._begin, self._end = shown, speed, begin, end
        self._requests, self._clock, self._wait = requests, clock, wait
        self._view: LiveView | None = None
        self._started: tuple[int, float] | None = None

    def show(self, event: Event) -> None:
        """Wait until the time of `event`, and show it.

        Raises:
            ValueError: the event does not follow from those before it.
        """
        if isinstance(event, Header):
            self._view = LiveView(event)
            return
        assert self._view is not None
        if event.t >= self._begin:
            self._pass_time(self._view, event.t)
        self._view.take(event)
        if self._screen.due(self._view):
            self.draw()

    def draw(self) -> None:
        """Draw the current view."""
        if self._view is not None:
            self._screen.draw(self._view, self._progress(self._view))

    def idle(self) -> None:
        """Redraw the view if it is due, and wait for the length of a frame."""
        if self._view is not None and self._screen.due(self._view):
            self.draw()
        self._wait(FRAME_SECONDS)

    def _pass_time(self, view: LiveView, time: int) -> None:
        """Wait until `time` (ns) of the trace, and draw the view meanwhile."""
        if self._started is None:
            self._started = time, self._clock()
        begin, began = self._started
        due = began + (time - begin) / (self._speed * NS_PER_S)
        while (left := due - self._clock()) > 0:
            passed = (self._clock() - began) * self._speed
            view.now = max(view.now, min(begin + int(passed * NS_PER_S), time))
            if self._screen.due(view):
                self.draw()
            self._wait(min(left, FRAME_SECONDS))

    def _progress(self, view: LiveView) -> str:
        """Return the progress in words, with the time that the rest takes."""
        if self._started is None:
            return ""
        begin, began = self._started
        seconds = self._clock() - began
        words = [] if self._speed == inf else [f"x{self._speed:g}"]
        if self._end is not None:
            far = done_so_far(view.now - begin, self._end - begin, seconds)
            words = [f"of {clock_text(self._end)}", far, *words]
        elif self._requests is not None:
            words = [done_so_far(view.finished + view.rejected, self._requests, seconds)]
        return "  ".join(filter(None, words))


@contextmanager
def live_trace(
    path: Path | None, requests: int | None, header: Mapping[str, Any]
) -> Iterator[Trace]:
    """Open a trace that is shown on stderr while it is written; without a path none is kept."""
    expansion, grouped = Expansion(), False

    def show(lines: bytes) -> None:
        # Read as from a file, so that the view is that of `kvcore watch`.
        nonlocal grouped
        for line in lines.splitlines():
            event = decode(line, grouped=grouped)
            if isinstance(event, Header):
                grouped = bool(event.cache_groups)
            for each in expansion.expand(event):
                player.show(each)

    with display(sys.stderr) as shown:
        player = Player(shown, inf, requests=requests)
        with Trace(path or os.devnull, on_lines=show, **header) as trace:
            yield trace
        player.draw()


@contextmanager
def showing(parts: RunParts, given: Mapping[str, Any]) -> Iterator[Running]:
    """Show a run on stderr while it writes its trace, if it has one.

    Raises:
        InputError: a run of several servers, or one without blocks.
    """
    if parts.many:
        msg = "--live shows one server: write a --trace, and see that with kvcore view"
        raise InputError(msg)
    if not parts.traced:
        msg = "--live shows blocks, which --allocation contiguous has none of"
        raise InputError(msg)
    path, requests = trace_path(parts, given), parts.workload.size
    with live_trace(path, requests, parts.header()) as trace:
        yield Running(recorder=trace, shows=True)
