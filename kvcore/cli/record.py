"""`kvcore record`: the KV events of a running server, in a file."""

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

from kvcore.cli.output import emit_json, file_path, json_option, print_table
from kvcore.errors import InputError
from kvcore.units import NS_PER_S, parse_seconds

if TYPE_CHECKING:
    from kvcore.kv_events.recording import Tally

REDRAW_SECONDS = 0.2
ERASE = "\r\x1b[K"


def seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Read a time above 0."""
    if value is None:
        return None
    try:
        time = parse_seconds(value) / NS_PER_S
    except InputError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    if not time:
        msg = "must be above 0 seconds"
        raise click.BadParameter(msg, ctx, param)
    return time


@click.command(context_settings={"show_default": True})
@click.option("--zmq", "address", required=True, metavar="ADDRESS", help="Where it publishes.")
@click.option("--replay", metavar="ADDRESS", help="Where it sends batches again.")
@click.option("--topic", default="", show_default=False, help="Only topics that begin so.")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=1,
    help="Data-parallel ranks, at ports in a row.",
)
@click.option("--for", "during", callback=seconds, metavar="SECONDS", help="Stop after that.")
@click.option("--batches", type=click.IntRange(min=1), help="Stop after so many.")
@click.option(
    "--replay-timeout",
    callback=seconds,
    default="5",
    metavar="SECONDS",
    help="To wait for a batch that was asked for.",
)
@click.option(
    "--reconnect",
    callback=seconds,
    default="5",
    metavar="SECONDS",
    help="At most between two tries to connect again.",
)
@click.option(
    "-o",
    "--out",
    required=True,
    callback=file_path,
    metavar="FILE",
    help="Where to; .gz and .zst by name.",
)
@json_option
def record(
    *, out: Path, during: float | None, batches: int | None, as_json: bool, **given: Any
) -> None:
    """Record the KV events that a server publishes over ZMQ: vLLM, SGLang, TensorRT-LLM.

    Until Ctrl-C, SIGTERM, --for or --batches: each ends with a complete file. Batches that
    are missing are asked for, if the server has an address for that, or told as lost.
    """
    from kvcore.kv_events.recording import RecordingWriter  # noqa: PLC0415 - as above
    from kvcore.kv_events.recording import record as run  # noqa: PLC0415 - a slow room
    from kvcore.kv_events.subscriber import Server, Subscriber  # noqa: PLC0415 - as above

    server = Server(**given)
    with (
        Subscriber(server) as subscriber,
        _ending(subscriber.stop),
        RecordingWriter(out) as writer,
        _progress() as (tell, tick),
    ):
        tell(f"listening to {server.address}; Ctrl-C ends the recording")
        tally = run(subscriber, writer, seconds=during, batches=batches, tell=tell, tick=tick)
    if not tally.batches:
        click.echo(f"kvcore: no batch came from {server.address}", err=True)
    counts = attrs.asdict(tally)
    if as_json:
        emit_json({"schema": 1, "file": str(out), **counts})
    else:
        rows = [(name, f"{count:,}") for name, count in counts.items()]
        print_table(["recorded", str(out)], rows, right=[str(out)])


@contextmanager
def _ending(stop: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM call `stop` while the body runs."""
    before = {
        number: signal.signal(number, lambda *_: stop())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str], None], Callable[[Tally], None]]]:
    """Yield what tells a sentence on stderr, and what shows the tally there if it is seen."""
    seen, shown = sys.stderr.isatty(), 0.0

    def tell(sentence: str) -> None:
        click.echo(f"{ERASE if seen else ''}kvcore: {sentence}", err=True)

    def tick(tally: Tally) -> None:
        nonlocal shown
        if seen and monotonic() - shown > REDRAW_SECONDS:
            shown = monotonic()
            click.echo(
                f"{ERASE}{tally.batches:,} batches, {tally.stored:,} blocks stored, "
                f"{tally.removed:,} removed, {tally.gaps:,} gaps",
                nl=False,
                err=True,
            )

    yield tell, tick
    if seen:
        click.echo(ERASE, nl=False, err=True)
