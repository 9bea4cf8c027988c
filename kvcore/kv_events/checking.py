"""What a recording of KV events holds, and what such a stream can and cannot tell."""

from __future__ import annotations

import os
from typing import Any

import attrs

from kvcore.kv_events.block_tracker import KINDS, Anomaly, Ledger, blocks_by_medium
from kvcore.kv_events.recording import (
    SCHEMA,
    Lost,
    Received,
    RecordingReader,
    Restarted,
    Skipped,
)

TELLS = (
    "These events tell which blocks were stored and removed, and in which order. They do not "
    "tell who looked up what: a request that found its blocks leaves no event. So they can "
    "be checked and shown, but not run again under another policy, unless the engine "
    "reported every use (kv-events:file=FILE,lookups=full) or a log of its requests is "
    "joined (kv-events:file=FILE,requests=LOG)."
)


@attrs.frozen
class RecordingReport:
    """What a recording holds, up to its end or where it is cut.

    Attributes:
        file: the path, as given.
        format, engine: as the recording says; `engine` is None where it does not.
        complete, cut_reason: whether nothing is missing at its end; if not, why.
        batches, events: how many there were, `events` by kind.
        blocks: how many were `stored`, `removed`, `stored_again` (where they were),
            `reused` (likewise, in full-report mode), `moved`, `cleared`, and `forgotten` at
            restarts.
        resident: different blocks at the end, by medium.
        restarts, replayed, garbage: of publishers; batches that came twice; messages that
            were no batch.
        gaps: publisher, first number and count of what is missing; `missing` batches in all.
        anomalies: how many by kind; `examples` are the first of them.
        tells: what such a stream can and cannot tell, and where this one is unsure.
    """

    file: str
    format: str
    engine: str | None
    complete: bool
    cut_reason: str | None
    batches: int
    events: dict[str, int]
    blocks: dict[str, int]
    resident: dict[str, int]
    restarts: int
    replayed: int
    garbage: int
    gaps: list[dict[str, Any]]
    missing: int
    anomalies: dict[str, int]
    examples: list[Anomaly]
    tells: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it, with the schema number."""
        fields = attrs.asdict(self)
        del fields["cut_reason"]
        return {"schema": SCHEMA, **fields}


def check_recording(file: str | os.PathLike[str], *, full: bool = False) -> RecordingReport:
    """Read a recording, follow its events, and say what is resident and what cannot be.

    `full` says that the engine was in full-report mode: what is stored again was reused.
    Also reads files of TensorRT-LLM's events and Dynamo's router events, one a line.

    Raises:
        InputError: the file cannot be opened.
        TraceError: it is no recording, or a line is damaged: file, line, reason.
    """
    reader = RecordingReader(file)
    ledger, garbage = Ledger(full=full), 0
    for item in reader:
        match item:
            case Received(batch, seq, publisher):
                ledger.follow(batch, seq, publisher)
            case Lost(publisher, first, count):
                ledger.miss(publisher, first, count)
            case Restarted(publisher):
                ledger.restart(publisher)
            case Skipped():
                garbage += 1
    counts = ("stored", "removed", "stored_again", "reused", "moved", "cleared", "forgotten")
    return RecordingReport(
        file=str(reader.file),
        format=reader.header.get("format", "none"),
        engine=reader.header.get("engine"),
        complete=reader.complete,
        cut_reason=reader.cut_reason,
        batches=ledger.batches,
        events=dict(ledger.events),
        blocks={name: getattr(ledger, name) for name in counts},
        resident=blocks_by_medium(ledger),
        restarts=ledger.restarts,
        replayed=ledger.replayed,
        garbage=garbage,
        gaps=[
            {"publisher": publisher, "first": first, "count": count}
            for publisher, first, count in ledger.gaps
        ],
        missing=ledger.missing,
        anomalies=dict(ledger.anomalies),
        examples=list(ledger.examples),
        tells=_tells(ledger, garbage),
    )


def _tells(ledger: Ledger, garbage: int) -> str:
    sentences = [TELLS]
    lost = ledger.missing + garbage
    if lost:
        sentences.append(
            f"{lost} batches are missing or unreadable: the others say what is resident."
        )
    if ledger.anomalies["unknown_parent"] or ledger.anomalies["never_stored"]:
        sentences.append(
            "Some blocks were stored before it begins, or in what is missing: the counts of "
            f"{KINDS['unknown_parent']} and {KINDS['never_stored']} say how much of that shows."
        )
    if ledger.anomalies["collision"]:
        sentences.append(
            "Some hashes stand for different blocks: hits on them would be wrong answers, or "
            "the hashes are not chained."
        )
    return " ".join(sentences)
