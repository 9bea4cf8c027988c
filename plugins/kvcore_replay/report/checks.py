"""Reports on checked files: the counts of a trace, and those of a recording of KV events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvcore.sections import Section, Table
from kvcore_cli.report.simulation import group_text
from kvcore_cli.report.tables import setup, share

if TYPE_CHECKING:
    from kvcore_events.block_tracker import RecordingReport
    from kvcore_replay.check.trace import Report

MOST_ROWS = 16
"""Largest number of replicas in a table."""

COUNTS = ("routed", "finished", "rejected", "failures")
"""Columns of the table of replicas that are counts."""


def trace_sections(report: Report) -> list[Section]:
    """Return the report on the check of a trace."""
    rows = [(what, f"{count:,}") for what, count in _trace_counts(report)]
    rows += [
        (f"hit ratio by {unit}", share(ratio)) for unit, ratio in report.hit["ratio"].items()
    ]
    evicted, replicas = report.evictions, report.replicas or []
    rows.append(("evictions", f"{evicted['blocks']:,} blocks, digest {evicted['digest'][:16]}"))
    cluster: Section = (
        f"--json has each of the {len(replicas):,} replicas."
        if len(replicas) > MOST_ROWS
        else Table(
            ["replica", *COUNTS, "hit ratio by block", "blocks cached"],
            [[*_replica(replica)] for replica in replicas],
        )
    )
    setting = setup(report.header) if report.header else ""
    groups = Table(
        ["group", "keeps", "blocks cached", "private"],
        [
            [str(index), group_text(group), f"{group['cached']:,}", f"{group['private']:,}"]
            for index, group in enumerate(report.groups or [])
        ],
    )
    pools = Table(
        ["pool", "slots", "free", "of cached spans"],
        [
            [pool["pool"], *(f"{pool[name]:,}" for name in ("slots", "free", "cached"))]
            for pool in report.pools or []
        ],
    )
    return [Table(["trace", report.file], rows), groups, pools, cluster, setting]


def _trace_counts(report: Report) -> Iterator[tuple[str, int]]:
    yield "lines", report.lines
    yield from ((f"  {event}", count) for event, count in report.events.items())
    for state in ("free", "cached", "private"):
        yield f"blocks {state}", report.pool[state]
    if report.groups is None:
        yield "spans", report.pool["spans"]
    for how, count in report.preemptions.items():
        if count:
            yield f"preempted by {how}", count
    yield "blocks looked up", report.hit["lookup_blocks"]
    yield "blocks hit", report.hit["hit_blocks"]
    yield "own blocks found again", report.hit["self_hit_blocks"]
    for tier in report.tiers:
        yield f"tier {tier['tier']}: blocks of {tier['slots']:,} slots", tier["used_blocks"]
        for kind in ("parked", "loading", "recovered"):
            if tier[f"{kind}_blocks"]:
                yield f"  {kind}", tier[f"{kind}_blocks"]
        yield "  stored so far", tier["stored_blocks"]
        yield "  loaded", tier["loaded_blocks"]
        for reason, blocks in tier["dropped_blocks"].items():
            yield f"  dropped, {reason}", blocks


def _replica(replica: Mapping[str, Any]) -> Iterator[str]:
    """Yield the cells of a replica, over all its lives."""
    yield str(replica["replica"])
    yield from (f"{replica[name]:,}" for name in COUNTS)
    yield share(replica["hit"]["ratio"]["block"])
    yield f"{replica['pool']['cached']:,}" if replica["up"] else "down"


def recording_sections(report: RecordingReport) -> list[Section]:
    """Return the report on the check of a recording: counts, then anomalies."""
    rows = [*_recording_counts(report), *_anomalies(report)]
    return [Table(["recording", report.file], rows), report.tells]


def _recording_counts(report: RecordingReport) -> Iterator[tuple[str, str]]:
    yield "format", report.format
    if report.engine is not None:
        yield "engine", report.engine
    yield "batches", f"{report.batches:,}"
    for event, count in report.events.items():
        yield f"  {event}", f"{count:,}"
    for state, count in report.blocks.items():
        if count or state in ("stored", "removed"):
            yield f"blocks {state.replace('_', ' ')}", f"{count:,}"
    for medium, count in report.resident.items():
        yield f"resident on {medium}", f"{count:,}"


def _anomalies(report: RecordingReport) -> Iterator[tuple[str, str]]:
    from kvcore_events.block_tracker import KINDS  # noqa: PLC0415 - traces do without it

    for anomaly in ("restarts", "replayed", "garbage"):
        count = getattr(report, anomaly)
        if count:
            yield anomaly, f"{count:,}"
    for gap in report.gaps:
        last = gap["first"] + gap["count"] - 1
        publisher = gap["publisher"]
        source = "" if publisher is None else f" from {publisher}"
        yield f"missing{source}", f"batches {gap['first']:,} to {last:,}"
    for kind, count in report.anomalies.items():
        if count:
            yield KINDS[kind], f"{count:,}"
    for example in report.examples:
        yield f"  {example.where}", example.what
