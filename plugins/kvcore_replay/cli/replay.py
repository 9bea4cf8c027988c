"""`kvcore replay`: check a trace line by line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvcore.errors import InputError, TraceError
from kvcore.hookspecs import OUTPUT
from kvcore.sections import Section
from kvcore_cli.output import emit_json, json_option, print_sections, reading, trace_file
from kvcore_cli.verb import Time, VerbCommand, echo, flags_of, option, verb
from kvcore_replay.check.trace import replay as replay_trace
from kvcore_replay.cli.trace_options import price_option, refuse_recording


class Replay(VerbCommand):
    """The command of `replay`, which earlier releases asked what-if."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Parse a command line; one with options of `whatif` is a command line of that."""
        from kvcore_replay.cli.whatif import whatif  # noqa: PLC0415 - for old command lines

        former = set(flags_of(whatif.params)) - set(flags_of(self.params))
        if former.isdisjoint(text.partition("=")[0] for text in args):
            return super().make_context(info_name, args, parent, **extra)
        now = "`kvcore whatif` now; use that"
        echo(f"kvcore: to run a trace again with other options is {now}", err=True)
        return whatif.make_context("whatif", args, parent, **extra)


@verb(
    "kvcore replay run.jsonl.gz --at 60",
    "kvcore replay day.jsonl.gz --price openai",
    cls=Replay,
)
@click.argument("file", callback=trace_file)
@option(
    "--at",
    heading=OUTPUT,
    type=Time(),
    help="Time of the trace, in seconds, at which the state is reported.  [default: its end]",
)
@price_option
@json_option
def replay(*, file: Path, at: int | None, price: Any, as_json: bool) -> None:
    """Replay the trace FILE: rebuild the cache line by line, and check every line.

    Fails if a line is damaged or cannot follow from those before it, and, after reporting
    what was readable, if the file is cut.

    FILE may be the directory that --out of simulate or run wrote, or a recording of a real
    server's KV events, as `kvcore record` writes it: it is checked, and its counts are shown.
    """
    from kvcore_events.recording import is_recording  # noqa: PLC0415 - `--help` does without

    if is_recording(file):
        if price is not None or at is not None:
            refuse_recording(file)
        _show_recording(file, as_json=as_json)
        return
    if price is not None and at is not None:
        msg = "--at reports a state before the end, and --price bills the whole trace: give one"
        raise InputError(msg)
    with reading("replaying", file) as tick:
        report = replay_trace(file, at, tick)
    document = report.as_dict()
    bills: list[Section] = []
    if price is not None and report.complete:
        from kvcore_replay.recorded_run import bill_trace  # noqa: PLC0415 - for prices alone
        from kvcore_replay.report.billing import OF_TRACE, bill_sections  # noqa: PLC0415 - as above

        with reading("billing", file) as tick:
            document["bill"] = bill_trace(file, price, tick).as_dict()
        bills = [*bill_sections(document["bill"]), OF_TRACE]
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
