"""The plan of a decode step, made where its contexts are. Needs Triton.

What `TritonAttention.plan` computes on the host from the contexts of single new tokens, for
graphs: in as many entries as any contexts need, of which the last ones are empty.

    contexts    ->   chunks, sequence by sequence    ->   longest first
                     divide_contexts                      order_chunks

An entry finds its sequence by counting those whose chunks all come before it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202 - Triton takes annotations for types of its own

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def _ranges(context, window, sinks, chunk, tile: tl.constexpr, part: tl.constexpr):
    """Return the ranges of tokens that the token after `context` others attends to.

    These are the sinks: their number, chunks, and tokens of a chunk; and the window: its first
    token, where its first chunk begins, chunks, and tokens of a chunk.
    """
    begin = tl.maximum(context + 1 - window, 0)
    begin = tl.where(begin > sinks, begin, 0)
    kept = tl.where(begin > 0, sinks, 0)
    first = begin // part * part
    sink_chunks, sink_step = _cut(kept, chunk, tile)
    chunks, step = _cut(context + 1 - first, chunk, tile)
    return kept, sink_chunks, sink_step, begin, first, chunks, step


@triton.jit
def _cut(tokens, chunk, tile: tl.constexpr):
    """Return the number of chunks of up to `chunk` tokens, and the tokens of each, in tiles."""
    count = tl.maximum(tl.cdiv(tokens, chunk), 1)
    step = tl.maximum(tl.cdiv(tokens, count * tile), 1) * tile
    return tl.cdiv(tokens, step), step


@triton.jit(do_not_specialize=["count", "limit", "window", "sinks", "wave", "programs"])
def divide_contexts(
    contexts,
    chunks_out,
    splits,
    count,
    limit,
    width,
    window,
    sinks,
    wave,
    programs,
    heads: tl.constexpr,
    finer: tl.constexpr,
    even: tl.constexpr,
    least: tl.constexpr,
    tile: tl.constexpr,
    part: tl.constexpr,
    rows: tl.constexpr,
    entries: tl.constexpr,
):
    """Write entries of the work list, sequence by sequence, and the splits.

    Grid: entries. `rows` is a power of two from `count`, the number of sequences, on; `width`
    is the number of blocks of a table, `wave` the number of chunks of a sequence for which
    even contexts make one wave. The other names are those of `chunk_of` and `AttentionPlan`.
    """
    sequence = tl.arange(0, rows)
    live = sequence < count
    context = tl.load(contexts + sequence, mask=live, other=0)
    # What sequences attend to does not depend on how it is cut.
    kept, _, _, begin, _, _, _ = _ranges(context, window, sinks, least, tile, part)
    lengths = tl.where(live, context + 1 - begin + kept, 0)
    total, longest = tl.sum(lengths, 0), tl.max(lengths, 0)
    if even * longest * count <= (even + 1) * total:
        chunk = tl.cdiv(longest, wave)
    else:
        chunk = tl.cdiv(total * heads, finer * programs)
    chunk = tl.maximum(chunk, least)
    _, sink_chunks, _, _, _, chunks, _ = _ranges(context, window, sinks, chunk, tile, part)
    chunks = tl.where(live, sink_chunks + chunks, 0).to(tl.int32)
    slots = tl.where(chunks > 1, chunks, 0)
    ends, slot_ends = tl.cumsum(chunks, 0), tl.cumsum(slots, 0)
    if tl.program_id(0) == 0:
        tl.store(splits + sequence * 3, sequence, mask=live)
        tl.store(splits + sequence * 3 + 1, slot_ends - slots, mask=live)
        tl.store(splits + sequence * 3 + 2, slot_ends, mask=live)
    entry = tl.program_id(0) * entries + tl.arange(0, entries)
    filled = entry < tl.sum(chunks, 0)
    before = ends[None, :] <= entry[:, None]
    owner = tl.sum(before.to(tl.int32), 1)
    index = entry - tl.sum(tl.where(before, chunks[None, :], 0), 1)
    slot = index + tl.sum(tl.where(before, slots[None, :], 0), 1)
    context = tl.load(contexts + owner, mask=filled, other=0)
    kept, sink_chunks, sink_step, begin, first, chunks, step = _ranges(
        context, window, sinks, chunk, tile, part
    )
    in_sinks = index < sink_chunks
    own = sink_chunks + chunks
    index = tl.where(in_sinks, index, index - sink_chunks)
    step = tl.where(in_sinks, sink_step, step)
    low = tl.where(in_sinks, 0, first) + index * step
    high = tl.minimum(low + step, tl.where(in_sinks, kept, context + 1))
    low = tl.maximum(low, tl.where(in_sinks, 0, begin))
    address = chunks_out + entry * 8
    mask = entry < limit
    tl.store(address, owner, mask=mask)
    tl.store(address + 1, owner * width, mask=mask)
    tl.store(address + 2, low, mask=mask)
    tl.store(address + 3, tl.where(filled, high, low), mask=mask)
    tl.store(address + 4, tl.where(own > 1, slot, -1), mask=mask)
    tl.store(address + 5, own, mask=mask)
    tl.store(address + 6, tl.full([entries], 1, tl.int32), mask=mask)
    tl.store(address + 7, context, mask=mask)


@triton.jit(do_not_specialize=["limit"])
def order_chunks(chunks, work, limit, entries: tl.constexpr, others: tl.constexpr):
    """Write entries of the work list in order: the longest first, equal ones as they were.

    Grid: entries, each of which counts those before it, `others` at a time.
    """
    entry = tl.program_id(0) * entries + tl.arange(0, entries)
    mask = entry < limit
    own = tl.load(chunks + entry * 8 + 3, mask=mask, other=0)
    own -= tl.load(chunks + entry * 8 + 2, mask=mask, other=0)
    rank = tl.zeros([entries], tl.int32)
    for begin in tl.range(0, limit, others):
        other = begin + tl.arange(0, others)
        inside = other < limit
        length = tl.load(chunks + other * 8 + 3, mask=inside, other=-1)
        length -= tl.load(chunks + other * 8 + 2, mask=inside, other=0)
        longer = length[None, :] > own[:, None]
        first = (length[None, :] == own[:, None]) & (other[None, :] < entry[:, None])
        rank += tl.sum((longer | first).to(tl.int32), 1)
    column = tl.arange(0, 8)
    moved = tl.load(chunks + entry[:, None] * 8 + column[None, :], mask=mask[:, None], other=0)
    tl.store(work + rank[:, None] * 8 + column[None, :], moved, mask=mask[:, None])
