"""Kernels that write new K/V into blocks: as it is, or as a codec by token codes it.

One pass: what is coded is read once and never written but as codes. Needs Triton.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,no-untyped-call"
# ruff: noqa: ANN001, ANN202, PLR0124 - Triton takes annotations for types; NaN is not itself

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton import language as tl

from kvcore.models.codec import Codec, Part
from kvcore_plugins.codec import E4M3, E5M2, INT8

ROWS, WARPS = 32, 4
"""Rows that a program writes, a row being the K or V of a token in a head, and its warps."""

PLAIN, FP8, FP8_BY_HEAD, GRID = range(4)
"""How a row is stored."""


@triton.jit
def _above(number):
    """Return the least numbers of fp16 that are not less."""
    half = number.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True)
    step = tl.where(half < 0, -1, 1) * (number > half.to(tl.float32)).to(tl.int32)
    return (bits + step.to(tl.int16)).to(tl.float16, bitcast=True)


@triton.jit
def _fp8(number, precision: tl.constexpr, bias: tl.constexpr):
    """Return the codes of numbers in fp8, none of which is too great; ties go to even.

    In integers, since older GPUs convert to neither format, and the interpreter wrongly.
    """
    bits = number.to(tl.int32, bitcast=True)
    sign, bits = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    dropped: tl.constexpr = 23 - precision
    half: tl.constexpr = (1 << (dropped - 1)) - 1
    code = (bits + half + ((bits >> dropped) & 1)) >> dropped
    code -= (127 - bias) << precision
    # Below the least exponent steps are all alike. Adding 1.5 * 2^23 rounds to whole ones.
    small = bits.to(tl.float32, bitcast=True) * (1 << (bias - 1 + precision))
    small = tl.where(small < 1 << precision, small, 0.0)
    whole = ((small + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(bits < ((128 - bias) << 23), whole, code)
    return (tl.where(number != number, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def _store(
    rows,
    slots,
    out,
    scales,
    count,
    heads,
    token_stride,
    head_stride,
    factor,
    greatest,
    width: tl.constexpr,
    columns: tl.constexpr,
    per_program: tl.constexpr,
    way: tl.constexpr,
    precision: tl.constexpr,
    bias: tl.constexpr,
):
    """Write `per_program` rows; `columns` is the power of two from `width` on."""
    row = tl.program_id(0) * per_program + tl.arange(0, per_program)
    column = tl.arange(0, columns)
    live = row < count
    there = live[:, None] & (column < width)[None, :]
    begin = (row // heads).to(tl.int64) * token_stride + (row % heads) * head_stride
    number = tl.load(rows + begin[:, None] + column[None, :], mask=there, other=0.0)
    slot = tl.load(slots + row, mask=live, other=0).to(tl.int64)
    place = out + (slot * width)[:, None] + column[None, :]
    if way == 0:
        tl.store(place, number, mask=there)
    elif way == 1:
        # Divided in fp32 and rounded to the dtype of K/V, as torch does.
        scaled = tl.div_rn(number.to(tl.float32), factor).to(number.dtype).to(tl.float32)
        cut = tl.clamp(scaled, -greatest, greatest, propagate_nan=tl.PropagateNan.ALL)
        tl.store(place, _fp8(cut, precision, bias), mask=there)
    else:
        wide = number.to(tl.float32)
        wide = tl.clamp(wide, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        lost = tl.sum((wide != wide).to(tl.int32), 1) > 0
        if way == 2:  # noqa: PLR2004 - `FP8_BY_HEAD`, as a kernel must write it
            most = tl.max(tl.abs(wide), 1)
            scale = _above(tl.div_rn(tl.where(lost, float("nan"), most), greatest))
            step = tl.where(scale == 0, 1.0, scale.to(tl.float32))
            coded = tl.div_rn(wide, tl.broadcast_to(step[:, None], wide.shape))
            tl.store(place, _fp8(coded, precision, bias), mask=there)
            tl.store(scales + slot, scale, mask=live)
        else:
            low = tl.min(tl.where(there, wide, float("inf")), 1)
            high = tl.max(tl.where(there, wide, float("-inf")), 1)
            zero = -_above(-tl.where(lost, float("nan"), low))
            span = tl.where(lost, float("nan"), high) - zero.to(tl.float32)
            scale = _above(tl.div_rn(span, tl.full(span.shape, 255.0, tl.float32)))
            step = tl.where(scale == 0, 1.0, scale.to(tl.float32))
            code = wide - zero.to(tl.float32)[:, None]
            code = tl.div_rn(code, tl.broadcast_to(step[:, None], wide.shape))
            # Rounded to even, as above.
            code = (code + 12582912.0) - 12582912.0
            tl.store(place, code.to(tl.int32).to(tl.uint8), mask=there)
            tl.store(scales + slot * 2, scale, mask=live)
            tl.store(scales + slot * 2 + 1, zero, mask=live)


def store_rows(rows: Tensor, slots: Tensor, out: Tensor) -> None:
    """Write rows, `[tokens, heads, width]`, to the rows `slots` of `out`, `[n, width]`."""
    _launch(rows, slots, out, out, PLAIN)


def way_of(codec: Codec, part: Part, dtype: torch.dtype) -> int | None:
    """Return how `store_coded` codes as a codec does; None: it cannot."""
    if dtype == torch.float64:
        return None
    if isinstance(codec, E4M3 | E5M2):
        return FP8 if codec.scale == "tensor" else FP8_BY_HEAD
    if isinstance(codec, INT8) and codec.by_token(part):
        return GRID
    return None


def store_coded(
    rows: Tensor, slots: Tensor, planes: Sequence[Tensor], codec: Codec, way: int
) -> None:
    """Code rows, `[tokens, heads, width]`, and write them to the rows `slots` of planes.

    Planes are bytes, with a row for each token of each head, as in the coded pool.
    """
    codes, *rest = planes
    greatest = factor = 1.0
    if isinstance(codec, E4M3 | E5M2):
        greatest, factor = codec.greatest, codec.factor
    precision, bias = (2, 15) if isinstance(codec, E5M2) else (3, 7)
    scales = rest[0].view(torch.float16) if rest else codes
    _launch(rows, slots, codes, scales, way, factor, greatest, precision, bias)


def _launch(
    rows: Tensor,
    slots: Tensor,
    out: Tensor,
    scales: Tensor,
    way: int,
    factor: float = 1.0,
    greatest: float = 1.0,
    precision: int = 3,
    bias: int = 7,
) -> None:
    tokens, heads, width = rows.shape
    if not tokens:
        return
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    count = tokens * heads
    with torch.cuda.device_of(out):  # Triton launches on the current GPU
        _store[(triton.cdiv(count, ROWS),)](
            rows,
            slots,
            out,
            scales,
            count,
            heads,
            rows.stride(0),
            rows.stride(1),
            factor,
            greatest,
            width=width,
            columns=triton.next_power_of_2(width),
            per_program=ROWS,
            way=way,
            precision=precision,
            bias=bias,
            num_warps=WARPS,
        )
