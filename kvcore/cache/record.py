"""The trace lines of an admission: what hit, where it stopped and why, what was allocated."""

from __future__ import annotations

from kvcore.cache.sequence import Sequence
from kvcore.policy import Match, Recorder


def record_open(
    trace: Recorder,
    seq: Sequence,
    prompt_blocks: int,
    limit: int,
    match: Match,
    now: int,
    *,
    again: bool,
) -> None:
    """Write HIT, MISS and ALLOC of an admission.

    At most `limit` of the `prompt_blocks` blocks of the prompt could hit.
    """
    request = seq.request
    hit = seq.hit_blocks
    repeat = {"again": True} if again else {}
    if hit:
        trace.line(
            "HIT", now, request=request.id, seq=seq.id, blocks=hit, span=seq.span.id, **repeat
        )
    if hit < prompt_blocks:
        why = _why(seq, limit, match)
        trace.line("MISS", now, request=request.id, seq=seq.id, block=hit, why=why, **repeat)
    if seq.private:
        trace.line("ALLOC", now, seq=seq.id, first=hit, runs=seq.private)


def _why(seq: Sequence, limit: int, match: Match) -> str:
    """Say why the hit ended before the prompt did."""
    if seq.hit_blocks < limit:
        return "absent" if match[3] is None else "expired"
    if not seq.keys or limit < (seq.request.prompt - 1) // seq.span.shape.block_size:
        return "no keys"
    return "partial"
