"""`kvcore export`: write a trace in the formats of other tools."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any

import click

from kvcore.errors import InputError, StorageError
from kvcore.files import compressor, part_path, refuse_overwrite
from kvcore.progress import Tick
from kvcore.units import DECIMAL, format_bytes
from kvcore.untrusted import parse_digits
from kvcore_cli.output import (
    emit_json,
    file_option,
    input_option,
    json_option,
    reading,
    trace_file,
)
from kvcore_cli.verb import echo, verb
from kvcore_replay.cli.trace_options import replica_option

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA = 1
ANNOUNCED = 100 * 10**6
"""Size of an export in bytes from which on a notice is printed."""

USUAL_KEY_TOKENS = 512
"""Tokens of a key in the traces of Mooncake's authors."""


def _events(trace: Path, out: Path, tick: Tick, replica: str | None) -> dict[str, Any]:
    from kvcore_events.recording import RecordingWriter  # noqa: PLC0415 - a slow room
    from kvcore_replay.export import event_batches  # noqa: PLC0415 - a slow room

    batches = 0
    with RecordingWriter(out, engine="kvcore") as recording:
        for batches, batch in enumerate(event_batches(trace, tick, replica), 1):
            recording.batch(batch, seq=batches - 1)
    return {"batches": batches}


def _announce(trace: Path, out: Path, replica: str | None, *, force: bool) -> None:
    """Print a notice if the events of a trace will be large.

    Raises:
        StorageError: the disk has too little free space, and `force` is not given.
    """
    from kvcore_replay.export import ExportSize  # noqa: PLC0415 - as above

    with reading("counting", trace) as tick:
        size = ExportSize.from_trace(trace, tick, replica)
    needed = size.bytes(compressed=compressor(out) is not None)
    about = (
        f"about {format_bytes(needed, DECIMAL)}: {size.tokens:,} stand-ins for the token ids "
        f"of {size.blocks:,} blocks"
    )
    if part_path(out) != out and out.parent.is_dir():  # not a device or a pipe
        free = disk_usage(out.parent).free
        if needed > free and not force:
            msg = (
                f"{out} takes {about}, and its disk has {format_bytes(free, DECIMAL)} free: "
                "name a file that ends in .gz, or one on another disk, or give --force"
            )
            raise StorageError(msg)
    if needed >= ANNOUNCED:
        echo(f"kvcore: writing {about}", err=True)


def _publish(
    trace: Path, address: str, replay: str | None, replica: str | None
) -> dict[str, Any]:
    from kvcore_events.formats import encode  # noqa: PLC0415 - as above
    from kvcore_events.publisher import Publisher  # noqa: PLC0415 - as above
    from kvcore_replay.export import event_batches  # noqa: PLC0415 - as above

    payloads = map(encode, event_batches(trace, replica=replica))
    # A file that is no trace is refused before a subscriber is waited for.
    first = list(islice(payloads, 1))
    with Publisher(address, replay) as publisher:
        echo(f"kvcore: publishing at {publisher.address}, once someone listens", err=True)
        return {"batches": publisher.serve_all(chain(first, payloads))}


def _router_events(trace: Path, out: Path, tick: Tick, replica: str | None) -> dict[str, Any]:
    from kvcore_events.formats import encode  # noqa: PLC0415 - as above
    from kvcore_replay.export import dynamo_batches, write_lines  # noqa: PLC0415 - as above

    worker = parse_digits((replica or "").partition(":")[0]) or 0  # what is none, is refused
    batches = dynamo_batches(trace, worker, tick, replica)
    lines = (encode(batch) + b"\n" for batch in batches)
    events = write_lines(out, lines)
    if not events:
        echo(f"kvcore: {out} is empty: no block was stored in the run of {trace}", err=True)
    return {"events": events}


def _requests(trace: Path, out: Path, tick: Tick, replica: str | None) -> dict[str, Any]:
    from kvcore_replay.export import MooncakeRows, write_lines  # noqa: PLC0415 - as above

    _refuse(replica, "mooncake has the requests of all replicas")
    rows = MooncakeRows(trace, tick)
    written: dict[str, Any] = {"requests": write_lines(out, rows)}
    return written | {"key_tokens": rows.key_tokens, "left_out": dict(rows.left_out)}


def _tracks(trace: Path, out: Path, tick: Tick, replica: str | None) -> dict[str, Any]:
    from kvcore_replay.export import write_lines  # noqa: PLC0415 - as above
    from kvcore_replay.report.perfetto import PerfettoTrace  # noqa: PLC0415 - for this format alone

    _refuse(replica, "perfetto has all replicas, each with processes of its own")
    document = PerfettoTrace(trace, tick)
    write_lines(out, document)
    return document.counts


def _anonymised(trace: Path, out: Path, key: Path | None, tick: Tick) -> dict[str, Any]:
    from kvcore_plugins.traces.keyed import KeyedNames  # noqa: PLC0415 - as above
    from kvcore_replay.anonymise import anonymise  # noqa: PLC0415 - as above

    return {"lines": anonymise(trace, out, KeyedNames.from_file(key), tick)}


def _refuse(replica: str | None, why: str) -> None:
    if replica is not None:
        msg = f"--to {why}: leave --replica out"
        raise InputError(msg)


FORMATS: dict[str, Callable[[Path, Path, Tick, str | None], dict[str, Any]]] = {
    "vllm": _events,
    "dynamo": _router_events,
    "mooncake": _requests,
    "perfetto": _tracks,
}
"""Functions that write a trace and return counts to report, by format."""


@verb(
    "kvcore export run.jsonl.gz --to mooncake --out requests.jsonl",
    "kvcore export run.jsonl.gz --to perfetto --out run.json.gz",
    "kvcore export run.jsonl.gz --to vllm --zmq tcp://127.0.0.1:5557",
    "kvcore export day.jsonl.gz --anonymise --out shared.jsonl.gz",
    renamed={"--format": "--to"},
)
@click.argument("trace", callback=trace_file)
@click.option(
    "--to",
    "kind",
    type=click.Choice(list(FORMATS)),
    help="Format: KV events of vLLM, router events of Dynamo, requests of Mooncake, or tracks "
    "for Perfetto and chrome://tracing.",
)
@file_option("--out", help="File to write; compressed if its name ends in .gz or .zst.")
@click.option(
    "--zmq",
    metavar="ADDRESS",
    help="Address at which events are published over ZMQ, as vLLM does, in place of a file.",
)
@click.option(
    "--replay",
    metavar="ADDRESS",
    help="With --zmq: address at which subscribers can ask for missing batches again.",
)
@click.option(
    "--anonymise",
    is_flag=True,
    help="Write the trace again, with names, request ids and keys of blocks as keyed hashes.",
)
@input_option(
    "--key",
    help="With --anonymise: file with the key of the hashes.  [default: one that is drawn]",
)
@replica_option
@click.option(
    "--force",
    is_flag=True,
    help="Write the file even if the disk seems to have too little space.",
)
@json_option
def export(
    *,
    trace: Path,
    kind: str | None,
    out: Path | None,
    zmq: str | None,
    replay: str | None,
    anonymise: bool,
    key: Path | None,
    replica: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Export the TRACE of a run as KV events, requests or tracks, for other tools.

    Events of vLLM are written as a recording, which `kvcore replay` checks, or published over
    ZMQ, from the first subscriber's connection until the last subscriber leaves. The TRACE
    may be the directory that --out of simulate or run wrote. With --anonymise it is written
    again as a trace, in which names and prompts are keyed hashes.
    """
    if anonymise:
        if out is None or kind or zmq or replay or replica:
            msg = "--anonymise takes --out FILE and --key alone; export what it has written"
            raise click.UsageError(msg)
        refuse_overwrite(out, [trace, key])
        with reading("exporting", trace) as tick:
            document = _anonymised(trace, out, key, tick)
    elif key is not None:
        msg = "--key is for --anonymise alone: leave it out"
        raise click.UsageError(msg)
    elif kind is None:
        context = click.get_current_context()
        named = {param.name: param for param in context.command.params}
        raise click.MissingParameter(ctx=context, param=named["kind"])
    elif out is not None and zmq is None and replay is None:
        refuse_overwrite(out, [trace])
        if kind == "vllm":
            _announce(trace, out, replica, force=force)
        with reading("exporting", trace) as tick:
            document = FORMATS[kind](trace, out, tick, replica)
    elif out is None and zmq is not None and kind == "vllm":
        document = _publish(trace, zmq, replay, replica)
    else:
        msg = "give --out FILE, or with --to vllm --zmq ADDRESS and perhaps --replay"
        raise click.UsageError(msg)
    to = out or zmq
    for note in _notes(document):
        echo(f"kvcore: {note}", err=True)
    if as_json:
        emit_json({"schema": SCHEMA, "format": kind or "kvcore", "out": str(to), **document})
    else:
        name, count = next(iter(document.items()))
        echo(f"{to}: {count:,} {name}")


def _notes(about: dict[str, Any]) -> list[str]:
    """Return sentences on the parts of a trace that the format cannot express."""
    from kvcore_cli.report.tables import counted  # noqa: PLC0415 - most exports have no notes

    notes = []
    if about.get("key_tokens", USUAL_KEY_TOKENS) not in (0, USUAL_KEY_TOKENS):
        notes.append(
            f"a key is {about['key_tokens']} tokens, which the format cannot say: its readers "
            f"take {USUAL_KEY_TOKENS} without an option such as that of kvcore, "
            f"mooncake:path=FILE,key_tokens={about['key_tokens']}"
        )
    for field, count in about.get("left_out", {}).items():
        lost = f"left out: {field!r}"
        if field == "t":
            lost = "rounded down to milliseconds: the times"
        notes.append(f"{lost} of {counted(count, 'request')}")
    return notes
