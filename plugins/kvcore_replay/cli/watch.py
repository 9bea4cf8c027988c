"""`kvcore watch`: show the events of a trace by its clock, or while it is written."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from math import inf, isnan
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click
import orjson

from kvcore.errors import InputError
from kvcore.files import CutError, DamageError, decompressed, part_path
from kvcore.units import NS_PER_S
from kvcore_cli.output import trace_file
from kvcore_cli.verb import Time, results, verb
from kvcore_replay.cli.trace_options import replica_option
from kvcore_replay.state.replicas import ServerReader

if TYPE_CHECKING:
    from kvcore_replay.cli.live import Player
if sys.platform != "win32":
    import fcntl

SPEED = 10.0
"""Default number of seconds of the trace in a second."""

TAIL_BYTES = 1 << 16
"""Bytes at the end of a trace in which its last line is searched."""


def factor(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Return a speed above 0."""
    if value is not None and (isnan(value) or value <= 0):
        msg = "must be above 0, such as 10; inf is as fast as it can be read"
        raise click.BadParameter(msg, ctx, param)
    return value


@verb("kvcore watch run.jsonl.gz --speed 60", "kvcore watch run.jsonl.gz --from 90 --to 95")
@click.argument("trace", callback=trace_file)
@click.option(
    "--speed",
    type=float,
    callback=factor,
    metavar="FACTOR",
    help="Seconds of the trace shown in one second; inf does not wait.  [default: 10; inf for "
    "a trace that is being written, and where stdout is no terminal]",
)
@click.option(
    "--from",
    "begin",
    type=Time(),
    help="Time of the trace, in seconds, up to which events are not waited for.",
)
@click.option(
    "--to",
    "end",
    type=Time(),
    help="Time of the trace, in seconds, at which to stop.",
)
@replica_option
@click.option(
    "--every",
    type=Time(),
    default="10",
    help="Seconds of the trace between two lines, where stdout is no terminal.",
)
def watch(
    *,
    trace: Path,
    speed: float | None,
    begin: int | None,
    end: int | None,
    replica: str | None,
    every: int,
) -> None:
    """Watch the TRACE of a run: its pool and queue, hits and evictions, by its clock.

    A trace that is still being written (as FILE.part, by another process) is followed until
    its end. Where stdout is no terminal, a line is printed from time to time. The TRACE may
    be the directory that --out of simulate or run wrote.
    """
    from kvcore_replay.cli.live import Player, display  # noqa: PLC0415 - `--help` does without

    if not every:
        msg = "--every 0: give the seconds between two lines"
        raise InputError(msg)
    out, part = results(), part_path(trace)
    written = part if part != trace and _is_written(part) else trace
    follows = _is_written(written)
    if speed is None:
        speed = SPEED if out.isatty() and not follows else inf
    with display(out, every / NS_PER_S) as shown:
        last = None if follows else _last_time(written)
        if end is not None:
            last = end if last is None else min(end, last)
        player = Player(shown, speed, begin=begin or 0, end=last)
        reader = ServerReader(written, replica)
        if follows:
            reader = _Follower(written, player.idle, replica)
        stopped = _play(reader, player, inf if end is None else end)
    if not stopped:
        reader.require_complete()


def _play(reader: ServerReader, player: Player, end: float) -> bool:
    """Show the events of a trace up to `end` (ns); return True if there are later ones."""
    for event in reader:
        if event.t > end:
            player.draw()
            return True
        try:
            player.show(event)
        except ValueError as error:
            reader.fail(f"{event.event}: {error}")
    player.draw()
    return False


def _is_written(path: Path) -> bool:
    """Return True if a process writes the trace at `path` now."""
    try:
        with path.open("rb") as file:
            return _is_locked(file.fileno())
    except OSError:
        return False  # its reader will fail, with the reason


def _is_locked(file: int) -> bool:
    """Return True if a living process writes the open file, as a `kvcore.files.AtomicFile`.

    False if files cannot be locked on this system.
    """
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _last_time(path: Path) -> int | None:
    """Return the time (ns) of the last line of a trace; None if that cannot be read."""
    tail = b""
    try:
        with path.open("rb") as file:
            for piece in decompressed(file, ServerReader.expansion):
                tail = (tail + piece)[-TAIL_BYTES:]
        time = orjson.loads(tail.rstrip(b"\n").rpartition(b"\n")[2])["t"]
    except (OSError, CutError, DamageError, ValueError, LookupError, TypeError):
        return None
    return time if type(time) is int else None


class _Follower(ServerReader):
    """Reads a trace while it is written, until its writer has ended."""

    def __init__(self, file: Path, idle: Callable[[], None], replica: str | None) -> None:
        super().__init__(file, replica)
        self._idle = idle

    def _open(self) -> BinaryIO:
        self._growing = _GrowingFile(self.file, self._idle)
        return self._growing

    def require_complete(self) -> None:
        """Raise TraceError unless END was reached; say so if the file was taken away."""
        self.cut_reason = self._growing.lost or self.cut_reason
        super().require_complete()


class _GrowingFile(io.FileIO):
    """A file that is read while it is written, and ends when its writer has ended.

    Attributes:
        lost: what another process has done to it, at which it ends as well.
    """

    lost: str | None = None

    def __init__(self, path: Path, idle: Callable[[], None]) -> None:
        super().__init__(path)
        self._idle = idle

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes, at most `size`; wait for them."""
        while True:
            written = _is_locked(self.fileno())
            data = super().read(-1 if size is None else size)
            if data or not written:
                return data or b""
            found = os.fstat(self.fileno())
            if found.st_size < self.tell():
                self.lost = "the file was cut while it was written"
            elif not found.st_nlink:
                self.lost = "the file was removed or replaced while it was written"
            if self.lost:
                return b""
            self._idle()
