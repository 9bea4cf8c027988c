"""A kernel that writes new K/V into blocks: as it is, or as a codec by token codes it.

One pass and one launch for K and V: keys are rotated on the way, if they are not rotated yet,
and K/V is read once, and written only as codes. Needs Triton.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,no-untyped-call"
# ruff: noqa: ANN001, ANN202, PLR0124 - Triton takes annotations for types; NaN is not itself

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import attrs
import torch
import triton
from torch import Tensor
from triton import language as tl

from kvcore.engine import Rotation
from kvcore.models.codec import Codec, Part
from kvcore_plugins.codec import E4M3, E5M2, INT8

ROWS, WARPS = 32, 4
"""Rows that a program writes, a row being the K or V of a token in a head, and its warps."""

TURNED_BYTES = 8192
"""Bytes that a program rotates, at most: it holds them with partners and angles."""

PLAIN, FP8, FP8_BY_HEAD, GRID = range(4)
"""How a row is stored."""


@triton.jit
def _above(value):
    """Return the least numbers of fp16 that are not less."""
    half = value.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True)
    step = tl.where(half < 0, -1, 1) * (value > half.to(tl.float32)).to(tl.int32)
    return (bits + step.to(tl.int16)).to(tl.float16, bitcast=True)


@triton.jit
def _fp8(value, precision: tl.constexpr, bias: tl.constexpr):
    """Return the codes of numbers that fp8 can hold; ties go to even.

    In integers, since older GPUs convert to neither format, and the interpreter wrongly.
    """
    bits = value.to(tl.int32, bitcast=True)
    sign, bits = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    dropped: tl.constexpr = 23 - precision
    half: tl.constexpr = (1 << (dropped - 1)) - 1
    code = (bits + half + ((bits >> dropped) & 1)) >> dropped
    code -= (127 - bias) << precision
    # Below the least exponent all steps are equal. Adding 1.5 * 2^23 rounds to whole ones.
    small = bits.to(tl.float32, bitcast=True) * (1 << (bias - 1 + precision))
    small = tl.where(small < 1 << precision, small, 0.0)
    rounded = ((small + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(bits < ((128 - bias) << 23), rounded, code)
    return (tl.where(value != value, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def _rotated(
    value,
    rows,
    begin,
    token,
    cosines,
    sines,
    places,
    live,
    per_program: tl.constexpr,
    columns: tl.constexpr,
    pairs: tl.constexpr,
    adjacent: tl.constexpr,
    named: tl.constexpr,
):
    """Return rows rotated by their angles, computed in the dtype of the tables."""
    position = tl.load(places + token, mask=live, other=0).to(tl.int64) if named else token
    position = (position * pairs)[:, None]
    if adjacent:
        pair = tl.arange(0, columns // 2)
        turns = live[:, None] & (pair < pairs)[None, :]
        cos = tl.load(cosines + position + pair[None, :], mask=turns, other=1.0)
        sin = tl.load(sines + position + pair[None, :], mask=turns, other=0.0)
        apart = tl.reshape(value.to(cos.dtype), (per_program, columns // 2, 2))
        a, b = tl.split(apart)
        joined = tl.join(a * cos - b * sin, b * cos + a * sin)
        turned = tl.reshape(joined, (per_program, columns))
    else:
        # A partner is in another lane: it is loaded again, from the cache of the core.
        column = tl.arange(0, columns)
        first = column < pairs
        pair = tl.where(first, column, column - pairs)
        partner = tl.where(first, column + pairs, column - pairs)
        turns = live[:, None] & (column < 2 * pairs)[None, :]
        cos = tl.load(cosines + position + pair[None, :], mask=turns, other=1.0)
        sin = tl.load(sines + position + pair[None, :], mask=turns, other=0.0)
        other = tl.load(rows + begin[:, None] + partner[None, :], mask=turns, other=0.0)
        sin = tl.where(first[None, :], -sin, sin)
        turned = value.to(cos.dtype) * cos + other.to(cos.dtype) * sin
    return turned.to(value.dtype)


@triton.jit
def _write(
    rows,
    slots,
    out,
    scales,
    token_stride,
    head_stride,
    factor,
    greatest,
    cosines,
    sines,
    places,
    count,
    heads,
    width: tl.constexpr,
    columns: tl.constexpr,
    per_program: tl.constexpr,
    way: tl.constexpr,
    precision: tl.constexpr,
    bias: tl.constexpr,
    pairs: tl.constexpr,
    adjacent: tl.constexpr,
    named: tl.constexpr,
):
    """Write `per_program` rows; `columns` is the power of two from `width` on."""
    row = tl.program_id(0) * per_program + tl.arange(0, per_program)
    column = tl.arange(0, columns)
    live = row < count
    inside = live[:, None] & (column < width)[None, :]
    token = (row // heads).to(tl.int64)
    begin = token * token_stride + (row % heads) * head_stride
    value = tl.load(rows + begin[:, None] + column[None, :], mask=inside, other=0.0)
    if pairs > 0:
        value = _rotated(
            value, rows, begin, token, cosines, sines, places, live,
            per_program, columns, pairs, adjacent, named,
        )  # fmt: skip
    slot = tl.load(slots + row, mask=live, other=0).to(tl.int64)
    address = out + (slot * width)[:, None] + column[None, :]
    if way == 0:
        tl.store(address, value, mask=inside)
    elif way == 1:
        # Divided in fp32 and rounded to the dtype of K/V, as torch does.
        scaled = tl.div_rn(value.to(tl.float32), factor).to(value.dtype).to(tl.float32)
        cut = tl.clamp(scaled, -greatest, greatest, propagate_nan=tl.PropagateNan.ALL)
        tl.store(address, _fp8(cut, precision, bias), mask=inside)
    else:
        wide = value.to(tl.float32)
        wide = tl.clamp(wide, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        lost = tl.sum((wide != wide).to(tl.int32), 1) > 0
        if way == 2:  # noqa: PLR2004 - `FP8_BY_HEAD`, as a kernel must write it
            greatest_seen = tl.max(tl.abs(wide), 1)
            scale = _above(tl.div_rn(tl.where(lost, float("nan"), greatest_seen), greatest))
            step = tl.where(scale == 0, 1.0, scale.to(tl.float32))
            coded = tl.div_rn(wide, tl.broadcast_to(step[:, None], wide.shape))
            tl.store(address, _fp8(coded, precision, bias), mask=inside)
            tl.store(scales + slot, scale, mask=live)
        else:
            low = tl.min(tl.where(inside, wide, float("inf")), 1)
            high = tl.max(tl.where(inside, wide, float("-inf")), 1)
            zero = -_above(-tl.where(lost, float("nan"), low))
            span = tl.where(lost, float("nan"), high) - zero.to(tl.float32)
            scale = _above(tl.div_rn(span, tl.full(span.shape, 255.0, tl.float32)))
            step = tl.where(scale == 0, 1.0, scale.to(tl.float32))
            code = wide - zero.to(tl.float32)[:, None]
            code = tl.div_rn(code, tl.broadcast_to(step[:, None], wide.shape))
            # Rounded to even, as above.
            code = (code + 12582912.0) - 12582912.0
            tl.store(address, code.to(tl.int32).to(tl.uint8), mask=inside)
            tl.store(scales + slot * 2, scale, mask=live)
            tl.store(scales + slot * 2 + 1, zero, mask=live)


@triton.jit
def _store(
    keys,
    key_slots,
    key_out,
    key_scales,
    key_token_stride,
    key_head_stride,
    key_factor,
    key_greatest,
    values,
    value_slots,
    value_out,
    value_scales,
    value_token_stride,
    value_head_stride,
    value_factor,
    value_greatest,
    cosines,
    sines,
    places,
    count,
    heads,
    key_width: tl.constexpr,
    key_columns: tl.constexpr,
    value_width: tl.constexpr,
    value_columns: tl.constexpr,
    per_program: tl.constexpr,
    way: tl.constexpr,
    precision: tl.constexpr,
    bias: tl.constexpr,
    pairs: tl.constexpr,
    adjacent: tl.constexpr,
    named: tl.constexpr,
) -> None:
    """Write rows of keys, rotated if there are `pairs`, or in the second half of values."""
    if tl.program_id(1) == 0:
        _write(
            keys, key_slots, key_out, key_scales, key_token_stride, key_head_stride,
            key_factor, key_greatest, cosines, sines, places, count, heads,
            key_width, key_columns, per_program, way, precision, bias, pairs, adjacent, named,
        )  # fmt: skip
    else:
        _write(
            values, value_slots, value_out, value_scales, value_token_stride,
            value_head_stride, value_factor, value_greatest, cosines, sines, places, count,
            heads, value_width, value_columns, per_program, way, precision, bias, 0, adjacent,
            named,
        )  # fmt: skip


@attrs.frozen(eq=False)
class Target:
    """Where new K or V is written, and how.

    Attributes:
        way: how a row is stored; the same for K and V of a pool.
        planes: matrices with a row for each token of each head: numbers as they are, or a
            codec's codes and scales as bytes.
        factor, greatest: divisor of a codec's numbers, and the greatest number it has.
        precision, bias: bits of the mantissa, and bias of the exponent, of fp8.
    """

    way: int
    planes: Sequence[Tensor]
    factor: float = 1.0
    greatest: float = 1.0
    precision: int = 3
    bias: int = 7

    @classmethod
    def from_codec(
        cls, codec: Codec, part: Part, dtype: torch.dtype, planes: Sequence[Tensor]
    ) -> Target | None:
        """Return the target in the planes of a codec; None: the kernel cannot code so."""
        if dtype == torch.float64:
            return None
        if isinstance(codec, E4M3 | E5M2):
            form = FP8 if codec.scale == "tensor" else FP8_BY_HEAD
            precision, bias = (2, 15) if isinstance(codec, E5M2) else (3, 7)
            return cls(form, planes, codec.factor, codec.greatest, precision, bias)
        if isinstance(codec, INT8) and codec.by_token(part):
            return cls(GRID, planes)
        return None


New: TypeAlias = tuple[Target, Tensor, Tensor, Rotation | None]
"""A target, its rows to write into, the new rows, and the rotation of these."""


def store_rows(first: New, second: New | None = None) -> None:
    """Write rows, `[tokens, heads, width]`, in one launch: those of K, of V, or of both.

    Those of `second` are not rotated, and equal in number.
    """
    target, _, rows, rotation = first
    tokens, heads, _ = rows.shape
    count = tokens * heads
    if not count:
        return
    columns = [triton.next_power_of_2(half[2].shape[2]) for half in (first, second or first)]
    turned = max(1, TURNED_BYTES // (max(columns) * rows.itemsize))
    per_program = min(ROWS, turned) if rotation else ROWS
    cosines = sines = positions = rows
    if rotation is not None:
        # Of the width of the arithmetic; as a rule they are so already.
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        cosines, sines = (
            table.to(rows.device, wide).contiguous() for table in (rotation.cos, rotation.sin)
        )
        if rotation.places is not None:
            positions = rotation.places.to(rows.device).contiguous()
    with torch.cuda.device_of(target.planes[0]):  # Triton launches on the current GPU
        _store[(triton.cdiv(count, per_program), 1 if second is None else 2)](
            *_arguments(first),
            *_arguments(second or first),
            cosines,
            sines,
            positions,
            count,
            heads,
            key_width=rows.shape[2],
            key_columns=columns[0],
            value_width=(second or first)[2].shape[2],
            value_columns=columns[1],
            per_program=per_program,
            way=target.way,
            precision=target.precision,
            bias=target.bias,
            pairs=0 if rotation is None else rotation.pairs,
            adjacent=rotation is not None and rotation.adjacent,
            named=rotation is not None and rotation.places is not None,
            num_warps=WARPS,
        )


def _arguments(new: New) -> tuple[Any, ...]:
    """Return the arguments of the kernel for K or V."""
    target, slots, rows, _ = new
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    codes, *rest = target.planes
    scales = rest[0].view(torch.float16) if rest else codes
    strides = rows.stride(0), rows.stride(1)
    return rows, slots, codes, scales, *strides, target.factor, target.greatest
