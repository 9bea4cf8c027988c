"""`kvcore replay`: check a trace, or run its requests again with other options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvcore.cli.options import price_option, what_if
from kvcore.cli.output import (
    emit_json,
    file_path,
    json_option,
    print_sections,
    progress,
    reading,
    trace_file,
)
from kvcore.cli.verb import Time, echo, verb
from kvcore.errors import InputError, TraceError
from kvcore.report.tables import share
from kvcore.trace.check import Report
from kvcore.trace.check import replay as replay_trace

if TYPE_CHECKING:
    from kvcore.kv_events import RecordingReport

REPLICA = [
    *("replica", "routed", "finished", "rejected", "failures", "hit ratio by block"),
    "blocks cached",
]
"""Headers of the table of a cluster's replicas."""

MOST_ROWS = 16
"""Largest number of replicas in a table."""

CAPS = ("max_tokens", "max_seqs", "steps", "chunked", "watermark")


@verb(
    "kvcore replay run.jsonl.gz --at 60",
    "kvcore replay run.jsonl.gz --eviction lfu --blocks 20k",
)
@click.argument("file", callback=trace_file)
@click.option(
    "--at",
    type=Time(),
    metavar="SECONDS",
    help="Time of the trace, in seconds, at which the state is reported.  [default: its end]",
)
@what_if("eviction")
@what_if("prefix")
@what_if("retention", "Retention policy: which blocks a running sequence drops, or `none`.")
@what_if("blocks")
@what_if("block_size", "Number of tokens in a KV block, in a pool of the same memory.")
@what_if("scheduler")
@what_if("latency")
@what_if("drafter", "Drafter: how many drafts a step accepts, or `none`.")
@what_if("tier", "Tier below the pool, nearest first, such as host:memory=64GiB, or `none`.")
@what_if("max_tokens")
@what_if("max_seqs")
@what_if("steps")
@what_if("chunked")
@what_if("watermark")
@what_if("rate_scale", "Factor on the rate at which requests of the workload arrive.")
@what_if("slo", "Expected latency in seconds, or `none`; judges the recorded run too.")
@what_if("router")
@what_if("replicas", "Number of servers that share the requests, each like the recorded one.")
@what_if("view")
@what_if("fail", "Replica that fails, such as replica=3,at=600,for=120, or `none`.")
@what_if("autoscale", "Planner that starts and stops servers, or `none`.")
@what_if("disaggregate", "Servers that prefill and that decode, or `none`.")
@click.option(
    "--export",
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
    from kvcore.kv_events.recording import is_recording  # noqa: PLC0415 - `--help` does without

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
    document, bills = report.as_dict(), None
    if price is not None and report.complete:
        from kvcore.analysis.recorded_run import bill_trace  # noqa: PLC0415 - for prices alone

        with reading("billing", file) as tick:
            document["bill"] = bills = bill_trace(file, price, tick).as_dict()
    if as_json:
        emit_json(document)
    else:
        _print(report)
        if bills is not None:
            _print_bills(bills)
    if not report.complete:
        msg = f"{file}: incomplete: {report.cut_reason}"
        raise TraceError(msg)


def _show_recording(file: Path, *, as_json: bool) -> None:
    """Check a recording of KV events, and print its counts."""
    from kvcore.kv_events import check_recording  # noqa: PLC0415 - traces do without it

    with reading("checking", file) as tick:
        report = check_recording(file, tick=tick)
    if as_json:
        emit_json(report.as_dict())
    else:
        table = ["recording", report.file], _recording_rows(report), [report.file]
        print_sections(table, report.tells)
    if not report.complete:
        msg = f"{file}: incomplete: {report.cut_reason}"
        raise TraceError(msg)


def _recording_rows(report: RecordingReport) -> list[tuple[str, str]]:
    """Return the rows of the table: counts, then anomalies."""
    return [*_counts(report), *_faults(report)]


def _counts(report: RecordingReport) -> Iterator[tuple[str, str]]:
    yield "format", report.format
    if report.engine is not None:
        yield "engine", report.engine
    yield "batches", f"{report.batches:,}"
    for event, count in report.events.items():
        yield f"  {event}", f"{count:,}"
    for what, count in report.blocks.items():
        if count or what in ("stored", "removed"):
            yield f"blocks {what.replace('_', ' ')}", f"{count:,}"
    for medium, count in report.resident.items():
        yield f"resident on {medium}", f"{count:,}"


def _faults(report: RecordingReport) -> Iterator[tuple[str, str]]:
    from kvcore.kv_events.block_tracker import KINDS  # noqa: PLC0415 - as above

    for what in ("restarts", "replayed", "garbage"):
        count = getattr(report, what)
        if count:
            yield what, f"{count:,}"
    for gap in report.gaps:
        last = gap["first"] + gap["count"] - 1
        yield f"missing from {gap['publisher']}", f"batches {gap['first']:,} to {last:,}"
    for kind, count in report.anomalies.items():
        if count:
            yield KINDS[kind], f"{count:,}"
    for example in report.examples:
        yield f"  {example.where}", example.what


def _what_if(file: Path, given: dict[str, Any], *, as_json: bool) -> None:
    """Run the requests again, and print both runs."""
    from kvcore.analysis.what_if import whatif  # noqa: PLC0415 - checking a trace does without it

    caps = {name: given.pop(name) for name in CAPS if name in given}
    found = whatif(file, **given, batching=caps or None, progress=progress)
    if as_json:
        emit_json(found.as_dict())
        return
    from kvcore.report.whatif import WhatIfReport  # noqa: PLC0415 - JSON does without it

    report = WhatIfReport(found)
    print_sections(
        report.headline,
        (report.headers, report.rows, report.headers[1:]),
        report.verdict,
        *((headers, rows, headers[1:]) for headers, rows in report.tables),
        report.setup,
    )
    if found.recorded.bill is not None and found.rerun.bill is not None:
        _print_bills(found.recorded.bill.as_dict(), found.rerun.bill.as_dict()["run"])


def _print_bills(bills: dict[str, Any], again: dict[str, Any] | None = None) -> None:
    """Print the bills of a run, and that of the same requests run again."""
    from kvcore.report.billing import bill_sections  # noqa: PLC0415 - for prices alone

    echo()
    print_sections(*bill_sections(bills, again))


def _tier_rows(tier: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the rows of a tier: its contents, and its transfers."""
    name = tier["tier"]
    yield f"tier {name}: blocks of {tier['slots']:,} slots", tier["used_blocks"]
    for what in ("parked", "loading", "recovered"):
        if tier[f"{what}_blocks"]:
            yield f"  {what}", tier[f"{what}_blocks"]
    yield "  stored so far", tier["stored_blocks"]
    yield "  loaded", tier["loaded_blocks"]
    for reason, blocks in tier["dropped_blocks"].items():
        yield f"  dropped, {reason}", blocks


def _print(report: Report) -> None:
    counts = [
        ("lines", report.lines),
        *((f"  {event}", count) for event, count in report.events.items()),
        *((f"blocks {place}", report.pool[place]) for place in ("free", "cached", "private")),
        ("spans", report.pool["spans"]),
        *((f"preempted by {how}", count) for how, count in report.preemptions.items() if count),
        ("blocks looked up", report.hit["lookup_blocks"]),
        ("blocks hit", report.hit["hit_blocks"]),
        ("own blocks found again", report.hit["self_hit_blocks"]),
        *(row for tier in report.tiers for row in _tier_rows(tier)),
    ]
    ratios = [
        (f"hit ratio by {unit}", share(ratio)) for unit, ratio in report.hit["ratio"].items()
    ]
    evicted = report.evictions
    rows = [*((what, f"{count:,}") for what, count in counts), *ratios]
    rows.append(("evictions", f"{evicted['blocks']:,} blocks, digest {evicted['digest'][:16]}"))
    from kvcore.report.tables import setup  # noqa: PLC0415 - JSON does without it

    about = setup(report.header) if report.header else ""
    tables: list[Any] = [(["trace", report.file], rows, [report.file])]
    replicas = report.replicas or []
    if len(replicas) > MOST_ROWS:
        tables.append(f"--json has each of the {len(replicas):,} replicas.")
    elif replicas:
        tables.append((REPLICA, list(map(_replica_row, replicas)), REPLICA[1:]))
    print_sections(*tables, about)


def _replica_row(found: Mapping[str, Any]) -> list[str]:
    """Return the row of a replica, over all its lives."""
    counts = [found[name] for name in ("routed", "finished", "rejected", "failures")]
    held = found["pool"]["cached"] if found["up"] else None
    ratio = found["hit"]["ratio"]["block"]
    cached = "down" if held is None else f"{held:,}"
    return [str(found["replica"]), *(f"{n:,}" for n in counts), share(ratio), cached]
