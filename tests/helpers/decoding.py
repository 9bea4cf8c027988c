"""Sequences with new tokens, by Triton's interpreted kernels, compared with float64."""

from math import nan

import torch

from kvcore import Plugins
from kvcore.engine import RaggedBatch, TensorLayout
from kvcore.testing.dense import attention
from kvcore_engine.backend import TorchCPU

TOLERANCES = {"fp32": 4e-6, "fp16": 3e-3, "bf16": 2e-2}
"""Greatest difference from float64 over the same numbers, which are normally distributed."""


class Decoding:
    """Sequences with new tokens, in a pool that is NaN where nothing is stored.

    The first sequence uses the first and the last block of the pool.
    """

    def __init__(self, lengths, *, new=None, group=4, codec=None, spare=3, **fields):
        """Store K/V of all tokens, and draw queries of the last `new` of each; None: of one."""
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
        self.new = new or [1] * len(lengths)
        queries = torch.randn(sum(self.new), heads * group, layout.head_dim, generator=draw)
        self.queries = queries.to(dtype)

    @property
    def batch(self):
        """The step that computes the new tokens."""
        contexts = [length - new for length, new in zip(self.lengths, self.new, strict=True)]
        return RaggedBatch(self.tables, contexts, self.new)

    def check(self, *, window=None, sinks=0, scale=None, weighed=False):
        """Compare attention with that in float64 over the K/V that `read` returns."""
        plan = self.backend.plan(self.batch)
        options = {"window": window, "sinks": sinks, "scale": scale}
        tolerance = TOLERANCES[self.backend.layout.dtype]
        close = {"atol": tolerance, "rtol": tolerance}
        if weighed:
            found, sums = self.backend.attend_weighed(0, plan, self.queries, **options)
        else:
            found = self.backend.attend(0, plan, self.queries, **options)
        assert not self.backend.fallbacks
        row = 0
        for sequence, (length, new) in enumerate(zip(self.lengths, self.new, strict=True)):
            read = self.backend.read(0, self.tables[sequence], length)
            keys, values = (x.double() for x in read)
            queries = self.queries[row : row + new].double()
            expected = attention(queries, keys, values, **options)
            torch.testing.assert_close(found[row : row + new].double(), expected, **close)
            if weighed:
                # Attention over values of which each has a dimension of its own.
                apart = torch.eye(length).double()[:, None].expand(-1, keys.shape[1], -1)
                weights = attention(queries, keys, apart, **options)
                summed = weights.unflatten(1, (keys.shape[1], -1)).sum((0, 2))
                torch.testing.assert_close(sums[sequence].double(), summed, **close)
            row += new
