"""`kvcore record`: write the KV events of a running server to a file."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvcore.errors import InputError
from kvcore.units import NS_PER_S, parse_bytes, parse_seconds
from kvcore.untrusted import escaped
from kvcore_cli.output import (
    done_so_far,
    emit_json,
    file_option,
    json_option,
    line_seconds,
    print_table,
)
from kvcore_cli.verb import Count, Seconds, echo, end_signals, verb

if TYPE_CHECKING:
    from kvcore_events.recording import Tally

NOTHING_CAME = 4
"""The exit code if no batch arrived."""

UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
"""Seconds in each unit of an age."""

REDRAW_SECONDS = 0.2
ERASE = "\r\x1b[K"


def rotation(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, float]:
    """Return the size and the age at which a piece ends, as arguments of `RecordingWriter`."""
    limits: dict[str, float] = {}
    for value in values:
        by_age = value[:-1].strip()[-1:].isdigit() and value[-1] in UNITS  # `5ss` is no time
        name = "rotate_seconds" if by_age else "rotate_bytes"
        if name in limits:
            msg = f"{value!r} is a second {'age' if by_age else 'size'}: give one of each"
            raise click.BadParameter(msg, ctx, param)
        try:
            if by_age:
                limits[name] = parse_seconds(value[:-1]) / NS_PER_S * UNITS[value[-1]]
            else:
                limits[name] = parse_bytes(value)
        except InputError as error:
            msg = f"{error}; or of time, such as 90s, 30m, 1h or 1d"
            raise click.BadParameter(msg, ctx, param) from None
    if not all(limits.values()):
        msg = "must be above 0"
        raise click.BadParameter(msg, ctx, param)
    return limits


@verb(
    "kvcore record --zmq tcp://127.0.0.1:5557 -o live.jsonl.gz",
    "kvcore record --zmq tcp://host:5557 --replay tcp://host:5558 --for 600 -o live.jsonl.gz",
)
@click.option(
    "--zmq",
    "address",
    required=True,
    metavar="ADDRESS",
    help="Address at which the server publishes, such as tcp://127.0.0.1:5557.",
)
@click.option(
    "--replay",
    metavar="ADDRESS",
    help="Address at which the server sends missing batches again.",
)
@click.option(
    "--topic",
    default="",
    show_default=False,
    metavar="PREFIX",
    help="Prefix of the topics to subscribe to.  [default: all topics]",
)
@click.option(
    "--ranks",
    type=Count(),
    default=1,
    help="Number of data-parallel ranks of the server, which publish at consecutive ports.",
)
@click.option(
    "--for",
    "during",
    type=Seconds(),
    help="Time after which the recording ends.",
)
@click.option(
    "--batches",
    type=Count(),
    help="Number of batches after which the recording ends.",
)
@click.option(
    "--replay-timeout",
    type=Seconds(),
    default="5",
    help="Time to wait for each batch of a replay.",
)
@click.option(
    "--reconnect",
    type=Seconds(),
    default="5",
    help="Longest time between two attempts to connect again.",
)
@file_option(
    "-o",
    "--out",
    required=True,
    help="File to write; compressed if its name ends in .gz or .zst.",
)
@click.option(
    "--rotate",
    "limits",
    multiple=True,
    callback=rotation,
    metavar="SIZE|AGE",
    help="Size or age at which a piece ends and the next begins, such as 1GiB or 1h; may be "
    "given twice. Pieces are complete files, FILE with -000001, -000002 before its suffix.",
)
@json_option
def record(
    *,
    out: Path,
    during: float | None,
    batches: int | None,
    limits: dict[str, Any],
    as_json: bool,
    **given: Any,
) -> None:
    """Record the KV events that a server publishes over ZMQ: vLLM, SGLang, TensorRT-LLM.

    Ctrl-C, SIGTERM, SIGHUP, --for and --batches end the recording, each with a complete file.
    Missing batches are requested at --replay; those that are not sent again are recorded as
    lost. If no batch arrives, nothing is written, an older FILE stays, and the exit code is 4.
    """
    from kvcore_events.recording import RecordingWriter  # noqa: PLC0415 - as above
    from kvcore_events.recording import record as run  # noqa: PLC0415 - a slow room
    from kvcore_events.subscriber import Server, Subscriber  # noqa: PLC0415 - as above

    try:
        server = Server(**given)
    except ValueError as error:
        raise InputError(str(error)) from None
    with (
        Subscriber(server) as subscriber,
        _ending(subscriber.stop),
        RecordingWriter(out, **limits) as writer,
        _messages() as (warn, progress),
    ):
        warn(f"listening to {server.address}; Ctrl-C ends the recording")
        tally = run(
            subscriber, writer, seconds=during, batches=batches, warn=warn, progress=progress
        )
        if not tally.batches:
            writer.discard()
    if not tally.batches:
        then = f"{out} stays as it was" if out.exists() else "nothing is written"
        echo(f"kvcore: no batch came from {server.address}: {then}", err=True)
    counts = {"pieces": writer.pieces, **attrs.asdict(tally)}
    if as_json:
        emit_json({"schema": 1, "file": str(out), **counts})
    else:
        rows = [(name, f"{count:,}") for name, count in counts.items()]
        print_table(["recorded", str(out)], rows, right=[str(out)])
    if not tally.batches:
        click.get_current_context().exit(NOTHING_CAME)


@contextmanager
def _ending(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on Ctrl-C, SIGTERM and SIGHUP while the body runs."""
    before = {number: signal.signal(number, lambda *_: stop()) for number in end_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _messages() -> Iterator[tuple[Callable[[str], None], Callable[[Tally], None]]]:
    """Yield functions that print sentences, and at intervals the tally, on stderr."""
    terminal = sys.stderr.isatty()
    every = REDRAW_SECONDS if terminal else line_seconds()
    begun = shown = monotonic()

    def warn(sentence: str) -> None:
        click.echo(f"{ERASE if terminal else ''}kvcore: {escaped(sentence)}", err=True)

    def progress(tally: Tally) -> None:
        nonlocal shown
        if (now := monotonic()) - shown > every:
            shown = now
            line = (
                f"batches: {done_so_far(tally.batches, None, now - begun)}, {tally.stored:,} "
                f"blocks stored, {tally.removed:,} removed, {tally.gaps:,} gaps"
            )
            line = f"{ERASE}{line}" if terminal else f"kvcore: {line}"
            click.echo(line, nl=not terminal, err=True)

    yield warn, progress
    if terminal:
        click.echo(ERASE, nl=False, err=True)
