"""The arithmetic of codecs that round numbers to even grids, and pack the steps into bytes.

A grid has `2**bits` points, `zero + code * scale`. It spans the numbers of a group: some
neighbouring channels of a token, or one channel of some neighbouring tokens. Zero is rounded
down to fp16 and the scale up, before codes are computed, so that the grid still spans all
numbers: none is clipped, and each is at most half a step from its point.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore_plugins.codec.dtypes import widened

FP16_MAX = 65504.0
"""The greatest number of fp16, to which greater ones are cut."""


def encode(rows: Tensor, bits: int, group: int, *, across: bool) -> tuple[Tensor, Tensor]:
    """Return the codes and the grids of `rows`, `[n, tokens, width]`.

    Codes are `[n, tokens, width * bits / 8]` of uint8, grids `[n, tokens, width / group, 2]`
    of fp16, or, for groups of tokens (`across`), `[n, tokens / group, 2, width]`: scale and
    zero. A grid with a NaN among its numbers is NaN.
    """
    wide = saturated(rows).contiguous()
    numbers, axis = _grouped(wide, rows.shape[1 if across else 2] // group, across=across)
    low, high = numbers.aminmax(dim=axis, keepdim=True)
    zero = -rounded_up(-low)
    scale = rounded_up((high - zero) / (2**bits - 1))
    codes = (numbers - zero) / torch.where(scale == 0, 1, scale)
    grid = torch.cat((scale, zero), axis)
    return _packed(codes.round_().byte().view(rows.shape), bits), grid


def decode(codes: Tensor, grid: Tensor, bits: int, *, across: bool) -> Tensor:
    """Return the numbers that `encode` coded, `[n, tokens, width]` in fp32."""
    wide = _unpacked(codes, bits)
    numbers, axis = _grouped(wide, grid.shape[1 if across else 2], across=across)
    scale, zero = torch.split(grid.float(), 1, axis)
    return numbers.mul_(scale).add_(zero).view(wide.shape)


def saturated(rows: Tensor) -> Tensor:
    """Return the rows in fp32 or fp64, cut to the range of fp16. NaN stays."""
    return widened(rows).clamp(-FP16_MAX, FP16_MAX)


def rounded_up(numbers: Tensor) -> Tensor:
    """Return the least numbers of fp16 that are not less."""
    half = numbers.half()
    # The next number has the next bits; the bits of negative numbers count downwards.
    step = torch.where(half < 0, -1, 1) * (numbers > half)
    return (half.view(torch.int16) + step.short()).view(torch.half)


def _grouped(rows: Tensor, groups: int, *, across: bool) -> tuple[Tensor, int]:
    """Return a view with an axis for the members of each group, and that axis."""
    count, tokens, width = rows.shape
    if across:
        return rows.view(count, groups, tokens // groups, width), 2
    return rows.view(count, tokens, groups, width // groups), 3


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Return `[n, tokens, width]` codes as bytes, `[n, tokens, width * bits / 8]`.

    Byte j holds, from its lowest bits up, code j of the first 1/k of the row, of the second,
    and so on, where k codes fit into a byte: slices of a row are unpacked as they lie.
    """
    if bits == 8:  # noqa: PLR2004 - a byte
        return codes
    parts = codes.chunk(8 // bits, -1)
    out = parts[0].clone()
    for index, part in enumerate(parts[1:], 1):
        out |= part << bits * index
    return out


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the codes in fp32, `[n, tokens, width]`."""
    if bits == 8:  # noqa: PLR2004 - a byte
        return packed.float()
    width, count = packed.shape[-1], 8 // bits
    out = packed.new_empty((*packed.shape[:-1], width * count), dtype=torch.float32)
    for index in range(count):
        part = packed >> bits * index if index else packed
        last = index == count - 1
        out[..., index * width : (index + 1) * width] = part if last else part & 2**bits - 1
    return out
