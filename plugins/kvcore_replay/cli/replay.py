"""`kvcore replay`: check a trace, or run its requests again with other options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvcore.cli.output import (
    emit_json,
    file_path,
    json_option,
    print_sections,
    progress,
    reading,
    trace_file,
)
from kvcore.cli.verb import Time, option, verb
from kvcore.errors import InputError, TraceError
from kvcore.hookspecs import OUTPUT
from kvcore.sections import Section
from kvcore_replay.check.trace import replay as replay_trace
from kvcore_replay.cli.trace_options import price_option, what_if_options

CAPS = ("max_tokens", "max_seqs", "steps", "chunked", "watermark")


@verb(
    "kvcore replay run.jsonl.gz --at 60",
    "kvcore replay run.jsonl.gz --eviction lfu --blocks 20k",
)
@click.argument("file", callback=trace_file)
@option(
    "--at",
    heading=OUTPUT,
    type=Time(),
    metavar="SECONDS",
    help="Time of the trace, in seconds, at which the state is reported.  [default: its end]",
)
@what_if_options
@option(
    "--export",
    heading=OUTPUT,
    callback=file_path,
    metavar="FILE",
    help="What if: JSONL file for the trace of the second run.",
)
@price_option
@json_option
def replay(*, file: Path, at: int | None, as_json: bool, **asked: Any) -> None:
    """Replay the trace FILE: rebuild the cache line by line, and check every line.

    Fails if a line is damaged or cannot follow from those before it, and, after reporting
    what was readable, if the file is cut.

    With any of the options that begin with "What if", the requests of FILE are run again, with
    these options changed and all others as recorded, and both runs are printed side by side.
    That needs a complete trace of `compare`, or, under the model's clock, of `simulate` or
    `run`; or the recording of an engine.

    FILE may be the directory that --out of simulate or run wrote, or a recording of a real
    server's KV events, as `kvcore record` writes it: it is checked, and its counts are shown.
    """
    from kvcore_events.recording import is_recording  # noqa: PLC0415 - `--help` does without

    price = asked.pop("price")
    given = {name: value for name, value in asked.items() if value is not None}
    if is_recording(file):
        if given or price is not None or at is not None:
            msg = (
                f"{file} is a recording of KV events: it is checked and shown, without "
                "options. `kvcore compare` and `curve` run its requests as "
                f"kv-events:path={file},lookups=full, if the engine reported every use"
            )
            raise InputError(msg)
        _show_recording(file, as_json=as_json)
        return
    if given:
        if at is not None:
            msg = "--at is for the recorded run alone: leave it out, or the what-if options"
            raise InputError(msg)
        _what_if(file, given | {"price": price}, as_json=as_json)
        return
    with reading("replaying", file) as tick:
        report = replay_trace(file, at, tick)
    document = report.as_dict()
    bills: list[Section] = []
    if price is not None and report.complete:
        from kvcore_replay.recorded_run import bill_trace  # noqa: PLC0415 - for prices alone
        from kvcore_replay.report.billing import bill_sections  # noqa: PLC0415 - as above

        with reading("billing", file) as tick:
            document["bill"] = bill_trace(file, price, tick).as_dict()
        bills = bill_sections(document["bill"])
    if as_json:
        emit_json(document)
    else:
        from kvcore_replay.report.checks import trace_sections  # noqa: PLC0415 - JSON does without it

        print_sections(*trace_sections(report), *bills)
    if not report.complete:
        msg = f"{file}: incomplete: {report.cut_reason}"
        raise TraceError(msg)


def _show_recording(file: Path, *, as_json: bool) -> None:
    """Check a recording of KV events, and print its counts."""
    from kvcore_events.block_tracker import check_recording  # noqa: PLC0415 - traces do without it

    with reading("checking", file) as tick:
        report = check_recording(file, tick=tick)
    if as_json:
        emit_json(report.as_dict())
    else:
        from kvcore_replay.report.checks import recording_sections  # noqa: PLC0415 - as above

        print_sections(*recording_sections(report))
    if not report.complete:
        msg = f"{file}: incomplete: {report.cut_reason}"
        raise TraceError(msg)


def _what_if(file: Path, given: dict[str, Any], *, as_json: bool) -> None:
    """Run the requests again, and print both runs."""
    from kvcore_replay.what_if import whatif  # noqa: PLC0415 - checking a trace does without it

    caps = {name: given.pop(name) for name in CAPS if name in given}
    found = whatif(file, **given, batching=caps or None, progress=progress)
    if as_json:
        emit_json(found.as_dict())
        return
    from kvcore_replay.report.whatif import WhatIfReport  # noqa: PLC0415 - JSON does without it

    print_sections(*WhatIfReport(found).sections)
