"""Attention of new tokens over the blocks of a pool, where they lie. Needs Triton.

The context of each sequence is cut into chunks. A program attends to one chunk for the query
heads that share a K/V head, and a second kernel combines the chunks of a sequence:

    sequence 0  |  chunk  |  chunk  |  chunk  |   ->  partial outputs  ->  combined
    sequence 1  | chunk |                         ->  output
                    |
                    | tile | tile | ... | tile |     64 tokens each: one or more blocks

Of a prompt, and of drafted tokens that are verified, a program takes several new tokens, one
after the other. What lies before the first of them all attend to; behind it, and in a window,
each of them has an end, and a beginning, of its own:

                  the context        new tokens
    new token 0   x x x x x x x x    x
    new token 1   x x x x x x x x    x x
    new token 2   x x x x x x x x    x x x
                  | whole tile  |   masked   |

Source: Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023, for
the split along the context; Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018, for how its parts are combined; Kwon et al., "Efficient memory management for
large language model serving with PagedAttention", SOSP 2023, for blocks.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,no-untyped-call"
# mypy: disable-error-code="assignment"
# ruff: noqa: ANN001, ANN201, ANN202 - Triton takes annotations for types of its own
# ruff: noqa: C901, FBT003, PLR0912, PLR0915, PLR2004, SIM102 - a kernel is one function, with numbers
# ruff: noqa: RUF005 - Triton adds tuples, and does not unpack them

from __future__ import annotations

import triton
from triton import language as tl

PLAIN, FP8, FP8_BY_HEAD, INT8_BY_TOKEN, INT4_BY_TOKEN = range(5)
"""How a head of a token is stored. Kernels read no globals: they have the numbers."""


@triton.jit
def _widened(
    words, part: tl.constexpr, way: tl.constexpr, bits: tl.constexpr, dot: tl.constexpr
):
    """Return one of the numbers of each word in a dtype that can be multiplied.

    Plain numbers are words themselves. Bytes of fp8 become fp16 by their bits: E5M2 (`bits` is
    5) are upper bytes of fp16, E4M3 become a 256th of the number, and NaN stays NaN. Codes are
    counted from the middle, so that nothing large cancels; 1024 plus a code is fp16 with the
    code in its lowest bits.
    """
    if way == 0:
        wide = words
    elif way < 3:
        wide = (words << 8) if part == 0 else (words & -256)
        if bits == 4:
            # s eeee mmm becomes s 0eeee mmm0000000. A carry finds NaN, which has all bits set.
            wide = (wide >> 1) & -0x4001
            wide = wide | ((wide + 0x80) & 0x4000)
        wide = wide.to(tl.float16, bitcast=True)
    elif way == 3:
        wide = ((words >> (8 * part)) & 255) | 0x6400
        wide = wide.to(tl.float16, bitcast=True) - 1152.0
    else:
        wide = ((words >> (8 * (part % 2) + 4 * (part // 2))) & 15) | 0x6400
        wide = wide.to(tl.float16, bitcast=True) - 1032.0
    return wide.to(dot)


@triton.jit
def _steps(grid, way: tl.constexpr):
    """Return the scale of each token, and what a code in the middle stands for."""
    step, middle = grid, grid
    if way == 2:
        step = grid.to(tl.float32)
    elif way > 2:
        step = (grid & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        middle = (grid >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        middle += (128 if way == 3 else 8) * step
    return step, middle


@triton.jit
def _scores(
    queries,
    sums,
    keys,
    grid,
    scale,
    packed: tl.constexpr,
    way: tl.constexpr,
    bits: tl.constexpr,
    dot: tl.constexpr,
):
    """Return the scores of queries and a tile of keys, `[heads, tokens]`, in log2.

    `queries` has a part for each number of a word, and `sums` are the sums of their channels.
    Scales and zeros of a token are applied to its score.
    """
    scores = tl.dot(queries[0], _widened(keys, 0, way, bits, dot), input_precision="ieee")
    for part in tl.static_range(1, packed):
        wide = _widened(keys, part, way, bits, dot)
        scores = tl.dot(queries[part], wide, scores, input_precision="ieee")
    step, middle = _steps(grid, way)
    if way >= 2:
        scores = scores * step[None, :]
    if way > 2:
        scores += sums[:, None] * middle[None, :]
    return scores * scale


@triton.jit
def _channels(column, part: tl.constexpr, full: tl.constexpr, packed: tl.constexpr):
    """Return the channels of a part of words: of its bytes, or of half of their bits."""
    return column if packed == 1 else 2 * column + part % 2 + part // 2 * (full // 2)


@triton.jit
def _offsets(
    blocks,
    begin,
    stride,
    width: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    unit: tl.constexpr,
):
    """Return where the tokens of a tile begin, `[tile]`, from the ids of its blocks.

    `begin` is the first token of the tile, `stride` the numbers from block to block, and all
    is a multiple of `unit`. In 64 bits: a pool may have more than 2^31 numbers.
    """
    part: tl.constexpr = block_size if block_size < tile else tile
    inside = tl.arange(0, part)
    if block_size > tile:
        inside += begin % block_size
    firsts = blocks.to(tl.int64) * stride
    offsets = firsts[:, None] + (inside * width)[None, :]
    return tl.multiple_of(tl.reshape(offsets, [tile]), unit)


@triton.jit
def _ids(
    table,
    begin,
    end,
    block_size: tl.constexpr,
    tile: tl.constexpr,
):
    """Return the ids of the blocks of a tile: one for each block, or for a part of one."""
    part: tl.constexpr = block_size if block_size < tile else tile
    tokens = begin + tl.arange(0, tile // part) * part
    return tl.load(table + tokens // block_size, mask=tokens < end, other=0)


@triton.jit
def _rows(
    numbers, offsets, width: tl.constexpr, padded: tl.constexpr, seen, whole: tl.constexpr
):
    """Load `[tile, padded]` numbers; those beyond the width, or not seen, are zero."""
    column = tl.arange(0, padded)
    address = numbers + offsets[:, None] + column[None, :]
    if whole and padded == width:
        loaded = tl.load(address)
    elif whole:
        loaded = tl.load(address, mask=(column < width)[None, :], other=0.0)
    else:
        loaded = tl.load(address, mask=seen[:, None] & (column < width)[None, :], other=0.0)
    return loaded


@triton.jit
def _columns(
    numbers, offsets, width: tl.constexpr, padded: tl.constexpr, seen, whole: tl.constexpr
):
    """Load the numbers that `_rows` loads, transposed: `[padded, tile]`."""
    column = tl.arange(0, padded)
    address = numbers + offsets[None, :] + column[:, None]
    if whole and padded == width:
        loaded = tl.load(address)
    elif whole:
        loaded = tl.load(address, mask=(column < width)[:, None], other=0.0)
    else:
        loaded = tl.load(address, mask=seen[None, :] & (column < width)[:, None], other=0.0)
    return loaded


@triton.jit
def _grids(
    grids,
    blocks,
    begin,
    stride,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    seen,
    whole: tl.constexpr,
    way: tl.constexpr,
):
    """Load the scale or the grid of each token of a tile: one number, or a word."""
    if way < 2:
        loaded = 0.0
    else:
        offsets = _offsets(blocks, begin, stride, 1, block_size, tile, 1)
        if whole:
            loaded = tl.load(grids + offsets)
        else:
            loaded = tl.load(grids + offsets, mask=seen, other=0)
    return loaded


@triton.jit
def _tile(
    queries,
    sums,
    keys,
    values,
    key_grids,
    value_grids,
    blocks,
    begin,
    lo,
    hi,
    own,
    window,
    sinks,
    most,
    total,
    middles,
    outs,
    scale,
    key_stride,
    value_stride,
    grid_stride,
    packed: tl.constexpr,
    tokens: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    padded: tl.constexpr,
    value_padded: tl.constexpr,
    key_unit: tl.constexpr,
    value_unit: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    way: tl.constexpr,
    bits: tl.constexpr,
    dot: tl.constexpr,
    whole: tl.constexpr,
):
    """Attend to a tile: return what the next one adds to.

    These are the greatest products of weights, in log2, the sums of weights, those of what
    codes in the middle stand for, and the outputs, a part for each number of a word.
    `own` are the positions of the queries. All of them attend to all of a `whole` tile.
    """
    token = begin + tl.arange(0, tile)
    seen = (token >= lo) & (token < hi)
    offsets = _offsets(blocks, begin, key_stride, width, block_size, tile, key_unit)
    read = _columns(keys, offsets, width, padded, seen, whole)
    offsets = _offsets(blocks, begin, value_stride, value_width, block_size, tile, value_unit)
    stored = _rows(values, offsets, value_width, value_padded, seen, whole)
    key_grid = _grids(key_grids, blocks, begin, grid_stride, block_size, tile, seen, whole, way)
    value_grid = _grids(
        value_grids, blocks, begin, grid_stride, block_size, tile, seen, whole, way
    )
    scores = _scores(queries, sums, read, key_grid, scale, packed, way, bits, dot)
    attended = seen[None, :]
    if tokens > 1:
        near = (token[None, :] > own[:, None] - window) | (token < sinks)[None, :]
        attended = attended & (token[None, :] <= own[:, None]) & near
    step, middle = _steps(value_grid, way)
    products = scores
    if way >= 2:
        # Of a token's weight and its scale the greatest product is 1, which fp16 holds.
        products += tl.log2(tl.maximum(step, 5.9604645e-8))[None, :]
    if not whole:
        scores = tl.where(attended, scores, -1e30)
        products = tl.where(attended, products, -1e30)
    greatest = tl.maximum(most, tl.max(products, 1))
    shrunk = tl.exp2(most - greatest)
    weights = tl.exp2(scores - greatest[:, None])
    if tokens > 1 and not whole:
        # A query may attend to nothing in this tile, nor in those before it.
        weights = tl.where(attended, weights, 0.0)
    total = total * shrunk + tl.sum(weights, 1)
    if way > 2:
        middles = middles * shrunk + tl.sum(weights * middle[None, :], 1)
    if way >= 2:
        weights = weights * step[None, :]
    weights = weights.to(dot)
    added = ()
    for part in tl.static_range(packed):
        wide = _widened(stored, part, way, bits, dot)
        out = outs[part] * shrunk[:, None]
        added = added + (tl.dot(weights, wide, out, input_precision="ieee"),)
    return greatest, total, middles, added


@triton.jit
def _members(step, heads, tokens: tl.constexpr, group: tl.constexpr, rows: tl.constexpr):
    """Return where the rows of a program are, `[rows]`, counted from the first of them.

    They are the query heads of a K/V head, of one new token after the other; a token has
    `heads * group` query heads, and the next one is `step` tokens further on.
    """
    member = tl.arange(0, rows)
    if tokens > 1:
        member = member // group * step * heads * group + member % group
    return member


@triton.jit
def _queries(
    queries,
    row,
    count,
    head,
    heads,
    tokens: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    full: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    packed: tl.constexpr,
    way: tl.constexpr,
    dot: tl.constexpr,
):
    """Load the queries of `count` tokens that share a K/V head: parts `[rows, padded]`."""
    member, column = tl.arange(0, rows), tl.arange(0, padded)
    first = queries + (row * heads + head) * group * full
    first += (_members(1, heads, tokens, group, rows) * full)[:, None]
    mask = (member < group * count)[:, None] & (column < width)[None, :]
    parts = ()
    sums = tl.zeros([rows], tl.float32)
    for part in tl.static_range(packed):
        channel = _channels(column, part, full, packed)
        loaded = tl.load(first + channel[None, :], mask=mask, other=0)
        if way > 2:
            sums += tl.sum(loaded.to(tl.float32), 1)
        parts = parts + (loaded.to(dot),)
    return parts, sums


# Which ids of a step are aligned changes from step to step: no kernel is compiled for it.
@triton.jit(
    do_not_specialize=["window", "sinks"], do_not_specialize_on_alignment=["tables", "work"]
)
def attend_chunks(
    queries,
    keys,
    values,
    key_grids,
    value_grids,
    tables,
    work,
    out,
    partial,
    logs,
    totals,
    scale,
    factor,
    key_stride,
    value_stride,
    grid_stride,
    window,
    sinks,
    tokens: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    full: tl.constexpr,
    value_full: tl.constexpr,
    packed: tl.constexpr,
    width: tl.constexpr,
    value_width: tl.constexpr,
    padded: tl.constexpr,
    value_padded: tl.constexpr,
    key_unit: tl.constexpr,
    value_unit: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
    way: tl.constexpr,
    bits: tl.constexpr,
    dot: tl.constexpr,
    windowed: tl.constexpr,
):
    """Attend to one chunk of one sequence, for the query heads of one K/V head.

    Grid: K/V heads x entries of the work list. An entry is empty where its chunk is. It has up
    to `tokens` new tokens, of which each attends to the last `window` tokens, up to itself, and
    to the first `sinks`; a chunk of a single one has no others.

    Of a head of a token, `width` and `value_width` words are stored, each of them `packed`
    numbers of the `full` width of keys and of the `value_full` width of values. `totals`, if it
    is given, gets the logarithms of the sums of weights of whole sequences.
    """
    head, heads = tl.program_id(0), tl.num_programs(0)
    entry = work + tl.program_id(1) * 8
    lo, hi = tl.load(entry + 2), tl.load(entry + 3)
    if lo < hi:
        row, slot = tl.load(entry).to(tl.int64), tl.load(entry + 4).to(tl.int64)
        count, context, own = 1, 0, 0
        if tokens > 1:
            count, context = tl.load(entry + 6), tl.load(entry + 7)
            own = context + tl.arange(0, rows) // group
        table = tables + tl.load(entry + 1)
        keys += head * block_size * width
        values += head * block_size * value_width
        if way >= 2:
            key_grids += head * block_size
            value_grids += head * block_size
        index, sums = _queries(
            queries, row, count, head, heads, tokens, group, rows, full, width, padded, packed,
            way, dot,
        )  # fmt: skip
        most = tl.full([rows], -1e30, tl.float32)
        total = tl.zeros([rows], tl.float32)
        middles = total
        outs = ()
        for _ in tl.static_range(packed):
            outs = outs + (tl.zeros([rows, value_padded], tl.float32),)
        part: tl.constexpr = block_size if block_size < tile else tile
        # Ids are of the tile to come: each is loaded while the tile before is computed.
        begin = lo // part * part
        unmasked = hi
        if tokens > 1:
            # All of the new tokens attend to what is before the second of them.
            unmasked = begin if windowed else tl.maximum(begin, tl.minimum(hi, context + 1))
        end = begin + (unmasked - begin) // tile * tile
        blocks = _ids(table, begin, hi, block_size, tile)
        if windowed and tokens == 1:
            if (begin < lo) & (begin < end):
                most, total, middles, outs = _tile(
                    index, sums, keys, values, key_grids, value_grids, blocks, begin,
                    lo, hi, own, window, sinks, most, total, middles, outs, scale, key_stride,
                    value_stride, grid_stride, packed, tokens, width, value_width, padded,
                    value_padded, key_unit, value_unit, block_size, tile, way, bits, dot, False,
                )  # fmt: skip
                begin += tile
                blocks = _ids(table, begin, hi, block_size, tile)
        for first in tl.range(begin, end, tile, num_stages=stages):
            now = blocks
            blocks = _ids(table, first + tile, hi, block_size, tile)
            most, total, middles, outs = _tile(
                index, sums, keys, values, key_grids, value_grids, now, first, lo, hi,
                own, window, sinks, most, total, middles, outs, scale, key_stride,
                value_stride, grid_stride, packed, tokens, width, value_width, padded,
                value_padded, key_unit, value_unit, block_size, tile, way, bits, dot, True,
            )  # fmt: skip
        if tokens > 1:
            for first in tl.range(end, hi, tile, num_stages=stages):
                now = blocks
                blocks = _ids(table, first + tile, hi, block_size, tile)
                most, total, middles, outs = _tile(
                    index, sums, keys, values, key_grids, value_grids, now, first, lo,
                    hi, own, window, sinks, most, total, middles, outs, scale, key_stride,
                    value_stride, grid_stride, packed, tokens, width, value_width, padded,
                    value_padded, key_unit, value_unit, block_size, tile, way, bits, dot, False,
                )  # fmt: skip
        elif end < hi:
            most, total, middles, outs = _tile(
                index, sums, keys, values, key_grids, value_grids, blocks, end, lo, hi,
                own, window, sinks, most, total, middles, outs, scale, key_stride,
                value_stride, grid_stride, packed, tokens, width, value_width, padded,
                value_padded, key_unit, value_unit, block_size, tile, way, bits, dot, False,
            )  # fmt: skip
        member, column = tl.arange(0, rows), tl.arange(0, value_padded)
        valid = member < group * count
        mask = valid[:, None] & (column < value_width)[None, :]
        if tokens > 1:
            # A query that attends to nothing of this chunk adds nothing to the others.
            total = tl.where(total > 0, total, 1.0)
        log = most + tl.log2(total)
        if slot < 0:
            base = (row * heads + head) * group + _members(1, heads, tokens, group, rows)
            if totals is not None:
                tl.store(totals + base, log, mask=valid)
        else:
            # The chunks of a new token have one slot after the other.
            base = (slot * heads + head) * group
            base += _members(tl.load(entry + 5), heads, tokens, group, rows)
            tl.store(logs + base, log, mask=valid)
        for part in tl.static_range(packed):
            result = outs[part] * (factor / total)[:, None]
            if way > 2:
                result += (middles / total)[:, None]
            channel = _channels(column, part, value_full, packed)
            partial_address = base[:, None] * value_full + channel[None, :]
            if slot < 0:
                tl.store(out + partial_address, result.to(out.dtype.element_ty), mask=mask)
            else:
                tl.store(partial + partial_address, result, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["splits"])
def combine_chunks(
    partial,
    logs,
    splits,
    out,
    totals,
    width: tl.constexpr,
    padded: tl.constexpr,
    parts: tl.constexpr,
):
    """Combine the chunks of one sequence, for one query head.

    Grid: query heads x sequences. A sequence is its row, the first slot of its chunks, and the
    slot after the last; it is skipped if it has no slots.
    """
    head, heads = tl.program_id(0), tl.num_programs(0)
    entry = splits + tl.program_id(1) * 3
    row = tl.load(entry).to(tl.int64)
    first, end = tl.load(entry + 1), tl.load(entry + 2)
    if first < end:
        column = tl.arange(0, padded)
        inside = column < width
        most = -1e30
        total = 0.0
        output = tl.zeros([padded], tl.float32)
        for begin in tl.range(first, end, parts):
            slot = begin + tl.arange(0, parts)
            filled = slot < end
            index = slot.to(tl.int64) * heads + head
            log = tl.load(logs + index, mask=filled, other=-1e30)
            greatest = tl.maximum(most, tl.max(log, 0))
            shrunk = tl.exp2(most - greatest)
            weight = tl.where(filled, tl.exp2(log - greatest), 0.0)
            address = partial + index[:, None] * width + column[None, :]
            rows = tl.load(address, mask=filled[:, None] & inside[None, :], other=0.0)
            output = output * shrunk + tl.sum(rows * weight[:, None], 0)
            total = total * shrunk + tl.sum(weight, 0)
            most = greatest
        index = row * heads + head
        result = (output / total).to(out.dtype.element_ty)
        tl.store(out + index * width + column, result, mask=inside)
        if totals is not None:
            tl.store(totals + index, most + tl.log2(total))


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["tables", "work"])
def weigh_chunks(
    queries,
    keys,
    key_grids,
    tables,
    work,
    totals,
    masses,
    scale,
    key_stride,
    grid_stride,
    tokens,
    group: tl.constexpr,
    rows: tl.constexpr,
    full: tl.constexpr,
    packed: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    key_unit: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    way: tl.constexpr,
    bits: tl.constexpr,
    dot: tl.constexpr,
):
    """Write how much attention each token of a chunk gets: weights summed over query heads.

    `masses` is `[K/V heads, tokens]`, with a place for each token of the blocks of `tables`.
    """
    head, heads = tl.program_id(0), tl.num_programs(0)
    entry = work + tl.program_id(1) * 8
    lo, hi = tl.load(entry + 2), tl.load(entry + 3)
    if lo < hi:
        row, first = tl.load(entry).to(tl.int64), tl.load(entry + 1)
        keys += head * block_size * width
        if way >= 2:
            key_grids += head * block_size
        parts, sums = _queries(
            queries, row, 1, head, heads, 1, group, rows, full, width, padded, packed, way, dot
        )
        member = tl.arange(0, rows)
        index = (row * heads + head) * group + member
        total = tl.load(totals + index, mask=member < group, other=0.0)
        masses += head.to(tl.int64) * tokens + first.to(tl.int64) * block_size
        part: tl.constexpr = block_size if block_size < tile else tile
        for begin in tl.range(lo // part * part, hi, tile):
            blocks = _ids(tables + first, begin, hi, block_size, tile)
            token = begin + tl.arange(0, tile)
            seen = (token >= lo) & (token < hi)
            offsets = _offsets(blocks, begin, key_stride, width, block_size, tile, key_unit)
            read = _columns(keys, offsets, width, padded, seen, False)
            grid = _grids(
                key_grids, blocks, begin, grid_stride, block_size, tile, seen, False, way
            )
            scores = _scores(parts, sums, read, grid, scale, packed, way, bits, dot)
            weights = tl.exp2(scores - total[:, None])
            weights = tl.where((member < group)[:, None], weights, 0.0)
            tl.store(masses + token, tl.sum(weights, 0), mask=seen)
