"""A kernel that reads memory and does nothing else. Needs Triton."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,no-untyped-call"
# ruff: noqa: ANN001 - Triton takes annotations for types of its own

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

SHAPES = ((4, 2048, 8), (8, 2048, 4), (16, 1024, 4), (2, 4096, 16))
"""Programs for each multiprocessor, words at a time, and warps: the fastest shape counts."""


@triton.jit
def _combined(words, out, count, step: tl.constexpr) -> None:
    """Combine all words with XOR, so that none can be left out."""
    program = tl.program_id(0).to(tl.int64)
    combined = tl.zeros([step], tl.int32)
    offset = tl.arange(0, step)
    for begin in tl.range(program * step, count, tl.num_programs(0) * step):
        combined ^= tl.load(words + begin + offset)
    tl.store(out + program, tl.xor_sum(combined, 0))


def readers(source: Tensor) -> list[Callable[[], Any]]:
    """Return calls that read a tensor of 4-byte numbers, a multiple of 4,096 of them."""
    words = source.view(torch.int32)
    count = torch.cuda.get_device_properties(source.device).multi_processor_count
    out = torch.empty(count * max(size for size, _, _ in SHAPES), dtype=torch.int32)
    out = out.to(source.device)
    return [
        partial(
            _combined[(count * programs,)], words, out, words.numel(), step, num_warps=warps
        )
        for programs, step, warps in SHAPES
    ]
