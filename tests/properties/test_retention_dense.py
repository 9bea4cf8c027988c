"""Attention over blocks of which some are forgotten is attention without those tokens."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="K/V lies in tensors")

from helpers.paged import Paged, loaded_model  # noqa: E402 - needs torch

from kvcore import OutOfBlocks  # noqa: E402
from kvcore.testing.dense import DenseCache, Text, next_batch  # noqa: E402
from kvcore_plugins.retention import Window  # noqa: E402

pytestmark = pytest.mark.slow

MODEL = "layers=2,hidden=16,heads=4,kv_heads=2,head_dim=4,vocab_size=61"
SIZES = (1, 4, 5)


class Forgetful(DenseCache):
    """K and V of a sequence without blocks, of which rows can be deleted."""

    def __init__(self):
        """Start with every token."""
        super().__init__()
        self.there = []

    def forget(self, positions):
        """Delete the rows of these positions."""
        keep = [i for i, at in enumerate(self.there) if at not in positions]
        self.there = [self.there[i] for i in keep]
        self._kept = {k: (a[keep], b[keep]) for k, (a, b) in self._kept.items()}


class Reference:
    """A text computed alone, with nothing shared, forgetting by rule."""

    def __init__(self, generator, paged, seq, window, sinks):
        """Begin with what the sequence has hit, computed at once."""
        self.generator, self.size = generator, paged.cache.geometry.block_size
        self.window, self.sinks = window, sinks
        text = paged.texts[seq]
        self.text = Text(list(text.tokens), text.prompt, text.seed)
        self.dense = Forgetful()
        if seq.computed:
            self._run(seq.computed)

    def step(self, count):
        """Compute `count` more tokens, then forget whole blocks; return the logits."""
        self._run(count)
        logits = self.generator.seen
        first = -(-self.sinks // self.size) * self.size
        end = max(self.text.computed - self.window, 0) // self.size * self.size
        self.dense.forget(range(first, end))
        return logits

    def _run(self, count):
        attend = self.dense.attend([0], [count])
        start = self.text.computed
        self.dense.there += range(start, start + count)
        self.generator.forward(next_batch([self.text], [count]), attend)
        self.text.computed += count


steps = st.lists(
    st.tuples(
        st.sampled_from(["open"] * 2 + ["step"] * 6 + ["close"]),
        st.integers(0, 3),
        st.integers(1, 13),
    ),
    min_size=20,
    max_size=30,
)


def prompt(path, length):
    """Return a prompt that shares its beginning with others of the same path."""
    return [(7 * i + 31 * (path % 2) * (i >= 8)) % 61 for i in range(2 * length)]


@pytest.mark.parametrize("size", SIZES)
@given(actions=steps, window=st.sampled_from((1, 5, 8)), sinks=st.sampled_from((0, 1, 4)))
def test_logits_are_those_without_the_forgotten_tokens(size, actions, window, sinks):
    """Prefixes shared, chunks of all sizes, blocks freed and used again: the same to 1e-10."""
    generator = loaded_model(MODEL)
    paged = Paged(generator, 60 // size, size, Window(tokens=window, sinks=sinks))
    references = {}
    for what, which, number in actions:
        running = list(paged.texts)
        if what == "open":
            with suppress(OutOfBlocks):
                seq = paged.open(prompt(which, number), seed=number)
                references[seq] = Reference(generator, paged, seq, window, sinks)
        elif running and what == "close":
            paged.close(running[which % len(running)])
        elif what == "step":
            counts = {s: min(paged.texts[s].left, number) for s in running}
            drawn = paged.step(counts)
            rows = iter(generator.seen if drawn else ())
            for seq, token in drawn.items():
                logits = None if token is None else next(rows)
                alone = references[seq].step(counts[seq])
                if token is not None:
                    torch.testing.assert_close(logits, alone[0], rtol=1e-10, atol=1e-10)
                    references[seq].text.tokens.append(token)
