"""Sequences that decode by Triton's interpreted kernels, compared with float64."""

from math import inf, nan, sqrt

import torch

from kvcore import Plugins
from kvcore.engine import RaggedBatch, TensorLayout
from kvcore_engine.backend import TorchCPU

TOLERANCES = {"fp32": 4e-6, "fp16": 3e-3, "bf16": 2e-2}
"""Greatest difference from float64 over the same numbers, which are normally distributed."""


class Decoding:
    """Sequences that decode, in a pool that is NaN where nothing is stored.

    The first sequence uses the first and the last block of the pool.
    """

    def __init__(self, lengths, *, group=4, codec=None, spare=3, **fields):
        """Store K/V of all tokens, and draw random queries of the last tokens."""
        sizes = {"block_size": 16, "kv_heads": 1, "head_dim": 64} | fields
        sizes.setdefault("value_dim", sizes["head_dim"])
        held = [-(-length // sizes["block_size"]) for length in lengths]
        codec = Plugins().build("codec", codec) if codec else None
        layout = TensorLayout(blocks=sum(held) + spare, layers=1, codec=codec, **sizes)
        draw = torch.Generator().manual_seed(7)
        order = torch.randperm(layout.blocks - 2, generator=draw) + 1
        order = [layout.blocks - 1, 0, *order.tolist()]
        self.tables = [[order.pop(0) for _ in range(blocks)] for blocks in held]
        self.backend = TorchCPU(attention="triton")
        self.backend.allocate(layout)
        self.kernel = self.backend._kernel._divider.kernel
        self.lengths, dtype = lengths, self.backend._pool.dtype
        self.backend.fill(nan if codec is None else 7)
        tokens, heads = sum(lengths), layout.kv_heads
        plan = self.backend.plan(RaggedBatch(self.tables, [0] * len(lengths), lengths))
        rows = [
            torch.randn(tokens, heads, width, generator=draw).to(dtype)
            for width in (layout.head_dim, layout.value_dim)
        ]
        self.backend.store(0, plan, *rows)
        queries = torch.randn(len(lengths), heads * group, layout.head_dim, generator=draw)
        self.queries = queries.to(dtype)

    def check(self, *, window=None, sinks=0, scale=None, weighed=False):
        """Compare attention with that in float64 over the K/V that `read` returns."""
        contexts = [length - 1 for length in self.lengths]
        plan = self.backend.plan(RaggedBatch(self.tables, contexts, [1] * len(contexts)))
        options = {"window": window, "sinks": sinks, "scale": scale}
        tolerance = TOLERANCES[self.backend.layout.dtype]
        close = {"atol": tolerance, "rtol": tolerance}
        if weighed:
            found, sums = self.backend.attend_weighed(0, plan, self.queries, **options)
        else:
            found = self.backend.attend(0, plan, self.queries, **options)
        assert not self.backend.fallbacks
        for row, (table, length) in enumerate(zip(self.tables, self.lengths, strict=True)):
            keys, values = (x.double() for x in self.backend.read(0, table, length))
            group = self.queries.shape[1] // keys.shape[1]
            query = self.queries[row].double().view(keys.shape[1], group, -1)
            scores = torch.einsum("hgd,thd->hgt", query, keys)
            scores *= 1 / sqrt(keys.shape[2]) if scale is None else scale
            if window is not None:
                at = torch.arange(length)
                scores[..., (at < length - window) & (at >= sinks)] = -inf
            weights = scores.softmax(-1)
            expected = torch.einsum("hgt,thd->hgd", weights, values).flatten(0, 1)
            torch.testing.assert_close(found[row].double(), expected, **close)
            if weighed:
                summed = weights.sum(1)
                torch.testing.assert_close(sums[row].double(), summed, **close)
