"""The header of a trace, and the lines in which a sequence opens and closes."""

from __future__ import annotations

from collections.abc import Container, Iterable

from kvcore.cache.layout import Geometry
from kvcore.cache.pool import Ids
from kvcore.cache.prefix import Match
from kvcore.cache.recorder import Recorder
from kvcore.cache.sequence import Sequence
from kvcore.errors import InputError
from kvcore.plugins import Plugin
from kvcore.request import Request


def record_header(
    trace: Recorder, geometry: Geometry, blocks: int, plugins: Iterable[Plugin]
) -> None:
    """Begin `trace` with what its cache is made of."""
    trace.begin(
        count=geometry.count,
        block_size=geometry.block_size,
        key_tokens=geometry.key_tokens,
        blocks=blocks,
        plugins={
            plugin.kind: {"name": plugin.name, "options": plugin.options()}
            for plugin in plugins
        },
    )


def check_admission(admitted: Container[int | str], request: Request, *, again: bool) -> None:
    """Refuse an admission that would make the trace contradict itself.

    Raises:
        InputError: a second first admission of a request, or a return of an unknown one.
    """
    if again != (request.id in admitted):
        why = "was not admitted before: leave out again=True"
        if not again:
            why = "was admitted before: give another id, or again=True if it returns"
        msg = f"request {request.id!r} {why}"
        raise InputError(msg)


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
    if not hit or hit < prompt_blocks:
        why = _why(seq, limit, match)
        trace.line("MISS", now, request=request.id, seq=seq.id, block=hit, why=why, **repeat)
    if seq.private:
        trace.line("ALLOC", now, seq=seq.id, first=hit, runs=seq.private)


def record_close(trace: Recorder, seq: Sequence, freed: Ids | None, now: int) -> None:
    """Write FREE of a sequence that closes, and all that it had forgotten."""
    gaps = [(first, end - first) for first, end in seq.gaps]
    forgotten = {"forgotten": gaps} if gaps else {}
    trace.line("FREE", now, seq=seq.id, runs=freed, reason="close", **forgotten)


def _why(seq: Sequence, limit: int, match: Match) -> str:
    """Say why the hit ended before the prompt did."""
    if seq.hit_blocks < limit:
        return "absent" if match[3] is None else "expired"
    if not seq.keys or limit < (seq.request.prompt_tokens - 1) // seq.span.geometry.block_size:
        return "no keys"
    return "partial"
