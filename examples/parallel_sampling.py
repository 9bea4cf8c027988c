"""Fork a sequence: parallel samples and beam search share the K/V of what they share.

Run it with `python examples/parallel_sampling.py` (needs torch).
"""

from __future__ import annotations

from typing import Any

import attrs

from kvcore import KVCache, Request
from kvcore.cache import Sequence
from kvcore.engine import Attend, RaggedBatch, Sampling, Tensor, TensorLayout, row_positions
from kvcore.request import block_keys
from kvcore_engine.backend import TorchCPU
from kvcore_engine.generator import Transformer
from kvcore_engine.generator.sampling import sample

BLOCK = 4
PROMPT = "the cache keeps what the model has read so far"


@attrs.frozen(eq=False)
class Branch:
    """A continuation: its sequence in the cache, its tokens, its log-probability."""

    sequence: Sequence
    tokens: list[int]
    score: float = 0.0


class Writer:
    """A model whose K/V lies in blocks."""

    def __init__(self, model: Transformer, blocks: int = 64) -> None:
        self.model, self.backend = model, TorchCPU()
        model.load(self.backend, "fp64")
        spec = model.spec
        self.backend.allocate(
            TensorLayout(
                blocks=blocks,
                block_size=BLOCK,
                layers=spec.layers,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                value_dim=spec.value_dim,
                dtype="fp64",
            )
        )
        self.cache = KVCache(blocks, BLOCK, ids=True)
        self.cache.on_copy = self._copied
        self.copies = 0

    def read(self, text: str) -> Branch:
        """Compute `text` except its last token, which each branch computes for itself."""
        tokens = self.model.encode(text)
        keys = block_keys(tokens, BLOCK)
        request = Request(id=text, prompt_tokens=len(tokens), keys=keys, key_tokens=BLOCK)
        sequence = self.cache.open(request, first_tokens=0)
        self.logits([Branch(sequence, tokens[:-1])])
        return Branch(sequence, tokens)

    def fork(self, branch: Branch, token: int | None = None, score: float = 0.0) -> Branch:
        """Return a branch that shares every block of another, and goes on with `token`."""
        more = [] if token is None else [token]
        return Branch(self.cache.fork(branch.sequence), branch.tokens + more, score)

    def logits(self, branches: list[Branch]) -> Tensor:
        """Compute in one step what is left of each branch; return the logits that follow."""
        starts = [branch.sequence.computed for branch in branches]
        new = [b.tokens[start:] for b, start in zip(branches, starts, strict=True)]
        lengths = list(map(len, new))
        for branch, length in zip(branches, lengths, strict=True):
            self.cache.extend(branch.sequence, length)
        batch = RaggedBatch(
            block_tables=[self.cache.block_table(branch.sequence) for branch in branches],
            contexts=starts,
            lengths=lengths,
            token_ids=[token for tokens in new for token in tokens],
            positions=row_positions(starts, lengths),
            output_indices=[0] * len(branches),
            seeds=[0] * len(branches),
        )
        logits = self.model.logits(batch, self._attend(batch))
        for branch, length in zip(branches, lengths, strict=True):
            self.cache.commit(branch.sequence, length)
        return logits

    def _attend(self, batch: RaggedBatch) -> Attend:
        plan = self.backend.plan(batch)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
            self.backend.store(layer, plan, k, v)
            return self.backend.attend(layer, plan, q, **how)

        return attend

    def _copied(self, source: int, target: int) -> None:
        self.copies += 1
        self.backend.copy_blocks([(source, target)])


def parallel(writer: Writer, root: Branch, samples: int, length: int) -> list[Branch]:
    """Continue `root` in several ways, each drawn from a seed of its own."""
    branches = [writer.fork(root) for _ in range(samples)]
    for place in range(length):
        marks = [(seed, place) for seed in range(samples)]
        drawn = sample(writer.logits(branches), marks, [Sampling(1.0)] * samples)
        for branch, token in zip(branches, drawn, strict=True):
            branch.tokens.append(token)
    return branches


def beam_search(writer: Writer, root: Branch, width: int, length: int) -> list[Branch]:
    """Return the likeliest continuations, of which each step keeps `width`."""
    beams = [writer.fork(root)]
    for _ in range(length):
        chances = writer.logits(beams).log_softmax(dim=-1)
        found = [
            (beam.score + chance, beam, token)
            for beam, row in zip(beams, chances, strict=True)
            for chance, token in zip(*(x.tolist() for x in row.topk(width)), strict=True)
        ]
        best = sorted(found, key=lambda candidate: -candidate[0])[:width]
        kept = [writer.fork(beam, token, score) for score, beam, token in best]
        for beam in beams:
            writer.cache.close(beam.sequence)
        beams = kept
    return beams


def main() -> None:
    """Print what is written, and the blocks it takes."""
    writer = Writer(Transformer(seed=1))
    root = writer.read(PROMPT)
    samples = parallel(writer, root, samples=4, length=6)
    for branch in samples:
        print("sample", *branch.tokens[len(root.tokens) :])
    table = writer.cache.block_table
    alone = sum(len(table(branch.sequence)) for branch in samples)
    shared = len({block for branch in samples for block in table(branch.sequence)})
    print(f"blocks {shared} instead of {alone}, {writer.copies} copied on write")
    for beam in beam_search(writer, root, width=3, length=6):
        print(f"beam   {beam.score:.2f}", *beam.tokens[len(root.tokens) :])


if __name__ == "__main__":
    main()
