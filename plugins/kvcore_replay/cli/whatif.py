"""`kvcore whatif`: run the requests of a trace again with other options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvcore_cli.output import (
    emit_json,
    file_option,
    json_option,
    print_sections,
    progress,
    trace_file,
)
from kvcore_cli.verb import verb
from kvcore_replay.cli.trace_options import (
    gpu_price_option,
    price_option,
    refuse_recording,
    what_if_options,
)


@verb(
    "kvcore whatif run.jsonl.gz --eviction lfu --blocks 20k",
    "kvcore whatif run.jsonl.gz --prefix none",
    "kvcore whatif run.jsonl.gz --device b200 --tensor-parallel 2",
)
@click.argument("file", callback=trace_file)
@what_if_options
@file_option("--export", help="JSONL file for the trace of the second run.")
@price_option
@gpu_price_option
@json_option
def whatif(*, file: Path, as_json: bool, **changes: Any) -> None:
    """Run the requests of the trace FILE again, with other options, beside the recorded run.

    All options that are left out are as recorded. FILE is a complete trace of `compare`, or,
    under the model's clock, of `simulate` or `run`, or the directory that --out of these
    wrote; or the recording of an engine. Every line of it is checked.
    """
    from kvcore_events.recording import is_recording  # noqa: PLC0415 - `--help` does without
    from kvcore_replay.what_if import whatif as run_again  # noqa: PLC0415 - as above

    if is_recording(file):
        refuse_recording(file)
    runs = run_again(file, **changes, progress=progress)
    if as_json:
        emit_json(runs.as_dict())
        return
    from kvcore_replay.report.whatif import WhatIfReport  # noqa: PLC0415 - JSON does without it

    print_sections(*WhatIfReport(runs).sections)
