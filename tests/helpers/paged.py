"""A generator that is driven step by step over a KVCache and a backend, without a clock."""

from functools import cache
from itertools import count

from kvcore import KVCache, OutOfBlocks, Request
from kvcore.engine import RaggedBatch, TensorLayout, row_positions
from kvcore.plugins.options import instantiate, parse
from kvcore.request import block_keys
from kvcore.testing.dense import DenseCache, Text, advance, loaded, next_batch
from kvcore_engine.backend import TorchCPU
from kvcore_engine.compaction import Compactor
from kvcore_engine.generator import Transformer
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix

NAN = float("nan")


class Watched(Transformer):
    """A transformer that keeps the logits of the last step."""

    seen = None

    def logits(self, step, attend):
        """Return the logits, and keep them in `seen`."""
        self.seen = super().logits(step, attend)
        return self.seen


class Paged:
    """Texts in a cache, by sequence, with every block filled with NaN at allocation."""

    def __init__(self, generator, blocks, block_size, retention=None):
        spec = generator.spec
        self.generator = generator
        self.backend = TorchCPU()
        self.backend.allocate(
            TensorLayout(
                blocks=blocks,
                block_size=block_size,
                layers=spec.layers,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                value_dim=spec.value_dim,
                dtype="fp64",
            )
        )
        self.backend.fill(NAN)
        self.cache = KVCache(
            blocks,
            block_size,
            eviction=LRU(),
            prefix=Radix(),
            retention=retention,
            ids=True,
        )
        self.cache.on_copy = self._copied
        self.compactor = Compactor.for_run(self.cache, self.backend, generator)
        self.texts = {}
        self.copies = []
        self._serials = count(1)

    def open(self, prompt, seed=0, first=None):
        """Admit a prompt and return its sequence."""
        size = self.cache.geometry.block_size
        keys = block_keys(prompt, size)
        request = Request(
            id=next(self._serials), prompt_tokens=len(prompt), keys=keys, key_tokens=size
        )
        return self._admitted(self.cache.open(request, first), Text(list(prompt), seed=seed))

    def recompute(self, seq):
        """Close a sequence, and open it again with the tokens that it has generated."""
        text = self.texts[seq]
        self.close(seq)
        text.computed = 0
        return self._admitted(self.cache.open(seq.request, resumed=True), text)

    def fork(self, seq, seed):
        """Return a child that draws from another seed."""
        text = self.texts[seq]
        child = self.cache.fork(seq)
        self.texts[child] = Text(list(text.tokens), text.prompt, seed, text.computed)
        return child

    def close(self, seq):
        """Close a sequence."""
        self.cache.close(seq)
        del self.texts[seq]

    def step(self, counts):
        """Compute the given numbers of tokens; return the drawn token of each sequence.

        A sequence for which there is no room is left out.
        """
        counts = {seq: n for seq, n in counts.items() if self._room(seq, n)}
        if not counts:
            return {}
        texts = [self.texts[seq] for seq in counts]
        contexts = [seq.held for seq in counts]
        tables = [
            self.cache.block_table(seq)[: self._blocks(context + n)]
            for (seq, n), context in zip(counts.items(), contexts, strict=True)
        ]
        step = RaggedBatch(
            tables,
            contexts,
            list(counts.values()),
            positions=row_positions((seq.position for seq in counts), counts.values()),
            held_positions=self.compactor.held_positions(counts, contexts),
        )
        plan = self.backend.plan(step)
        weigh = self.compactor.attend(list(counts), step)

        def attend(layer, queries, keys, values, **how):
            self.backend.store(layer, plan, keys, values)
            return weigh(layer, plan, queries, **how)

        drawn = advance(self.generator, texts, list(counts.values()), attend)
        for seq, n in counts.items():
            self.cache.commit(seq, n)
        self.cache.check_integrity()
        return dict(zip(counts, drawn, strict=True))

    def run(self, *seqs, output):
        """Step until each sequence has `output` tokens of output."""
        while left := [s for s in seqs if self.output(s) < output]:
            assert self.step({seq: self.texts[seq].left for seq in left})

    def output(self, seq):
        """Return the number of tokens that a sequence has generated."""
        return len(self.texts[seq].tokens) - self.texts[seq].prompt

    def kept(self, seq):
        """Return K and V of a sequence in each layer, in the order of its blocks."""
        table, tokens = self.cache.block_table(seq), seq.held
        return [
            self.backend.read(layer, table, tokens)
            for layer in range(self.generator.spec.layers)
        ]

    def _admitted(self, seq, text):
        text.computed = seq.position
        self.texts[seq] = text
        self._poison(self.cache.block_table(seq)[seq.hit_blocks :])
        return seq

    def _room(self, seq, tokens):
        """Return True if there is room for `tokens` more tokens, extending if needed."""
        missing = seq.computed + tokens - seq.tokens
        if missing <= 0:
            return True
        before = seq.blocks
        try:
            self.cache.extend(seq, missing)
        except OutOfBlocks:
            return False
        self._poison(self.cache.block_table(seq)[before - seq.dropped :])
        return True

    def _blocks(self, tokens):
        return -(-tokens // self.cache.geometry.block_size)

    def _poison(self, blocks):
        if blocks:
            self.backend.fill(NAN, list(blocks))

    def _copied(self, source, target):
        self.copies.append((source, target))
        self.backend.copy_blocks([(source, target)])


@cache
def uncached(generator, tokens, prompt, seed=0):
    """Return the logits after all tokens, computed at once, and the drawn token."""
    step = next_batch([Text(list(tokens), prompt, seed)], [len(tokens)])
    (drawn,) = generator.forward(step, DenseCache().attend([0], [len(tokens)]))
    return generator.seen[0], drawn


@cache
def loaded_model(spec):
    """Return a `Watched` transformer with the options `spec`, loaded in fp64."""
    (parsed,) = parse(f"transformer:{spec}")
    return loaded(instantiate(Watched, parsed.options))
