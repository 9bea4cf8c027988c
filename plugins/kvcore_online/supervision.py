"""The life of a server: background work, messages, open files, the end by signals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import orjson

from kvcore.errors import PolicyError
from kvcore.files import part_path
from kvcore.untrusted import escaped, escaped_json
from kvcore_cli.verb import end_signals
from kvcore_events.recording import next_piece

if sys.platform != "win32":
    import resource

PAUSE_SECONDS = 1.0
"""Seconds after which background work that has failed starts again."""

SPARE_FILES = 256
"""File descriptors that are kept free of connections: for servers, files and refusals."""

BACKLOG = 64
"""Connections that the system accepts before the listener does: they are accepted at a time."""

_MOST_KINDS = 256


class Messages:
    """Prints sentences on stderr, repeated ones at the 10th, the 100th, the 1,000th time."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def warn(self, sentence: str, kind: str | None = None) -> None:
        """Print a sentence; of many of one kind (None: equal ones) only a few.

        Does nothing if stderr is closed.
        """
        kind = sentence if kind is None else kind
        if len(self._counts) >= _MOST_KINDS and kind not in self._counts:
            kind = ""  # so that the memory is bounded whatever the sentences are
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 10 ** (len(str(count)) - 1):
            times = f" ({count:,} times)" if count > 1 else ""
            warn(f"{sentence}{times}")

    def failed(self, error: PolicyError) -> None:
        """Print the failure of a plugin; of many of one plugin only a few."""
        self.warn(str(error), str(error).partition("(")[0])  # kind and name, in each of them


class _Lines(logging.Handler):
    """Prints a line on stderr for each record; does nothing if stderr is closed.

    Attributes:
        as_json: whether it is a JSON object, in place of the time and the sentence.
    """

    as_json = False

    def emit(self, record: logging.LogRecord) -> None:
        """Print the line of a record."""
        time = (
            datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "milliseconds")
        )
        sentence = record.getMessage()
        line = f"{time} kvcore: {escaped(sentence)}\n"
        if self.as_json:
            level = record.levelname.lower()
            # The name of a file may be no Unicode, which JSON is.
            sentence = sentence.encode(errors="backslashreplace").decode()
            fields = {"time": time.replace(" ", "T", 1), "level": level, "message": sentence}
            line = f"{escaped_json(orjson.dumps(fields)).decode()}\n"
        with suppress(OSError, ValueError, AttributeError):  # broken, closed, none at all
            sys.stderr.write(line)
            sys.stderr.flush()


_LINES = _Lines()
LOG = logging.Logger("kvcore_online", logging.INFO)  # noqa: LOG001 - none of the user's changes it
LOG.addHandler(_LINES)


def log_as_json(*, as_json: bool) -> None:
    """Print lines from now on as JSON objects, or as sentences."""
    _LINES.as_json = as_json


def warn(sentence: str) -> None:
    """Print a sentence on stderr, with the time; do nothing if stderr is closed."""
    LOG.warning("%s", sentence)


def announce(what: str, host: str) -> None:
    """Print that a server listens, and a warning if other machines can reach its address."""
    try:
        loopback = ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        warn(f"{host} is no loopback: whoever reaches it can use it")
    LOG.info("%s; Ctrl-C ends", what)


def unused_path(path: Path) -> Path:
    """Return the path for a new trace: `path`, or its next piece if an earlier trace has that.

    So a server that is started again loses nothing of what it has recorded, be it whole or the
    `.part` that a killed process has left. A device or a pipe is written to as it is.
    """
    part = part_path(path)
    empty = part == path or not path.exists() or not path.stat().st_size
    if empty and (part == path or not part.exists()):
        return path
    piece = next_piece(path)
    LOG.info("%s has an earlier trace: this one goes to %s", path, piece.name)
    return piece


async def supervised(
    what: str, job: Callable[[], Awaitable[None]], failed: Callable[[], None]
) -> None:
    """Run a job that has no end; if it fails, print that, call `failed`, and start it again."""
    while True:
        try:
            await job()
        except Exception as error:  # noqa: BLE001 - else nobody would notice that it has ended
            warn(f"{what} failed, and starts again: {type(error).__name__}: {error}")
            failed()
        await asyncio.sleep(PAUSE_SECONDS)


def report_errors(messages: Messages) -> None:
    """Print errors of the running loop, such as too many open files, in a line each."""

    def handle(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        why = f": {error}" if error is not None else ""
        messages.warn(f"{context['message']}{why}")

    asyncio.get_running_loop().set_exception_handler(handle)


def connection_limit(wanted: int, files: int = 1) -> int:
    """Return how many connections of clients the limit of open files allows.

    The limit of the process is raised as far as needed, and as it may be.

    Args:
        wanted: largest number of connections.
        files: number of file descriptors of a connection, with its own one to a server.
    """
    if sys.platform == "win32":
        return wanted
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted * files + SPARE_FILES
    if limit == resource.RLIM_INFINITY:
        return wanted
    if limit < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            limit = raised
    spare = min(SPARE_FILES, limit // 2)
    return max(1, min(wanted, (limit - spare) // files))


async def stopped(
    stop: Coroutine[Any, Any, None], signals: asyncio.Event, abort: Callable[[], None]
) -> None:
    """Wait for `stop`, which waits for requests in flight; call `abort` on a further signal.

    A wrapper of the command may pass on a signal that the command gets as well.
    """
    LOG.info("ending; a second signal does not wait for requests in flight")
    signals.clear()
    stopping = asyncio.ensure_future(stop)
    again = asyncio.ensure_future(signals.wait())
    await asyncio.wait([stopping, again], return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not stopping.done():
        abort()
    await stopping
    LOG.info("ended")


@contextmanager
def signalled(rotate: Callable[[], None] | None = None) -> Iterator[asyncio.Event]:
    """Yield an event that Ctrl-C, SIGTERM and SIGHUP set; later they end the process.

    With `rotate` SIGHUP calls that, as is usual for daemons, unless it says that the terminal
    of the process has been closed.
    """
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    began_in_terminal = _has_terminal()

    def hung_up() -> None:
        if rotate is None or (began_in_terminal and not _has_terminal()):
            event.set()
        else:
            rotate()

    # Signals come to the main thread alone.
    in_main = threading.current_thread() is threading.main_thread()
    numbers = end_signals() if in_main else []
    before = {signum: signal.getsignal(signum) for signum in numbers}
    for signum in numbers:
        is_hangup = signum.name == "SIGHUP"
        loop.add_signal_handler(signum, hung_up if is_hangup else event.set)
    try:
        yield event
    finally:
        for signum, handler in before.items():
            loop.remove_signal_handler(signum)
            signal.signal(signum, handler)


def _has_terminal() -> bool:
    """Return True if stdin, stdout or stderr is a terminal that is open."""
    return any(map(os.isatty, range(3)))
