"""Models on paged blocks against models without a cache: logits, tokens, K and V."""

from contextlib import suppress
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="K/V lies in tensors")

from helpers.paged import Paged, loaded_model, uncached  # noqa: E402 - needs torch

from kvcore import OutOfBlocks  # noqa: E402
from kvcore.testing.dense import Text, advance, loaded  # noqa: E402
from kvcore_engine.generator import SinCos  # noqa: E402

pytestmark = pytest.mark.slow

MODELS = (
    "layers=2,hidden=16,heads=4,kv_heads=2,head_dim=4,vocab_size=61",
    "layers=2,hidden=16,heads=2,kv_heads=1,head_dim=8,vocab_size=61,window=7",
    "layers=1,hidden=16,heads=2,kv_heads=2,head_dim=4,vocab_size=61,temperature=1",
)
SIZES = (1, 16, 17, 256)
POOL = 7
"""Blocks of the pool: too few for the requests, so that some are evicted or must wait."""

ACTIONS = ["open"] * 3 + ["step"] * 5 + ["close", "fork"] * 2 + ["again"]

steps = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5), st.integers(0, 31)),
    min_size=32,
    max_size=40,
)


def prompt(path, extra, size):
    """Return a prompt of up to three pieces, the last of two kinds, and some more tokens.

    A piece is a block long, or four tokens if blocks are shorter than that.
    """
    piece = max(size, 4)
    tokens = [
        (7 * i + 31 * (path == 2 * depth + 1)) % 61
        for depth in range(1 + path // 2)
        for i in range(piece)
    ]
    return tokens + [(path + 5 * i) % 61 for i in range(extra % 6)]


def play(paged, actions, size):
    """Perform the actions that are possible, and yield the tokens that each step draws."""
    for what, which, number in actions:
        running = list(paged.texts)
        seq = running[which % len(running)] if running else None
        if what == "open":
            with suppress(OutOfBlocks):
                paged.open(prompt(which, number, size), seed=number)
        elif seq is None:
            continue
        elif what == "close":
            paged.close(seq)
        elif what == "again":
            with suppress(OutOfBlocks):
                paged.recompute(seq)
        elif what == "fork" and seq.computed == seq.tokens:
            paged.fork(seq, seed=number)
        elif what == "step":
            # One sequence is left out now and then; chunks are of all sizes.
            batch = [s for s in running if s is not seq or number % 3]
            chunk = 1 + number * number % (2 * max(size, 4))
            if drawn := paged.step({s: min(paged.texts[s].left, chunk) for s in batch}):
                yield drawn


@pytest.mark.parametrize("size", SIZES)
@given(actions=steps, model=st.sampled_from(MODELS))
def test_logits_and_tokens_are_those_of_the_uncached_model(size, actions, model):
    """Logits equal those of the uncached model to 1e-10, and tokens are the same.

    Sequences share prefixes, run in chunks, fork, are evicted and recomputed.
    """
    generator = loaded_model(model)
    paged = Paged(generator, POOL if size > 1 else 4 * POOL, size)
    for drawn in play(paged, actions, size):
        rows = iter(generator.seen)
        for seq, token in drawn.items():
            if token is None:
                continue
            text = paged.texts[seq]
            before = tuple(text.tokens[:-1])
            logits, expected = uncached(generator, before, text.prompt, text.seed)
            torch.testing.assert_close(next(rows), logits, rtol=1e-10, atol=1e-10)
            assert token == expected


@pytest.mark.parametrize("size", SIZES)
@given(actions=steps)
def test_blocks_are_those_of_a_recomputation(size, actions):
    """K and V of a sequence's blocks have the bytes of a computation without a cache.

    Blocks are hit, computed, moved and copied.
    """
    paged = Paged(waves(), POOL if size > 1 else 4 * POOL, size)
    for _ in play(paged, actions, size):
        for seq, text in paged.texts.items():
            if not text.computed:
                continue
            expected = computed(text.tokens[: text.computed])
            for (keys, values), call in zip(paged.kept(seq), expected, strict=True):
                assert torch.equal(keys, call[0])
                assert torch.equal(values, call[1])


@cache
def waves():
    """Return a generator whose K and V depend on token and position only."""
    return loaded(SinCos(layers=2, kv_heads=1, heads=1, head_dim=4, vocab_size=61))


def computed(tokens):
    """Return K and V of `tokens` in each layer."""
    found = []

    def attend(_layer, _queries, keys, values, **_how):
        found.append((keys, values))

    advance(waves(), [Text(list(tokens))], [len(tokens)], attend)
    return found
