"""An engine on `KVCache`: turns hit the answers before them, samples share blocks, LFU evicts.

Run it with `python examples/engine.py` (needs torch).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs

from kvcore import KVCache, Trace
from kvcore.cache import Sequence as CacheSequence
from kvcore.engine import (
    RaggedBatch,
    Tensor,
    TensorLayout,
    attend_through,
    row_positions,
)
from kvcore.request import block_keys, text_request
from kvcore_engine.backend import TorchCPU
from kvcore_engine.generator import Transformer
from kvcore_plugins.eviction import LFU
from kvcore_replay.check import check_trace

BLOCK = 4
STEP = 1_000_000
"""Nanoseconds that a step takes here; a real engine has a clock."""


@attrs.frozen(eq=False)
class Branch:
    """A text that is computed: its sequence in the cache, and its tokens."""

    sequence: CacheSequence
    text: list[int]


class Engine:
    """Answers one prompt at a time, with K/V in the blocks that the cache assigns."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model, self.cache, self.backend = model, cache, TorchCPU()
        model.load(self.backend, "fp64")
        spec = model.spec
        layout = TensorLayout(
            blocks=cache.pool.blocks,
            block_size=BLOCK,
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.value_dim,
            dtype="fp64",
        )
        self.backend.allocate(layout)
        cache.on_copy = self._copy
        self.now = self.served = self.copies = 0

    def answer(
        self, prompt: Sequence[int], length: int, samples: int = 1
    ) -> tuple[int, list[list[int]]]:
        """Return the blocks that hit, and answers that begin with the likeliest tokens."""
        self.served += 1
        request = text_request(
            self.served, prompt, output=length, block_size=BLOCK, publish=True
        )
        seq = self.cache.open(request, first_tokens=0, now=self.now)  # pins what hits
        branches = [Branch(seq, list(prompt))]
        try:
            first = self.step(branches)[0].topk(samples).indices.tolist()
            branches.extend(Branch(self.cache.fork(seq), list(prompt)) for _ in first[1:])
            for place in range(length):
                chosen = self.step(branches).argmax(dim=-1).tolist() if place else first
                for branch, token in zip(branches, chosen, strict=True):
                    branch.text.append(token)
        finally:  # whatever has failed: what is committed stays cached, all else is freed
            for branch in branches:
                self.cache.close(branch.sequence, self.now)
        return seq.hit_blocks, [branch.text[len(prompt) :] for branch in branches]

    def step(self, branches: list[Branch]) -> Tensor:
        """Compute the tokens that have no K/V; return the logits that follow each text."""
        cache, backend = self.cache, self.backend
        starts = [branch.sequence.computed for branch in branches]
        lengths = [len(b.text) - start for b, start in zip(branches, starts, strict=True)]
        for branch in branches:  # 1. room, by evictions: what is missing, if a step is repeated
            seq = branch.sequence
            cache.extend(seq, len(branch.text) - seq.tokens, self.now)
        batch = RaggedBatch(
            block_tables=[cache.block_table(branch.sequence) for branch in branches],
            contexts=starts,
            lengths=lengths,
            token_ids=[
                token
                for branch, start in zip(branches, starts, strict=True)
                for token in branch.text[start:]
            ],
            positions=row_positions(starts, lengths),
            output_indices=[0] * len(branches),
            seeds=[0] * len(branches),
        )
        attend = attend_through(backend.plan(batch), backend.store_rotated, backend.attend)
        logits = self.model.logits(batch, attend)  # 2. K/V is in the blocks
        self.now += STEP
        self._publish(branches[0])  # 3. the blocks of the first answer get keys
        for branch, length in zip(branches, lengths, strict=True):  # 4. others may hit them
            cache.commit(branch.sequence, length, self.now)
        return logits

    def _publish(self, branch: Branch) -> None:
        """Append the keys of the blocks that generated tokens have filled."""
        seq = branch.sequence
        keys = block_keys(branch.text, BLOCK)[len(seq.keys) :]
        self.cache.append_keys(seq, keys)
        if keys and self.cache.trace is not None:
            self.cache.trace.keys(self.now, request=seq.request.id, keys=keys)

    def _copy(self, source: int, target: int) -> None:
        """Copy the K/V of a block that several samples have into that of one of them."""
        self.backend.copy_blocks([(source, target)])
        self.copies += 1


def main() -> None:
    """Serve three turns of each of two chats, in a pool that does not hold both."""
    model = Transformer(seed=1)
    chats = {"ann": "why is the answer of a turn asked for again", "ben": "and what goes first"}
    texts = {name: model.encode(text) for name, text in chats.items()}
    with TemporaryDirectory() as folder:
        file = Path(folder, "engine.jsonl")
        with Trace(file) as trace:
            cache = KVCache(20, BLOCK, eviction=LFU(half_life=60.0), trace=trace, ids=True)
            engine = Engine(model, cache)
            for name, more in [("ann", "go on"), ("ben", "why")] * 3:
                hit, (best, *_) = engine.answer(texts[name], length=12, samples=2)
                most = (len(texts[name]) - 1) // BLOCK  # the last token is always computed
                print(f"{name}: {hit} of {most} blocks hit, {cache.evicted_blocks} evicted")
                texts[name] += best + model.encode(more)
                cache.check_integrity()
        evicted = check_trace(file).evictions["blocks"]
        print(f"{engine.copies} blocks copied on write; the trace has {evicted} evictions")


if __name__ == "__main__":
    main()
